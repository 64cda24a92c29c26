"""How many episodes are at play: the run's bound, and what the engine's cache has room for."""

import asyncio
from collections.abc import Sequence

import pytest

from agentrl.engines.base import Cache
from agentrl.rollout.gate import Gate


def cache(used: float = 0.0, preempted: int = 0, tokens: int = 100) -> Cache:
    return Cache(tokens=tokens, used=used, preempted=preempted)


async def entered(gate: Gate, count: int) -> list[asyncio.Task[None]]:
    """So many who ask to be let in, as far as they come by themselves."""

    tasks = [asyncio.ensure_future(gate.__aenter__()) for _ in range(count)]
    await settled()
    return tasks


async def settled() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("most", "felt", "wanted"),
    [
        (9, [None, None], [9, 9]),  # the engine says nothing
        (9, [cache(tokens=5)], [1]),  # one is always let in
        (9, [cache(tokens=1000)], [9]),
        (9, [cache(tokens=29), *[cache(0.79)] * 9], [2, 3, 4, 5, 6, 7, 8, 9, 9, 9]),
        (9, [cache(tokens=29), cache(0.8), cache(0.94)], [2, 2, 2]),  # two of the longest episodes, of 10 tokens, fit
        # All eight are at play: of these three quarters, and then a whole round for another one.
        (99, [cache(tokens=20), *[cache(0.5)] * 6, cache(0.95)], [2, 3, 4, 5, 6, 7, 8, 6]),
        (99, [cache(tokens=20), *[cache(0.5)] * 6, cache(0.1, 1), cache(0.99, 2)], [2, 3, 4, 5, 6, 7, 8, 6, 6]),
        (99, [cache(tokens=70), cache(0.5), cache(1.0), cache(0.5)], [7, 8, 7, 7 + 1 / 7]),
        (99, [cache(tokens=70), cache(0.5, 5), cache(0.5, 5)], [7, 7, 7 + 1 / 7]),
    ],
)
async def test_the_limit_grows_holds_and_is_cut(most: int, felt: Sequence[Cache | None], wanted: list[float]) -> None:
    gate, limits = Gate(most, 10), list[float]()
    fits = felt[0] and felt[0].tokens
    for seen in felt:
        gate.observe(seen and cache(seen.used, seen.preempted, fits or 0))
        limits.append(gate.limit)
        # Nobody leaves, and somebody always waits.
        playing = await entered(gate, most)
        assert sum(task.done() for task in playing) <= most
    assert limits == pytest.approx(wanted)


async def test_a_cut_is_to_show_before_there_is_another() -> None:
    gate, limits = Gate(99, 10), list[float]()
    gate.observe(cache(tokens=20))
    waiting = await entered(gate, 9)
    for _ in range(6):
        gate.observe(cache(0.5, tokens=20))
    for _ in range(3):  # 8 are at play, 7 and 6
        gate.observe(cache(1.0, tokens=20))
        limits.append(gate.limit)
        await gate.__aexit__()
    waiting[-1].cancel()
    assert limits == [6, 6, 4.5]


def test_without_anyone_who_waits_nothing_grows() -> None:
    gate = Gate(9, 10)
    gate.observe(cache(tokens=20))
    gate.observe(cache())
    assert gate.limit == 2


def test_those_that_wait_come_in_order_and_whoever_gives_up_takes_no_place() -> None:
    async def go() -> None:
        gate = Gate(2, 10)
        earliest, second, third, fourth, fifth = tasks = await entered(gate, 5)
        assert [task.done() for task in tasks] == [True, True, False, False, False]
        third.cancel()
        await gate.__aexit__()
        await settled()
        assert third.cancelled() and fourth.done() and not fifth.done()
        # Let in and given up at once: the place goes on to the next.
        await gate.__aexit__()
        fifth.cancel()
        (sixth,) = await entered(gate, 1)
        assert fifth.cancelled() and sixth.done() and earliest.done() and second.done()
        (seventh,) = await entered(gate, 1)
        assert not seventh.done()
        seventh.cancel()
        await settled()

    gate = Gate(1, 10)
    for _ in range(2):  # one gate, two event loops
        asyncio.run(go())
        (done,) = asyncio.run(entered(gate, 1))
        assert done.done()
        asyncio.run(gate.__aexit__())
