r"""Mathematical problems from data sets: which columns they stand in, which rows are any good, and how they are split.

Known layouts, by their columns: ``problem`` or ``question`` or ``prompt`` (text, or chat messages), and ``answer``,
``ground_truth`` or ``reward_model.ground_truth``, or else a ``solution`` with a box. That reads DeepScaleR, DAPO-Math,
MATH, AIME and GSM8K (``#### 42``). No problem is in both splits, whatever its spacing.
"""

import functools
import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from agentrl.answers import readable
from agentrl.datafiles import Row, read_rows, stamp
from agentrl.errors import ConfigError, UsageError
from agentrl.grading import last_boxed
from agentrl.tasks import TaskList, split_of, stable_hash
from agentrl.types import Task

TEST_SHARE = 10
"""Of one source, one problem in this many belongs to the test split."""
MAX_PROMPT = 20_000
"""Characters of a problem; a longer one is a bad row."""
SAMPLE = Path(__file__).with_name("math_sample.jsonl")
"""Sixty problems of our own, for trying things out."""
_SHOWN = 5
_PROMPTS = ("problem", "question", "prompt")
_ANSWERS = ("answer", "reward_model.ground_truth", "ground_truth", "expected_answer", "final_answer", "solution")
_IDS = ("id", "unique_id", "extra_info.index")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where the problems come from; hashable, so that what was read once is kept."""

    data: str | tuple[tuple[str, str], ...] | None = None
    """One data set, one for each split as (split, data set), or None for the sample."""
    config: str | None = None
    """The configuration of a hub data set."""
    split: str | tuple[tuple[str, str], ...] | None = None
    """The hub data set's split to read, for all or as (split, its split); None reads the one of the same name."""
    columns: tuple[tuple[str, str], ...] = ()
    """Which column holds the prompt, the answer and the id; what is left out is recognised."""
    skip_bad_rows: bool = False
    """Whether bad rows are left out with a warning instead of refused."""

    def __post_init__(self) -> None:
        if unknown := {name for name, _ in self.columns} - {"prompt", "answer", "id"}:
            raise ConfigError(f"columns names {sorted(unknown)[0]!r}: it maps prompt, answer and id to columns")
        if isinstance(self.data, tuple) and sorted(name for name, _ in self.data) != ["test", "train"]:
            raise ConfigError("data needs a data set for train and one for test, or a single one for both")

    @property
    def files(self) -> tuple[tuple[str, str], ...]:
        """The data sets to read, each with the split it is for; an empty split stands for both."""
        if self.data is None:
            return (("", str(SAMPLE)),)
        # Test first: a problem that is in both is left out of train.
        return (("", self.data),) if isinstance(self.data, str) else tuple(sorted(self.data))

    def hub_split(self, split: str) -> str:
        """The split of the hub data set that becomes ``split``."""
        if isinstance(self.split, tuple):
            return dict(self.split).get(split or "train", split or "train")
        return self.split or split or "train"


def load_problems(source: Source) -> Mapping[str, TaskList]:
    """The tasks of each split that has any; what was read before is read again only when its file has changed.

    Raises:
        ConfigError: the columns can't be recognised, or one that was named is not there.
        UsageError: a data set can't be read, or has bad rows and ``skip_bad_rows`` is not set.
    """
    return _load(source, tuple(stamp(name) for _, name in source.files))


@functools.lru_cache(maxsize=4)
def _load(source: Source, stamps: tuple[object, ...]) -> Mapping[str, TaskList]:
    tasks: dict[str, list[Task]] = {"train": [], "test": []}
    seen, faults = _Seen(), list[str]()
    for given, name in source.files:
        for row, task in _tasks(source, name, source.hub_split(given)):
            fault = task if isinstance(task, str) else seen.fault(task, row.place)
            if fault or isinstance(task, str):
                faults.append(f"{row.place} {fault}")
                continue
            split = given or (
                str(row.data["split"]) if source.data is None else split_of(_bare(task.prompt), TEST_SHARE)
            )
            tasks[split].append(task)
    if faults:
        _complain(faults, source.skip_bad_rows)
    return {split: TaskList(found) for split, found in tasks.items() if found}


def _bare(problem: str) -> str:
    """What ``problem`` shares with those that are spaced in another way, and decides its split."""
    return "".join(problem.split())


class _Seen:
    """The problems and ids read so far."""

    def __init__(self) -> None:
        self._problems: dict[int, tuple[str, int]] = {}
        self._ids: set[str] = set()

    def fault(self, task: Task, place: str) -> str:
        """Why ``task`` can't join the others; empty, and remembered, where it can."""
        key = stable_hash(_bare(task.prompt))
        if key in self._problems:
            first, answer = self._problems[key]
            return f"repeats the problem of {first}{'' if answer == hash(task.answer) else ', with another answer'}"
        # Ids need to differ within a split; data sets that number their rows give train and test the same ones.
        name = f"{place.rpartition(' ')[0]} {task.id}"
        if name in self._ids:
            return f"has the id {task.id!r} of an earlier one"
        self._problems[key] = (place, hash(task.answer))
        self._ids.add(name)
        return ""


def _complain(faults: list[str], skip: bool) -> None:
    shown = "; ".join(faults[:_SHOWN]) + (" …" if len(faults) > _SHOWN else "")
    rows = f"{len(faults)} bad row{'s' if len(faults) > 1 else ''}"
    if not skip:
        raise UsageError(f"{rows}: {shown} (mend them, or leave them out with skip_bad_rows=True)")
    warnings.warn(f"{rows} left out: {shown}", stacklevel=2)


def _tasks(source: Source, name: str, split: str) -> Iterator[tuple[Row, Task | str]]:
    """Every row with its task, or with what is wrong with it."""
    columns: Mapping[str, str] = {}
    for row in read_rows(name, config=source.config, split=split):
        if row.fault:
            yield row, row.fault
            continue
        columns = columns or _columns(name, row.data, dict(source.columns))
        yield row, _task(row.data, columns)


def _columns(name: str, data: Mapping[str, object], given: Mapping[str, str]) -> Mapping[str, str]:
    """The column of the prompt, of the answer, and of the id if there is one, told by the first good row."""
    found = dict(given)
    lower = {path.lower(): path for path in _paths(data)}
    for what, candidates in (("prompt", _PROMPTS), ("answer", _ANSWERS), ("id", _IDS)):
        known = next((lower[candidate] for candidate in candidates if candidate in lower), None)
        if what not in found and known is not None:
            found[what] = known
    missing = [what for what in ("prompt", "answer") if what not in found]
    wrong = [path for path in given.values() if path not in lower.values()]
    if missing or wrong:
        problem = f"has no column {wrong[0]!r}" if wrong else f"has no column known to hold the {missing[0]}"
        raise ConfigError(
            f"{name!r} {problem}, only {', '.join(lower.values()) or 'none'}: "
            'say columns={"prompt": …, "answer": …} with the names of its columns'
        )
    return found


def _paths(data: Mapping[str, object]) -> Iterator[str]:
    for name, value in data.items():
        yield name
        if isinstance(value, Mapping):
            yield from (f"{name}.{inner}" for inner in cast(Mapping[str, object], value))


def _at(data: Mapping[str, object], path: str) -> object:
    if path in data:
        return data[path]
    outer, _, inner = path.partition(".")
    value = data.get(outer)
    return cast(Mapping[str, object], value).get(inner) if isinstance(value, Mapping) else None


def _task(data: Mapping[str, object], columns: Mapping[str, str]) -> Task | str:
    prompt = _prompt(_at(data, columns["prompt"]))
    if prompt is None or not prompt.strip():
        return f"has no problem in {columns['prompt']!r}"
    if len(prompt) > MAX_PROMPT or not _encodable(prompt):
        return f"has a problem in {columns['prompt']!r} that is too long or no valid text"
    answer = _answer(_at(data, columns["answer"]), solution=columns["answer"].lower().endswith("solution"))
    if answer is None or not _encodable(answer) or not readable(answer):
        return f"has no answer in {columns['answer']!r} that can be read"
    task = Task(id=f"{stable_hash(_bare(prompt)):016x}", prompt=prompt.strip(), answer=answer)
    name = _at(data, columns["id"]) if "id" in columns else None
    return replace(task, id=str(name)) if isinstance(name, str | int) and str(name).strip() else task


def _encodable(text: str) -> bool:
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def _prompt(value: object) -> str | None:
    if isinstance(value, str):
        return _without_frame(value)
    if not isinstance(value, list):
        return None
    texts: list[str] = []
    for message in cast(list[object], value):
        if not isinstance(message, Mapping):
            return None
        role, content = (cast(Mapping[str, object], message).get(key) for key in ("role", "content"))
        if role == "user" and isinstance(content, str):
            texts.append(_without_frame(content))
    return "\n\n".join(texts)


def _without_frame(prompt: str) -> str:
    """``prompt`` without a first and last paragraph that ask for another form of answer, as DAPO-Math's do."""
    paragraphs = prompt.strip().split("\n\n")
    if len(paragraphs) > 2 and "Answer: $Answer" in paragraphs[0]:
        paragraphs = paragraphs[1:]
        if '"Answer:"' in paragraphs[-1]:
            paragraphs = paragraphs[:-1]
    return "\n\n".join(paragraphs)


def _answer(value: object, *, solution: bool) -> str | None:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return str(int(value)) if value.is_integer() else repr(value)
    text = str(value)
    if "####" in text:
        return text.rpartition("####")[2].strip()
    boxed = last_boxed(text)
    return boxed if boxed is not None or solution else text.strip()
