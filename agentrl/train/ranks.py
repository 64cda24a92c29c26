"""The processes of a run with several ranks: rank 0 is the run's own process, starts the others and ends them.

Where torchrun has started all processes, they only join. Not covered: calls and their arguments are pickled, so a
process that can connect to a rank can run code in it. Ranks that a run starts itself find each other through a folder
that only its user can read, and talk over the loopback device. Whoever uses torchrun must protect its network.
"""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from agentrl.config import Config
from agentrl.errors import ConfigError, InfrastructureError
from agentrl.processes.parent import start_python
from agentrl.train.sharded import dismiss, serve

_STORE = "AGENTRL_RANKS"
"""Environment variable with the address under which ranks that a run has started find each other."""
_PATIENCE = timedelta(days=30)
"""Longest wait of a rank for its next call, such as while rank 0 plays; a lost process ends the wait at once."""
_POLL_S = 0.1
_DYING_S = 10.0
"""Longest time that a process with a closed connection may take to end."""


def check_ranks(config: Config) -> None:
    """Refuse invalid settings of several ranks.

    Raises:
        ConfigError: a setting is invalid.
    """
    ranks, started = config.run.ranks, _world()
    if started > 1 and started != ranks:
        raise ConfigError(f"{started} processes were started together, as torchrun does: set run.ranks={started}")
    if ranks > 1 and ":" in config.model.device:
        raise ConfigError(f"each rank has a GPU of its own: set model.device='cuda', not {config.model.device!r}")


def is_follower() -> bool:
    """Return True if torchrun has started this process to follow another one."""
    return _world() > 1 and os.environ["RANK"] != "0"


@contextmanager
def ranks(config: Config) -> Generator[None]:
    """Run ``run.ranks`` processes within the block; this process is rank 0.

    Raises:
        ConfigError: there are fewer GPUs than ranks.
        InfrastructureError: another rank has ended.
    """
    if config.run.ranks == 1:
        yield
        return
    if config.model.device == "cuda" and _world() == 1 and torch.cuda.device_count() < config.run.ranks:
        raise ConfigError(f"run.ranks={config.run.ranks} needs a GPU each, and {torch.cuda.device_count()} are here")
    # A join that was abandoned may still write there, and its file must not hide why a rank has ended.
    with tempfile.TemporaryDirectory(prefix="agentrl-ranks-", ignore_cleanup_errors=True) as folder:
        followers: list[subprocess.Popen[bytes]] = []
        try:
            if _world() == 1:
                followers += (_start(config, Path(folder), rank) for rank in range(1, config.run.ranks))
            _join_with(followers, _address(Path(folder)), config.run.ranks)
            yield
            dismiss()
        except RuntimeError as error:
            if lost := _lost(followers, Path(folder)):
                raise InfrastructureError(
                    f"{lost}; the run goes on from its last checkpoint with agentrl train --resume"
                ) from error
            raise
        finally:
            for follower in followers:
                follower.kill()
                follower.wait()
            if dist.is_initialized():
                dist.destroy_process_group()


def follow() -> None:
    """Serve as the rank that the environment variables name, until rank 0 dismisses it."""
    rank = int(os.environ["RANK"])
    try:
        _join(os.environ.get(_STORE, "env://"), rank, _world())
        # Ctrl-C and SIGTERM are for rank 0, which needs all ranks to save the run.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        serve()
    except RuntimeError as error:
        sys.exit(f"agentrl: rank {rank} has ended: {str(error).splitlines()[0]}")
    dist.destroy_process_group()


def _world() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def _address(folder: Path) -> str:
    return "env://" if _world() > 1 else f"file://{folder}/store"


def _join(address: str, rank: int, world: int) -> None:
    if address != "env://":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world, timeout=_PATIENCE)


def _join_with(followers: Sequence[subprocess.Popen[bytes]], address: str, world: int) -> None:
    """Join as rank 0, unless a follower ends before it has joined too.

    Raises:
        RuntimeError: one has ended.
    """
    failed: list[Exception] = []

    def join() -> None:
        try:
            _join(address, 0, world)
        except Exception as error:
            failed.append(error)

    # Nothing interrupts a wait for others to join: it happens in a thread, which is abandoned if a follower ends.
    joining = threading.Thread(target=join, daemon=True)
    joining.start()
    while joining.is_alive():
        if any(follower.poll() is not None for follower in followers):
            raise RuntimeError("a rank ended before it had joined")
        joining.join(_POLL_S)
    for error in failed:
        raise error


def _start(config: Config, folder: Path, rank: int) -> subprocess.Popen[bytes]:
    """Start a rank, which logs to a file in ``folder``."""
    world = config.run.ranks
    threads = config.run.threads or max(1, len(os.sched_getaffinity(0)) // world)
    variables = {"RANK": rank, "WORLD_SIZE": world, "OMP_NUM_THREADS": threads, _STORE: _address(folder)}
    env = {**os.environ, **{name: str(value) for name, value in variables.items()}}
    words = ("-c", "from agentrl.train.ranks import follow; follow()")
    with (folder / f"{rank}.log").open("wb") as log:
        return start_python(words, log, env, signal.SIGKILL)


def _lost(followers: Sequence[subprocess.Popen[bytes]], folder: Path) -> str:
    """Return which rank has ended first, and why; empty where all ranks run."""
    deadline = time.monotonic() + _DYING_S
    while all(follower.poll() is None for follower in followers):
        if time.monotonic() > deadline or not followers:
            return ""
        time.sleep(_POLL_S)
    # A killed rank ends the others: its negative code is the cause.
    codes = {rank: follower.poll() or 0 for rank, follower in enumerate(followers, 1)}
    rank, code = min(codes.items(), key=lambda entry: entry[1])
    if code < 0:
        return f"rank {rank} was killed by {signal.Signals(-code).name}"
    lines = (folder / f"{rank}.log").read_text(errors="replace").split("\n")
    return f"rank {rank} has ended: {next((line for line in reversed(lines) if line), 'it said nothing')}"
