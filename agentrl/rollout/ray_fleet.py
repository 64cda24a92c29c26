"""A fleet of actors on a Ray cluster: each is a process with environments, their sandboxes and an engine.

Ray places the actors, and transfers groups and weights. It does not run the training loop, which uses the fleet as an
engine. Weights travel through the host: they are put into the object store once, and each node fetches them from there.
Transfers from GPU to GPU, by NCCL, are not implemented.

An actor that dies, alone or with its node, is replaced where there is room; the new one loads the newest weights and
joins. The groups of the dead actor are retried elsewhere with the same seeds, and so get the same tokens unless the
weights change meanwhile. Actors end with the process that made the fleet.
"""

import asyncio
import socket
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
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
from agentrl.rollout.plan import EpisodeSpec, PlayRequest
from agentrl.rollout.ray_cluster import cause, check_room, connect, errors, gist, ray
from agentrl.sandboxes import Counters
from agentrl.toolenv.tools.python import close_shared_sandbox, sandbox_counters, use_backend
from agentrl.types import Trajectory, flatten

_RAISED = (errors.RayTaskError, errors.UnserializableException)
"""Errors that an actor's method raised; Ray's other errors mean that the actor has died or is out of reach."""
_LOST = (errors.RayError, TimeoutError)
"""Errors of a call to an actor that has died or is out of reach."""
_ATTEMPTS = 3
"""How often an actor may die in a row, over the same episodes or while it starts."""
_CLOSING_S = 10.0
"""How long actors may take to close their environments before they are killed."""


class Actor:
    """Plays and samples in a process of its own, somewhere on the cluster."""

    async def start(self, config: Config, model: PreTrainedModel, options: Mapping[str, Any]) -> tuple[bool, float]:
        """Make the engine; return its ``exact`` and ``rounding``."""
        make_repeatable(config.run.deterministic)
        use_backend(config.env.sandbox)
        # vLLM takes the weights to the GPU in a process of its own.
        device = "cpu" if config.engine.name == "vllm" else config.model.device
        self._engine = make_engine(config.engine.name, model.to(device), options)  # pyright: ignore[reportArgumentType]
        self._collectors = dict[Any, Collector]()
        return self._engine.exact, self._engine.rounding

    async def load(self, weights: Mapping[str, tuple[Any, torch.dtype, torch.Size]], version: int) -> None:
        """Load new weights into the engine: bytes, type and shape of each."""
        tensors = (
            (name, torch.from_numpy(data).view(dtype).view(shape)) for name, (data, dtype, shape) in weights.items()
        )
        with warnings.catch_warnings(action="ignore"):  # of read-only shared memory, which engines only read
            await self._engine.load_weights(tensors, version)

    async def generate(self, prompt_ids: tuple[int, ...], sampling: Sampling, seed: int) -> Completion:
        """Sample a continuation."""
        return await self._engine.generate(prompt_ids, sampling, seed=seed)

    async def play(
        self,
        collector: Sequence[Any],
        group: Sequence[EpisodeSpec],
        sampling: Sampling,
        played: Mapping[int, Trajectory],
    ) -> tuple[Collected, Counters | None]:
        """Play a group with a collector from the object store; return the sandboxes' counters too."""
        [reference] = collector
        if reference not in self._collectors:
            fetched = await reference
            self._collectors.setdefault(reference, fetched)
        try:
            request = PlayRequest(specs=[group], sampling=sampling, played=played)
            collected = await self._collectors[reference].play(request, self._engine)
        except UsageError as error:  # something that the run's own machine has is missing on this one
            raise UsageError(f"on {socket.gethostname()}, where an actor of the fleet plays: {error}") from error
        return collected, sandbox_counters()

    async def greet(self) -> None:
        """Answer, to show that the actor is alive."""

    async def close(self) -> None:
        """Close environments and engine."""
        for collector in self._collectors.values():
            collector.close()
        close_shared_sandbox()
        self._engine.close()


@dataclass(slots=True, eq=False)
class _Slot:
    """A slot of the fleet, which an actor holds until it dies and another replaces it."""

    handle: Any
    """Calls the actor."""
    ready: bool = False
    """True while the actor can play."""
    load: int = 0
    """Episodes that it is playing."""


class RayFleet(Fleet):
    """Plays and samples with ``actors`` actors of a Ray cluster.

    Each holds ``rollout.concurrency`` episodes at a time, and a group is played by one of them.

    Args:
        config: the run's settings.
        model: a copy of the policy.
        engine_options: options of each actor's engine.
        actors: number of actors.
        cpus: CPUs of an actor, which are its threads too.
        gpus: GPUs of an actor; with a fraction several share one.
        resources: resources of an actor, by names that the nodes were started with.
        address: address of the cluster; "auto" finds one that this machine belongs to.
        patience: seconds within which actors must start.

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
        self._disconnect, self._slots = connect(address), list[_Slot]()
        need = {"CPU": cpus, "GPU": gpus, **(resources or {})}
        try:
            check_room(actors, {name: count for name, count in need.items() if count}, address)
            # Without retries of Ray's own: an actor that comes back has no weights, and must take them first.
            self._actor = ray.remote(Actor).options(
                num_cpus=cpus, num_gpus=gpus, resources=resources, max_restarts=0, scheduling_strategy="SPREAD"
            )
            self._recipe = config, ray.put(model.cpu()), engine_options
            self._slots += (_Slot(self._actor.remote()) for _ in range(actors))
            self.exact, self.rounding = self._started()
        except BaseException:
            self.close()
            raise
        self._weights, self._version = None, None
        self._probe: tuple[tuple[Any, ...], Completion] | None = None
        """The request that each actor got after the newest weights, and its completion."""
        self._sent = dict[Collector, Any]()
        """The reference of each collector in the object store."""
        self._counters = dict[Any, Counters]()
        """Counters of each actor's sandboxes, dead actors included."""
        self._changed = asyncio.Condition()
        """Notifies those who wait for an actor."""
        self._fault: InfrastructureError | None = None
        """The error that ends the fleet."""
        self._revivals = set[asyncio.Task[None]]()
        self._leaving = set[asyncio.Task[Collected]]()

    async def generate(self, prompt_ids: tuple[int, ...], sampling: Sampling, *, seed: int) -> Completion:
        """Sample a continuation with one of the actors; see :class:`agentrl.engines.base.Engine`.

        Raises:
            InfrastructureError: the engine failed, or actors died again and again.
        """
        # It is no episode, so it does not queue with them: new weights are probed while episodes are played.
        _, completion, _ = await self._call(0, "generate", prompt_ids, sampling, seed)
        return completion

    async def probe(self, prompt_ids: tuple[int, ...], sampling: Sampling, *, seed: int) -> Sequence[Completion]:
        """Sample the same continuation with each actor; an actor that restarts is compared with the result.

        Raises:
            InfrastructureError: the engine failed, or actors died again and again.
        """
        request, probed = (prompt_ids, sampling, seed), dict[Any, Completion]()
        while (missing := [slot for slot in self._slots if slot.ready and slot.handle not in probed]) or not probed:
            calls = (self._call(0, "generate", *request, slot=slot) for slot in missing or [None])
            probed |= {actor: completion for actor, completion, _ in await asyncio.gather(*calls)}
        self._probe = request, next(iter(probed.values()))
        return list(probed.values())

    async def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Send all actors new weights, in the type of their computation; the engine decides how open requests end.

        Raises:
            InfrastructureError: a tensor is unknown to the model or of another shape.
        """
        # The object store holds NumPy arrays as they are, and an actor reads them there; tensors would be pickled.
        weights = dict[str, tuple[Any, torch.dtype, torch.Size]]()
        for name, tensor in named_tensors:
            data = tensor.detach().to("cpu", self._dtype)
            weights[name] = data.contiguous().view(-1).view(torch.uint8).numpy(), self._dtype, data.shape
        placed = await asyncio.to_thread(ray.put, weights)
        self._weights, self._version, self._probe = placed, version, None
        await asyncio.gather(*(self._send_weights(slot, slot.handle) for slot in self._slots if slot.ready))

    async def play(self, collector: Collector, request: PlayRequest) -> Collected:
        """Play groups, each on the actor that has the fewest episodes; ``on_episode`` is called after each group.

        Raises:
            InfrastructureError: actors died again and again.
        """
        began, before = time.perf_counter(), self._counted()
        if collector not in self._sent:
            self._sent[collector] = ray.put(collector)
        # Within a list Ray passes the reference itself, so an actor fetches the collector only once.
        sent = [self._sent[collector]]

        async def play_group(group: Sequence[EpisodeSpec]) -> Collected:
            ready = {spec.seed: request.played[spec.seed] for spec in group if spec.seed in request.played}
            arguments = sent, group, request.sampling, ready
            actor, (part, counters), deaths = await self._call(len(group), "play", *arguments)
            if counters is not None:
                self._counters[actor] = counters
            for episode in flatten(part.groups):
                request.on_episode(episode)
            return replace(part, faults=part.faults + deaths * (len(group) - len(ready)))

        playing = [asyncio.create_task(play_group(group)) for group in request.specs]
        parts, cancelled = await wait_for_enough(request.enough, playing, self._leaving, lambda part: bool(part.groups))
        collected = replace(joined(parts), cancelled=cancelled)
        sandbox = sandbox_metrics(before, self._counted())
        return replace(collected, seconds=time.perf_counter() - began, sandbox=sandbox)

    def close(self) -> None:
        """End all actors, and with them their sandboxes."""
        if ray.is_initialized():
            closing = [slot.handle.close.remote() for slot in self._slots if slot.ready]
            if closing:
                ray.wait(closing, num_returns=len(closing), timeout=_CLOSING_S)
            for slot in self._slots:
                ray.kill(slot.handle)
        self._slots.clear()
        self._disconnect()

    def _counted(self) -> Counters | None:
        counters = list(self._counters.values())
        return sum(counters[1:], counters[0]) if counters else None

    def _started(self) -> tuple[bool, float]:
        """Start the first actors; return ``exact`` and ``rounding`` of their engines."""
        try:
            starts = [slot.handle.start.remote(*self._recipe) for slot in self._slots]
            engines = ray.get(starts, timeout=self._patience)
        except _RAISED as error:
            raise cause(error) from error
        except errors.GetTimeoutError:
            raise InfrastructureError(
                f"not all of the fleet's {len(self._slots)} actors have started within fleet.options.patience="
                f"{self._patience:g} seconds: `ray status` tells who holds the cluster's resources"
            ) from None
        except errors.RayError as error:
            raise InfrastructureError(f"an actor of the fleet died when it was started: {gist(error)}") from error
        for slot in self._slots:
            slot.ready = True
        return engines[0]

    async def _call(self, episodes: int, method: str, *args: Any, slot: _Slot | None = None) -> tuple[Any, Any, int]:
        """Call a method of an actor, or of another one if that dies; return the actor, its answer and the deaths."""
        deaths, died = 0, None
        while deaths < _ATTEMPTS:
            holder = slot if slot and slot.ready else await self._take(episodes)
            actor = holder.handle
            answer = getattr(actor, method).remote(*args)
            try:
                return actor, await self._answered(actor, answer), deaths
            except asyncio.CancelledError:
                ray.cancel(answer)  # otherwise the actor would continue to play
                raise
            except _RAISED as error:
                raise cause(error) from error
            except _LOST as error:
                deaths, died = deaths + 1, error
                self._lose(holder, actor)
            finally:
                holder.load -= episodes
                async with self._changed:
                    self._changed.notify(episodes)
        raise InfrastructureError(
            f"{deaths} actors of the fleet died one after the other over the same episodes, perhaps for want of "
            f"memory: {gist(died)}"
        ) from died

    async def _answered(self, actor: Any, answer: Any) -> Any:
        """Wait for an actor's answer, as long as the actor responds to a greeting now and then.

        Raises:
            TimeoutError: the actor does not respond.
        """
        waiting = asyncio.ensure_future(answer)
        try:
            while not (await asyncio.wait([waiting], timeout=self._patience))[0]:
                async with asyncio.timeout(self._patience):
                    await actor.greet.remote()
            return waiting.result()
        finally:
            waiting.cancel()

    async def _take(self, episodes: int) -> _Slot:
        """Wait for an actor that has room, and count so many episodes as its load."""

        def free() -> list[_Slot]:
            return [slot for slot in self._slots if slot.ready and (not episodes or slot.load < self._concurrency)]

        async with self._changed:
            await self._changed.wait_for(lambda: self._fault or free())
            if self._fault:
                raise self._fault
            slot = min(free(), key=lambda slot: slot.load)
            slot.load += episodes
            return slot

    async def _send_weights(self, slot: _Slot, actor: Any) -> None:
        """Send the newest weights to an actor that is ready."""
        try:
            await self._answered(actor, actor.load.remote(self._weights, self._version))
        except _RAISED as error:
            raise cause(error) from error
        except _LOST:
            self._lose(slot, actor)

    def _lose(self, slot: _Slot, actor: Any) -> None:
        """Replace a dead actor, unless another call has noticed its death before."""
        if slot.ready and slot.handle is actor:
            slot.ready = False
            task = asyncio.create_task(self._revive(slot))
            self._revivals.add(task)
            task.add_done_callback(self._revivals.discard)

    async def _check_same(self, actor: Any) -> None:
        """Check that an actor samples the same tokens as the others from the newest weights.

        Raises:
            InfrastructureError: the tokens or their log-probs differ.
        """
        if self._probe is not None:
            request, wanted = self._probe
            done: Completion = await actor.generate.remote(*request)
            difference = max(abs(a - b) for a, b in zip(done.logprobs, wanted.logprobs, strict=False))
            if done.token_ids != wanted.token_ids or difference > self.rounding:
                raise InfrastructureError("it samples from other weights than the others")

    async def _revive(self, slot: _Slot) -> None:
        """Put a new actor into the slot of one that has died, and let it play once it has the newest weights."""
        deaths = 0
        while not slot.ready and self._fault is None:
            try:
                ray.kill(slot.handle)  # it may only be out of reach
                slot.handle, sent = self._actor.remote(), None
                async with asyncio.timeout(self._patience):
                    await slot.handle.start.remote(*self._recipe)
                    while sent is not self._weights:  # newer weights may come meanwhile, and of the same version
                        sent = self._weights
                        await slot.handle.load.remote(sent, self._version)
                        if sent is self._weights:
                            await self._check_same(slot.handle)
                slot.ready = True
            except Exception as error:  # any exception: otherwise those who wait for an actor would wait for ever
                # There may be no room for it until its node comes back; the others continue meanwhile.
                late, fault = isinstance(error, TimeoutError), cause(error) if isinstance(error, _RAISED) else error
                deaths += not late or not any(slot.ready for slot in self._slots)
                if deaths == _ATTEMPTS:
                    why = f"it took longer than {self._patience:g} seconds" if late else gist(fault)
                    self._fault = InfrastructureError(
                        f"an actor of the fleet could not be started again in {deaths} attempts: {why}"
                    )
        async with self._changed:
            self._changed.notify_all()
