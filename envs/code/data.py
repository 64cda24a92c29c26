r"""Load programming problems from files, JSON or Parquet, in our own layout or in that of a well-known data set.

Ours, for a function and for a program::

    {"id": "f1", "prompt": "…", "entry_point": "add", "tests": [{"args": [1, 2], "expected": 3}, …]}
    {"id": "p1", "prompt": "…", "tests": [{"stdin": "1 2\n", "stdout": "3\n"}, …]}

Optional are ``solution`` (a reference that passes), ``split`` (``train`` or ``test``) and ``timeout`` (seconds of CPU
time for each test). So are ``setup`` (source that stands before the submission), and ``kwargs`` beside ``args``.

Loaded as they are published: HumanEval (``prompt``, ``test``, ``entry_point``), MBPP (``text`` or ``prompt``, ``code``,
``test_list``), APPS and TACO (``question``, ``input_output``), LeetCodeDataset (``problem_description`` or ``query``,
``completion``, ``test``, ``entry_point``). A problem is skipped and counted if its tests are more than calls with
literals or its values are too large. So is a problem that imports a package that is not named, or whose row has further
columns.
"""

import json
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import pydantic

from agentrl.envs.code.asserts import UnreadableTest, call_name, call_of, imported, read_asserts
from agentrl.envs.code.grading import MAX_CODE_CHARS, Case, Problem, StreamCase
from agentrl.envs.code.values import MAX_OUTPUT_BYTES
from agentrl.envs.datafiles import LAYOUTS, left_over, read_rows, tags_of
from agentrl.errors import ConfigError
from agentrl.sandboxes.inside.rootfs import PACKAGES
from agentrl.toolenv.tasks import split_of
from agentrl.toolenv.tools.schema import explain
from agentrl.types import Task

SAMPLE = Path(__file__).with_name("sample.jsonl")
"""The problems that come with agentrl."""
TEST_SHARE = 5
"""Of the problems that name no split, one in this many belongs to the test split."""
MAX_INPUT_CHARS = 4_000_000
"""Limit of a test's input."""
_ENTRY_POINT = re.compile(r"[A-Za-z_]\w*(?:\(\)\.[A-Za-z_]\w*)?", re.ASCII)
Row: TypeAlias = Mapping[str, object]


class _CallRow(pydantic.BaseModel, extra="forbid"):
    args: list[Any]
    kwargs: dict[str, Any] = {}
    expected: Any


class _StreamRow(pydantic.BaseModel, extra="forbid"):
    stdin: str
    stdout: str


class _OwnRow(pydantic.BaseModel, extra="forbid"):
    id: str
    prompt: str
    tests: list[_CallRow] | list[_StreamRow]
    entry_point: str = ""
    setup: str = ""
    solution: str = ""
    split: Literal["train", "test"] | None = None
    timeout: float | None = pydantic.Field(default=None, gt=0, allow_inf_nan=False)


def load_splits(files: Sequence[tuple[str, str]], packages: Sequence[str] = ()) -> Mapping[str, tuple[Task, ...]]:
    """Load the tasks of all ``files`` by split; a problem that is in test is dropped from train, with a warning.

    Args:
        files: what :func:`agentrl.envs.datafiles.by_split` returns.
        packages: packages that problems may import beside the sandbox's usual ones.

    Raises:
        ConfigError: a file can't be used, as :func:`load` says.
        UsageError: a file can't be read.
    """
    splits: dict[str, tuple[Task, ...]] = {"train": (), "test": ()}
    for split, path in files:
        for name, tasks in load(path, packages, split).items():
            splits[name] += tasks
    tested = {task.prompt for task in splits["test"]}
    train = tuple(task for task in splits["train"] if task.prompt not in tested)
    if repeated := len(splits["train"]) - len(train):
        warnings.warn(f"{repeated} problems of train are in test as well and are left out", stacklevel=2)
    return {**splits, "train": train}


def load(path: str | Path, packages: Sequence[str] = (), split: str = "") -> Mapping[str, tuple[Task, ...]]:
    """Load the tasks of a file by split; a row without ``split`` gets one by its id, one in five ``test``.

    A warning counts the rows that are skipped.

    Args:
        path: a file that :func:`agentrl.envs.datafiles.read_rows` reads.
        packages: packages that problems may import beside the sandbox's usual ones.
        split: the split that all of the file is for; empty to divide it.

    Raises:
        ConfigError: there is no such file, a row is no JSON object, a row of our own layout is wrong, two rows share an
            id, or nothing is left.
        UsageError: the file can't be read.
    """
    if not Path(path).expanduser().is_file():
        raise ConfigError(f"the problems in {str(path)!r} can't be read: there is no such file")
    splits: dict[str, list[Task]] = {"train": [], "test": []}
    left_out = Counter[str]()
    seen: set[str] = set()
    for number, source_row in enumerate(read_rows(str(path)), start=1):
        row, location = source_row.data, source_row.location
        name = str(next((row[key] for key in ("id", "task_id", "problem_id") if key in row), number))
        if source_row.fault or name in seen:
            raise ConfigError(f"{location} {source_row.fault or f'has the id {name!r} of an earlier one'}")
        seen.add(name)
        try:
            task = task_of(row, name, packages)
        except UnreadableTest as error:
            # In our own layout a wrong row is its author's mistake; published data sets are taken as they are.
            if "tests" in row:
                raise ConfigError(f"{location}: {error}") from error
            left_out[str(error)] += 1
        else:
            own = str(row.get("split"))  # what other data sets call a split is not ours
            splits[split or (own if own in splits else split_of(name, TEST_SHARE))].append(task)
    reasons = "; ".join(f"{count}: {reason}" for reason, count in left_out.most_common())
    if not any(splits.values()):
        raise ConfigError(f"{path} has no problem that can be graded{f' ({reasons})' if reasons else ''}")
    if left_out:
        warnings.warn(f"{path}: {left_out.total()} of {len(seen)} problems are left out ({reasons})", stacklevel=2)
    return {split: tuple(tasks) for split, tasks in splits.items()}


def task_of(row: Row, name: str, packages: Sequence[str] = ()) -> Task:
    """Parse ``row``, in whichever layout, into a task.

    Raises:
        UnreadableTest: it has no known layout, a test that can't be graded, or an import that ``packages`` lacks.
    """
    layout = next((layout for layout in LAYOUTS["code"] if set(layout["required"]) <= set(row)), None)
    if layout is None:
        raise UnreadableTest("the layout is not known")
    # An unknown column may hold half of the problem, and nobody would notice that it is missing.
    if rest := left_over(row, {*layout["required"], *layout["optional"]}):
        raise UnreadableTest(f"the layout is known, but not with {', '.join(rest)}")
    prompt, problem = _READERS[layout["name"]](row)
    needed = imported(problem.setup) | imported(problem.solution)
    if foreign := needed - {*packages, *PACKAGES, *sys.stdlib_module_names}:
        raise UnreadableTest(f"{', '.join(sorted(foreign))} is imported and not named in packages")
    if not problem.cases:
        raise UnreadableTest("there are no tests")
    if len(problem.setup) > MAX_CODE_CHARS:
        raise UnreadableTest("setup is too long")
    # Exactly one of the two: a function to call, or standard input to read.
    streams = isinstance(problem.cases[0], StreamCase)
    if streams == bool(problem.entry_point) or (
        problem.entry_point and not _ENTRY_POINT.fullmatch(problem.entry_point)
    ):
        raise UnreadableTest(
            "entry_point must name a function where tests have args, and be missing where they have stdin"
        )
    closing = "Write a program that reads standard input and writes standard output."
    if problem.entry_point:
        called, _, method = problem.entry_point.partition("().")
        wanted = f"the class `{called}` with the method `{method}`" if method else f"the function `{called}`"
        closing = f"Write Python code that defines {wanted}, with all imports that it needs."
    text = f"{prompt.strip()}\n\n{closing}"
    problem = replace(problem, packages=tuple(packages))
    return Task(id=name, prompt=text, answer=problem.solution, data={"problem": problem}, tags=tags_of(row))


def _own(row: Row) -> tuple[str, Problem]:
    try:
        own = _OwnRow.model_validate(row, strict=True)
    except pydantic.ValidationError as error:
        raise UnreadableTest(explain(error)) from error
    cases = tuple(
        call_of(test.args, test.kwargs, test.expected)
        if isinstance(test, _CallRow)
        else _stream(test.stdin, test.stdout)
        for test in own.tests
    )
    problem = Problem(
        cases=cases, entry_point=own.entry_point, setup=own.setup, solution=own.solution, timeout=own.timeout
    )
    return own.prompt, problem


def _leetcode(row: Row) -> tuple[str, Problem]:
    cases = read_asserts(_text(row, "test"), "candidate")
    match row:
        # Up to version 0.3.0 the ``query`` lacks the examples, or asks for another kind of answer than we do.
        case {"meta": {"question_title": str(text), "lang_code": str(code)}} | {
            "problem_description": str(text),
            "starter_code": str(code),
        }:
            prompt = f"{text}\n\n```\n{code.strip()}\n```"
        case _:
            prompt = _text(row, "query")
    setup, solution = _text(row, "prompt"), _text(row, "completion")
    return prompt, Problem(cases=cases, entry_point=_text(row, "entry_point"), setup=setup, solution=solution)


def _human_eval(row: Row) -> tuple[str, Problem]:
    code = _text(row, "prompt")
    cases = read_asserts(_text(row, "test"), "candidate")
    # The prompt has these imports already, so a submission need not repeat them.
    setup = "\n".join(line for line in code.splitlines() if line.startswith(("import ", "from ")))
    solution = code + _text(row, "canonical_solution") if "canonical_solution" in row else ""
    prompt = f"Complete this code:\n\n```\n{code.strip()}\n```"
    return prompt, Problem(cases=cases, entry_point=_text(row, "entry_point"), setup=setup, solution=solution)


def _mbpp(row: Row) -> tuple[str, Problem]:
    asserts, solution = _texts(row["test_list"]), _text(row, "code").replace("\r\n", "\n")
    # MBPP names no function: the tested one is that which the tests call.
    name = call_name("\n".join(asserts), solution)
    cases = read_asserts("\n".join([*asserts, *_texts(row.get("challenge_test_list", []))]), name)
    example = f"For example, this holds:\n\n```\n{asserts[0].strip()}\n```" if asserts else ""
    text = _text(row, "text" if "text" in row else "prompt")
    return f"{text}\n\n{example}", Problem(cases=cases, entry_point=name, solution=solution)


def _apps(row: Row) -> tuple[str, Problem]:
    tests = _json(row["input_output"])
    if not isinstance(tests, dict) or not {"inputs", "outputs"} <= set(tests):
        raise UnreadableTest("input_output lacks inputs or outputs")
    inputs, outputs = tests["inputs"], tests["outputs"]
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise UnreadableTest("there are not as many outputs as inputs")
    solutions = _json(row.get("solutions") or "[]")
    solution = str(solutions[0]) if isinstance(solutions, list) and solutions else ""
    starter, name = str(row.get("starter_code") or "").strip(), str(tests.get("fn_name") or "")
    pairs = zip(inputs, outputs, strict=True)
    if name:
        # LeetCode's problems define their function as a method of this class.
        entry_point = f"Solution().{name}" if "class Solution" in starter + solution else name
        cases: tuple[Case, ...] = tuple(call_of(_list(args), {}, *_wrapped(wanted)) for args, wanted in pairs)
    else:
        entry_point, cases = "", tuple(_stream(_joined(lines), _joined(wanted)) for lines, wanted in pairs)
    prompt = f"{_text(row, 'question')}\n\n```\n{starter}\n```" if starter else _text(row, "question")
    return prompt, Problem(cases=cases, entry_point=entry_point, solution=solution)


_READERS: Mapping[str, Callable[[Row], tuple[str, Problem]]] = {
    "own": _own,
    "LeetCodeDataset": _leetcode,
    "HumanEval": _human_eval,
    "MBPP": _mbpp,
    "APPS": _apps,
}
"""For each layout of ``layouts.toml`` the function that returns a row's prompt and problem."""


def _stream(stdin: str, stdout: str) -> StreamCase:
    if len(stdin) > MAX_INPUT_CHARS or len(stdout.encode("utf-8", "surrogatepass")) > MAX_OUTPUT_BYTES:
        raise UnreadableTest("an input or output is too large")
    return StreamCase(stdin=stdin, stdout=stdout)


def _wrapped(wanted: object) -> tuple[object, ...]:
    """Accept a value both wrapped and bare where a data set wraps some values into a list and does not say which."""
    return (wanted, wanted[0]) if isinstance(wanted, list) and len(wanted) == 1 else (wanted,)


def _joined(lines: object) -> str:
    return "\n".join(map(str, lines)) if isinstance(lines, list) else str(lines)


def _list(value: object) -> list[object]:
    if not isinstance(value, list):
        raise UnreadableTest("what should be a list is none")
    return value


def _text(row: Row, key: str) -> str:
    text = row.get(key)
    if not isinstance(text, str):
        raise UnreadableTest(f"{key} is no text")
    return text


def _texts(value: object) -> list[str]:
    texts = [item for item in _list(value) if isinstance(item, str)]
    if len(texts) != len(_list(value)):
        raise UnreadableTest("a test is no text")
    return texts


def _json(value: object) -> object:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise UnreadableTest("a field that should hold JSON does not") from error
