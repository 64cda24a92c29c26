"""The benchmarks run: their help, and our side of a small one; nothing is timed and nothing is installed."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest

from agentrl.sandboxes import SandboxUnavailable, open_sandbox

FOLDER = Path(__file__).resolve().parents[1] / "scripts" / "benchmarks"


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd="/")


def test_help_shows_examples() -> None:
    shown = run(FOLDER / "end_to_end.py", "--help")
    assert shown.returncode == 0
    assert "examples:" in shown.stdout and "--quick --without-trl" in shown.stdout


def test_help_of_the_sandboxes_shows_examples() -> None:
    shown = run(FOLDER / "sandboxes.py", "--help")
    assert shown.returncode == 0 and "examples:\n  sandboxes.py" in shown.stdout


@pytest.mark.slow
def test_sandboxes_are_measured(tmp_path: Path) -> None:
    if not can_open("local"):
        pytest.skip("the local sandbox can't run here")
    numbers = tmp_path / "new" / "sandboxes.json"
    shown = run(FOLDER / "sandboxes.py", "--quick", "--only", "local", "--json", numbers)
    assert shown.returncode == 0, shown.stderr
    assert "failed:" not in shown.stdout, shown.stdout
    found = json.loads(numbers.read_text())
    assert all(0 < second < 10 for row in found["seconds"].values() for second in row)
    assert len(found["seconds"]["local: warm cell"]) == 30 and found["seconds"]["python3 -c pass"]
    names = {one["name"] for one in found["measures"]}
    assert {"local: warm cells", "local: fresh one-shots", "local: next cell after fork bomb"} <= names


def can_open(backend: Literal["local", "docker"]) -> bool:
    """Whether the back end can be opened."""
    try:
        open_sandbox(backend).close()
    except SandboxUnavailable:
        return False
    return True


def test_help_of_the_head_shows_examples() -> None:
    shown = run(FOLDER / "head.py", "--help")
    assert shown.returncode == 0 and "examples:\n  head.py" in shown.stdout


def test_the_head_is_measured(tmp_path: Path) -> None:
    numbers = tmp_path / "new" / "head.json"
    shown = run(FOLDER / "head.py", "--quick", "--device", "cpu", "--threads", "1", "--json", numbers)
    assert shown.returncode == 0, shown.stderr
    found = json.loads(numbers.read_text())
    assert all(len(row) == 2 and all(0 < second < 10 for second in row) for row in found["seconds"].values())
    assert {"ours: forward", "ours: forward + backward", "eager log_softmax: forward"} <= set(found["seconds"])
    promised = [one for one in found["measures"] if one["target"]]
    assert [one["target"] for one in promised] == ["<= 1/20", "<= 1.05", "<= 1.45", "<= 1.05"]
    assert all(f"| {one['name']} | {one['value']} |" in shown.stdout for one in promised)


@pytest.mark.slow
def test_our_side_of_end_to_end_runs(tmp_path: Path) -> None:
    numbers = tmp_path / "new" / "numbers.json"
    shown = run(FOLDER / "end_to_end.py", "--quick", "--without-trl", "--threads", "1", "--json", numbers)
    assert shown.returncode == 0, shown.stderr
    assert "| ragged | ours | 2 |" in shown.stdout and "| fixed | ours | generate |" in shown.stdout
    steps = {name: played["ours"] for name, played in json.loads(numbers.read_text())["steps"].items()}
    assert {length for step in steps["fixed"] for length in step["lengths"]} == {16}
    ragged = {length for step in steps["ragged"] for length in step["lengths"]}
    assert len(ragged) > 1 and 5 <= min(ragged) <= max(ragged) == 24


def test_a_side_that_fails_says_why() -> None:
    shown = run(FOLDER / "end_to_end_ours.py", json.dumps({"name": "broken"}))
    assert shown.returncode != 0 and "Error" in shown.stderr


def test_the_seeds_of_a_quickstart_are_a_table(tmp_path: Path) -> None:
    rows = [{"step": 0, "success": 0.3, "seconds_run": 20.4}, {"step": 8, "success": 0.955, "seconds_run": 99.6}]
    (tmp_path / "evals.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "config.toml").write_text("[run]\nseed = 7\n")
    shown = run(FOLDER / "quickstart_seeds.py", tmp_path)
    assert shown.stdout.splitlines()[2:] == ["| 7 | 30.0% (0), 95.5% (8) | 100 |"], shown.stderr
