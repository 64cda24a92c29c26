"""The Ray cluster of a fleet: join it, check its room, and explain its errors."""

import os
import socket
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from agentrl.errors import ConfigError, InfrastructureError

# If no cluster answers, Ray would retry for a quarter of an hour; it reads this variable when it is imported.
os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "2")
ray: Any = import_module("ray")
errors: Any = import_module("ray.exceptions")


def connect(address: str) -> Callable[[], object]:
    """Connect to a cluster.

    Returns:
        A function that ends the connection; it does nothing if this process was connected before.

    Raises:
        ConfigError: no cluster is reachable.
    """
    if ray.is_initialized():
        return lambda: None
    host, _, port = (os.environ.get("RAY_ADDRESS", address) if address == "auto" else address).rpartition(":")
    try:
        if port.isdigit():  # tried first, since Ray takes minutes to give up
            socket.create_connection((host.rpartition("/")[2], int(port)), timeout=10).close()
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"no Ray cluster can be reached at fleet.options.address={address!r}: start one with `ray start --head`, "
            f"or set fleet.name='local' ({gist(error)})"
        ) from error
    return ray.shutdown


def check_room(actors: int, need: Mapping[str, float], address: str) -> None:
    """Check that the nodes have room for so many actors when nothing else runs there.

    Raises:
        ConfigError: they don't.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    room = sum(int(min((node.get(name, 0) / count for name, count in need.items()), default=actors)) for node in nodes)
    if not 1 <= actors <= room:
        asked = ", ".join(f"{name}: {count:g}" for name, count in need.items())
        raise ConfigError(
            f"fleet.options.actors={actors} of {{{asked}}} each do not fit the {len(nodes)} nodes of the Ray cluster "
            f"at {address!r}, which have room for {room}: set it from 1 to that, or start more nodes"
        )


def cause(error: Any) -> Exception:
    """Return the exception that an actor has raised, or its description where it can't be sent here."""
    if isinstance(error, errors.RayTaskError) and not isinstance(error.cause, errors.RayError):
        return error.cause
    last = str(error).strip().splitlines()[-1]
    return InfrastructureError(f"an actor of the fleet raised what can't be sent here: {last}")


def gist(error: BaseException | None) -> str:
    """Return an error in one line: the last one where an import failed on a node, the first one otherwise."""
    lines = (str(error).strip() or type(error).__name__).splitlines()
    return lines[-1 if "in its creation task" in lines[0] else 0]
