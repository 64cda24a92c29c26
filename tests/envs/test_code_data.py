"""Problems out of files: our layout, those of well-known data sets, and files that are wrong or hostile."""

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.envs.code.asserts import UnreadableTest, call_of, read_asserts
from agentrl.envs.code.data import TEST_SHARE, load, load_splits, task_of
from agentrl.envs.code.env import Code, problem_of
from agentrl.envs.code.grading import CallCase, Problem, StreamCase
from agentrl.envs.code.values import TRUTH, Tolerance
from agentrl.errors import ConfigError
from agentrl.toolenv.tasks import split_of

from . import published
from .published import tables

ROWS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("code_rows.json").read_text(encoding="utf-8"))
FUNCTION, PROGRAM, HUMAN_EVAL, MBPP, APPS_PROGRAM, APPS_CALL, LEETCODE = ROWS.values()
"""A row of each layout, the first two of our own."""


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    return lambda *rows: Path(published.write(tmp_path / "problems.jsonl", rows))


def read(row: Mapping[str, Any]) -> tuple[str, Problem]:
    task = task_of(row, "x")
    return task.prompt, problem_of(task)


def test_our_layout() -> None:
    prompt, problem = read(FUNCTION)
    assert prompt == "Add.\n\nWrite Python code that defines the function `add`, with all imports that it needs."
    assert problem.cases == (call_of([1, 2], {}, 3), call_of(["a", "b"], {}, "ab"))
    assert (problem.entry_point, problem.timeout, problem.setup) == ("add", 2.5, "import math")
    prompt, problem = read(PROGRAM)
    assert prompt == "Echo.\n\nWrite a program that reads standard input and writes standard output."
    assert problem == Problem(cases=(StreamCase(stdin="a\n", stdout="a\n"),))


def test_mbpp_shows_one_test() -> None:
    prompt, problem = read(MBPP)
    assert "assert pair(1, 2) == (1, 2)" in prompt and "None" not in prompt
    assert (problem.entry_point, len(problem.cases)) == ("pair", 3)
    assert read({**MBPP, "text": 1, "prompt": "Sanitized."} | {"text": "Plain."})[0].startswith("Plain.")


def test_apps() -> None:
    expected = (StreamCase(stdin="1 2\n", stdout="3\n"), StreamCase(stdin="3 4\n5 6", stdout="7\n11"))
    assert read(APPS_PROGRAM)[1].cases == expected
    prompt, problem = read(APPS_CALL)
    assert problem.entry_point == "Solution().flip"
    assert "defines the class `Solution` with the method `flip`" in prompt
    # Whether [[2, 1]] is the value or wraps it, this layout does not say.
    assert problem.cases[0] == call_of([[1, 2]], {}, [[2, 1]], [2, 1])


ROUGHLY = Tolerance(relative=0.0, absolute=0.1)
CLOSE = Tolerance(relative=0.001, absolute=0.0)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("f(1) == 2", call_of([1], {}, 2)),
        ("f(-1, x='a') == [2, (3,)]", call_of([-1], {"x": "a"}, [2, (3,)])),
        ("2 == f(1)", call_of([1], {}, 2)),
        ("f(1) is None, 'why'", call_of([1], {}, None)),
        ("f(1)", call_of([1], {}, True, tolerance=TRUTH)),
        ("not f(1)", call_of([1], {}, False, tolerance=TRUTH)),
        ("f(1) is True", call_of([1], {}, True)),
        ("f({}, set(), {1: 2}) == {1}", call_of([{}, set(), {1: 2}], {}, {1})),
        ("f(2 * 3 - 1) == (1 / 4,)", call_of([5], {}, (0.25,))),
        ("abs(f(1) - 2 / 4) <= 0.1", call_of([1], {}, 0.5, tolerance=ROUGHLY)),
        ("math.isclose(f(1), 2, rel_tol=0.001)", call_of([1], {}, 2.0, tolerance=CLOSE)),
    ],
)
def test_asserts_that_are_read(source: str, expected: CallCase) -> None:
    assert read_asserts(f"assert {source}", "f") == (expected,)


WRONG = tables("code_wrong")
LARGE = ["assert f(" + "(" * 900, "assert f(" + "-" * 90000 + "1) == 1", "assert f(1) == " + "[" * 250 + "]" * 250]


@pytest.mark.parametrize("source", [*WRONG["unreadable"], *LARGE, "#" * 1_000_001], ids=lambda source: source[:30])
def test_asserts_that_are_refused(source: str) -> None:
    with pytest.raises(UnreadableTest):
        read_asserts(source, "f")


@given(st.text(st.sampled_from("f()=-+*/1'[]{},: \nassert"), max_size=60))
def test_no_test_code_raises_anything_else(text: str) -> None:
    with contextlib.suppress(UnreadableTest):
        read_asserts(f"assert {text}", "f")


FURTHER: list[tuple[dict[str, Any], dict[str, Any]]] = [
    *((HUMAN_EVAL, {"query": "The problem itself."}), (HUMAN_EVAL, {"completion": "    return 0.0\n"})),
    *((MBPP, {"test": "assert pair(3, 4) == (3, 4)"}), (APPS_PROGRAM, {"images": ["…"]}), (LEETCODE, {"context": "…"})),
]


@pytest.mark.parametrize(("row", "more"), FURTHER, ids=lambda row: "-".join(row)[:20])
def test_a_layout_with_further_columns_is_not_understood(row: Mapping[str, Any], more: Mapping[str, Any]) -> None:
    with pytest.raises(UnreadableTest, match=f"the layout is known, but not with {', '.join(more)}"):
        task_of({**row, **more}, "x")
    harmless = {**row, "difficulty": "Easy", "tags": ["a"], "empty": "", "none": None, "number": 3}
    assert task_of(harmless, "x") == replace(task_of(row, "x"), tags=("difficulty:Easy",))


def test_packages_that_problems_import_are_to_be_named(write: Callable[..., Path]) -> None:
    imports = "from sortedcontainers import SortedList\nimport numpy.linalg, os.path as path\nfrom . import nothing"
    further = {**LEETCODE, "task_id": "sorted", "prompt": imports}
    path = write(LEETCODE, further, {**LEETCODE, "task_id": "x", "completion": "import torch, _x"})
    with pytest.warns(UserWarning, match="1: sortedcontainers is imported and not named in packages; 1: _x, torch is"):
        assert sum(map(len, load(path).values())) == 1
    with pytest.warns(UserWarning, match="1 of 3 problems are left out .1: _x, torch is imported"):
        assert sum(map(len, load(path, ["sortedcontainers"]).values())) == 2
    with pytest.raises(ConfigError, match=r"line 1: sortedcontainers is imported and not named in packages"):
        load(write({**FUNCTION, "setup": "import sortedcontainers"}))
    assert read({**APPS_PROGRAM, "solutions": ["print 2\nimport torch"]})[1].solution.startswith("print 2")


def test_splits_are_by_row_or_by_id(write: Callable[..., Path]) -> None:
    rows = [{**PROGRAM, "id": f"p{number}"} for number in range(300)]
    splits = load(write(*rows, {**PROGRAM, "id": "own", "split": "test"}, {**APPS_PROGRAM, "split": "validation"}))
    assert splits["test"][-1].id == "own" or splits["test"][-2].id == "own"
    assert 30 < len(splits["test"]) < 90
    assert all(split_of(task.id, TEST_SHARE) == "train" for task in splits["train"])
    assert load(write(*reversed(rows)))["test"] == tuple(t for t in reversed(splits["test"]) if t.id.startswith("p"))


def test_a_published_test_set_is_used_whole(write: Callable[..., Path], tmp_path: Path) -> None:
    path = write(*({**HUMAN_EVAL, "task_id": f"HumanEval/{number}"} for number in range(30)))
    (tmp_path / "train.jsonl").write_text(f"{json.dumps(MBPP)}\n{json.dumps({**HUMAN_EVAL, 'task_id': 'HumanEval/0'})}")
    assert Code(split="test", data={"test": str(path)}).task_set.size == 30
    with pytest.raises(ConfigError, match=r"no task of .*problems\.jsonl is in the split 'train': give .*data="):
        _ = Code(data={"test": str(path)}).task_set
    files = (("test", str(path)), ("train", str(tmp_path / "train.jsonl")))
    with pytest.warns(UserWarning, match="1 problems of train are in test as well and are left out"):
        splits = load_splits(files)
    assert (len(splits["test"]), [task.id for task in splits["train"]]) == (30, [str(MBPP["task_id"])])
    for data in ({"train": str(path)}, {"dev": str(path)}, [str(path)]):
        with pytest.raises(ConfigError, match="data"):
            Code(data=data)  # pyright: ignore[reportArgumentType]


def test_what_can_not_be_graded_is_left_out_and_told(write: Callable[..., Path]) -> None:
    loop = "def check(candidate):\n    for i in range(3):\n        assert candidate(i) == i"
    path = write(HUMAN_EVAL, {**HUMAN_EVAL, "task_id": "loop", "test": loop}, {"task_id": "what"}, "")
    with pytest.warns(UserWarning, match=r"2 of 3 problems are left out .*layout is not known"):
        splits = load(path)
    assert [task.id for tasks in splits.values() for task in tasks] == ["HumanEval/x"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        *(([{**ROWS[layout], **changes}], message) for layout, changes, message in WRONG["wrong"]),
        *((["{"], "line 1 is no JSON"), (["[" * 100_000], "line 1 is no JSON"), (["[1]"], "line 1 is no JSON object")),
        *(([""], "no problem that can be graded"), ([{"a": 1}], "layout is not known")),
        ([PROGRAM, PROGRAM], "line 2 has the id 'p' of an earlier one"),
        ([{**HUMAN_EVAL, "test": None}], "test is no text"),
        ([{**PROGRAM, "setup": "#" * 100_001}], "setup is too long"),
        ([{**FUNCTION, "tests": [{"args": ["x" * 2_000_000], "expected": 1}]}], "too large"),
        ([{**PROGRAM, "tests": [{"stdin": "", "stdout": "x" * 70_000}]}], "too large"),
    ],
)
def test_files_that_are_wrong(write: Callable[..., Path], rows: list[object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(write(*rows))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be read"):
        load(tmp_path / "none.jsonl")


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from([*ROWS.values()]), st.data())
def test_no_row_raises_anything_else(row: Mapping[str, Any], data: st.DataObject) -> None:
    for key in data.draw(st.sets(st.sampled_from(sorted(row)), min_size=1, max_size=2)):
        row = {**row, key: data.draw(anything)}
    with contextlib.suppress(UnreadableTest):
        task_of(row, "x")
