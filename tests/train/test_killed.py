"""Runs that play ahead and are killed: one that is deterministic ends in the bytes of one that was left alone."""

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl.engines.base import Completion, Sampling
from agentrl.runs.checkpoint import load_unused
from agentrl.runs.folder import checkpoints
from agentrl.runs.records import read_episodes
from agentrl.train.overlap import Overlapped
from agentrl.types import Trajectory, flatten

from ..engines.around import Around
from .conftest import JITTERY, Make, Server, Train, rows_of
from .test_interrupt import lines

SETTINGS = (
    *("env.id=jittery:test/Jittery-v0", "rollout.tasks=4", "rollout.concurrency=9", "run.deterministic=true"),
    *("optim.steps=7", "eval.tasks=1", "eval.every=2", "save.every=1", "optim.average=0.5"),
)
KILLS = int(os.environ.get("AGENTRL_KILLS", "3"))
"""How often a run is killed before it may end."""


def moments(mode: str) -> Iterator[tuple[Callable[[Path], bool], float]]:
    """Instants by chance, the same each time: what a run has to have begun, and how many seconds it may go on then."""
    rng = random.Random(f"{mode} {KILLS}")
    for kill in range(KILLS):
        step = 1 + 5 * kill // KILLS
        yield rng.choice(
            [
                # While it writes a checkpoint, before one is whole, or behind it.
                (lambda run, step=step: any(run.glob(f"checkpoints/*step-{step:06d}*/*")), rng.choice([0.0, 0.05])),
                # While it evaluates what it has saved, or plays on.
                (lambda run, step=step: (run / "checkpoints" / f"step-{step:06d}").exists(), rng.uniform(0, 0.2)),
                (lambda run, step=step: (run / "episodes" / f"step-{step:06d}.jsonl.zst").exists(), 0.0),
                (lambda run, step=step: lines(run / "metrics.jsonl") >= step, rng.uniform(0, 0.2)),
                # Twice in a row: while it reads, begins, or does the first again.
                (lambda _: True, rng.uniform(0, 2)),
            ]
        )


def timeless(episode: Trajectory) -> Trajectory:
    return replace(episode, tool_runs=tuple(replace(one, wall_s=0.0) for one in episode.tool_runs))


def ending(run: Path) -> dict[str, Any]:
    """All that a run leaves, without its times."""
    last = checkpoints(run)[-1]
    return {
        "rows": rows_of(run),
        "evals": rows_of(run, "evals.jsonl"),
        "weights": (last / "model.safetensors").read_bytes(),
        "optimizer": (last / "optimizer.pt").read_bytes(),
        **{
            path.name: [(timeless(record.trajectory), record.advantages) for record in read_episodes(path)]
            for path in sorted((run / "episodes").iterdir())
            if not path.name.startswith(".")
        },
    }


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["off", "lag"])
def test_a_run_that_was_killed_ends_in_the_bytes_of_one_that_was_not(
    train: Train, server: Server, tmp_path: Path, mode: str
) -> None:
    (tmp_path / "jittery.py").write_text(JITTERY)
    settings = (*SETTINGS, f"rollout.overlap={mode}")
    train("whole", *settings).done()
    command, run = train("killed", *settings, "save.keep=2"), tmp_path / "runs" / "killed"
    command.until(lambda: (run / "config.toml").exists())
    for ready, pause_s in moments(mode):
        command.until(lambda ready=ready: ready(run))
        time.sleep(pause_s)
        os.kill(command.pid, signal.SIGKILL)
        assert command.wait() == -signal.SIGKILL
        command = server.start(tmp_path, "train", "--resume", "runs/killed")
    command.done()
    whole, killed = ending(tmp_path / "runs" / "whole"), ending(run)
    assert whole.keys() == killed.keys()
    assert [name for name in whole if whole[name] != killed[name]] == []
    assert [row["staleness_max"] for row in killed["rows"]] == [0, *[int(mode == "lag")] * 6]
    kept = [path.name for path in checkpoints(run)]
    assert kept == ["step-000000", "step-000006", "step-000007"]
    ahead = [len(load_unused(path)) for path in checkpoints(run)[1:]]
    assert ahead == ([12, 0] if mode == "lag" else [0, 0])


class Blocking(Around):
    """Answers so many requests and no more."""

    def __init__(self, engine: Any, answers: int) -> None:
        super().__init__(engine)
        self.left, self.asked = answers, 0

    async def generate(self, prompt_ids: tuple[int, ...], sampling: Sampling, *, seed: int) -> Completion:
        self.left, self.asked = self.left - 1, self.asked + 1
        if self.left < 0:
            await asyncio.Event().wait()
        return await super().generate(prompt_ids, sampling, seed=seed)


def test_in_flight_no_episode_that_has_ended_is_played_again(small: Make) -> None:
    run = small("rollout.overlap=inflight", "rollout.max_staleness=2")
    engines = [Blocking(run.parts.engine, answers) for answers in (36, 20, 99)]
    sources = [Overlapped(run.config, run.mix, run.players, engine) for engine in engines]

    async def played(source: Overlapped) -> list[list[Trajectory]]:
        return [list(map(timeless, flatten((await source.batch(number)).trained))) for number in (1, 2)]

    async def stopped(source: Overlapped, ended: int) -> None:
        await source.batch(1)
        while len(source.unused()) < ended:
            await asyncio.sleep(0)

    undisturbed = asyncio.run(played(sources[0]))
    asyncio.run(stopped(sources[1], 8))
    sources[2].restore(sources[1].state(), sources[1].unused())

    async def resumed() -> list[Trajectory]:
        return list(map(timeless, flatten((await sources[2].batch(2)).trained)))

    assert asyncio.run(resumed()) == undisturbed[1]
    assert engines[2].asked == 12 - 8, "each of them has one turn"
