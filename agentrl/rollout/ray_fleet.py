"""A fleet of actors on a Ray cluster: each is a process with environments, their sandboxes and an engine.

Ray places the actors, and transfers groups and weights. It does not run the training loop, which uses the fleet as an
engine. Weights are put into the object store once, and each node fetches them from there. From a trainer's GPU to those
of actors they go by NCCL instead, which was not run yet; the store then keeps them for actors that restart.

An actor that dies, alone or with its node, is replaced where there is room; the new one loads the newest weights and
joins. The groups of the dead actor are retried elsewhere with the same seeds, and so get the same tokens unless the
weights change meanwhile. Actors end with the process that made the fleet.
"""

import asyncio
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentrl.config import Config
from agentrl.engines.base import Completion, Sampling
from agentrl.errors import InfrastructureError
from agentrl.rollout.collected import Collected, joined
from agentrl.rollout.collector import Collector, Fleet
from agentrl.rollout.enough import wait_for_enough
from agentrl.rollout.metrics import sandbox_metrics
from agentrl.rollout.plan import EpisodeSpec, PlayRequest
from agentrl.rollout.ray_actor import Actor, broadcast, dist, packed
from agentrl.rollout.ray_cluster import cause, check_room, connect, errors, gist, ray
from agentrl.sandboxes import Counters
from agentrl.types import flatten

_RAISED = (errors.RayTaskError, errors.UnserializableException)
"""Errors that an actor's method raised; Ray's other errors mean that the actor has died or is out of reach."""
_LOST = (errors.RayError, TimeoutError)
"""Errors of a call to an actor that has died or is out of reach."""
_ATTEMPTS = 3
"""How often an actor may die in a row, over the same episodes or while it starts."""
_CLOSING_S = 10.0
"""How long actors may take to close their environments before they are killed."""


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
        collective: send weights to all actors at once, by NCCL or gloo; by default where trainer and actors have GPUs.

    Raises:
        ConfigError: no cluster is reachable, or it has no room for so many actors, or they don't take the options.
        InfrastructureError: an actor did not start.
    """

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
        collective: bool | None = None,
    ) -> None:
        self._concurrency, self._patience, self._dtype = config.rollout.concurrency, patience, model.dtype
        self._collective = model.device.type == "cuda" and gpus >= 1 if collective is None else collective
        self._device = model.device if self._collective else torch.device("cpu")
        self._disconnect, self._slots = connect(address), list[_Slot]()
        need = {"CPU": cpus, "GPU": gpus, **(resources or {})}
        try:
            check_room(actors, {name: count for name, count in need.items() if count}, address)
            # Without retries of Ray's own: an actor that comes back has no weights, and must take them first.
            self._actor = ray.remote(Actor).options(
                num_cpus=cpus, num_gpus=gpus, resources=resources, max_restarts=0, scheduling_strategy="SPREAD"
            )
            # From its own GPU, which the broadcast has filled, an actor's vLLM takes the weights by CUDA IPC.
            arrive = {"weights_on": "cuda:0"} if self._device.type == "cuda" and config.engine.name == "vllm" else {}
            self._recipe = config, ray.put(model.cpu()), {**engine_options, **arrive}
            self._slots += (_Slot(self._actor.remote()) for _ in range(actors))
            self.exact, self.rounding = self._started()
        except BaseException:
            self.close()
            raise
        self._weights: Any = None
        """Puts the newest weights into the object store, and returns their reference."""
        self._version: int | None = None
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
        # A copy: the trainer may change its weights while they are put into the store.
        tensors = {
            name: tensor.detach().to(self._device, self._dtype, copy=self._collective).contiguous()
            for name, tensor in named_tensors
        }
        putting = asyncio.create_task(asyncio.to_thread(lambda: ray.put(packed(tensors))))
        self._weights, self._version, self._probe = putting, version, None
        ready = [slot for slot in self._slots if slot.ready]
        if not (self._collective and ready and await self._broadcast(ready, tensors)):
            await putting
            await asyncio.gather(*(self._send_weights(slot, slot.handle) for slot in self._slots if slot.ready))

    async def _broadcast(self, slots: Sequence[_Slot], tensors: Mapping[str, Tensor]) -> bool:
        """Send weights to all actors at once; return False if one of them, or the network between them, has failed."""
        host, world, version = ray.util.get_node_ip_address(), 1 + len(slots), self._version
        store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        sending = asyncio.to_thread(broadcast, store, 0, world, tensors.values())
        empty = {name: tensor.to("meta") for name, tensor in tensors.items()}
        group = world, host, store.port
        answers = (
            self._answered(actor, actor.receive.remote(empty, version, self._device.type, rank, *group))
            for rank, actor in enumerate((slot.handle for slot in slots), 1)
        )
        work = [asyncio.ensure_future(part) for part in (sending, *answers)]
        # Where one fails the others would wait for it.
        done, waiting = await asyncio.wait(work, return_when=asyncio.FIRST_EXCEPTION)
        for part in waiting:
            part.cancel()
        failures = [error for part in done if (error := part.exception())]
        if failures:
            why = gist(failures[0])
            warnings.warn(f"new weights go through Ray's object store: a broadcast failed ({why})", stacklevel=2)
        return not failures

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
        weights = await self._weights
        try:
            await self._answered(actor, actor.load.remote(weights, self._version))
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
                        await slot.handle.load.remote(await sent, self._version)
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
