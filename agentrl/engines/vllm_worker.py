"""What agentrl adds to vLLM's worker processes: new weights, read from a file into the model that runs.

vLLM imports this module in each worker, before it makes the model.
"""

import os
import select
import threading
from collections.abc import Iterable
from contextlib import suppress
from importlib import import_module
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

# oneDNN would pack the weights of a CPU's model and leave the originals empty: nothing could be loaded into them.
_platforms: Any = import_module("vllm.platforms")
if _platforms.current_platform.is_cpu():
    _operations: Any = import_module("vllm._custom_ops")
    _operations._supports_onednn = False


def end_with(owner: int) -> None:
    """End this process, and so vLLM's others, when the one that made the engine has ended: if killed, it could not."""
    with suppress(ProcessLookupError):  # it was killed before this one had begun
        select.select([os.pidfd_open(owner)], [], [])
    os._exit(1)


if owner := os.environ.get("AGENTRL_VLLM_OWNER"):
    threading.Thread(target=end_with, args=(int(owner),), daemon=True).start()


class Extension:
    """Methods that ``collective_rpc`` calls on a worker."""

    model_runner: Any
    """The worker's own."""

    def agentrl_load(self, path: str) -> None:
        """Copy the weights of a safetensors file into the model, in place."""
        weights: Iterable[tuple[str, Tensor]] = load_file(path).items()
        # vLLM's reload_weights() would make the layers anew, with the old head where embeddings are tied.
        self.model_runner.model.load_weights(weights)
