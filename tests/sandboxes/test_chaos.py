"""The sandbox's own processes are killed while programs run; and what the chaos must notice, it does notice."""

import json
import math
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agentrl.sandboxes import Result, Sandbox, SandboxError

from ..conftest import load_script

SCRIPTS = Path(__file__).parents[2] / "scripts"
chaos = load_script("chaos_sandboxes")


@pytest.mark.slow
@pytest.mark.parametrize(("runs", "kill_every"), [(60, 0.1), pytest.param(200, 0.5, marks=pytest.mark.ci)])
def test_runs_under_fire(sandbox: Sandbox, runs: int, kill_every: float) -> None:
    options = ["--runs", str(runs), "--kill-every", str(kill_every), "--seed", "7"]
    done = subprocess.run([sys.executable, SCRIPTS / "chaos_sandboxes.py", *options], capture_output=True, text=True)
    report = json.loads(done.stdout)
    assert (done.returncode, report["violations"]) == (0, [])
    assert report["counts"]["ok"] > runs / 2 and report["counts"]["killed session"] > 0


@pytest.mark.parametrize(
    ("outcome", "kill", "wrong"),
    [
        *((Result(status="ok", value="4"), -1.0, False), (Result(status="ok", value="5"), -1.0, True)),
        *((Result(status="ok", value="5"), 1.0, True), (Result(status="timeout"), -1.0, True)),
        *((Result(status="killed"), 1.0, True), (Result(status="crash", attempts=2), 1.0, True)),
        *((Result(status="ok", value="4", state="lost"), 1.0, True), (SandboxError("gone"), -1.0, True)),
        *((SandboxError("gone"), 1.0, False), (SandboxError("gone"), math.inf, False)),
    ],
)
def test_judge(outcome: Result | SandboxError, kill: float, wrong: bool) -> None:
    """The last kill had its effect so many seconds after the program began."""
    record, began = chaos.Record(), time.monotonic()
    record.last_kill = began + kill
    record.judge("2 + 2", chaos.Expected(statuses={"ok"}, value="4", keeps_state=True), outcome, began)
    assert bool(record.violations) is wrong
    assert sum(record.counts.values()) == 1


@pytest.mark.parametrize(
    ("name", "blamed"), [("sigkill_self", True), ("kill_minus1", True), ("forge_frame_then_fail", False)]
)
def test_only_who_kills_itself_may_be_blamed_after_one_kill(name: str, blamed: bool) -> None:
    assert ("crash" in chaos.hostile(chaos.random.Random(0), [name])[1].statuses) is blamed


@pytest.mark.slow
def test_a_session_that_can_not_be_had_again_is_a_fault(sandbox: Sandbox) -> None:
    for seconds in (1, 8, 64):  # on a busy machine even the first run may come late
        until = time.time() + seconds
        with sandbox.session() as session:
            if session.run(f"import os, time\nif time.time() > {until}: os._exit(1)\nx = 1").state != "kept":
                continue
            time.sleep(max(0.0, until - time.time()))
            for pid in chaos.first_processes()["session"]:
                chaos.os.kill(pid, 9)
            with pytest.raises(SandboxError, match="a cell that ran before ends with exit now"):
                session.run("x")
        return
    raise AssertionError("the first run always came too late")
