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
sys.modules |= {"vllm": types.ModuleType("vllm"), "vllm.platforms": platforms}
import agentrl.engines.vllm_worker
time.sleep(5)
print("it lives")
"""


@pytest.mark.slow
def test_a_worker_whose_owner_is_gone_before_it_begins_ends() -> None:
    (owner := subprocess.Popen(["true"])).wait()
    environment = {**os.environ, "AGENTRL_VLLM_OWNER": str(owner.pid)}
    done = subprocess.run([sys.executable, "-c", WORKER], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
