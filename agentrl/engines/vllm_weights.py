"""New weights on their way into vLLM's workers, by its own interface for weight transfer.

CUDA IPC and NCCL are vLLM's. Ours is a third backend, a file in memory, for CPUs and where neither fits.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from agentrl.engines.vllm_cards import Backend

_base: Any = import_module("vllm.distributed.weight_transfer.base")
_ipc: Any = import_module("vllm.distributed.weight_transfer.ipc_engine")
_nccl: Any = import_module("vllm.distributed.weight_transfer.nccl_engine")
_network: Any = import_module("vllm.utils.network_utils")
_reload: Any = import_module("vllm.model_executor.model_loader.reload")
Work = Coroutine[Any, Any, Any]


class FileEngine(_ipc.IPCWeightTransferEngine):
    """The workers' side of the backend "file": loads layer by layer as vLLM's own for CUDA IPC does."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load the weights of a file; if it can't be read, the model keeps the old ones."""
        # vLLM's own method synchronizes a GPU afterwards, which a CPU does not have.
        try:
            self.model.load_weights(load_file(update_info["path"]).items())
        except BaseException:
            _reload.finalize_layerwise_reload(self.model, self.model_config)
            raise


class IpcSender(_ipc.IPCTrainerWeightTransferEngine):
    """The trainer's side of "ipc", for a rank that shares a GPU with vLLM while others train with it."""

    def _all_gather_and_merge_handles(self, handles: list[dict[str, Any]]) -> list[dict[str, Any]]:
        # vLLM would gather from all ranks of PyTorch's process group, and they do not take part.
        return handles

    @staticmethod
    def _post_send_sync() -> None:
        torch.cuda.ipc_collect()


class Transfer:
    """Sends weights to a vLLM, from a thread; as vLLM's trainer side wants it, it is their source and calls vLLM.

    Args:
        llm: vLLM's ``AsyncLLM``.
        loop: the event loop that it serves.
        answered: waits there for an answer of vLLM's.
        backend: as ``choose_backend`` returns it.
        cards: the GPUs of vLLM's workers.
        path: where the backend "file" finds the weights.
    """

    def __init__(
        self,
        llm: Any,
        loop: asyncio.AbstractEventLoop,
        answered: Callable[[Any, Work], Work],
        backend: Backend,
        cards: Sequence[int],
        path: Path,
    ) -> None:
        self.path, self._llm, self._loop, self._answered = path, llm, loop, answered
        self._tensors: Mapping[str, Tensor] = {}
        self._version = 0
        if backend == "ipc":
            info = _ipc.IPCTrainerInitInfo(rank=0)
            self._sender = IpcSender.trainer_init(info, client=self, source=self)
        elif backend == "nccl":
            info = _nccl.NCCLTrainerInitInfo("127.0.0.1", _network.get_open_port(), 1 + len(cards), rank=0)
            self._sender = _nccl.NCCLTrainerWeightTransferEngine.trainer_init(info, client=self, source=self)
        else:
            self.init_weight_transfer_engine({})
            self._sender = self

    def send(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Send all weights, and return when vLLM has them."""
        self._tensors, self._version = tensors, version
        try:
            self._sender.send_weights()
        finally:
            self._tensors = {}

    def send_weights(self) -> None:
        """Let the workers read the file."""
        self.start_weight_update()
        self.update_weights({"path": str(self.path)})
        self.finish_weight_update()

    def metadata(self) -> list[Any]:
        """Return name, type and shape of each tensor."""
        return [_base.ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Iterate over names and tensors."""
        return iter(self._tensors.items())

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Let the workers join."""
        self._ask(self._llm.init_weight_transfer_engine(_base.WeightTransferInitRequest(init_info=init_info)))

    def start_weight_update(self) -> None:
        """Begin an update."""
        self._ask(self._llm.start_weight_update())

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Let the workers receive weights."""
        self._ask(self._llm.update_weights(_base.WeightTransferUpdateRequest(update_info=update_info)))

    def finish_weight_update(self) -> None:
        """End an update; tokens that are sampled from now on carry its version."""
        self._ask(self._llm.finish_weight_update(str(self._version)))

    def _ask(self, work: Work) -> None:
        asyncio.run_coroutine_threadsafe(self._answered(self._llm, work), self._loop).result()
