"""What agentrl adds to vLLM's worker processes: an end with the process that owns them, and weights from a file.

vLLM imports this module in each worker, before it makes the model.
"""

import os
import select
import threading
from contextlib import suppress
from importlib import import_module
from typing import Any

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


_factory: Any = import_module("vllm.distributed.weight_transfer.factory")
_factory.WeightTransferEngineFactory.register_engine("file", "agentrl.engines.vllm_weights", "FileEngine")


class Extension:
    """Adds no method to vLLM's worker: naming it makes vLLM import this module."""
