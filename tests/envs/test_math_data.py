"""Layouts, bad rows, duplicates and splits of mathematical data sets."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl.envs.datafiles import read_rows
from agentrl.envs.math.data import Source, load_problems
from agentrl.errors import ConfigError, UsageError

from . import published

Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    return lambda rows, name="data.jsonl": published.write(tmp_path / name, rows)


def problems(source: Source) -> dict[str, str]:
    """Every prompt with its answer, of both splits."""
    return {task.prompt: task.answer for tasks in load_problems(source).values() for task in tasks}


def refused(data: Any, message: str, error: type[Exception] = UsageError, **options: Any) -> None:
    """Whether this data is refused with this message."""
    with pytest.raises(error, match=message):
        load_problems(Source(data=data, **options))


@pytest.mark.parametrize(
    ("row", "name"), [({"ID": "2024-I-1"}, "2024-I-1"), ({"extra_info": {"index": "abc"}}, "abc"), ({"id": 0}, "0")]
)
def test_ids_are_the_rows_own(write: Write, row: dict[str, Any], name: str) -> None:
    (tasks,) = load_problems(Source(data=write([{"problem": "P", "answer": "070", **row}]))).values()
    assert (tasks[0].id, tasks[0].answer) == (name, "070")


def test_an_id_that_is_not_there_follows_from_the_problem(write: Write) -> None:
    (tasks,) = load_problems(Source(data=write([{"problem": "P", "answer": 1}]))).values()
    (again,) = load_problems(Source(data=write([{"problem": " P\n", "answer": 1, "more": 2}]))).values()
    assert tasks[0].id == again[0].id


def test_columns_can_be_named(write: Write) -> None:
    rows = [{"text": "P", "meta": {"result": "5"}, "key": "k", "answer": "not this"}]
    (tasks,) = load_problems(
        Source(data=write(rows), columns=(("answer", "meta.result"), ("id", "key"), ("prompt", "text")))
    ).values()
    assert (tasks[0].prompt, tasks[0].answer, tasks[0].id) == ("P", "5", "k")


@pytest.mark.parametrize(
    "more",
    [
        *({"table": "a | b"}, {"image": {"bytes": "…"}}, {"Figures": ["…"]}, {"original_problem": "…"}),
        {"question": "How many are left?"},
    ],
    ids=str,
)
def test_what_may_belong_to_the_problem_is_not_dropped_without_a_word(write: Write, more: dict[str, Any]) -> None:
    row = {"problem": "P", "answer": "5", "source": "ours", "level": 3, "empty": "", "none": None, **more}
    (name,) = more
    message = rf"may belong to the problem, {name}: say columns=.*: problem, answer, .*{name}"
    refused(write([row]), message, ConfigError)
    message = rf"line 2 has '{name}', which may belong to the problem"
    refused(write([{"problem": "Q", "answer": "5"}, row]), message)
    named = (("answer", "answer"), ("prompt", "problem"))
    assert problems(Source(data=write([row]), columns=named)) == {"P": "5"}
    if isinstance(more[name], str):
        with_it = (("answer", "answer"), ("passage", name), ("prompt", "problem"))
        assert problems(Source(data=write([row]), columns=with_it)) == {f"{more[name]}\nP": "5"}


NOTHING: list[dict[str, Any]] = [
    *({"question": "P", "ground_truth": r"$\boxed{5}$"}, {"problem": "P", "question": "P", "answer": "5"}),
    {"passage": None, "question": "P", "options": None, "answer": "5"},
    {"passage": "", "question": "P", "options": [], "answer": "5"},
]


@pytest.mark.parametrize("row", NOTHING)
def test_what_adds_nothing_is_not_left_over(write: Write, row: dict[str, Any]) -> None:
    assert problems(Source(data=write([row]))) == {"P": "5"}


ASKED = "Answer with the letter of the right choice."


CHOICES: list[Any] = published.tables("math")["choices"]


@pytest.mark.parametrize(("choices", "answer", "shown", "letter"), CHOICES)
def test_choices(write: Write, choices: object, answer: object, shown: str, letter: str) -> None:
    row = {"question": "Which?", "options": choices, "answer": answer}
    assert problems(Source(data=write([row]))) == {f"Which?\n\n{shown}\n\n{ASKED}": letter}


def test_a_letter_beside_the_answer_is_right_as_well(write: Write) -> None:
    row = {"question": "Which is least? A. -2 B. 0", "answer": "-2", "choice_answer": "(A)"}
    rows = [row, {"question": "What is 1+1?", "answer": "2", "choice_answer": ""}]
    tasks = [task for split in load_problems(Source(data=write(rows))).values() for task in split]
    assert sorted((task.answer, dict(task.data)) for task in tasks) == [("-2", {"letter": "A"}), ("2", {})]
    # Where the choices have a column of their own, the letter is what is asked for.
    row = {"question": "Which?", "options": ["x", "y"], "answer": "y", "answer_idx": "B"}
    assert list(problems(Source(data=write([row]))).values()) == ["B"]


@pytest.mark.parametrize(
    ("choices", "answer"),
    [
        *((["1", "2"], answer) for answer in (2, -1, True, "2", "C", "AB", 0.5, None)),
        *((["1"], 0), ([["1"], "2"], 1), ("1 or 2", "A"), ("A) 1 C) 2", "A")),
        *(({"text": ["1", "2"], "label": ["A", "B"]}, "A"), (4, "A"), (["x"] * 27, "A")),
    ],
    ids=str,
)
def test_choices_that_are_refused(write: Write, choices: object, answer: object) -> None:
    why = r"line 1 has (a passage or choices that can't|no answer in 'answer' that can) be"
    refused(write([{"question": "Which?", "choices": choices, "answer": answer}]), why)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ((), r"known to hold the prompt: say columns=\{.* with the names of its columns: text, value$"),
        ((("prompt", "text"),), "known to hold the answer"),
        ((("prompt", "text"), ("answer", "number")), "no column 'number': say .* columns: text, value"),
    ],
)
def test_unknown_columns_are_named(write: Write, columns: tuple[tuple[str, str], ...], message: str) -> None:
    refused(write([{"text": "P", "value": "5"}]), message, ConfigError, columns=columns)


def test_wrong_arguments() -> None:
    allowed = "'question': it maps prompt, passage, choices, answer, letter, equation, id to columns"
    refused("", allowed, ConfigError, columns=(("question", "q"),))
    refused((("train", "a.jsonl"),), "needs a data set for test", ConfigError)


BAD: list[object] = [
    *([1], {"problem": "", "answer": "1"}, {"problem": None, "answer": "1"}, {"problem": 5, "answer": "1"}),
    *({"answer": "1"}, {"problem": "no answer"}, {"problem": "none", "answer": None}),
    {"problem": "blank", "answer": " "},
    *({"problem": "open", "answer": "{1"}, {"problem": "bool", "answer": True}, {"problem": "list", "answer": [1, 2]}),
    *({"problem": "long" * 6000, "answer": "1"}, {"problem": "long answer", "answer": "1" * 1001}),
    *({"problem": "\ud800", "answer": "1"}, {"problem": "surrogate", "answer": "\ud800"}),
    *({"problem": "not finite", "answer": float("nan")}, {"problem": [{"role": "user"}], "answer": "1"}),
    *({"problem": "S", "answer": "1", "picture": "x"}, {"problem": "T", "answer": "1", "picture": {"bytes": "x"}}),
    {"problem": [{"role": "user", "content": [{"type": "image"}]}, {"role": "user", "content": "?"}], "answer": "1"},
    {"problem": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "1"}], "answer": "1"},
    *({"problem": "good", "answer": "2"}, {"problem": "Go\nod", "answer": "11"}),
]  # fmt: skip
GOOD = {"problem": "Good", "answer": "1"}


def test_bad_rows_are_refused_by_place(write: Write) -> None:
    for bad in [*BAD[:-2], BAD[-1]]:
        refused(write([GOOD, bad]), r"bad rows \(1\): data\.jsonl line 2 .*skip_bad_rows=True")


def test_bad_rows_are_skipped_and_counted(write: Write) -> None:
    path = write([GOOD, *BAD])
    refused(path, r"bad rows \(22\): data\.jsonl line 2 .* …")
    with pytest.warns(UserWarning, match=r"bad rows left out \(22\): data\.jsonl line 2"):
        assert problems(Source(data=path, skip_bad_rows=True)) == {"Good": "1", "good": "2"}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"problem": "P", "answer": "1", "choice_answer": "{"}], "has no letter in 'choice_answer' that can be read"),
        ([{"problem": "P", "solution": "It is 2."}], "line 1 has no answer in 'solution'"),
        ([GOOD, {"problem": "Good ", "answer": "2"}], r"line 2 repeats .* of data\.jsonl line 1, with another answer"),
        ([{"id": 1, **GOOD}, {"id": 1, "problem": "Q", "answer": "2"}], "line 2 has the id '1' of an earlier one"),
    ],
)
def test_rows_that_are_refused(write: Write, rows: list[object], message: str) -> None:
    refused(write(rows), message)


def test_one_source_is_divided_by_its_problems(write: Write) -> None:
    rows = [{"problem": f"What is {i} + 1?", "answer": i + 1} for i in range(2000)]
    tasks = load_problems(Source(data=write(rows)))
    turned = [{**row, "problem": row["problem"].replace(" ", "  ")} for row in reversed(rows)]
    again = load_problems(Source(data=write(turned, "turned.jsonl")))
    for split in ("train", "test"):
        problems_of_split = {"".join(task.prompt.split()) for task in tasks[split]}
        assert problems_of_split == {"".join(task.prompt.split()) for task in again[split]}
    assert 150 < tasks["test"].size < 250
    assert tasks["train"].size + tasks["test"].size == 2000


def test_two_files_share_no_problem(write: Write) -> None:
    train = write([{"problem": "P", "answer": "1"}, {"problem": "Q", "answer": "2"}], "train.jsonl")
    test = write([{"problem": "Q ", "answer": "2"}], "test.jsonl")
    data = (("test", test), ("train", train))
    refused(data, r"train\.jsonl line 2 repeats the problem of test\.jsonl line 1")
    with pytest.warns(UserWarning, match=r"bad rows left out \(1\): train\.jsonl line 2"):
        tasks = load_problems(Source(data=data, skip_bad_rows=True))
    assert [[task.prompt for task in tasks[split]] for split in ("train", "test")] == [["P"], ["Q"]]


def test_files_of_one_name_are_two_files(write: Write, tmp_path: Path) -> None:
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
    train = write([{"id": 1, "problem": "P", "answer": "1"}], "train/set.jsonl")
    data = (("test", write([{"id": 1, "problem": "R", "answer": "3"}], "test/set.jsonl")), ("train", train))
    assert problems(Source(data=data)) == {"P": "1", "R": "3"}
    write([{"id": 3, "problem": "P", "answer": "1"}], "test/set.jsonl")
    refused(data, r"bad rows \(1\): set\.jsonl line 1 repeats the problem of set\.jsonl line 1")


def test_a_file_is_read_once_until_it_changes(write: Write) -> None:
    source = Source(data=write([{"problem": "P", "answer": "1"}]))
    loaded = load_problems(source)
    assert load_problems(source) is loaded
    write([{"problem": "P", "answer": "100"}])
    assert problems(source) == {"P": "100"}


def test_folders_and_their_splits(write: Write, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    (tmp_path / "set").mkdir()
    for split in ("train", "test"):
        write([{"question": f"{split} {i}", "answer": f"#### {i}"} for i in range(3)], f"set/{split}.jsonl")
    folder = str(tmp_path / "set")
    both = (("test", folder), ("train", folder))
    for split, tasks in load_problems(Source(data=both)).items():
        assert [task.prompt for task in tasks] == [f"{split} 0", f"{split} 1", f"{split} 2"]
    turned = Source(data=both, split=(("test", "train"), ("train", "test")))
    assert load_problems(turned)["test"][0].prompt == "train 0"
    assert set(problems(Source(data=folder, split="test"))) == {"test 0", "test 1", "test 2"}
    assert next(read_rows(folder, split="test")).location.endswith("[test] row 1")
    refused(folder, "split 'dev'", split="dev")
