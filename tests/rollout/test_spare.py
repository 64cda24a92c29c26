"""Groups that come too late are cancelled, and episodes wait for room in the engine's cache."""

import asyncio
from collections.abc import Mapping

import pytest

from agentrl.engines.base import Cache, Completion, Sampling
from agentrl.engines.rng import derive_seed
from agentrl.engines.scripted import ScriptedEngine
from agentrl.rollout.collector import Collected
from agentrl.types import Trajectory

from .conftest import ANSWER, CALL, Make, collect, journal, scripted, specs

pytestmark = pytest.mark.usefixtures("one_thread", "registered")


def test_groups_that_come_too_late_are_cancelled_and_nobody_waits_for_them(make_collector: Make) -> None:
    collector = make_collector()
    turns = [collector._renderer.turn(turn) for turn in (CALL, ANSWER)]
    names = ("calm", "late", "calm2", "late", "chatty")
    asked, heard = specs(*names, members=2), list[Trajectory]()
    turn_of = {
        derive_seed(spec.seed, number): turn for group in asked for spec in group for number, turn in enumerate(turns)
    }
    late = scripted(collector, asked, CALL, ANSWER)
    asked = [slow if slow[0].task_id == "late" else group for slow, group in zip(late, asked, strict=True)]

    class Patient(ScriptedEngine):
        async def generate(self, prompt_ids: tuple[int, ...], sampling: Sampling, *, seed: int) -> Completion:
            while len(journal.open_tools) < 4 and not journal.hold.is_set():
                await asyncio.sleep(0.001)
            self.turns = [tuple(turn_of[seed])]
            return await super().generate(prompt_ids, sampling, seed=seed)

    async def play(played: Mapping[int, Trajectory]) -> Collected:
        return await collector.collect(asked, Patient(()), Sampling(), enough=3, played=played, on_episode=heard.append)

    async def go() -> tuple[Collected, Collected]:
        collected = await play({})
        # They are in the middle of a tool's call, which is open until it ends.
        assert len(journal.open_tools) == 4 == journal.at_once and len(collector._leaving) == 2
        journal.hold.set()
        while collector._leaving:
            await asyncio.sleep(0.001)
        assert not journal.open_tools and journal.played["late"] == 4, "and they have not gone on"
        played = sum(journal.played.values())
        again = await play({episode.seed: episode for episode in heard})
        assert sum(journal.played.values()) == played, "what was cancelled does not begin again"
        return collected, again

    for collected, cancelled in zip(asyncio.run(go()), (2, 0), strict=True):
        assert [group.task_id for group in collected.groups] == ["calm", "calm2", "chatty"]
        assert (collected.lost, collected.faults, collected.cancelled) == (0, 0, cancelled)
    assert {episode.task_id for episode in heard} == {"calm", "calm2", "chatty"}


def test_a_group_that_is_lost_leaves_its_place_to_a_spare_one(make_collector: Make) -> None:
    asked = specs("fault-always", "calm", "calm2", members=2)
    collected = collect(make_collector(max_fault_rate=0.5), asked, ANSWER, enough=2)
    assert [group.task_id for group in collected.groups] == ["calm", "calm2"]
    assert collected.lost + collected.cancelled == 1


class Small(ScriptedEngine):
    """Has a cache for two of the longest episodes."""

    used = 0.0
    made_at_first = 0

    async def generate(self, prompt_ids: tuple[int, ...], sampling: Sampling, *, seed: int) -> Completion:
        self.made_at_first = self.made_at_first or journal.made
        return await super().generate(prompt_ids, sampling, seed=seed)

    @property
    def cache(self) -> Cache:
        return Cache(tokens=2 * 2000, used=self.used, preempted=0)


@pytest.mark.parametrize(("used", "grows"), [(0.9, False), (0.5, True)])
def test_the_engines_cache_is_asked_before_the_first_episode_and_after_each_turn(
    make_collector: Make, used: float, grows: bool
) -> None:
    collector = make_collector(concurrency=9)
    engine = Small([collector._renderer.turn(ANSWER)] * 9)
    engine.used = used
    assert len(collect(collector, specs(*["slow"] * 9), engine=engine).groups) == 9
    # An environment is made as its episode is admitted, so these counts don't depend on how fast the machine is.
    assert engine.made_at_first <= 2 and (journal.made > 2) is grows
