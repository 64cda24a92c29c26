"""Read the rows of a data set: JSON, Parquet, or what the ``datasets`` library loads, each with its location.

A data set is read once, from front to back. A row that can't be read is passed on with the reason.
"""

import codecs
import gzip
import io
import json
import tomllib
import warnings
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar, cast

from agentrl.errors import ConfigError, HubError, UsageError

JSON = tuple(kind + packed for kind in (".jsonl", ".json") for packed in ("", ".gz", ".zst"))
PARQUET = ".parquet"
T = TypeVar("T")
_BATCH = 1024
_SHOWN = 5
_MOST_TAG = 40
"""Characters of a tag; a longer text names no kind of task."""
LAYOUTS: Mapping[str, Any] = tomllib.loads(Path(__file__).with_name("layouts.toml").read_text(encoding="utf-8"))
"""The columns of published data sets, by kind of problem."""
_METADATA = frozenset(LAYOUTS["metadata"].split())


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRow:
    """One row."""

    location: str
    """Where it stands, for messages: ``train.jsonl line 7``."""
    data: Mapping[str, object]
    """Its columns; empty where it can't be read."""
    fault: str = ""
    """Why it can't be read; empty for a good row."""


def table(name: str, value: Mapping[str, str], wanted: str = "a table of texts") -> tuple[tuple[str, str], ...]:
    """Return the table of texts ``value`` as sorted pairs.

    Raises:
        ConfigError: the argument ``name`` is no such table; the message asks for ``wanted``.
    """
    # A caller in Python may give a list or a Path.
    texts = cast(list[object], [*value, *value.values()]) if isinstance(cast(object, value), Mapping) else [None]
    if not all(isinstance(text, str) for text in texts):
        raise ConfigError(f"{name} is {value!r}: give {wanted}")
    return tuple(sorted(value.items()))


def text_or_table(name: str, value: str | Mapping[str, str] | None) -> str | tuple[tuple[str, str], ...] | None:
    """Return a text as it is, and a table of texts as sorted pairs.

    Raises:
        ConfigError: the argument ``name`` is neither.
    """
    return value if value is None or isinstance(value, str) else table(name, value, "a text or a table of texts")


def by_split(data: str | tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    """Return the data sets to read as (split, data set), test before train; an empty split stands for both.

    Raises:
        ConfigError: there are splits but test and train, or no data set for test.
    """
    if isinstance(data, str):
        return (("", data),)
    if not {"test"} <= {name for name, _ in data} <= {"test", "train"}:
        raise ConfigError(
            "data needs a data set for test, beside it one for train, or a single one for both; it has "
            + (", ".join(sorted(name for name, _ in data)) or "none")
        )
    return tuple(sorted(data))


def tasks_of(splits: Mapping[str, T], split: str, data: Sequence[tuple[str, str]]) -> T:
    """Return the tasks of ``split``; ``data`` are the data sets that they come from, by split.

    Raises:
        ConfigError: there is none.
    """
    if not splits.get(split):
        names = " and ".join(name for _, name in data)
        raise ConfigError(f'no task of {names} is in the split {split!r}: give data={{"train": …, "test": …}}')
    return splits[split]


def refuse_or_warn(what: str, faults: Sequence[str], *, skip: bool, option: str) -> None:
    """Refuse bad rows or tasks, or warn of them where they are to be skipped.

    Raises:
        ConfigError: there are some, and they are not to be skipped.
    """
    if not faults:
        return
    shown = "; ".join(faults[:_SHOWN]) + (" …" if len(faults) > _SHOWN else "")
    if not skip:
        raise ConfigError(f"{what} ({len(faults)}): {shown} (mend them, or leave them out with {option}=True)")
    warnings.warn(f"{what} left out ({len(faults)}): {shown}", stacklevel=3)


def read_rows(source: str, *, config: str | None = None, split: str = "train") -> Iterator[SourceRow]:
    """Iterate over the rows of ``source``, in order, read lazily.

    Args:
        source: the path of a file (``.jsonl`` or ``.json``, also packed as ``.gz`` or ``.zst``, or ``.parquet``) or of
            a folder that ``datasets.load_dataset`` understands; or the name of a data set on the Hugging Face hub.
        config: the configuration of a folder or hub data set.
        split: its split.

    Raises:
        UsageError: there is no such file or data set, it can't be read, or a library that reads it is missing.
        HubError: the data set is not here, and the hub can't be reached.
    """
    path = Path(source).expanduser()
    # This function is no generator itself, so that a missing file is an error now and not at the first row.
    if source.lower().endswith(JSON):
        return _json_rows(_existing(path))
    if source.lower().endswith(PARQUET):
        return _parquet(_existing(path))
    if path.is_file():
        suffixes = ", ".join((*JSON, PARQUET))
        raise UsageError(f"{source!r} is no data file that can be read here: convert it to one of {suffixes}")
    return _hub(str(path) if path.is_dir() else source, config, split)


def left_over(data: Mapping[str, object], read: Collection[str]) -> list[str]:
    """List the columns with text, lists or tables that were not read and may belong to the problem.

    Args:
        data: a row.
        read: the columns that were read; a copy of one of them is not left over.
    """
    values = [data[name] for name in read if name in data]
    return [
        name
        for name, value in data.items()
        if name not in read and name.lower().replace(" ", "_") not in _METADATA
        if value and isinstance(value, str | list | Mapping) and value not in values
    ]


def tags_of(data: Mapping[str, object]) -> tuple[str, ...]:
    """Return the tags of a row: its difficulty and subject, such as ``level:5`` for MATH's ``Level 5``."""
    named = {name: data.get(name) for name in ("difficulty", "level", "subject", "type")}
    texts = {name: str(value).strip() for name, value in named.items() if isinstance(value, str | int | float)}
    return tuple(f"{name}:{text.removeprefix('Level ')}" for name, text in texts.items() if 0 < len(text) <= _MOST_TAG)


def stamp(source: str) -> tuple[object, ...]:
    """Return a key that changes when the file ``source`` is written again; empty for folders and hub data sets."""
    path = Path(source).expanduser()
    if not path.is_file():
        return ()
    status = path.stat()
    return (str(path.resolve()), status.st_mtime_ns, status.st_size)


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise UsageError(f"there is no data file {str(path)!r}: give the path of an existing one")
    return path


def _json_rows(path: Path) -> Iterator[SourceRow]:
    with _complaining(path), _opened(path) as file:
        # A file called .json holds a list, or, very often, lines as well.
        whole = b"" if ".jsonl" in path.name.lower() else file.read().removeprefix(codecs.BOM_UTF8).strip()
        if whole.startswith(b"["):
            items = cast(list[object], json.loads(whole))
            yield from (_row(f"{path.name} item {count}", item) for count, item in enumerate(items, start=1))
            return
        for count, line in enumerate(whole.splitlines() or file, start=1):
            if line.strip():
                yield _json_row(f"{path.name} line {count}", line)


def _json_row(location: str, line: bytes) -> SourceRow:
    try:
        return _row(location, json.loads(line))
    except (ValueError, RecursionError) as error:
        return SourceRow(location=location, data={}, fault=f"is no JSON ({error})")


def _row(location: str, data: object) -> SourceRow:
    if not isinstance(data, dict):
        return SourceRow(location=location, data={}, fault="is no JSON object")
    return SourceRow(location=location, data=cast(dict[str, object], data))


def _opened(path: Path) -> IO[bytes]:
    kind = path.suffix.lower()
    if kind == ".zst":
        import zstandard

        return io.BufferedReader(cast(Any, zstandard.open(path, "rb")))
    return cast(IO[bytes], gzip.open(path)) if kind == ".gz" else path.open("rb")


def _parquet(path: Path) -> Iterator[SourceRow]:
    try:
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise UsageError("reading Parquet needs pyarrow: pip install 'agentrl[math]'") from error
    with _complaining(path), pyarrow.parquet.ParquetFile(path) as file:
        rows = (row for batch in file.iter_batches(batch_size=_BATCH) for row in batch.to_pylist())
        yield from (_row(f"{path.name} row {count}", row) for count, row in enumerate(rows, start=1))


@contextmanager
def _complaining(path: Path) -> Generator[None]:
    """Name the file when reading it fails."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:  # gzip, zstandard and pyarrow have each their own kinds
        raise UsageError(f"{str(path)!r} can't be read: {error}") from error


def _hub(source: str, config: str | None, split: str) -> Iterator[SourceRow]:
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise UsageError(f"loading the data set {source!r} needs datasets: pip install 'agentrl[math]'") from error
    load: Any = datasets.load_dataset
    try:
        rows = load(source, config, split=split)
    except Exception as error:  # the library raises many kinds, from the network's to its readers'
        reason = (str(error) or type(error).__name__).splitlines()[0]
        kind = HubError if isinstance(error, ConnectionError) else UsageError
        raise kind(f"the data set {source!r} (config {config!r}, split {split!r}) can't be loaded: {reason}") from error
    return (_row(f"{source} [{split}] row {count}", row) for count, row in enumerate(rows, start=1))
