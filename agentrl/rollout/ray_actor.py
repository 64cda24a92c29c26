"""An actor of a fleet on Ray: environments, their sandboxes and an engine in a process of its own.

Where trainer and actors have GPUs, weights reach all actors at once by a process group of PyTorch's. Ray's own
collective functions refuse the process that trains, since it is no actor. Nor can their groups be made again once
another actor has taken the place of a dead one. So each publication has a group of its own, of the actors alive then.
"""

import asyncio
import socket
import warnings
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from transformers import PreTrainedModel

from agentrl.config import Config
from agentrl.engines import make_engine
from agentrl.engines.base import Completion, Sampling
from agentrl.errors import UsageError
from agentrl.models.load import make_repeatable
from agentrl.rollout.collected import Collected
from agentrl.rollout.collector import Collector
from agentrl.rollout.plan import EpisodeSpec, PlayRequest
from agentrl.sandboxes import Counters
from agentrl.toolenv.tools.python import close_shared_sandbox, sandbox_counters, use_backend
from agentrl.types import Trajectory

dist: Any = torch.distributed
MEETING = timedelta(seconds=60)
"""Time that a process of a broadcast waits for the others."""
Packed = Mapping[str, tuple[Any, torch.dtype, torch.Size]]
"""Bytes, type and shape of tensors by name: Ray's object store holds NumPy arrays as they are, and tensors pickled."""


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

    async def load(self, weights: Packed, version: int) -> None:
        """Load new weights into the engine."""
        tensors = (
            (name, torch.from_numpy(data).view(dtype).view(shape)) for name, (data, dtype, shape) in weights.items()
        )
        with warnings.catch_warnings(action="ignore"):  # of read-only shared memory, which engines only read
            await self._engine.load_weights(tensors, version)

    async def receive(self, weights: Mapping[str, Tensor], version: int, device: str, rank: int, *group: Any) -> None:
        """Take part in a broadcast, and load its weights into the engine.

        Args:
            weights: without numbers, on the device "meta".
            version: of the weights.
            device: kind of device that they go to: "cuda" or "cpu".
            rank: of this process.
            group: number of processes, and host and port of the store where they find each other.
        """
        tensors = {name: torch.empty_like(tensor, device=device) for name, tensor in weights.items()}
        world, host, port = group

        def take_part() -> None:
            broadcast(dist.TCPStore(host, port, timeout=MEETING), rank, world, tensors.values())

        await asyncio.to_thread(take_part)
        await self._engine.load_weights(tensors.items(), version)

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


def broadcast(store: Any, rank: int, world: int, tensors: Iterable[Tensor]) -> None:
    """Send tensors from rank 0 to the same ones of all other processes.

    Args:
        store: where the processes find each other.
        rank: of this process.
        world: number of processes.
        tensors: on GPUs, by NCCL, or on CPUs, by gloo.

    Raises:
        RuntimeError: a process has died, or has not come.
    """
    (device,) = {tensor.device.type for tensor in tensors}
    # Made directly, beside PyTorch's default group, which may be that of the trainer's ranks.
    kind = dist.ProcessGroupNCCL if device == "cuda" else dist.ProcessGroupGloo
    group = kind(store, rank, world, MEETING)
    for tensor in tensors:
        group.broadcast(tensor, 0).wait()
    if device == "cuda":  # where the stream has waited, and not this thread
        torch.cuda.synchronize()
    group.shutdown()


def packed(tensors: Mapping[str, Tensor]) -> Packed:
    """Pack tensors for Ray's object store."""
    return {
        name: (tensor.cpu().view(-1).view(torch.uint8).numpy(), tensor.dtype, tensor.shape)
        for name, tensor in tensors.items()
    }
