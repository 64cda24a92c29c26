"""Groups without signal make room for others: how often, which, and the same ones in a run that goes on."""

import asyncio
import json
from collections.abc import Generator, Iterable, Sequence

import gymnasium
import pytest

from agentrl.engines.base import Sampling
from agentrl.rollout.collected import Collected
from agentrl.rollout.collector import always
from agentrl.rollout.plan import EpisodeSpec
from agentrl.toolenv.base import Episode
from agentrl.toolenv.tasks import TaskList
from agentrl.train.groups import Collecting, Played, is_silent, play_groups
from agentrl.train.order import TaskOrder
from agentrl.types import Group, Task, flatten

from .conftest import Make, Shout
from .test_trainer import step, trainer_of

COUNT = 24


class Mute(Shout):
    """``Shout`` where only tasks whose number is a multiple of ``every`` tell their episodes apart."""

    def __init__(self, *, split: str = "train", tooled: bool = True, every: int = 2) -> None:
        super().__init__(split=split, tooled=tooled)
        self.every = every

    def tasks(self, split: str) -> TaskList:
        return TaskList([Task(id=str(n), prompt=f"Say {n}.", answer=str(n)) for n in range(COUNT)])

    def reward(self, episode: Episode) -> dict[str, float]:
        heard = int(episode.task.id) % self.every == 0
        return {"correct": float(self.np_random.random()) if heard else 0.5}


@pytest.fixture(autouse=True)
def mute() -> Generator[None]:
    gymnasium.register("test/Mute-v0", entry_point=Mute)
    yield
    del gymnasium.registry["test/Mute-v0"]


def play(small: Make, number: int, *overrides: str) -> Played:
    run = small("env.id=test/Mute-v0", "rollout.turn_tokens=4", *overrides)
    return asyncio.run(Collecting(run.config, run.mix, run.players, run.parts.engine).batch(number))


def numbers(groups: Iterable[Group]) -> list[int]:
    return [int(group.task_id) for group in groups]


def test_without_refills_every_group_is_trained_on(small: Make) -> None:
    played = play(small, 2, "env.args.every=2")
    assert played.trained == list(played.collected.groups) and len(played.trained) == 3
    assert played.silent == sum(number % 2 for number in numbers(played.trained))
    assert [is_silent(group) for group in played.trained] == [number % 2 == 1 for number in numbers(played.trained)]


def test_silent_groups_are_left_out_for_the_next_tasks(small: Make) -> None:
    run, at = small("env.id=test/Mute-v0", "rollout.turn_tokens=4", "rollout.refills=3"), 0
    source = Collecting(run.config, run.mix, run.players, run.parts.engine)
    for number in (1, 2):
        played, begin = asyncio.run(source.batch(number)), at
        own = [int(task.id) for task in run.source.pick(24, seed=0)]
        asked, heard = numbers(played.collected.groups), [one for one in own[begin:] if one % 2 == 0]
        # In loops: each round asks for as many further tasks as are missing.
        found = 0
        for _ in range(4):
            more = own[at : at + 3 - found]
            at, found = at + len(more), found + sum(one % 2 == 0 for one in more)
        assert asked == own[begin:at] and numbers(played.trained) == heard[:3], "in their order, and none is left out"
        seeds = [episode.seed for group in played.collected.groups for episode in group]
        assert len(set(seeds)) == len(seeds) and played.silent == len(asked) - found > 0


def test_refills_end_and_what_is_missing_stays_silent(small: Make) -> None:
    played = play(small, 1, "rollout.refills=2", "env.args.every=23")
    asked, trained = played.collected.groups, played.trained
    assert 6 < len(asked) <= 9 and len(trained) == 3 and played.silent > len(asked) - 3
    silent = [group for group in asked if is_silent(group)]
    assert [group for group in trained if is_silent(group)] == silent[: 3 - (len(asked) - len(silent))]


def test_spare_groups_begin_with_the_others_and_those_that_end_last_are_left_out(small: Make) -> None:
    # One group at a time, so that the clock decides nothing.
    settings = ("rollout.spare=2", "rollout.overlap=inflight", "rollout.refills=1", "rollout.concurrency=4")
    run, seeds, at = small("env.id=test/Mute-v0", "rollout.turn_tokens=4", *settings), list[int](), 0
    source = Collecting(run.config, run.mix, run.players, run.parts.engine)
    for number in (1, 2):
        played, own = asyncio.run(source.batch(number)), [int(task.id) for task in run.source.pick(24, seed=0)][at:]
        missing = sum(one % 2 for one in own[:3])
        assert missing and numbers(played.collected.groups) == own[: 3 + missing], "what was cancelled comes next"
        assert played.collected.cancelled == 4 and len(played.trained) == 3
        seeds += [episode.seed for episode in flatten(played.collected.groups)]
        at += 3 + missing
    assert len(set(seeds)) == len(seeds)


def test_groups_that_end_in_the_same_moment_as_the_last_one_that_was_missing_ask_for_no_more(small: Make) -> None:
    settings = ("rollout.spare=3", "rollout.refills=2", "rollout.overlap=inflight", "rollout.turn_tokens=4")
    run, asked = small("env.id=test/Mute-v0", "env.args.every=1", *settings), list[int]()

    async def collect(specs: Sequence[Sequence[EpisodeSpec]], enough: int) -> Collected:
        asked.append(len(specs))
        # As if all had ended when the first ones were counted.
        return await run.players.collect(specs, always(run.parts.engine), Sampling(max_tokens=4))

    played = asyncio.run(play_groups(run.config, run.mix, collect, 1, TaskOrder()))
    assert asked == [6] and len(played.groups) == 6


def test_a_step_counts_what_it_left_out_and_goes_on_alike(small: Make) -> None:
    settings = ("env.id=test/Mute-v0", "rollout.turn_tokens=4", "rollout.refills=3")
    first, later = (trainer_of(small(*settings))[0] for _ in range(2))
    results = [step(first)]
    later.rollouts.restore(json.loads(json.dumps(first.rollouts.state())), ())
    results.append(step(first, 2))
    again = step(later, 2)
    assert [one.seed for one in again.trajectories] == [one.seed for one in results[1].trajectories]
    for result in results:
        metrics, taught = result.metrics, sum(one.n_sampled for one in result.trajectories)
        assert metrics["groups_left_out"] > 0 and metrics["episodes"] == 4 * (3 + metrics["groups_left_out"])
        assert metrics["groups_silent"] == metrics["groups_left_out"] and metrics["sampled_tokens"] > taught
    assert first.sampled_tokens == sum(one.metrics["sampled_tokens"] for one in results)
    later.rollouts.restore({"step": 2}, ())  # of an older checkpoint
    assert later.rollouts.state() == {"order": {"next": 2 * 3 * 4, "returned": [], "dealt": {}}}
