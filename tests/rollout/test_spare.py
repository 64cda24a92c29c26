"""Groups that come too late are cancelled."""

import asyncio
from collections.abc import Mapping

import pytest

from agentrl.engines.base import Completion, Sampling
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
