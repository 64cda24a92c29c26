"""Workers side by side: who has a unit, when they wait, and rows that none of them loses."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import load

work, rows = load("work"), load("rows")


def test_a_unit_belongs_to_one_at_a_time(tmp_path: Path) -> None:
    with work.claimed("C-one", tmp_path) as mine:
        assert mine == tmp_path / "C-one" and (mine / ".lock").read_text().isdigit()
        with work.claimed("C-one", tmp_path) as other:
            assert other is None
        with work.claimed("C-two", tmp_path) as free:
            assert free is not None
    with work.claimed("C-one", tmp_path) as again:
        assert again is not None, "a claim ends with the one who had it"


def test_a_worker_waits_as_long_as_the_file_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(work, "_POLL_S", 0.01)
    pause, lines = tmp_path / "pause", []
    limits = work.Limits(2, 0, pause, lines.append)
    limits.wait()
    assert lines == []
    pause.touch()
    limits.wait(pause.unlink)
    assert lines == [f"waiting until {pause} is gone"] and work.Limits(0, 1e-15, None).reached


def test_two_processes_add_rows_and_lose_none(tmp_path: Path) -> None:
    path = tmp_path / "rows" / "C.jsonl"

    code = f"""
import sys
from pathlib import Path
import rows

file = rows.RowFile(Path({str(path)!r}), "abc")
for number in range(40):
    file.add({{"worker": int(sys.argv[1]), "number": number}}, long="x" * 20000)
"""
    folder = Path(rows.__file__).parent
    others = [subprocess.Popen([sys.executable, "-c", code, str(worker)], cwd=folder) for worker in range(2)]
    assert [process.wait() for process in others] == [0, 0]
    pairs = {(row["unit"]["worker"], row["unit"]["number"]) for row in map(json.loads, path.read_text().splitlines())}
    assert len(pairs) == 80
    mine = rows.RowFile(path, "abc")
    rows.RowFile(path, "abc").add({"late": 1})
    assert not mine.has({"late": 1})
    mine.refresh()
    assert mine.has({"late": 1})


def test_a_superseded_row_stays_in_the_file_and_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "C.jsonl"
    path.write_text('{"unit": {"seed": 1}, "superseded": "another machine"}\n{"unit": {"seed": 2}}\n')
    file = rows.RowFile(path, "abc")
    assert not file.has({"seed": 1}) and file.has({"seed": 2}) and rows.read_rows(path) == file.rows
    file.add({"seed": 1})
    assert len(path.read_text().splitlines()) == 3 and rows.read_rows(path) == file.rows
