"""vLLM's worker processes end with the process that made the engine; vLLM itself is not needed here."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("torch")
WORKER = """
import sys, time, types
platforms = types.ModuleType("vllm.platforms")
platforms.current_platform = types.SimpleNamespace(is_cpu=lambda: False)
factory = types.ModuleType("vllm.distributed.weight_transfer.factory")
factory.WeightTransferEngineFactory = types.SimpleNamespace(register_engine=lambda *_: None)
sys.modules |= {"vllm": types.ModuleType("vllm"), platforms.__name__: platforms, factory.__name__: factory}
import agentrl.engines.vllm_worker
print("ready", flush=True)
time.sleep(5)
"""


@pytest.mark.slow
@pytest.mark.parametrize("early", [True, False])
def test_a_worker_ends_with_its_owner_even_where_that_is_gone_before_it_begins(early: bool) -> None:
    owner = subprocess.Popen(["true" if early else "cat"], stdin=subprocess.PIPE)
    if early:
        owner.wait()
    environment = {**os.environ, "AGENTRL_VLLM_OWNER": str(owner.pid)}
    command = [sys.executable, "-c", WORKER]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as worker:
        if not early:
            assert worker.stdout and worker.stdout.readline() == "ready\n" and worker.poll() is None
        owner.communicate()
        assert worker.wait() == 1
