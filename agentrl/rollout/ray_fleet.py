"""A fleet of actors on a Ray cluster: each is a process with environments, their sandboxes and an engine.

Ray places the actors, and carries groups and weights; the training loop, which it never runs, takes the fleet for an
engine. Weights go by way of the host: the object store is given them once, and each node takes them from there. From
GPU to GPU, by NCCL, is not built.

An actor that dies, alone or with its node, is made anew where there is room, takes the newest weights and joins again.
Its groups are played again elsewhere, from the same seeds, and so with the same tokens where weights do not change
meanwhile. Actors end with the process that made the fleet.
"""

import asyncio
import os
import socket
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentrl.config import Config
from agentrl.engines import make_engine
from agentrl.engines.base import Completion, Sampling
from agentrl.errors import ConfigError, InfrastructureError, UsageError
from agentrl.models.load import make_repeatable
from agentrl.rollout.collected import Collected, joined
from agentrl.rollout.collector import Collector, Fleet, always
from agentrl.rollout.gate import first
from agentrl.rollout.metrics import sandbox_metrics
from agentrl.rollout.plan import EpisodeSpec
from agentrl.sandboxes import Counters
from agentrl.toolenv.tools.python import close_shared_sandbox, sandbox_counters
from agentrl.types import Trajectory, flatten

# Where no cluster answers, Ray would go on asking for a quarter of an hour; it reads this when it is imported.
os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "2")
_ray: Any = import_module("ray")
_errors: Any = import_module("ray.exceptions")

_RAISED = (_errors.RayTaskError, _errors.UnserializableException)
"""What an actor's method raised; other errors of Ray's are of an actor that has died or is out of reach."""
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
                [group], always(self._engine), sampling, on_episode=lambda _: None, known=known
            )
        except UsageError as error:  # where the run was begun all was there
            raise UsageError(f"on {socket.gethostname()}, where an actor of the fleet plays: {error}") from error
        return played, sandbox_counters()

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
        self._ours, self._places = _connect(address), list[_Place]()
        need = {"CPU": cpus, "GPU": gpus, **(resources or {})}
        try:
            _check_room(actors, {name: count for name, count in need.items() if count}, address)
            # Without retries of Ray's own: an actor that comes back has no weights, and must take them first.
            self._actor = _ray.remote(Actor).options(
                num_cpus=cpus, num_gpus=gpus, resources=resources, max_restarts=0, scheduling_strategy="SPREAD"
            )
            self._recipe = config, _ray.put(model.cpu()), engine_options
            self._places += (_Place(self._actor.remote()) for _ in range(actors))
            self.exact, self.rounding = self._started()
        except BaseException:
            self.close()
            raise
        self._weights, self._version = None, None
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
        self._weights, self._version = await asyncio.to_thread(_ray.put, weights), version
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
            self._sent[collector] = _ray.put(collector)
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
        parts, cancelled = await first(enough, playing, self._leaving, lambda part: bool(part.groups))
        collected = replace(joined(parts), cancelled=cancelled)
        sandbox = sandbox_metrics(before, self._counted())
        return replace(collected, seconds=time.perf_counter() - began, sandbox=sandbox)

    def close(self) -> None:
        """End all actors, and with them their sandboxes."""
        if not _ray.is_initialized():
            return
        closing = [place.handle.close.remote() for place in self._places if place.ready]
        if closing:
            _ray.wait(closing, num_returns=len(closing), timeout=_CLOSING_S)
        for place in self._places:
            _ray.kill(place.handle)
        self._places.clear()
        if self._ours:
            _ray.shutdown()

    def _counted(self) -> Counters | None:
        counters = list(self._counters.values())
        return sum(counters[1:], counters[0]) if counters else None

    def _started(self) -> tuple[bool, float]:
        """Start the first actors; give what they say of their engines."""
        try:
            said = _ray.get(
                [place.handle.start.remote(*self._recipe) for place in self._places], timeout=self._patience
            )
        except _RAISED as error:
            raise _cause(error) from error
        except _errors.GetTimeoutError:
            raise InfrastructureError(
                f"not all of the fleet's {len(self._places)} actors have started within fleet.options.patience="
                f"{self._patience:g} seconds: `ray status` tells who holds the cluster's resources"
            ) from None
        except _errors.RayError as error:
            raise InfrastructureError(f"an actor of the fleet died when it was started: {_gist(error)}") from error
        for place in self._places:
            place.ready = True
        return said[0]

    async def _call(self, episodes: int, method: str, *args: Any) -> tuple[Any, Any, int]:
        """Call a method of an actor, or of another where that dies; give who answered, the answer and the deaths."""
        deaths, died = 0, None
        while deaths < _ATTEMPTS:
            place = await self._take(episodes)
            actor = place.handle
            answer = getattr(actor, method).remote(*args)
            try:
                return actor, await answer, deaths
            except asyncio.CancelledError:
                _ray.cancel(answer)  # else it would play on
                raise
            except _RAISED as error:
                raise _cause(error) from error
            except _errors.RayError as error:
                deaths, died = deaths + 1, error
                self._lose(place, actor)
            finally:
                place.load -= episodes
                async with self._changed:
                    self._changed.notify(episodes)
        raise InfrastructureError(
            f"{deaths} actors of the fleet died one after the other over the same episodes, perhaps for want of "
            f"memory: {_gist(died)}"
        ) from died

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
            await actor.load.remote(self._weights, self._version)
        except _RAISED as error:
            raise _cause(error) from error
        except _errors.RayError:
            self._lose(place, actor)

    def _lose(self, place: _Place, actor: Any) -> None:
        """Have an actor replaced, unless another call has noticed its death before."""
        if place.ready and place.handle is actor:
            place.ready = False
            task = asyncio.create_task(self._revive(place))
            self._revivals.add(task)
            task.add_done_callback(self._revivals.discard)

    async def _revive(self, place: _Place) -> None:
        """Put a new actor in the place of one that has died, and let it play once it has the newest weights."""
        deaths = 0
        while not place.ready and self._fault is None:
            try:
                _ray.kill(place.handle)  # it may only be out of reach
                place.handle, given = self._actor.remote(), None
                async with asyncio.timeout(self._patience):
                    await place.handle.start.remote(*self._recipe)
                    while given is not self._weights:  # others may come meanwhile, and of the same version
                        given = self._weights
                        await place.handle.load.remote(given, self._version)
                place.ready = True
            except Exception as error:  # whatever it is: else those who wait for an actor would wait for ever
                # There may be no room for it until its node comes back; the others play on meanwhile.
                late, cause = isinstance(error, TimeoutError), _cause(error) if isinstance(error, _RAISED) else error
                deaths += not late or not any(one.ready for one in self._places)
                if deaths == _ATTEMPTS:
                    why = f"it took longer than {self._patience:g} seconds" if late else _gist(cause)
                    self._fault = InfrastructureError(
                        f"an actor of the fleet could not be started again in {deaths} attempts: {why}"
                    )
        async with self._changed:
            self._changed.notify_all()


def _connect(address: str) -> bool:
    """Connect to a cluster; give True if this process was connected to none before."""
    if _ray.is_initialized():
        return False
    host, _, port = (os.environ.get("RAY_ADDRESS", address) if address == "auto" else address).rpartition(":")
    try:
        if port.isdigit():  # asked here first: Ray takes minutes to give up
            socket.create_connection((host.rpartition("/")[2], int(port)), timeout=10).close()
        _ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"no Ray cluster can be reached at fleet.options.address={address!r}: start one with `ray start --head`, "
            f"or set fleet.name='local' ({_gist(error)})"
        ) from error
    return True


def _check_room(actors: int, need: Mapping[str, float], address: str) -> None:
    """Refuse more actors than the nodes have room for when nothing else runs there."""
    nodes = [node["Resources"] for node in _ray.nodes() if node["Alive"]]
    room = sum(int(min((node.get(name, 0) / count for name, count in need.items()), default=actors)) for node in nodes)
    if not 1 <= actors <= room:
        asked = ", ".join(f"{name}: {count:g}" for name, count in need.items())
        raise ConfigError(
            f"fleet.options.actors={actors} of {{{asked}}} each do not fit the {len(nodes)} nodes of the Ray cluster "
            f"at {address!r}, which have room for {room}: set it from 1 to that, or start more nodes"
        )


def _cause(error: Any) -> Exception:
    """Give what an actor has raised, or what is known of it where it can't be sent here."""
    if isinstance(error, _errors.RayTaskError) and not isinstance(error.cause, _errors.RayError):
        return error.cause
    last = str(error).strip().splitlines()[-1]
    return InfrastructureError(f"an actor of the fleet raised what can't be sent here: {last}")


def _gist(error: BaseException | None) -> str:
    """Say an error in a line: what could not be imported on a node stands at the end of many."""
    lines = (str(error).strip() or type(error).__name__).splitlines()
    return lines[-1 if "in its creation task" in lines[0] else 0]
