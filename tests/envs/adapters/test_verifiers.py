"""Task sets of verifiers in an interpreter of their own: what is graded, what is refused, and whose fault it is."""

import pickle
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from agentrl.envs.adapters.interpreter import Interpreter, close_interpreters
from agentrl.envs.adapters.verifiers import Verifiers
from agentrl.errors import ConfigError, InfrastructureError, UnknownNameError
from agentrl.toolenv.registry import make
from agentrl.types import Task

from ..published import play
from .conftest import FAKE, REAL
from .hostile import assert_all_are_graded

PARTS = {"exact": (0.0, 1.0), "long": (0.0, 1.0)}


class Sums(Verifiers):
    """With a gold player."""

    def gold(self, task: Task) -> list[str]:
        return [str(sum(map(int, re.findall(r"\d+", task.prompt))))]


@pytest.fixture(scope="module", params=[FAKE, REAL])
def python(request: pytest.FixtureRequest, make_python: Callable[..., str]) -> str:
    return make_python("verifiers", request.param)


@pytest.fixture
def env(python: str) -> Iterator[Sums]:
    with closing(Sums(python=python, taskset="sums_set", parts=PARTS)) as env:
        yield env


def test_answers_are_graded_by_the_rewards_of_the_set(env: Sums, python: str) -> None:
    assert env.reward_weights == {"exact": 2.0, "long": -0.5, "graded": 0.0} and env.best_return == 2.0
    assert env.instructions == "Answer with the number alone."
    (answer,) = env.gold(env.task_set[0])
    assert play(env, env.task_set[0].id, answer) == (2.0 - 0.5 * len(answer) / 100, True)
    assert env.episode.state["verdict"] == {"rewards": {"exact": 1.0, "long": len(answer) / 100}, "reason": ""}
    with closing(Sums(python=python, taskset="sums_set", parts=PARTS, split="test")) as other:
        ids = [{task.id for task in each.task_set} for each in (env, other)]
        assert not ids[0] & ids[1] and len(ids[0] | ids[1]) == 40
        assert pickle.loads(pickle.dumps(other)).task_set[0] == other.task_set[0]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("raise", "ValueError: what is that"),
        ("kill", "grading takes too long, or ends its process"),
        ("million", r"exact: 1e\+06 was paid"),
        ("nan", "exact: nan was paid"),
    ],
)
def test_a_verdict_that_can_not_be_read_earns_nothing(env: Sums, answer: str, reason: str) -> None:
    assert play(env, env.task_set[0].id, answer)[0] < 0
    assert env.episode.parts is not None and env.episode.parts["graded"] == 0.0
    assert re.search(reason, env.episode.state["verdict"]["reason"])


def test_an_agent_that_tries_all_that_raises_is_graded_every_time(env: Sums) -> None:
    assert_all_are_graded(env, ["raise", "kill", "million", "nan", "wrong"])


def test_what_can_not_be_lifted_is_refused_by_name(python: str) -> None:
    needs = (
        "needy_set needs a container, a runtime for its rewards, a runtime for setup, stop conditions, "
        "parts that a reward names as it grades: play it through the endpoint"
    )
    with pytest.raises(ConfigError, match=needs):
        Verifiers(python=python, taskset="needy_set", parts={"files": (0, 1)})


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"python": "/no/such/python"}, ConfigError, "name an interpreter that is there"),
        ({"taskset": ""}, ConfigError, "name the interpreter and the task set"),
        ({"taskset": "no_such_set"}, InfrastructureError, "verifiers_worker process does not start: .*no_such_set"),
        ({"parts": {"exact": (0, 1)}}, ConfigError, r"as in parts = \{ exact = \[0, 1\], long = \[0, 1\] \}"),
        ({"parts": PARTS | {"long": (1, 1)}}, ConfigError, "declare the range of each reward"),
        ({"config": {"colour": "red"}}, InfrastructureError, "verifiers_worker process does not start"),
        ({"split": "dev"}, UnknownNameError, "dev"),
    ],
)
def test_wrong_arguments_are_errors_at_once(python: str, arguments: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=f"(?s){message}"):
        make("agentrl/Verifiers-v0", **({"python": python, "taskset": "sums_set", "parts": PARTS} | arguments))


def test_a_process_that_fails_whatever_it_is_asked_is_a_fault(tmp_path: Path) -> None:
    (tmp_path / "dead.py").write_text("MAX_BYTES, CONTROL = 2 << 30, {}\ndef warm(): ...\ndef reply(): raise OSError")
    dead = Interpreter(python=sys.executable, file=str(tmp_path / "dead.py"))
    with pytest.raises(InfrastructureError, match="every dead process dies"):
        dead.ask(seconds=1.0)
    close_interpreters()
