"""The soak: nothing goes wrong or grows under faults, and what it must notice, it does notice."""

import json
from pathlib import Path
from typing import Any

import pytest

from agentrl.toolenv.tools.python import PythonTool

from .conftest import load_script

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.mark.ci
@pytest.mark.slow
def test_a_step_under_fire(server: Any, tmp_path: Path) -> None:
    done = server.run(SCRIPTS / "soak.py", "--episodes", "64", "--kill-every", "0.1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr + done.stdout
    report = json.loads(done.stdout)
    counts = report["counts"]
    assert report["violations"] == [] and counts["episodes"] + 8 * counts["groups_lost"] == 64
    assert counts["ran"] >= 0.8 * counts["episodes"] and counts["killed session"] > 0
    assert {"processes", "descriptors", "threads", "files in /dev/shm", "MiB"} <= report["first, last"].keys()


@pytest.mark.parametrize(("output", "wrong"), [("3000001", False), ("3000002", True), ("(no output)", True)])
def test_a_wrong_output_is_noticed(monkeypatch: pytest.MonkeyPatch, output: str, wrong: bool) -> None:
    soak = load_script("soak")
    for name, value in {"HANGS": 0.0, "GRADER_FAULTS": 0.0, "record": soak.Record()}.items():
        monkeypatch.setattr(soak, name, value)
    monkeypatch.setattr(PythonTool, "call", lambda *_: output)
    env = soak.Soak()
    env.reset(options={"task": "train:3"})
    env.step("a call, whatever the agent says")
    assert env.step("the answer")[2] and bool(soak.record.violations) is wrong
