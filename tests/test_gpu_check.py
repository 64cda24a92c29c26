"""The checks for a GPU: all run here, tiny and on a CPU, since nobody can mend them in the minutes that one is lent."""

import json
from pathlib import Path

import pytest

from .forked import Server

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "gpu_check.py"
pytestmark = pytest.mark.ci
PIECES = ("assumptions", "agreement", "update", "decode", "kernels", "learn", "memory")


@pytest.mark.slow
def test_every_piece_has_its_rows_and_goes_on_where_it_stopped(server: Server, tmp_path: Path) -> None:
    done = server.run(SCRIPT, "--out", tmp_path, "--quick", "--seconds", "9999", cwd=tmp_path)
    assert done.returncode == 0, done.stderr + done.stdout
    pieces = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in PIECES}
    assert {name: content["ended"] for name, content in pieces.items()} == dict.fromkeys(PIECES, "done")
    rows = {name: content["rows"] for name, content in pieces.items()}
    assert "NaN" not in (text := json.dumps(rows)) and "Infinity" not in text
    assert all(f"  {name}: " in done.stdout for of in rows.values() for name in of)
    assert [name for name, row in rows["assumptions"].items() if row.get("holds") is False] == []
    assert all(row["max"] < 1e-4 and row["engine_alone_same_bits"] for name, row in rows["agreement"].items()
               if name.startswith("float32"))  # fmt: skip
    assert all(row["seconds"] > 0 for name, row in rows["update"].items() if name != "card") and len(rows["update"]) > 5
    assert rows["learn"]["float32: end"]["code"] == 0 and "reward_mean" in rows["learn"]["float32: step 1"]

    # A piece that was cut off keeps its rows and gets the others; one that is done is left alone.
    cut = pieces["kernels"] | {"ended": "out of time", "rows": {"card": rows["kernels"]["card"]}}
    (tmp_path / "kernels.json").write_text(json.dumps(cut))
    done = server.run(SCRIPT, "--out", tmp_path, "--quick", "--seconds", "9999", "kernels", "update", cwd=tmp_path)
    assert done.returncode == 0 and "update: was done before" in done.stderr, done.stderr
    assert json.loads((tmp_path / "kernels.json").read_text())["rows"].keys() == rows["kernels"].keys()


def test_a_piece_that_takes_too_long_costs_only_itself(server: Server, tmp_path: Path) -> None:
    done = server.run(SCRIPT, "--out", tmp_path, "--quick", "--seconds", "0.2", "update", "kernels", cwd=tmp_path)
    assert done.returncode == 1 and "update: out of time after 0 s" in done.stdout, done.stdout
    assert json.loads((tmp_path / "kernels.json").read_text())["piece"] == "kernels", "the next one had its turn"


def test_a_piece_does_without_the_imports_of_another_process(server: Server, tmp_path: Path) -> None:
    done = server.run(SCRIPT, "--out", tmp_path, "--quick", "--inside", "kernels", cwd=tmp_path)
    assert done.returncode == 0 and json.loads((tmp_path / "kernels.json").read_text())["ended"] == "done"


def test_a_device_that_is_not_there_is_named(server: Server, tmp_path: Path) -> None:
    done = server.run(SCRIPT, "--out", tmp_path, "--device", "cuda:9", "--inside", "update", cwd=tmp_path)
    assert done.returncode == 1
    assert "there is no device 'cuda:9' here" in json.loads((tmp_path / "update.json").read_text())["ended"]
