"""A Ray cluster of three nodes on this machine, which starts however busy that is."""

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from ray._private import services
from ray.cluster_utils import Cluster

PATIENT = {
    # On a busy machine Ray's agents take longer than it waits for them.
    "RAY_agent_register_timeout_ms": "300000",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Its workers' priority would be so low that beside other tests they hardly start.
    "RAY_worker_niceness": "0",
    # It would kill actors where others fill the memory.
    "RAY_memory_monitor_refresh_ms": "0",
    # So that the death of a node is noticed soon.
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "30000",
}
NODE: dict[str, Any] = {"object_store_memory": 100 << 20, "include_dashboard": False}
PLAYER = {**NODE, "num_cpus": 1, "resources": {"player": 1}}


@contextmanager
def three_nodes() -> Generator[Cluster]:
    """One for Ray itself, and two with room for an actor each."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in PATIENT.items():
            patch.setenv(name, value)
        patch.setattr(services, "get_node", patiently(services.get_node))
        cluster = Cluster()
        # Without its head a process is to end sooner than after a minute.
        cluster.add_node(num_cpus=0, _system_config={"gcs_rpc_server_reconnect_timeout_s": 15}, **NODE)
        for _ in range(2):
            cluster.add_node(wait=False, **PLAYER)
        cluster.wait_for_nodes(timeout=300)
        yield cluster
        cluster.shutdown()


def patiently(get_node: Callable[..., Any]) -> Callable[..., Any]:
    """Have Ray wait five minutes for a node, and not half a minute."""

    def wait(*args: Any) -> Any:
        for _ in range(300):
            with suppress(RuntimeError):
                return get_node(*args)
            time.sleep(1)
        return get_node(*args)

    return wait
