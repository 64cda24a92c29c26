"""The piece that learns: the quickstart through the public command, its rewards row by row."""

import json
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from contextlib import suppress
from multiprocessing.context import ForkProcess
from pathlib import Path

from agentrl.cli import main as agentrl

from .bench import Bench, usable

FORK = multiprocessing.get_context("fork")
USUAL = {"sft.steps": 400, "optim.steps": 9, "eval.tasks": 150, "eval.every": 0}
"""Those of the table in docs/precision_and_memory.md, where a CPU goes from about 70% to 95%."""
WITHOUT_SANDBOX = {"env.id": "agentrl/Countdown-v0", "env.args": "{ level = 1, tool = false }"}
QUICK = {
    **{"sft.steps": 2, "sft.tasks": 8, "optim.steps": 1, "eval.tasks": 2, "eval.every": 0, "rollout.tasks": 1},
    **{**WITHOUT_SANDBOX, "rollout.group_size": 2, "optim.minibatches": 1, "optim.epochs": 1},
}


def learn(bench: Bench) -> None:
    """Train in both types side by side, and without a tool where there is no sandbox."""
    # No tensor is made here before the runs are forked: a GPU that was touched can't be used after a fork.
    dtypes = ["float32"] if bench.quick else ["float32", "bfloat16"]
    with tempfile.TemporaryDirectory() as folder:
        follow(bench, Path(folder), {dtype: {"model.dtype": dtype} for dtype in dtypes})
        ends = [bench.content["rows"].get(f"{dtype}: end", {}) for dtype in dtypes]
        if any("sandbox" in end.get("log", "").lower() for end in ends):
            follow(bench, Path(folder), {"float32 without a sandbox": {"model.dtype": "float32", **WITHOUT_SANDBOX}})


def follow(bench: Bench, folder: Path, runs: dict[str, dict[str, str]]) -> None:
    """Start runs that are not finished, and add a row for each of their steps and evaluations as it comes."""
    runs = {name: more for name, more in runs.items() if bench.content["rows"].get(f"{name}: end", {}).get("code") != 0}
    began, alive = time.monotonic(), {name: start(bench, folder, name, more) for name, more in runs.items()}
    while alive:
        time.sleep(0.3)
        for name, process in list(alive.items()):
            ended = not process.is_alive()
            rows = lines(folder / slug(name) / "metrics.jsonl"), lines(folder / slug(name) / "evals.jsonl")
            for kind, row in [("step", row) for row in rows[0]] + [("held out after", row) for row in rows[1]]:
                keys = ("reward_mean", "success", "seconds_generate", "seconds_update", "weight_ess", "logp_diff_max")
                what = f"{name}: {kind} {row['step']:.0f}"
                if what not in bench.content["rows"]:
                    bench.add(what, {key: row[key] for key in keys if key in row})
            if ended:
                code, log = process.exitcode, (folder / f"{slug(name)}.log").read_text(errors="replace")
                seconds = time.monotonic() - began
                bench.add(f"{name}: end", {"code": code, "seconds": seconds, **({"log": log[-3000:]} if code else {})})
                del alive[name]


def start(bench: Bench, folder: Path, name: str, more: dict[str, str]) -> ForkProcess:
    """Begin a run in a process of its own, which has all imports already."""
    chosen = {"run.dir": str(folder), "model.device": bench.device, **(QUICK if bench.quick else USUAL), **more}
    words = ["train", "--preset", "quickstart", "--name", slug(name)]
    words += [word for key, value in chosen.items() for word in ("--set", f"{key}={value}")]
    assert threading.active_count() == 1, "a fork would wait for ever for a lock of another thread"
    process = FORK.Process(target=command, args=(words, folder / f"{slug(name)}.log", bench.device))
    process.start()
    return process


def command(words: list[str], log: Path, device: str) -> None:
    """Do what the program ``agentrl`` does with these words; what it prints goes to a file."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT)
    for number in (1, 2):
        os.dup2(file, number)
    if not usable(device):  # an import has touched the GPU
        os.execv(sys.executable, [sys.executable, "-m", "agentrl", *words])
    raise SystemExit(agentrl(words))


def slug(name: str) -> str:
    """Return a name as a run may have it."""
    return name.replace(" ", "-")


def lines(path: Path) -> list[dict[str, float]]:
    """Read the whole lines of a file that is still being written."""
    rows: list[dict[str, float]] = []
    with suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            rows.append(json.loads(line))
    return rows
