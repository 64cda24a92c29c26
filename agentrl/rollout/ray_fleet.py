"""A fleet of actors on a Ray cluster: each is a process with environments, their sandboxes and an engine.

Ray places the actors, and carries groups and weights; the training loop, which it never runs, takes the fleet for an
engine. Weights go by way of the host: the object store is given them once, and each node takes them from there. From
GPU to GPU, by NCCL, is not built.

An actor that dies, alone or with its node, is made anew where there is room, takes the newest weights and joins again.
Its groups are played again elsewhere, from the same seeds, and so with the same tokens where weights do not change
meanwhile. Actors end with the process that made the fleet.
"""

import asyncio
import socket
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentrl.config import Config
from agentrl.engines import make_engine
from agentrl.engines.base import Completion, Sampling
from agentrl.errors import InfrastructureError, UsageError
from agentrl.models.load import make_repeatable
from agentrl.rollout.collected import Collected, joined
from agentrl.rollout.collector import Collector, Fleet
from agentrl.rollout.gate import wait_for_enough
from agentrl.rollout.metrics import sandbox_metrics
from agentrl.rollout.plan import EpisodeSpec
from agentrl.rollout.ray_cluster import cause, check_room, connect, errors, gist, ray
from agentrl.sandboxes import Counters
from agentrl.toolenv.tools.python import close_shared_sandbox, sandbox_counters
from agentrl.types import Trajectory, flatten

_RAISED = (errors.RayTaskError, errors.UnserializableException)
"""What an actor's method raised; other errors of Ray's are of an actor that has died or is out of reach."""
_LOST = (errors.RayError, TimeoutError)
"""What a call of an actor raises that has died, or is out of reach."""
_ATTEMPTS = 3
"""How often an actor may die in a row, over the same episodes or while it starts."""
_CLOSING_S = 10.0
"""How long actors may take to close their environments before they are killed."""


class Actor:
    """What runs in a process of its own, somewhere on the cluster."""

    async def start(self, config: Config, model: PreTrainedModel, options: Mapping[str, Any]) -> tuple[bool, float]:
        """Make the engine; give its ``exact`` and ``rounding``."""
        make_repeatable(config.run.deterministic)
        # vLLM takes the weights to the GPU in a process of its own.
        device = "cpu" if config.engine.name == "vllm" else config.model.device
        self._engine = make_engine(config.engine.name, model.to(device), options)  # pyright: ignore[reportArgumentType]
        self._collectors = dict[Any, Collector]()
        return self._engine.exact, self._engine.rounding

    async def load(self, weights: Mapping[str, tuple[Any, torch.dtype, torch.Size]], version: int) -> None:
        """Give the engine new weights: bytes, type and shape of each."""
        tensors = (
            (name, torch.from_numpy(data).view(dtype).view(shape)) for name, (data, dtype, shape) in weights.items()
        )
        with warnings.catch_warnings(action="ignore"):  # that the shared memory can't be written to: engines only read
            await self._engine.load_weights(tensors, version)

    async def generate(self, prompt_ids: tuple[int, ...], sampling: Sampling, seed: int) -> Completion:
        """Sample a continuation."""
        return await self._engine.generate(prompt_ids, sampling, seed=seed)

    async def play(
        self,
        collector: Sequence[Any],
        group: Sequence[EpisodeSpec],
        sampling: Sampling,
        known: Mapping[int, Trajectory],
    ) -> tuple[Collected, Counters | None]:
        """Play a group with a collector that lies in the object store; give the sandboxes' counters too."""
        [place] = collector
        if place not in self._collectors:
            fetched = await place
            self._collectors.setdefault(place, fetched)
        try:
            played = await self._collectors[place].play(
                [group], self._engine, sampling, on_episode=lambda _: None, known=known
            )
        except UsageError as error:  # where the run was begun all was there
            raise UsageError(f"on {socket.gethostname()}, where an actor of the fleet plays: {error}") from error
        return played, sandbox_counters()

    async def greet(self) -> None:
        """Answer, which is all that is asked for."""

    async def close(self) -> None:
        """Close environments and engine."""
        for collector in self._collectors.values():
            collector.close()
        close_shared_sandbox()
        self._engine.close()


@dataclass(slots=True, eq=False)
class _Place:
    """One of the places of the fleet, which an actor holds until it dies and another takes it."""

    handle: Any
    """Calls the actor."""
    ready: bool = False
    """True while the actor can play."""
    load: int = 0
    """Episodes that it was given."""


class RayFleet(Fleet):
    """Plays and samples with ``actors`` actors of a Ray cluster.

    Each holds ``rollout.concurrency`` episodes at a time, and a group is played by one of them.

    Args:
        config: the run's settings.
        model: a copy of the policy.
        engine_options: of the engine that each actor has.
        actors: how many.
        cpus: of an actor, which are its threads too.
        gpus: of an actor; a share lets several have one.
        resources: of an actor, by names that the nodes were started with.
        address: of the cluster; "auto" finds one that this machine belongs to.
        patience: seconds within which actors are to start.

    Raises:
        ConfigError: no cluster is reachable, or it has no room for so many actors, or they don't take the options.
        InfrastructureError: an actor did not start.
    """

    cache = None
    """Each actor's collector asks its own engine."""

    def __init__(
        self,
        config: Config,
        model: PreTrainedModel,
        engine_options: Mapping[str, Any],
        *,
        actors: int = 1,
        cpus: float = 1,
        gpus: float = 0,
        resources: Mapping[str, float] | None = None,
        address: str = "auto",
        patience: float = 600.0,
    ) -> None:
        self._concurrency, self._patience, self._dtype = config.rollout.concurrency, patience, model.dtype
        self._disconnect, self._places = connect(address), list[_Place]()
        need = {"CPU": cpus, "GPU": gpus, **(resources or {})}
        try:
            check_room(actors, {name: count for name, count in need.items() if count}, address)
            # Without retries of Ray's own: an actor that comes back has no weights, and must take them first.
            self._actor = ray.remote(Actor).options(
                num_cpus=cpus, num_gpus=gpus, resources=resources, max_restarts=0, scheduling_strategy="SPREAD"
            )
            self._recipe = config, ray.put(model.cpu()), engine_options
            self._places += (_Place(self._actor.remote()) for _ in range(actors))
            self.exact, self.rounding = self._started()
        except BaseException:
            self.close()
            raise
        self._weights, self._version = None, None
        self._probe: tuple[tuple[Any, ...], Completion] | None = None
        """What each actor was asked for since it has the newest weights, and what came."""
        self._sent = dict[Collector, Any]()
        """Where each collector lies in the object store."""
        self._counters = dict[Any, Counters]()
        """Of each actor's sandboxes, the dead ones' too."""
        self._changed = asyncio.Condition()
        """Tells those who wait for an actor."""
        self._fault: InfrastructureError | None = None
        """Why there will be none."""
        self._revivals = set[asyncio.Task[None]]()
        self._leaving = set[asyncio.Task[Collected]]()

    async def generate(self, prompt_ids: tuple[int, ...], sampling: Sampling, *, seed: int) -> Completion:
        """Sample a continuation with one of the actors; see :class:`agentrl.engines.base.Engine`.

        Raises:
            InfrastructureError: the engine failed, or actors died again and again.
        """
        # No episode, so it waits for none of those that are queued: new weights are probed while they are played.
        _, completion, _ = await self._call(0, "generate", prompt_ids, sampling, seed)
        return completion

    async def probe(self, prompt_ids: tuple[int, ...], sampling: Sampling, *, seed: int) -> Sequence[Completion]:
        """Sample the same continuation with each actor; one that comes back with these weights is compared with it.

        Raises:
            InfrastructureError: the engine failed, or actors died again and again.
        """
        request, probed = (prompt_ids, sampling, seed), dict[Any, Completion]()
        while (missing := [at for at in self._places if at.ready and at.handle not in probed]) or not probed:
            calls = (self._call(0, "generate", *request, at=at) for at in missing or [None])
            probed |= {actor: completion for actor, completion, _ in await asyncio.gather(*calls)}
        self._probe = request, next(iter(probed.values()))
        return list(probed.values())

    async def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Give all actors new weights, in the type of their computation; requests under way end as their engine says.

        Raises:
            InfrastructureError: a tensor is unknown to the model or of another shape.
        """
        # NumPy's arrays lie in the object store as they are, and an actor reads them there; tensors would be pickled.
        weights = dict[str, tuple[Any, torch.dtype, torch.Size]]()
        for name, tensor in named_tensors:
            data = tensor.detach().to("cpu", self._dtype)
            weights[name] = data.contiguous().view(-1).view(torch.uint8).numpy(), self._dtype, data.shape
        placed = await asyncio.to_thread(ray.put, weights)
        self._weights, self._version, self._probe = placed, version, None
        await asyncio.gather(*(self._give(place, place.handle) for place in self._places if place.ready))

    async def play(
        self,
        collector: Collector,
        specs: Sequence[Sequence[EpisodeSpec]],
        sampling: Sampling,
        *,
        on_episode: Callable[[Trajectory], None],
        known: Mapping[int, Trajectory],
        enough: int | None,
    ) -> Collected:
        """Play groups, each on the actor that has the fewest episodes; ``on_episode`` is told of whole groups.

        Raises:
            InfrastructureError: actors died again and again.
        """
        began, before = time.perf_counter(), self._counted()
        if collector not in self._sent:
            self._sent[collector] = ray.put(collector)
        # In a list, Ray gives an actor the place and not what lies there: it takes that only once.
        sent = [self._sent[collector]]

        async def played(group: Sequence[EpisodeSpec]) -> Collected:
            there = {spec.seed: known[spec.seed] for spec in group if spec.seed in known}
            actor, (part, counters), deaths = await self._call(len(group), "play", sent, group, sampling, there)
            if counters is not None:
                self._counters[actor] = counters
            for episode in flatten(part.groups):
                on_episode(episode)
            return replace(part, faults=part.faults + deaths * (len(group) - len(there)))

        playing = [asyncio.create_task(played(group)) for group in specs]
        parts, cancelled = await wait_for_enough(enough, playing, self._leaving, lambda part: bool(part.groups))
        collected = replace(joined(parts), cancelled=cancelled)
        sandbox = sandbox_metrics(before, self._counted())
        return replace(collected, seconds=time.perf_counter() - began, sandbox=sandbox)

    def close(self) -> None:
        """End all actors, and with them their sandboxes."""
        if ray.is_initialized():
            closing = [place.handle.close.remote() for place in self._places if place.ready]
            if closing:
                ray.wait(closing, num_returns=len(closing), timeout=_CLOSING_S)
            for place in self._places:
                ray.kill(place.handle)
        self._places.clear()
        self._disconnect()

    def _counted(self) -> Counters | None:
        counters = list(self._counters.values())
        return sum(counters[1:], counters[0]) if counters else None

    def _started(self) -> tuple[bool, float]:
        """Start the first actors; give what they say of their engines."""
        try:
            said = ray.get([place.handle.start.remote(*self._recipe) for place in self._places], timeout=self._patience)
        except _RAISED as error:
            raise cause(error) from error
        except errors.GetTimeoutError:
            raise InfrastructureError(
                f"not all of the fleet's {len(self._places)} actors have started within fleet.options.patience="
                f"{self._patience:g} seconds: `ray status` tells who holds the cluster's resources"
            ) from None
        except errors.RayError as error:
            raise InfrastructureError(f"an actor of the fleet died when it was started: {gist(error)}") from error
        for place in self._places:
            place.ready = True
        return said[0]

    async def _call(self, episodes: int, method: str, *args: Any, at: _Place | None = None) -> tuple[Any, Any, int]:
        """Call a method of an actor, or of another where that dies; give who answered, the answer and the deaths."""
        deaths, died = 0, None
        while deaths < _ATTEMPTS:
            place = at if at and at.ready else await self._take(episodes)
            actor = place.handle
            answer = getattr(actor, method).remote(*args)
            try:
                return actor, await self._answered(actor, answer), deaths
            except asyncio.CancelledError:
                ray.cancel(answer)  # else it would play on
                raise
            except _RAISED as error:
                raise cause(error) from error
            except _LOST as error:
                deaths, died = deaths + 1, error
                self._lose(place, actor)
            finally:
                place.load -= episodes
                async with self._changed:
                    self._changed.notify(episodes)
        raise InfrastructureError(
            f"{deaths} actors of the fleet died one after the other over the same episodes, perhaps for want of "
            f"memory: {gist(died)}"
        ) from died

    async def _answered(self, actor: Any, answer: Any) -> Any:
        """Wait for an actor's answer, as long as it shows now and then that it is there.

        Raises:
            TimeoutError: it does not.
        """
        waiting = asyncio.ensure_future(answer)
        try:
            while not (await asyncio.wait([waiting], timeout=self._patience))[0]:
                async with asyncio.timeout(self._patience):
                    await actor.greet.remote()
            return waiting.result()
        finally:
            waiting.cancel()

    async def _take(self, episodes: int) -> _Place:
        """Wait for an actor that has room, and give it so many episodes."""

        def free() -> list[_Place]:
            return [one for one in self._places if one.ready and (not episodes or one.load < self._concurrency)]

        async with self._changed:
            await self._changed.wait_for(lambda: self._fault or free())
            if self._fault:
                raise self._fault
            place = min(free(), key=lambda one: one.load)
            place.load += episodes
            return place

    async def _give(self, place: _Place, actor: Any) -> None:
        """Give an actor that is ready the newest weights."""
        try:
            await self._answered(actor, actor.load.remote(self._weights, self._version))
        except _RAISED as error:
            raise cause(error) from error
        except _LOST:
            self._lose(place, actor)

    def _lose(self, place: _Place, actor: Any) -> None:
        """Have an actor replaced, unless another call has noticed its death before."""
        if place.ready and place.handle is actor:
            place.ready = False
            task = asyncio.create_task(self._revive(place))
            self._revivals.add(task)
            task.add_done_callback(self._revivals.discard)

    async def _check_same(self, actor: Any) -> None:
        """Check that an actor samples what the others have sampled from the newest weights.

        Raises:
            InfrastructureError: it does not.
        """
        if self._probe is not None:
            request, wanted = self._probe
            done: Completion = await actor.generate.remote(*request)
            apart = max(abs(a - b) for a, b in zip(done.logprobs, wanted.logprobs, strict=False))
            if done.token_ids != wanted.token_ids or apart > self.rounding:
                raise InfrastructureError("it samples from other weights than the others")

    async def _revive(self, place: _Place) -> None:
        """Put a new actor in the place of one that has died, and let it play once it has the newest weights."""
        deaths = 0
        while not place.ready and self._fault is None:
            try:
                ray.kill(place.handle)  # it may only be out of reach
                place.handle, given = self._actor.remote(), None
                async with asyncio.timeout(self._patience):
                    await place.handle.start.remote(*self._recipe)
                    while given is not self._weights:  # others may come meanwhile, and of the same version
                        given = self._weights
                        await place.handle.load.remote(given, self._version)
                        if given is self._weights:
                            await self._check_same(place.handle)
                place.ready = True
            except Exception as error:  # whatever it is: else those who wait for an actor would wait for ever
                # There may be no room for it until its node comes back; the others play on meanwhile.
                late, fault = isinstance(error, TimeoutError), cause(error) if isinstance(error, _RAISED) else error
                deaths += not late or not any(one.ready for one in self._places)
                if deaths == _ATTEMPTS:
                    why = f"it took longer than {self._patience:g} seconds" if late else gist(fault)
                    self._fault = InfrastructureError(
                        f"an actor of the fleet could not be started again in {deaths} attempts: {why}"
                    )
        async with self._changed:
            self._changed.notify_all()
