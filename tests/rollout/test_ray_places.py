"""Who plays in a fleet on Ray, and with which weights, while actors die: with actors of this process and no cluster."""

import asyncio
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from agentrl.algos.head import TokenStats
from agentrl.batch import Batch
from agentrl.config import parse_config
from agentrl.engines.base import Completion, Sampling
from agentrl.errors import InfrastructureError, InvariantError
from agentrl.rollout.collected import Clock, Collected
from agentrl.rollout.plan import EpisodeSpec, PlayRequest
from agentrl.train.invariants import check_weights_in_use

pytest.importorskip("ray")
from agentrl.rollout import ray_actor, ray_fleet

pytestmark = pytest.mark.ray
SAID = Completion(token_ids=(5, 6), logprobs=(-1.0, -2.0), finish="length", version=3)


def method(answer: Callable[..., Any]) -> Any:
    """A method of an actor that is asked for from afar."""
    return SimpleNamespace(remote=lambda *args: asyncio.ensure_future(answer(*args)))


class Handle:
    """An actor that notes what it was given; it answers unless it is dead or mute, and plays nothing."""

    def __init__(self, *, dead: bool, loads: bool) -> None:
        self.weights, self.episodes = list[Any](), list[Any]()
        self.dead, self.mute, self.loads = dead, False, asyncio.Event()
        self.start, self.load, self.greet = method(self._greet), method(self._load), method(self._greet)
        self.generate, self.play = method(self._generate), method(self._play)
        self.receive, self.received, self.deaf = method(self._receive), list[Any](), False
        self.says = SAID
        if loads:
            self.loads.set()

    async def _greet(self, *_: object) -> None:
        await (asyncio.Event().wait() if self.mute else asyncio.sleep(0))

    async def _load(self, weights: Any, version: int) -> None:
        await self.loads.wait()
        self.weights.append((weights, version))

    async def _receive(self, *broadcast: Any) -> None:
        if self.deaf:
            raise ray_fleet.errors.RayError("it is gone")
        actor: Any = ray_actor.Actor()
        actor._engine = SimpleNamespace(load_weights=self._take)
        await actor.receive(*broadcast)

    async def _take(self, named_tensors: Any, version: int) -> None:
        self.received.append((dict(named_tensors), version))

    async def _generate(self, *_: object) -> Completion:
        await self._greet()
        if self.dead:
            raise ray_fleet.errors.RayError("it is gone")
        return self.says

    async def _play(self, *asked: Any) -> Any:
        if not asked:
            await asyncio.Event().wait()
        self.episodes.append(asked[-1])
        return Collected(groups=(), faults=0, lost=0, seconds=0.0, clock=Clock(), sandbox={}), None


class Here:
    """What the fleet needs of the module ``ray``."""

    def __init__(self) -> None:
        self.made, self.stored, self.dead, self.loads = list[Handle](), list[Any](), False, True
        self.kill: Callable[[Handle], object] = lambda _: None
        self.util = SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")

    def put(self, data: Any) -> object:
        self.stored.append(data)
        return object()

    def is_initialized(self) -> bool:
        return False

    def remote(self, *_: object) -> Any:
        if _:  # the class of actors, and else an actor of it
            return self
        self.made.append(Handle(dead=self.dead, loads=self.loads))
        return self.made[-1]

    def cancel(self, answer: asyncio.Future[Any]) -> None:
        answer.cancel()

    def options(self, **_: object) -> Any:
        return self

    def get(self, _: object, **__: object) -> Any:
        return [(True, 1e-3)]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Here:
    here = Here()
    monkeypatch.setattr(ray_fleet, "ray", here)
    monkeypatch.setattr(ray_fleet, "connect", lambda _: lambda: None)
    monkeypatch.setattr(ray_fleet, "check_room", lambda *_: None)
    return here


def fleet(here: Here, model: PreTrainedModel, actors: int = 1, **options: Any) -> Any:
    config = parse_config({"rollout": {"concurrency": 4}})
    return ray_fleet.RayFleet(config, model, {}, actors=actors, **options)


WEIGHTS = [("a", torch.zeros(1))]


async def until(ready: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not ready():
            await asyncio.sleep(0.001)


async def test_an_actor_that_comes_back_takes_other_weights_of_the_same_version(here: Here, model: Any) -> None:
    # As a caller may do that loads others before and after an evaluation.
    made = fleet(here, model)
    await made.load_weights(WEIGHTS, 3)
    here.made[0].dead, here.loads = True, False
    completion = asyncio.create_task(made.generate((1,), Sampling(), seed=0))
    await until(lambda: len(here.made) == 2)
    await asyncio.sleep(0.01)  # it is given the weights of before
    await made.load_weights(WEIGHTS, 3)
    here.made[1].loads.set()
    assert await completion == SAID
    assert here.made[1].weights[-1] == (await made._weights, 3)


@pytest.mark.parametrize("deaf", [False, True])
async def test_weights_reach_all_actors_at_once_or_else_by_the_store(
    here: Here, model: Any, deaf: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_actor, "MEETING", timedelta(seconds=0.5 if deaf else 60.0))
    made = fleet(here, model, actors=3, collective=True)
    wanted = {"a": torch.randn(300, 7), "b": torch.randn(1), "c": torch.randn(4, 4).T}
    here.made[1].deaf = deaf
    with pytest.warns(match="a broadcast failed") if deaf else nullcontext():
        await made.load_weights(wanted.items(), 3)
    for actor in here.made[:3]:
        if not deaf:
            [(weights, version)] = actor.received
            assert version == 3 and weights.keys() == wanted.keys() and not actor.weights
            assert all(torch.equal(weights[name], wanted[name]) for name in wanted)
    assert [len(actor.weights) for actor in here.made] == [int(deaf)] * 3
    # The store has them too, for an actor that comes back, whatever the trainer makes of its own meanwhile.
    here.made[0].dead = True
    wanted["a"].zero_()
    await made.generate((1,), Sampling(), seed=0)
    await until(lambda: len(here.made) == 4 and here.made[3].weights)
    assert float(abs(torch.from_numpy(here.stored[-1]["a"][0]).view(torch.float32)).sum()) > 0


@pytest.mark.parametrize("why", ["no head node", "it took longer than 0.02 seconds"])
async def test_nobody_waits_for_an_actor_that_can_not_be_made(here: Here, model: Any, why: str) -> None:
    def unreachable(_: Handle) -> None:
        raise RuntimeError("no head node")

    made = fleet(here, model)
    here.made[0].dead, made._patience = True, 0.02
    if "longer" in why:
        await made.load_weights(WEIGHTS, 3)
        here.loads = False
    else:
        here.kill = unreachable
    with pytest.raises(InfrastructureError, match=rf"could not be started again in 3 attempts: {why}$"):
        await made.generate((1,), Sampling(), seed=0)


async def test_actors_that_die_one_after_the_other_end_the_call(here: Here, model: Any) -> None:
    here.dead = True
    with pytest.raises(InfrastructureError, match=r"^3 actors of the fleet died .*: it is gone$"):
        await fleet(here, model).generate((1,), Sampling(), seed=0)


@pytest.mark.parametrize("method", ["generate", "load"])
async def test_an_actor_that_falls_silent_is_replaced(here: Here, model: Any, method: str) -> None:
    made = fleet(here, model)
    made._patience, silent = 0.02, here.made[0]
    silent.mute = True
    silent.loads.clear()
    work = made.generate((1,), Sampling(), seed=0) if method == "generate" else made.load_weights(WEIGHTS, 3)
    assert await work in (SAID, None)
    await until(lambda: made._slots[0].handle is not silent and made._slots[0].ready)


@pytest.mark.parametrize("wrong", [None, 0, 1])
async def test_each_actor_is_probed_and_so_is_one_that_comes_back(here: Here, model: Any, wrong: int | None) -> None:
    def score(batch: Batch) -> TokenStats:
        logp = torch.tensor(SAID.logprobs).repeat(len(batch.sampled) // 2)
        return TokenStats(logp, logp, logp)

    made = fleet(here, model, actors=2)
    await made.load_weights(WEIGHTS, 3)
    other = replace(SAID, logprobs=(-1.0, -2.1))
    if wrong is not None:
        here.made[wrong].says = other
    reason = r"given new weights, but engine and trainer disagree by up to 0\.1 "
    with nullcontext() if wrong is None else pytest.raises(InvariantError, match=reason):
        await check_weights_in_use(made, Sampling(), score, 1e-3)
    if wrong is None:
        here.made[0].dead = True
        await made.generate((1,), Sampling(), seed=0)
        here.made[-1].says = other
        await until(lambda: len(here.made) > 3 and made._slots[0].ready)
        assert made._slots[0].handle is here.made[-1] and here.made[-1].says == SAID, "it was made once more"


async def test_a_request_waits_for_no_episodes(here: Here, model: Any) -> None:
    made = fleet(here, model)
    playing = [asyncio.create_task(made._call(4, "play")) for _ in range(3)]
    await asyncio.sleep(0.01)
    assert await made.generate((1,), Sampling(), seed=0) == SAID
    for task in playing:
        task.cancel()
    await asyncio.wait(playing)
    assert made._slots[0].load == 0


async def test_actors_are_told_which_of_their_episodes_were_played_before(here: Here, model: Any) -> None:
    groups = [[EpisodeSpec(task_id="t", seed=seed)] for seed in (2, 3)]
    played: Any = {1: "one", 2: "two"}
    request = PlayRequest(specs=groups, sampling=Sampling(), played=played)
    await fleet(here, model).play("collector", request)
    assert here.made[0].episodes == [{2: "two"}, {}]
