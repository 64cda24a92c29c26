"""Rows from files and data sets, good and bad."""

import codecs
import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from agentrl.envs.datafiles import SourceRow, left_over, read_rows, stamp
from agentrl.errors import UsageError

from .published import write

DATA = [{"problem": "1+1", "answer": 2}, {"problem": "é\N{GREEK SMALL LETTER PI}", "answer": [1, {"a": None}]}]


def as_lines(data: list[dict[str, object]] = DATA) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in data).encode()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", as_lines()),
        ("a.jsonl.gz", gzip.compress(as_lines(), mtime=0)),
        ("A.JSONL.ZST", zstandard.compress(as_lines())),
        ("a.jsonl", as_lines().replace(b"\n", b"\r\n\r\n").rstrip()),
        ("a.json", as_lines()),
        ("a.json.gz", gzip.compress(as_lines(), mtime=0)),
    ],
)
def test_json_lines(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    assert [row.data for row in read_rows(str(path))] == DATA
    assert next(read_rows(str(path))) == SourceRow(location=f"{name} line 1", data=DATA[0])


@pytest.mark.parametrize("start", [b"\n ", codecs.BOM_UTF8])
@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize(
    ("name", "pack"), [("a.json", bytes), ("a.json.gz", gzip.compress), ("a.json.zst", zstandard.compress)]
)
def test_a_json_document(
    tmp_path: Path, indent: int | None, name: str, pack: Callable[[bytes], bytes], start: bytes
) -> None:
    path = tmp_path / name
    path.write_bytes(pack(start + json.dumps([*DATA, 1], indent=indent).encode()))
    rows = list(read_rows(str(path)))
    assert [row.data for row in rows] == [*DATA, {}]
    assert [row.fault for row in rows] == ["", "", "is no JSON object"]
    assert rows[1].location == f"{name} item 2"


def test_what_is_left_over() -> None:
    row = {"Q": "x", "copy": "x", "Problem Number": "3", "source": "s", "n": 4, "none": None}
    row |= {"list": [1], "table": {"a": 1}}
    assert left_over(row, {"Q"}) == ["list", "table"]
    assert left_over(row, {"Q", "table"}) == ["list"]


def test_bad_lines_are_handed_on(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    deep, large = b"[" * 100_000, b'{"a": ' + b"9" * 5000 + b"}"
    path.write_bytes(b"\n".join([b"{", b"[1]", b"\xff\xfe", deep, large, b"", b'{"a": 1}']))
    rows = list(read_rows(str(path)))
    assert [bool(row.fault) for row in rows] == [True, True, True, True, True, False]
    assert [row.location.rpartition(" ")[2] for row in rows] == ["1", "2", "3", "4", "5", "7"]
    assert rows[1].fault == "is no JSON object"
    assert rows[0].fault.startswith("is no JSON (")


def test_parquet(tmp_path: Path) -> None:
    rows = [
        {"prompt": [{"role": "user", "content": str(i)}], "reward_model": {"ground_truth": str(i)}} for i in range(3000)
    ]
    read = list(read_rows(write(tmp_path / "a.parquet", rows)))
    assert [row.data for row in read] == rows
    assert read[1700].location == "a.parquet row 1701"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.jsonl", None, "there is no data file"),
        ("a.csv", b"a,b", "is no data file that can be read here: convert it"),
        ("a.jsonl.gz", b"not packed", "can't be read"),
        ("a.jsonl.zst", b"not packed", "can't be read"),
        ("a.json", b'[{"a": 1}, {"a"', "can't be read"),
        ("a.json", b"[\xff]", "can't be read"),
        ("a.json", b"[" * 100_000, "can't be read"),
        ("a.jsonl.gz", gzip.compress(as_lines() * 1000)[:-50], "can't be read"),
        ("a.parquet", b"PAR1 and nothing else", r"a\.parquet' can't be read"),
    ],
)
def test_unreadable_files(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if name == "a.parquet":
        pytest.importorskip("pyarrow")
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=message):
        list(read_rows(str(tmp_path / name)))


def test_a_hub_data_set_that_is_not_there() -> None:
    pytest.importorskip("datasets")
    with pytest.raises(UsageError, match=r"'nobody/nothing'.*can't be loaded"):
        list(read_rows("nobody/nothing"))


def test_a_stamp_changes_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"{}")
    before = stamp(str(path))
    assert before == stamp(str(path)) != stamp("openai/gsm8k") == ()
    path.write_bytes(b"{} ")
    assert stamp(str(path)) != before
