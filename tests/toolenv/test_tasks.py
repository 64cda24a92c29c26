"""Sets of tasks by index and by id."""

import itertools

import pytest

from agentrl.errors import UnknownNameError
from agentrl.toolenv.tasks import GeneratedTasks, TaskList, split_of, stable_hash
from agentrl.types import Task

TASKS = [Task(id=name, prompt=f"Say {name}.") for name in ("a", "b", "c")]


def squares() -> GeneratedTasks:
    return GeneratedTasks("square", lambda index: Task(id="", prompt=f"{index}^2", answer=str(index**2)))


def test_a_list_by_index_and_by_id() -> None:
    tasks = TaskList(TASKS)
    assert tasks.size == 3 and list(tasks) == TASKS
    assert tasks[1] == tasks.find("b") == TASKS[1]


def test_a_list_says_which_id_is_near() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'alpha'"):
        TaskList([Task(id="alpha", prompt="")]).find("alhpa")


def test_a_generated_set_has_no_end() -> None:
    tasks = squares()
    assert tasks.size is None
    assert [task.answer for task in itertools.islice(tasks, 4)] == ["0", "1", "4", "9"]
    assert tasks.find(f"square:{10**17}") == tasks[10**17] and tasks[10**17].id == f"square:{10**17}"


@pytest.mark.parametrize(
    "name", ["", "7", "circle:7", "square:", "square:-1", "square:x", "square:²", "square:" + "9" * 40]
)
def test_other_ids_are_unknown(name: str) -> None:
    with pytest.raises(UnknownNameError, match="square:0"):
        squares().find(name)


def test_splits_stay_what_they_are() -> None:
    # Other values would move problems that somebody trained on into the test split.
    assert stable_hash("(12+34)") == 16979812500155338060
    assert 0 <= stable_hash("\ud800") < 2**64
    keys = [f"problem {number}" for number in range(4000)]
    assert 400 < sum(split_of(key, 8) == "test" for key in keys) < 600
    assert {split_of(key, 1) for key in keys} == {"test"}
    assert [split_of(key, 8) for key in keys] == ["test" if stable_hash(key) % 8 == 0 else "train" for key in keys]
