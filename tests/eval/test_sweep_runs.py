"""A sweep of tiny runs: killed at any moment it goes on, and ends with the table of one that ran through."""

import json
import os
import re
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

import agentrl
from agentrl.eval.sweep.work import start_process
from agentrl.runs.folder import read_jsonl

from ..forked import Command, Server, is_alive
from ..train.conftest import TOY, rows_of, same_weights

SETTINGS = """
run = { threads = 1, deterministic = true }
env = { id = "toy:test/Toy-v0" }
model.tiny = { hidden = 16, layers = 1, heads = 2 }
sft = { steps = 2, tasks = 8, episodes = 4 }
rollout = { tasks = 2, group_size = 3, turn_tokens = 4, episode_tokens = 96, truncated = { turn = "answer" } }
optim = { lr = 1e-2, max_tokens = 512, schedule = "linear" }
eval = { tasks = 12 }
save = { every = 0 }
"""
TOKENS = 110
PAIRS = ("--vary", "algo.advantage=otb,group_mean", "--vary", "algo.loss=ctpo,ppo_clip")
SMALL = ("toy.toml", "--seeds", "0", "--tokens", str(TOKENS), "--out", "out")
NAMES = [f"{advantage}-{loss}-seed0" for advantage in ("otb", "group_mean") for loss in ("ctpo", "ppo_clip")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """A sweep that has ended."""

    out: Path
    table: str
    progress: str

    def data(self) -> dict[str, Any]:
        """What it wrote, without times."""
        data = json.loads((self.out / "sweep.json").read_text())
        for run in data["runs"]:
            if run["result"]:
                del run["result"]["minutes"]
        return data


def begin(server: Server, folder: Path, *argv: str, toy: str = TOY) -> Command:
    (folder / "toy.py").write_text(toy)
    (folder / "toy.toml").write_text(SETTINGS)
    return server.start(folder, "sweep", *SMALL, *argv)


def finish(command: Command, folder: Path, code: int = 0) -> Done:
    assert command.wait() == code, command.err
    return Done(out=folder / "out", table=command.out, progress=command.err)


def without_minutes(table: str) -> list[str]:
    return [re.sub(r"\| [\d.]+ \|$", "|", line) for line in table.splitlines()]


@pytest.fixture(scope="module")
def whole(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Done:
    """A sweep that ran through."""
    folder = tmp_path_factory.mktemp("whole")
    return finish(begin(server, folder, *PAIRS), folder)


@pytest.mark.slow
def test_every_pair_is_trained_from_one_warm_start_on_as_many_tokens(whole: Done) -> None:
    warm = whole.out / "warm-start-seed0"
    (initial,) = read_jsonl(warm / "evals.jsonl")
    assert not (warm / "metrics.jsonl").exists()
    assert [run["name"] for run in whole.data()["runs"]] == ["warm-start-seed0", *NAMES]
    for name in NAMES:
        steps, evals = (read_jsonl(whole.out / name / f"{what}.jsonl") for what in ("metrics", "evals"))
        sampled = [step["sampled_tokens"] for step in steps]
        assert sum(sampled[:-1]) < TOKENS <= sum(sampled)
        assert [row["step"] for row in evals] == [0, len(steps)]
        same = ("success", "reward_mean", "turns_mean", "truncated")
        assert [evals[0][key] for key in same] == [initial[key] for key in same], "it begins with the warm start"
        (run,) = (run for run in whole.data()["runs"] if run["name"] == name)
        assert run["exit_code"] == 0 and run["seed"] == 0
        last = {"success": evals[-1]["success"], "tasks": 12, "sampled_tokens": sum(sampled)}
        curve = [[0, evals[0]["success"]], [sum(sampled), evals[-1]["success"]]]
        assert run["result"] == {**last, "curve": curve}
    outcomes = [json.dumps(run["result"]) for run in whole.data()["runs"][1:]]
    assert len(set(outcomes)) > 1, "runs that are all the same would make the comparison below easy"


def test_table_has_a_row_for_each_pair(whole: Done) -> None:
    head, rule, *rows = [line for line in whole.table.splitlines() if line.startswith("|")]
    assert head.startswith("| algo.advantage | algo.loss | seed 0 | all seeds (95% interval) |")
    assert len({line.count("|") for line in (head, rule, *rows)}) == 1
    assert [row.split(" | ")[:2] for row in rows] == [
        ["| warm start", ""],
        *(["| " + run.split("-")[0], run.split("-")[1]] for run in NAMES),
    ]
    for row, data in zip(rows, whole.data()["rows"], strict=True):
        pooled = data["pooled"]
        assert pooled["tasks"] == 12 and [pooled["success"]] == data["success"]
        assert f"{pooled['success']:.1%} ({pooled['low']:.1%} to {pooled['high']:.1%})" in row
    assert "[2/5] otb-ctpo-seed0: begins" in whole.progress and " left" in whole.progress


def test_same_command_does_nothing_twice(whole: Done, server: Server) -> None:
    before = (whole.out / NAMES[0] / "report.html").stat().st_mtime_ns
    again = finish(begin(server, whole.out.parent, *PAIRS), whole.out.parent)
    assert again.table == whole.table and again.progress == "5 of 5 runs are done already\n"
    assert (whole.out / NAMES[0] / "report.html").stat().st_mtime_ns == before
    listed = begin(server, whole.out.parent, *PAIRS, "--dry-run")
    assert listed.wait() == 0
    assert [line.split(":")[0] for line in listed.out.splitlines()] == [
        f"{name} (done)" for name in ("warm-start-seed0", *NAMES)
    ]
    other = begin(server, whole.out.parent, *PAIRS, "--set", "optim.lr=1e-3")
    assert other.wait() == 2
    assert "holds a run with other settings (optim.lr is 0.01 there and 0.001 here)" in other.err


HELD = (
    TOY
    + """
import os, signal
from pathlib import Path

reward = Toy.reward

def held_reward(self, episode):
    for rows in Path("out").glob("*/metrics.jsonl"):
        if rows.read_text().count("\\n") >= 2:
            try:
                Path(f"{rows.parent.name}.held").touch(exist_ok=False)
            except FileExistsError:
                continue  # another thread's reward was first, and the process stops once only
            os.kill(os.getpid(), signal.SIGSTOP)
    return reward(self, episode)

Toy.reward = held_reward
"""
)
"""Each run stands still, once, in the middle of its training."""


@pytest.mark.slow
def test_sweep_that_was_stopped_goes_on(whole: Done, server: Server, tmp_path: Path) -> None:
    for number, sig in enumerate((signal.SIGINT, signal.SIGTERM, signal.SIGKILL)):
        name = NAMES[number]
        command = begin(server, tmp_path, *PAIRS, toy=HELD)
        command.until((tmp_path / f"{name}.held").exists)
        (child,) = command.descendants()
        command.until(lambda child=child: psutil.Process(child).status() == psutil.STATUS_STOPPED)
        os.kill(command.pid, sig)
        os.kill(child, signal.SIGCONT)
        if sig != signal.SIGKILL:
            finish(command, tmp_path, 128 + sig)
            assert not is_alive(child)
            assert command.out == "" and command.err.endswith("agentrl: stopped; the same command resumes the sweep\n")
        if number:
            assert f"{number} of 5 runs are done already" in command.err
            assert f"{NAMES[number - 1]}: resumes" in command.err
    (tmp_path / f"{NAMES[3]}.held").touch()
    written_at = (tmp_path / "out" / NAMES[0] / "metrics.jsonl").stat().st_mtime_ns
    done = finish(begin(server, tmp_path, *PAIRS, toy=HELD), tmp_path)
    assert "3 of 5 runs are done already" in done.progress and f"{name}: resumes" in done.progress
    assert (tmp_path / "out" / NAMES[0] / "metrics.jsonl").stat().st_mtime_ns == written_at
    assert without_minutes(done.table) == without_minutes(whole.table)
    assert done.data() == whole.data()
    for name in NAMES[:3]:
        log = (tmp_path / "out" / "logs" / f"{name}.log").read_text()
        assert "agentrl: stopped, step-" in log and "going on with" in log
        run, other = whole.out / name, tmp_path / "out" / name
        assert rows_of(run) == rows_of(other) and rows_of(run, "evals.jsonl") == rows_of(other, "evals.jsonl")
        assert same_weights(run, other)


@pytest.mark.slow
def test_run_that_fails_is_told_and_the_rest_go_on(server: Server, tmp_path: Path) -> None:
    vary = ("--vary", "rollout.episode_tokens=8,96", "--jobs", "2", "--tokens", "60")
    done = finish(begin(server, tmp_path, *vary), tmp_path, 1)
    warm, short, long = done.data()["runs"]
    assert (warm["exit_code"], short["exit_code"], long["exit_code"]) == (0, 2, 0)
    assert "no episode had room for a turn: their prompts have 20 tokens or more" in short["error"]
    assert f"\n- 8-seed0 failed: {short['error']}\n" in done.table
    assert "| 8 | failed |  |  |  |" in done.table and short["result"] is None
    again = finish(begin(server, tmp_path, *vary), tmp_path, 1)
    assert "8-seed0: resumes" in again.progress and "2 of 3 runs are done already" in again.progress
    assert without_minutes(again.table) == without_minutes(done.table)


def test_without_its_warm_start_no_run_begins(server: Server, tmp_path: Path) -> None:
    vary = ("--vary", "algo.loss=ctpo,gspo", "--set", "model.device=gpu9")
    done = finish(begin(server, tmp_path, *vary), tmp_path, 1)
    errors = [run["error"] for run in done.data()["runs"]]
    assert "there is no device 'gpu9' here" in errors[0]
    assert errors[1:] == ["its warm start warm-start-seed0 failed"] * 2
    assert not (tmp_path / "out" / "ctpo-seed0").exists()


def test_a_run_is_a_new_process_of_this_python(tmp_path: Path) -> None:
    with (tmp_path / "log").open("ab") as log:
        process = start_process(("--version",), log)
        assert isinstance(process, subprocess.Popen) and os.getsid(process.pid) == process.pid
        assert process.wait() == 0 and (tmp_path / "log").read_text() == f"agentrl {agentrl.__version__}\n"
