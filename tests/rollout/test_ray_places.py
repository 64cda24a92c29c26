"""Who plays in a fleet on Ray, and with which weights, while actors die: with actors of this process and no cluster."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from agentrl.config import parse_config
from agentrl.engines.base import Sampling
from agentrl.errors import InfrastructureError

pytest.importorskip("ray")
from agentrl.rollout import ray_fleet

pytestmark = pytest.mark.ray


class Method:
    """A method of an actor that is asked for from afar."""

    def __init__(self, answer: Callable[..., Any]) -> None:
        self._answer = answer

    def remote(self, *args: Any) -> Any:
        return asyncio.ensure_future(self._answer(*args))


class Handle:
    """An actor that notes what weights it was given; it answers ``generate`` unless it is dead, and never plays."""

    def __init__(self) -> None:
        self.given, self.dead, self.held = list[Any](), False, asyncio.Event()
        self.start, self.load = Method(self._start), Method(self._load)
        self.generate, self.play = Method(self._generate), Method(self._play)

    async def _start(self, *_: object) -> None:
        await asyncio.sleep(0)

    async def _load(self, weights: Any, version: int) -> None:
        await self.held.wait()
        self.given.append(weights)

    async def _generate(self, *_: object) -> str:
        if self.dead:
            raise ray_fleet._errors.RayError("it is gone")  # pyright: ignore
        return "said"

    async def _play(self, *_: object) -> Any:
        await asyncio.Event().wait()


class Here:
    """What the fleet needs of the module ``ray``."""

    def __init__(self) -> None:
        self.made = list[Handle]()
        self.kill: Callable[[Handle], object] = lambda _: None

    def put(self, _: object) -> object:
        return object()

    def is_initialized(self) -> bool:
        return False

    def remote(self, *_: object) -> Any:
        if _:  # the class of actors, and else an actor of it
            return self
        self.made.append(Handle())
        return self.made[-1]

    def cancel(self, answer: asyncio.Future[Any]) -> None:
        answer.cancel()

    def options(self, **_: object) -> Any:
        return self

    def get(self, _: object, **__: object) -> Any:
        return [(True, 0.0)]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Here:
    here = Here()
    monkeypatch.setattr(ray_fleet, "_ray", here)
    monkeypatch.setattr(ray_fleet, "_connect", lambda _: False)
    monkeypatch.setattr(ray_fleet, "_check_room", lambda *_: None)
    return here


def fleet(here: Here, model: PreTrainedModel, actors: int = 1) -> Any:
    config = parse_config({"rollout": {"concurrency": 4}})
    return ray_fleet.RayFleet(config, model, {}, actors=actors)


WEIGHTS = [("a", torch.zeros(1))]


async def until(ready: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not ready():
            await asyncio.sleep(0.001)


def test_an_actor_that_comes_back_takes_other_weights_of_the_same_version(here: Here, model: Any) -> None:
    # As those are that an evaluation takes of a run with optim.average, and those that are trained.
    async def go() -> None:
        made = fleet(here, model)
        here.made[0].held.set()
        await made.load_weights(WEIGHTS, 3)
        here.made[0].dead = True
        said = asyncio.create_task(made.generate((1,), Sampling(), seed=0))
        await until(lambda: len(here.made) == 2)
        await asyncio.sleep(0.01)  # it is given the weights of before
        await made.load_weights(WEIGHTS, 3)
        here.made[1].held.set()
        assert await said == "said"
        assert here.made[1].given[-1] is made._weights

    asyncio.run(go())


def test_nobody_waits_for_an_actor_that_can_not_be_made(here: Here, model: Any) -> None:
    def unreachable(_: Handle) -> None:
        raise RuntimeError("no head node")

    async def go() -> None:
        made = fleet(here, model)
        here.made[0].dead, here.kill = True, unreachable
        async with asyncio.timeout(10):
            with pytest.raises(InfrastructureError, match=r"could not be started again in 3 attempts: no head node$"):
                await made.generate((1,), Sampling(), seed=0)

    asyncio.run(go())


def test_a_request_waits_for_no_episodes(here: Here, model: Any) -> None:
    async def go() -> None:
        made = fleet(here, model)
        playing = [asyncio.create_task(made._call(4, "play")) for _ in range(3)]
        await asyncio.sleep(0.01)
        async with asyncio.timeout(10):
            assert await made.generate((1,), Sampling(), seed=0) == "said"
        for task in playing:
            task.cancel()
        await asyncio.wait(playing)
        assert made._places[0].load == 0

    asyncio.run(go())
