"""Groups that come too late are cancelled, and episodes wait for room in the engine's cache."""

import asyncio
from collections.abc import Mapping, Sequence

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


class Cramped(ScriptedEngine):
    """Says the same in every turn. Has room for 16 requests' tokens; of more, one is computed anew."""

    ROOM = 16

    def __init__(self, turn: Sequence[int], *, tells: bool) -> None:
        super().__init__([turn])
        self.tells, self.under_way, self.preempted, self.most = tells, 0, 0, 0

    @property
    def cache(self) -> Cache | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        used = min(1.0, self.under_way / self.ROOM)
        return Cache(tokens=self.ROOM * 100, used=used, preempted=self.preempted) if self.tells else None

    async def generate(self, prompt_ids: tuple[int, ...], sampling: Sampling, *, seed: int) -> Completion:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        self.preempted += self.under_way > self.ROOM
        for _ in range(30 + seed % 30):
            await asyncio.sleep(0)
        self.under_way -= 1
        self.turns *= 2
        return await super().generate(prompt_ids, sampling, seed=seed)


@pytest.mark.slow
def test_as_many_episodes_are_at_play_as_the_engines_cache_holds(make_collector: Make) -> None:
    def played(tells: bool) -> tuple[Cramped, list[tuple[int, ...]]]:
        collector = make_collector(concurrency=5 * Cramped.ROOM, max_turns=3)
        engine = Cramped(collector._renderer.turn(CALL), tells=tells)
        collected = collect(collector, specs(*["calm"] * 160), engine=engine)
        return engine, [episode.token_ids for (episode,) in collected.groups]

    (bounded, some), (unbounded, other) = played(True), played(False)
    assert some == other, "no token depends on it"
    counts = [(engine.most, engine.preempted) for engine in (bounded, unbounded)]
    # One would fit whatever its length.
    assert Cramped.ROOM / 2 < bounded.most < 2 * Cramped.ROOM < unbounded.most, counts
    assert bounded.preempted < unbounded.preempted / 4, counts
