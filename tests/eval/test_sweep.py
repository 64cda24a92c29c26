"""A sweep's plan, what it refuses, its table, and real runs: killed at any moment they end as those of a quiet one."""

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from agentrl.cli import main
from agentrl.eval.sweep import SweepRequest, SweepRun, plan_runs, result_of, sweep
from agentrl.runs.files import lock_folder
from agentrl.runs.folder import RunFolder, read_jsonl

from ..cli.conftest import LOADING, refused
from ..forked import Command, Server, is_alive
from ..train.conftest import TOY, rows_of, same_weights

QUICK = ("--preset", "quickstart")
PAIRS = (*QUICK, "--vary", "algo.advantage=otb,otb_loo,group_mean", "--vary", "algo.loss=ctpo,gspo,ppo_clip")
HALT = """
import os, signal
from pathlib import Path

reward = Toy.reward

def halting_reward(self, episode):
    for rows in Path("out").glob("*/metrics.jsonl"):
        if rows.read_text().count("\\n") >= 2:
            try:
                Path(f"{rows.parent.name}.halted").touch(exist_ok=False)
            except FileExistsError:
                continue  # another thread's reward came before, and the process stops only once
            os.kill(os.getpid(), signal.SIGSTOP)
    return reward(self, episode)

Toy.reward = halting_reward
"""
"""Each run stops, once, in the middle of its training."""
SETTINGS = """
run = { threads = 1, deterministic = true }
env = { id = "toy:test/Toy-v0" }
model.tiny = { hidden = 16, layers = 1, heads = 2 }
sft = { steps = 2, tasks = 8, episodes = 4 }
rollout = { tasks = 2, group_size = 3, turn_tokens = 4, episode_tokens = 96, concurrency = 9, truncated.turn="answer" }
optim = { lr = 1e-2, max_tokens = 512, schedule = "linear" }
eval = { tasks = 12 }
save = { every = 0 }
"""
THREE = ("--vary", "algo.advantage+algo.loss=otb+ctpo,group_mean+ctpo,otb+ppo_clip")
NAMES = ["otb-ctpo-seed0", "group_mean-ctpo-seed0", "otb-ppo_clip-seed0"]

pytestmark = pytest.mark.usefixtures("here")


def planned(*vary: str, **changes: Any) -> list[SweepRun]:
    request: dict[str, Any] = {"preset": "quickstart", "config": None, "overrides": (), "seeds": [0], "tokens": 1000}
    return plan_runs(SweepRequest(**(request | {"vary": vary, "out": Path("out")} | changes)))


def test_dry_run_lists_every_pair_of_every_seed(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", *PAIRS, "--set", "eval.tasks=50", "--tokens", "1234", "--dry-run"]) == 0
    out, err = capsys.readouterr()
    assert err in ("", LOADING) and not list(here.iterdir())
    lines = out.splitlines()
    names = [line.split(" (new): agentrl train --preset quickstart --name ")[0] for line in lines]
    assert names[:2] == ["otb-ctpo-seed0", "otb-gspo-seed0"] and names[-1] == "group_mean-ppo_clip-seed2"
    assert len(set(names)) == len(lines) == 3 * 9
    assert "--set optim.max_sampled_tokens=1234" in lines[0] and "--set eval.tasks=50" in lines[0]
    assert "--set algo.advantage=otb_loo --set algo.loss=ppo_clip" in lines[5] and "run.seed=0" in lines[5]


def test_runs_differ_in_what_is_varied_and_in_nothing_else() -> None:
    runs = planned("rollout.tasks+rollout.group_size=16+4,8+8", "optim.lr=1e+0,2e+0", overrides=["eval.every=5"])
    varied = [(run.config.rollout.tasks, run.config.rollout.group_size, run.config.optim.lr) for run in runs]
    assert varied == [(16, 4, 1.0), (16, 4, 2.0), (8, 8, 1.0), (8, 8, 2.0)]
    differing = {"run": {"name"}, "rollout": {"tasks", "group_size"}, "optim": {"lr"}}
    assert len({run.config.model_dump_json(exclude=differing) for run in runs}) == 1
    assert runs[0].config.eval.every == 5
    runs = planned("optim.betas=[0.9, 0.95],[0.9,0.99], [0.9 , 0.95]")
    assert [run.config.optim.betas for run in runs] == [(0.9, 0.95), (0.9, 0.99), (0.9, 0.95)]
    assert [run.folder.name for run in runs] == [f"row{n}-0-9-0-9{d}-seed0" for n, d in ((1, 5), (2, 9), (3, 5))]


@pytest.mark.parametrize(
    ("argv", "wanted"),
    [
        (("--vary", "algo.loss=ctpo"), "give a TOML file, or --preset quickstart"),
        (QUICK, "the following arguments are required: --vary"),
        ((*QUICK, "--vary", "algo.loss=ctpo,gspoo"), "no loss is called 'gspoo'; did you mean 'gspo'?"),
        ((*QUICK, "--vary", "algo.loss=ctpo,"), "write a.b=1,2"),
        ((*QUICK, "--vary", "algo.loss"), "write a.b=1,2"),
        ((*QUICK, "--vary", "algo.loss=ctpo,ctpo"), "for the second time"),
        ((*PAIRS, "--vary", "algo.loss+optim.lr=dapo+1"), "for the second time"),
        ((*QUICK, "--vary", "rollout.tasks+rollout.group_size=8,4+4"), "a.b+c.d=1+2,3+4"),
        ((*QUICK, "--vary", "optim.lr+run.seed=1+2,3+4"), "use --seeds"),
        ((*PAIRS, "--set", "optim.steps=3"), "the sweep sets optim.steps itself: leave it out and use --tokens"),
        ((*PAIRS, "--set", "algo.loss_options.power=0.3"), "has no option 'power'"),
        ((*PAIRS, "--seeds", "0,x"), "argument --seeds"),
        ((*PAIRS, "--seeds", "-1"), "setting 'run.seed' is -1"),
        ((*PAIRS, "--tokens", "-1"), "setting 'optim.steps' is -1"),
        ((*PAIRS, "--jobs", "0"), "--jobs is 0"),
        ((*PAIRS, "--out", "taken/in"), "can't be written: Not a directory"),
        ((*PAIRS, "--out", "notes"), "sweep.json that no sweep wrote: choose another --out"),
        ((*PAIRS, "--out", "old", "--seeds", "0"), "(algo.loss is 'gspo' there and 'ctpo' here): choose another --out"),
        ((*PAIRS, "--out", "busy"), "in use by process PID: wait for it, or choose another --out"),
    ],
)
def test_what_is_refused(here: Path, argv: tuple[str, ...], wanted: str, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "taken").write_text("")
    (here / "notes").mkdir()
    (here / "notes" / "sweep.json").write_text('{"seeds": "of doubt"}')
    config = planned("algo.advantage=otb", "algo.loss=gspo", out=Path("old"), tokens=60000)[0].config
    RunFolder.create(config.updated(run={"name": "otb-ctpo-seed0"}), numbered=False).close()
    with lock_folder(here / "busy"):
        assert wanted.replace("PID", str(os.getpid())) in refused(capsys, "sweep", *argv)


def finish(run: SweepRun, *success: float, tasks: int = 8) -> None:
    """Write what a finished run leaves, with a step of 1,000 tokens before each evaluation but the first."""
    run.folder.mkdir(parents=True, exist_ok=True)
    steps = [{"step": step, "sampled_tokens": 1000} for step in range(1, len(success))]
    evals = [{"step": n, "success": rate, "tasks": tasks, "seconds_run": 60.0 * n} for n, rate in enumerate(success)]
    for name, rows in (("metrics", steps), ("evals", evals)):
        (run.folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run.folder / "report.html").write_text("")


def test_run_is_finished_that_sampled_its_tokens_and_has_its_last_evaluation_and_its_report() -> None:
    (run,) = planned("algo.loss=ctpo", tokens=2000)
    finish(run, 0.25, 0.5, 0.75)
    result = result_of(run)
    assert result and (result.success, result.tasks, result.sampled_tokens, result.minutes) == (0.75, 8, 2000, 2.0)
    assert result.curve == ((0, 0.25), (1000, 0.5), (2000, 0.75))
    os.utime(run.folder / "report.html", ns=(0, 0))
    assert result_of(run) is None, "the report is that of an earlier stop"
    (run.folder / "report.html").unlink()
    assert result_of(run) is None, "it was killed before its report"
    finish(run, 0.25, 0.5)
    assert result_of(run) is None, "it was stopped in the middle, right after an evaluation"
    finish(run, 0.25, 0.5, 0.75)
    (run.folder / "evals.jsonl").write_text('{"step": 0, "success": 0.25, "tasks": 8}\n')
    assert result_of(run) is None, "it was killed before its last evaluation"


def test_seeds_are_pooled_by_their_tasks() -> None:
    runs = planned("algo.loss=ctpo,gspo", seeds=[0, 1])
    for run, wins, tasks in zip(runs, (82, 0, 100, 163), (100, 163, 163, 163), strict=True):
        finish(run, 0.5, wins / tasks, tasks=tasks)
    table, failed = sweep(runs, 1, lambda _: None)
    # Newcombe (1998), table I, method 3: 81 of 263 has the interval 0.2553 to 0.3662; this is 182 of 263.
    assert "| ctpo | 82.0% | 61.3% | 69.2% (63.4% to 74.5%) | 50.0% | 1,000 | 1.0 |\n" in table and failed == 0


def begin(server: Server, folder: Path, *argv: str, toy: str = TOY) -> Command:
    (folder / "toy.py").write_text(toy)
    (folder / "toy.toml").write_text(SETTINGS)
    return server.start(folder, "sweep", "toy.toml", "--seeds", "0", "--tokens", "110", "--out", "out", *argv)


def end(command: Command, code: int) -> str:
    """Wait for a sweep; return its table without minutes."""
    assert command.wait() == code, command.err
    return re.sub(r"\| [\d.]+ \|\n", "|\n", command.out)


@pytest.mark.slow
def test_sweep_that_was_stopped_goes_on(server: Server, tmp_path: Path) -> None:
    quiet, out = tmp_path / "quiet", tmp_path / "out"
    quiet.mkdir()
    table = end(begin(server, quiet, *THREE, "--jobs", "2"), 0)
    for number, (name, sig) in enumerate(zip(NAMES, (signal.SIGINT, signal.SIGTERM, signal.SIGKILL), strict=True)):
        command = begin(server, tmp_path, *THREE, toy=TOY + HALT)
        command.until((tmp_path / f"{name}.halted").exists)
        (child,) = command.descendants()
        command.until(lambda child=child: psutil.Process(child).status() == psutil.STATUS_STOPPED)
        os.kill(command.pid, sig)
        os.kill(child, signal.SIGCONT)
        if sig == signal.SIGKILL:
            command.wait()
            psutil.wait_procs([psutil.Process(child)] if is_alive(child) else [])
        else:
            assert end(command, 128 + sig) == "" and not is_alive(child)
            assert command.err.endswith("agentrl: stopped; the same command resumes the sweep\n")
        if number:
            assert f"{3 - number + 1} of 3 runs are to be trained" in command.err
            assert f"{NAMES[number - 1]}: resumes" in command.err
    before = (out / NAMES[0] / "report.html").stat().st_mtime_ns
    command = begin(server, tmp_path, *THREE, toy=TOY + HALT)
    assert end(command, 0).replace("# out", "") == table.replace("# out", "")
    assert f"{NAMES[2]}: resumes" in command.err and (out / NAMES[0] / "report.html").stat().st_mtime_ns == before
    initial = [read_jsonl(out / name / "evals.jsonl")[0] for name in NAMES]
    assert len({tuple(row[key] for key in ("success", "reward_mean", "turns_mean")) for row in initial}) == 1
    for name in NAMES:
        assert "agentrl: stopped, step-" in (out / f"{name}.log").read_text()
        one_run, other = quiet / "out" / name, out / name
        sampled = [step["sampled_tokens"] for step in read_jsonl(one_run / "metrics.jsonl")]
        assert sum(sampled[:-1]) < 110 <= sum(sampled)
        assert rows_of(one_run) == rows_of(other) and rows_of(one_run, "evals.jsonl") == rows_of(other, "evals.jsonl")
        assert same_weights(one_run, other)


@pytest.mark.slow
def test_run_that_fails_has_its_reason_in_the_table_and_the_rest_go_on(server: Server, tmp_path: Path) -> None:
    vary = ("--vary", "rollout.episode_tokens=8,96", "--set", "sft.steps=0", "--jobs", "2", "--tokens", "60")
    table = end(begin(server, tmp_path, *vary), 1)
    assert "| 8 | not done |  |  |  |  |\n| 96 | " in table
    assert "\n8-seed0 failed: no episode had room for a turn: their prompts have 20 tokens or more" in table
    short, long = json.loads((tmp_path / "out" / "sweep.json").read_text())["runs"]
    assert short["error"] and not short["result"] and long["result"]["tasks"] == 12 and not long["error"]
    again = begin(server, tmp_path, *vary)
    assert end(again, 1) == table and "8-seed0: resumes" in again.err and "1 of 2 runs are to be" in again.err
    (tmp_path / "out" / "96-seed0" / "report.html").unlink()
    again = begin(server, tmp_path, *vary, "--dry-run")
    assert "96-seed0 (resumes): agentrl train" in end(again, 0)
