"""Runs that play ahead and are killed: one that is deterministic ends in the bytes of one that was left alone."""

import asyncio
import errno
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl.engines.base import Completion, Sampling
from agentrl.engines.rng import derive_seed
from agentrl.errors import InfrastructureError
from agentrl.runs.checkpoint import load_unused
from agentrl.runs.folder import checkpoints
from agentrl.runs.records import read_episodes
from agentrl.train.groups import StepGroups
from agentrl.train.overlap import Overlapped
from agentrl.types import Trajectory, flatten

from ..engines.around import Around
from ..forked import Server
from .conftest import AUDITED, JITTERY, Make, Train, rows_of

SETTINGS = (
    *("env.id=killable:test/Killable-v0", "rollout.tasks=2", "rollout.concurrency=4", "run.deterministic=true"),
    # A plan that learns, so that its state must survive too.
    *("rollout.plan=success", "env.args.level=[1,2]"),
    *("env.args.max_turns=2", "optim.steps=6", "eval.tasks=1", "eval.every=2", "save.every=1"),
    # A summary before the second turn, so that episodes have several rows.
    "rollout.driver.options={history='summarize',budget=1,request='2'}",
)
KILLABLE = f"""{AUDITED}{JITTERY}
import errno

class Killable(Jittery):
    def respond(self, episode):
        return (*super().respond(episode), {{"role": "user", "content": "2"}})

    def reward(self, episode):
        sys.audit("graded", self.split)
        return super().reward(episode)

def reach(number):
    if number == errno.ENOSPC:
        os.fsync = full
    else:
        os.kill(os.getpid(), number)

def full(_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

gymnasium.register("test/Killable-v0", entry_point=Killable)
"""
"""Kills its process at the events of the plan, or has the disk full from one on."""
INSTANTS = {
    ("off", 1): (
        # While it has written a checkpoint, all but its name.
        r"9 ^os\.rename .*/\.step-000001\.tmp ",
        # While it evaluates, and then twice in a row: as it reads the optimizer, and as it cuts the records.
        r"9 ^graded test",
        r"9 ^os\.scandir .*/step-000002/optimizer",
        r"9 ^open .*/\.metrics\.jsonl\.\w+\.tmp",
        # When it has ended.
        r"9 ^open .*/\.report\.html\.\w+\.tmp",
    ),
    ("lag", 1): (
        # While it writes a checkpoint, before any is whole; while it deletes an old one, and while it plays ahead.
        r"9 ^open .*/\.step-000000\.tmp None",
        r"9 ^shutil\.rmtree .*/\.step-000001\.tmp ",
        r"9 ^graded train",
        # The disk is full from here on.
        rf"{errno.ENOSPC} ^open .*/metrics\.jsonl a",
    ),
    # While the ranks write the weights; between a row and its episodes.
    ("lag", 2): (r"9 ^open .*/\.step-000002\.tmp/model-00001-of-", r"9 ^open .*/\.step-000004\.jsonl\.zst\.\w+\.tmp"),
}
"""Where a run is killed, one after the other, by its mode and its ranks."""


def timeless(episode: Trajectory) -> Trajectory:
    return replace(episode, tool_runs=tuple(replace(run, wall_s=0.0) for run in episode.tool_runs))


def ending(run: Path) -> dict[str, Any]:
    """All that a run leaves, without its times."""
    last = checkpoints(run)[-1]
    return {
        "rows": rows_of(run),
        "evals": rows_of(run, "evals.jsonl"),
        "weights": [path.read_bytes() for path in sorted(last.glob("model*.safetensors"))],
        "optimizer": [path.read_bytes() for path in sorted((last / "optimizer").iterdir())],
        **{
            path.name: [(timeless(record.trajectory), record.advantages) for record in read_episodes(path)]
            for path in sorted((run / "episodes").iterdir())
            if not path.name.startswith(".")
        },
    }


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "ranks"), INSTANTS)
def test_a_killed_run_ends_as_a_whole_one(train: Train, server: Server, tmp_path: Path, mode: str, ranks: int) -> None:
    (tmp_path / "killable.py").write_text(KILLABLE)
    settings = (*SETTINGS, f"rollout.overlap={mode}", "rollout.overlap.staleness=2", f"run.ranks={ranks}")
    train("whole", *settings).done()
    (tmp_path / "plan.txt").write_text("\n".join(INSTANTS[mode, ranks]))
    command = train("killed", *settings, "save.keep=2")
    for instant in INSTANTS[mode, ranks]:
        full = instant.startswith(f"{errno.ENOSPC} ")
        assert command.wait() == (1 if full else -signal.SIGKILL), f"{instant}: {command.err}"
        command = server.start(tmp_path, "train", "--resume", "runs/killed")
    command.done()
    run = tmp_path / "runs" / "killed"
    whole, killed = ending(run.with_name("whole")), ending(run)
    assert whole.keys() == killed.keys()
    assert [name for name in whole if whole[name] != killed[name]] == []
    assert [row["staleness_max"] for row in killed["rows"]] == [min(step, 2 * (mode == "lag")) for step in range(6)]
    assert [path.name for path in checkpoints(run)] == ["step-000000", "step-000005", "step-000006"]
    episodes = [record.trajectory for path in (run / "episodes").glob("*.zst") for record in read_episodes(path)]
    assert any(len(episode.rows) > 1 for episode in episodes)
    ahead = [len(load_unused(path)) for path in checkpoints(run)[1:]]
    assert ahead == ([6, 0] if mode == "lag" else [0, 0])
    assert [file for file in run.rglob(".*") if file.name != ".lock"] == [], "a kill leaves nothing behind for long"


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
    run = small("rollout.overlap=inflight", "rollout.overlap.staleness=2")
    engines = [Blocking(run.parts.engine, answers) for answers in (36, 20, 99)]
    sources = [Overlapped(run.config, run.mix, run.players, engine) for engine in engines]

    async def second(source: Overlapped, begin: int) -> list[Trajectory]:
        played = [await source.batch(number) for number in range(begin, 3)]
        return list(map(timeless, flatten(played[-1].trained)))

    async def stopped(source: Overlapped) -> None:
        await source.batch(1)
        while len(source.unused()) < 8:
            await asyncio.sleep(0)

    undisturbed = asyncio.run(second(sources[0], 1))
    asyncio.run(stopped(sources[1]))
    sources[2].restore(sources[1].state(), sources[1].unused())
    assert asyncio.run(second(sources[2], 2)) == undisturbed
    assert engines[2].asked == 12 - 8, "each of them has one turn"


class Losing(Around):
    """Fails in both attempts at one episode of the second step."""

    left = 2

    async def generate(self, prompt_ids: tuple[int, ...], sampling: Sampling, *, seed: int) -> Completion:
        if seed == derive_seed(derive_seed(0, "episode", 4, 0), 0) and self.left:
            self.left -= 1
            raise InfrastructureError("it is gone")
        return await super().generate(prompt_ids, sampling, seed=seed)


@pytest.mark.parametrize("mode", ["lag", "inflight"])
def test_a_group_that_was_lost_before_a_kill_is_lost_after_it(small: Make, mode: str) -> None:
    run = small(f"rollout.overlap={mode}", "rollout.max_fault_rate=0.5")
    # The engine of the run that goes on is well again.
    engines = Losing(run.parts.engine), run.parts.engine
    source, other = (Overlapped(run.config, run.mix, run.players, engine) for engine in engines)

    async def whole() -> StepGroups:
        await source.batch(1)
        while not next(iter(source.state()["ahead"].values()))[1]:  # pyright: ignore
            await asyncio.sleep(0)
        other.restore(source.state(), source.unused())
        return await source.batch(2)

    wanted, played = asyncio.run(whole()), asyncio.run(other.batch(2))
    assert played.trained == wanted.trained and len(wanted.trained) == 2
    for name in ("groups", "faults", "lost", "cancelled", "sandbox"):
        assert getattr(played.collected, name) == getattr(wanted.collected, name)
