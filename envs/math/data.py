r"""Load mathematical problems from data sets: recognise the columns, check the rows, deduplicate, and split.

``layouts.toml`` lists the columns that are recognised. The prompt, a text or chat messages, follows the row's passage
and precedes its choices. The answer is a column of its own, or the box of a ``solution``. Where the letter of the right
choice stands beside the answer, as in ``choice_answer``, that letter is right as well. The gold player has Python work
out an ``equation`` of numbers. These columns cover DeepScaleR, DAPO-Math, MATH, AIME, AMC, OlympiadBench, Minerva,
SVAMP, ASDiv, MMLU and GSM8K (``#### 42``). A data set with another column that may belong to the problem is refused
until ``columns`` names those that do. Duplicates within a file are dropped. No problem is in both splits, whatever its
spacing.
"""

import functools
import math
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from agentrl.envs.datafiles import LAYOUTS, SourceRow, by_split, left_over, read_rows, refuse_or_warn, stamp, tags_of
from agentrl.errors import ConfigError
from agentrl.grading.latex import readable
from agentrl.grading.numbers import last_boxed, plain_number
from agentrl.toolenv.tasks import TaskList, split_of, stable_hash
from agentrl.types import Task

TEST_SHARE = 10
"""Of one source, one problem in this many belongs to the test split."""
MAX_PROMPT = 20_000
"""Limit of a problem's characters; a longer one is a bad row."""
SAMPLE = Path(__file__).with_name("sample.jsonl")
"""Sixty problems of our own, for trying things out."""
_PARTS: Mapping[str, list[str]] = LAYOUTS["math"]
"""The parts of a problem, and the columns that may hold each, in order of preference."""
_ARITHMETIC = re.compile(r"[\d.()+\-*/ ]{1,200}")
_WHOLE = re.compile(r"(?<=\d)\.0+(?!\d)")
"""The zeros of ``76.0``."""
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_LETTER = re.compile(r"(?<!\S)\(?([A-Z])[).:]")
_COUNTED = re.compile(r"(\S+) +\(([A-Za-z][A-Za-z. ]*)\)")
"""``9 (apples)``, as ASDiv writes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The source of the problems; hashable, so that they are cached."""

    data: str | tuple[tuple[str, str], ...] | None = None
    """One data set, one for each split as (split, data set), or None for the sample."""
    config: str | None = None
    """The configuration of a hub data set."""
    split: str | tuple[tuple[str, str], ...] | None = None
    """The hub data set's split to read, for all or as (split, its split); None reads the one of the same name."""
    columns: tuple[tuple[str, str], ...] = ()
    """The columns of the prompt, its passage, its choices, the answer, its letter, its equation and the id. Those that
    are not named are recognised, but for the passage and the choices of a prompt that is named."""
    skip_bad_rows: bool = False
    """True to skip bad rows with a warning instead of refusing them."""

    def __post_init__(self) -> None:
        if unknown := {name for name, _ in self.columns} - set(_PARTS):
            raise ConfigError(f"columns names {sorted(unknown)[0]!r}: it maps {', '.join(_PARTS)} to columns")
        if self.data is not None:
            by_split(self.data)

    @property
    def files(self) -> tuple[tuple[str, str], ...]:
        """The data sets to read, each with the split it is for; an empty split stands for both."""
        # Test first: a problem that is in both is dropped from train.
        return by_split(str(SAMPLE) if self.data is None else self.data)

    def hub_split(self, split: str) -> str:
        """Return the split of the hub data set that becomes ``split``."""
        if isinstance(self.split, tuple):
            return dict(self.split).get(split or "train", split or "train")
        return self.split or split or "train"


def load_problems(source: Source) -> Mapping[str, TaskList]:
    """Load the tasks of each split that has any; they are cached until a file changes.

    Raises:
        ConfigError: the columns can't be recognised, or a named column is missing.
        UsageError: a data set can't be read, or has bad rows and ``skip_bad_rows`` is not set.
    """
    return _load(source, tuple(stamp(name) for _, name in source.files))


@functools.lru_cache(maxsize=4)
# The stamps are only part of the cache's key: a file that has changed has others.
def _load(source: Source, stamps: tuple[object, ...]) -> Mapping[str, TaskList]:
    tasks: dict[str, list[Task]] = {"train": [], "test": []}
    seen, faults, repeats = _Seen(), list[str](), Counter[str]()
    for origin, name in source.files:
        for row, task in _tasks(source, name, source.hub_split(origin)):
            # None stands for a duplicate, an empty text for a task that is accepted.
            fault = task if isinstance(task, str) else seen.fault(task, row.location, origin)
            if fault is None:
                repeats[name] += 1
                continue
            if fault or isinstance(task, str):
                faults.append(f"{row.location} {fault}")
                continue
            # The sample's rows name their own split.
            own = str(row.data["split"]) if source.data is None else split_of(_bare(task.prompt), TEST_SHARE)
            tasks[origin or own].append(task)
    refuse_or_warn("bad rows", faults, skip=source.skip_bad_rows, option="skip_bad_rows")
    for name, count in repeats.items():
        warnings.warn(f"{name}: {count} rows that repeat an earlier one are left out", stacklevel=2)
    return {split: TaskList(of_split) for split, of_split in tasks.items() if of_split}


def _bare(problem: str) -> str:
    """Remove white space, so that a problem's spacing changes neither its identity nor its split."""
    return "".join(problem.split())


class _Seen:
    """The problems and ids read so far."""

    def __init__(self) -> None:
        self._problems: dict[int, tuple[str, str, int]] = {}
        self._ids: set[tuple[str, str]] = set()

    def fault(self, task: Task, location: str, origin: str) -> str | None:
        """Return why ``task`` is refused; empty where it is accepted and remembered; None for a duplicate to drop."""
        key = stable_hash(_bare(task.prompt))
        if key in self._problems:
            earlier, earlier_origin, answer = self._problems[key]
            if answer != hash(task.answer):
                return f"repeats the problem of {earlier}, with another answer"
            return None if earlier_origin == origin else f"repeats the problem of {earlier}"
        # Ids need to differ within a split only: data sets that number their rows repeat them in train and test.
        if (origin, task.id) in self._ids:
            return f"has the id {task.id!r} of an earlier one"
        self._problems[key] = (location, origin, hash(task.answer))
        self._ids.add((origin, task.id))
        return ""


def _tasks(source: Source, name: str, split: str) -> Iterator[tuple[SourceRow, Task | str]]:
    """Yield every row with its task, or with its fault."""
    named, columns = dict(source.columns), dict[str, str]()
    for row in read_rows(name, config=source.config, split=split):
        if row.fault:
            yield row, row.fault
            continue
        columns = columns or _columns(name, row.data, named)
        rest = _left_over(row.data, columns, named)
        yield row, f"has {rest[0]!r}, which may belong to the problem" if rest else _task(row.data, columns)


def _columns(name: str, data: Mapping[str, object], named: Mapping[str, str]) -> dict[str, str]:
    """Return the column of each part of a problem: those ``named``, and those recognised by the first good row."""
    columns = dict(named)
    lower = {path.lower(): path for path in _flat(data)}
    for part, candidates in _PARTS.items():
        paths = [lower[candidate] for candidate in candidates if candidate in lower]
        # A caller who names the prompt's column has decided whether a passage or choices belong to it.
        if part not in named and paths and not ("prompt" in named and part in ("passage", "choices")):
            columns[part] = paths[0]
    missing = [part for part in ("prompt", "answer") if part not in columns]
    wrong = [path for path in named.values() if path not in lower.values()]
    rest = _left_over(data, columns, named)
    if missing or wrong or rest:
        problem = f"no column {wrong[0]!r}" if wrong else f"columns that may belong to the problem, {', '.join(rest)}"
        problem = f"no column known to hold the {missing[0]}" if missing and not wrong else problem
        raise ConfigError(
            f'{name!r} has {problem}: say columns={{"prompt": …, "answer": …}}, and passage or choices where it has '
            f"such, with the names of its columns: {', '.join(lower.values()) or 'none'}"
        )
    return columns


def _left_over(data: Mapping[str, object], columns: Mapping[str, str], named: Mapping[str, str]) -> list[str]:
    # A caller who names the prompt's column has decided what belongs to it.
    read = {part for path in columns.values() for part in (path, path.partition(".")[0])}
    return [] if "prompt" in named else left_over(data, read)


def _flat(data: Mapping[str, object]) -> Mapping[str, object]:
    """Return a row's columns by name, and those of its tables as ``outer.inner``."""
    flat: dict[str, object] = {}
    for name, value in data.items():
        flat[name] = value
        if isinstance(value, Mapping):
            flat |= {f"{name}.{inner}": part for inner, part in cast(Mapping[str, object], value).items()}
    return {**flat, **data}


def _task(data: Mapping[str, object], columns: Mapping[str, str]) -> Task | str:
    """Make a row's task; a text says what is wrong with the row."""
    flat = _flat(data)
    parts = {part: flat.get(column) for part, column in columns.items()}
    prompt, passage, choices = _prompt(parts["prompt"]), parts.get("passage") or "", _choices(parts.get("choices"))
    if prompt is None or not prompt.strip():
        return f"has no problem in {columns['prompt']!r}"
    if not isinstance(passage, str) or choices is None:
        return "has a passage or choices that can't be read"
    letters, listed = choices
    prompt = "\n".join(filter(None, (passage.strip(), prompt.strip(), listed)))
    if len(prompt) > MAX_PROMPT or not _encodable(prompt):
        return f"has a problem in {columns['prompt']!r} that is too long or no valid text"
    letter = parts.get("letter")
    if letters:
        answer = _letter(parts["answer"], letters) or _letter(letter, letters)
    else:
        answer = _answer(parts["answer"], solution=columns["answer"].lower().endswith("solution"))
    if answer is None or not _usable(answer):
        return f"has no answer in {columns['answer']!r} that can be read"
    more: dict[str, str] = {}
    # The letter of a choice in the problem's text is right as well; a number, which may count from 0 or 1, is not.
    if isinstance(letter, str) and letter.strip() and not letters:
        more["letter"] = letter.strip("(). ")
        if not _usable(more["letter"]):
            return f"has no letter in {columns['letter']!r} that can be read"
    equation = parts.get("equation")
    if isinstance(equation, str) and _ARITHMETIC.fullmatch(equation):
        more["equation"] = _WHOLE.sub("", equation.strip())
    task = Task(id=f"{stable_hash(_bare(prompt)):016x}", prompt=prompt, answer=answer, data=more, tags=tags_of(data))
    name = parts.get("id")
    return replace(task, id=str(name)) if isinstance(name, str | int) and str(name).strip() else task


def _choices(value: object) -> tuple[str, str] | None:
    """Return the letters of the choices and a text that lists them, both empty where there are none; None where bad.

    Choices are a list, a mapping from letters, or one text: ``A) 1 B) 2``.
    """
    if not value:
        return "", ""
    if isinstance(value, str):
        letters, lines = "".join(_LETTER.findall(value)), [value.strip()]
    elif isinstance(value, list | Mapping):
        pairs = value.items() if isinstance(value, Mapping) else zip(_LETTERS, value, strict=False)
        texts = {letter: str(text).strip() for letter, text in pairs if isinstance(text, str | int | float)}
        letters = "".join(texts) if len(texts) == len(value) else ""
        # Choices that bring their letters along are listed as they are.
        own = "".join(match[1] for text in texts.values() if (match := _LETTER.match(text)))
        lines = [text if own == letters else f"({letter}) {text}" for letter, text in texts.items()]
    else:
        return None
    if len(letters) < 2 or not _LETTERS.startswith(letters):
        return None
    return letters, "\n".join(["", *lines, "", "Answer with the letter of the right choice."])


def _letter(answer: object, letters: str) -> str | None:
    """Return the letter of the right choice, which the row has as such or as a number, counted from 0."""
    text = (_answer(answer, solution=False) or "").strip("(). ")
    if not isinstance(answer, str) and text.isdecimal() and int(text) < len(letters):
        return letters[int(text)]
    return text if len(text) == 1 and text in letters else None


def _usable(answer: str) -> bool:
    return _encodable(answer) and readable(answer)


def _encodable(text: str) -> bool:
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def _prompt(value: object) -> str | None:
    if isinstance(value, str):
        return _without_frame(value)
    if not isinstance(value, list) or not all(isinstance(message, Mapping) for message in cast(list[object], value)):
        return None
    # What a system message asks for, the environment asks for in its own words.
    messages = [message for message in cast(list[Mapping[str, object]], value) if message.get("role") != "system"]
    texts = [message.get("content") for message in messages if message.get("role") == "user"]
    if len(texts) != len(messages) or not all(isinstance(text, str) for text in texts):
        return None
    return "\n\n".join(map(_without_frame, cast(list[str], texts)))


def _without_frame(prompt: str) -> str:
    """Remove a first and last paragraph that ask for another form of answer, as DAPO-Math's do."""
    paragraphs = prompt.strip().split("\n\n")
    if len(paragraphs) > 2 and "Answer: $Answer" in paragraphs[0]:
        paragraphs = paragraphs[1:]
        if '"Answer:"' in paragraphs[-1]:
            paragraphs = paragraphs[:-1]
    return "\n\n".join(paragraphs)


def _answer(value: object, *, solution: bool) -> str | None:
    if isinstance(value, list) and len(cast(list[object], value)) == 1:
        value = cast(list[object], value)[0]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return str(int(value)) if value.is_integer() else repr(value)
    text = str(value)
    if "####" in text:
        return text.rpartition("####")[2].strip()
    if (match := _COUNTED.fullmatch(text.strip())) and plain_number(match[1]) is not None:
        return rf"{match[1]} \text{{ {match[2]}}}"
    boxed = last_boxed(text)
    return boxed if boxed is not None or solution else text.strip()
