"""Pid 1 of a container: it has imported everything, never runs a program, and serves one session after the other.

Each session gets the same overseer and the same program as in the ``local`` back end, without namespaces of its own:
the container is its namespace. Between sessions every process but this one is killed and every file is removed.
"""

import gc
import os
import resource
import signal
import stat
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from agentrl.sandboxes import kernel, processes, program, seccomp, wire, zygote
from agentrl.sandboxes.base import Limits
from agentrl.sandboxes.inheritance import Inheritance
from agentrl.sandboxes.link import Link, SessionEnded
from agentrl.sandboxes.overseer import Overseer

WRITABLE: Final = ("/tmp", "/dev/shm")
"""Folders that a program can write into."""
# What a program may do to itself; a container whose filter or protocol was tried is not used again.
_ORDINARY: Final = {"ok", "error", "exit", "timeout", "memory", "output_limit", "killed"}
_ROUNDS: Final = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class _Given:
    """What the host said first."""

    limits: Limits
    preload: list[str]
    key: bytes


def main() -> None:
    """Import, tell the host, then serve one session for every ``open`` until the host is gone; never returns."""
    link = Link()
    try:
        given = _hear_start(link)
        link.key = given.key
        loaded = _become_pid_1(given)
        before = inheritable()
        link.tell({"t": "ready", "modules": loaded})
        while True:
            words = link.hear()
            spoiled = set[object]()
            # Closed as soon as it was opened: there is no session to serve.
            if not any(word["t"] == "close" for word in words):
                spoiled = _serve(link, given.limits)
            link.tell({"t": "clean", "usable": wipe() and not spoiled and inheritable() == before})
    except Exception as error:  # whatever it is, the container ends here, and the host must hear of it
        link.tell({"t": "fault", "why": f"{type(error).__name__}: {error}"})
    finally:
        os._exit(1)


def _hear_start(link: Link) -> _Given:
    (word,) = link.hear()
    limits, preload = word["limits"], word["preload"]
    if not isinstance(limits, dict) or not isinstance(preload, list):
        raise wire.WireError("the first word is not the settings")
    key = bytes.fromhex(wire.text(word, "key", 100) or "")
    return _Given(limits=Limits(**limits), preload=[str(name) for name in preload], key=key)


def _become_pid_1(given: _Given) -> list[str]:
    # Pid 1 gets only the signals that it handles, so it handles none.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    loaded = zygote.preload(given.preload)
    zygote.forget_ourselves()
    sys.argv = [""]
    gc.collect()
    gc.freeze()
    kernel.set_dumpable(False)
    return loaded


def _serve(link: Link, limits: Limits) -> set[object]:
    """Serve one session to its end and give what speaks against using this container again."""
    out, err = link.begin()
    proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY)
    instructions = seccomp.program(kernel.MACHINE, program.ours(limits)[0])
    start = Inheritance(channel=-1, out=out, err=err, limits=limits, seccomp=instructions, inside=None)
    overseer = Overseer(link, start, proc, link)
    try:
        overseer.serve()
        raise RuntimeError("the overseer serves until the host lets go")
    except SessionEnded:
        return overseer.seen - _ORDINARY
    except OSError as error:
        # The session can't go on; the host ends it and takes another container.
        link.sendall(wire.pack({"t": "fault", "why": f"{type(error).__name__}: {error}", "errno": error.errno}))
        link.flush()
        while not any(word["t"] == "close" for word in link.hear()):
            continue
        return {"fault"}
    finally:
        processes.end_all()
        overseer.close()
        link.end()
        for descriptor in (out, err, proc):
            os.close(descriptor)


def inheritable() -> tuple[object, ...]:
    """Give what the programs of later sessions get from this process: limits, priority, scheduling, cores."""
    kinds = [kind for name, kind in sorted(vars(resource).items()) if name.startswith("RLIMIT_")]
    with open("/proc/self/oom_score_adj") as file:
        killed_at = file.read()
    scheduled = os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0), frozenset(os.sched_getaffinity(0))
    return (*map(resource.getrlimit, kinds), *scheduled, killed_at, signal.pthread_sigmask(signal.SIG_BLOCK, ()))


def wipe() -> bool:
    """Kill what is left, and remove all files.

    Returns:
        Whether nothing is left.
    """
    if os.getpid() != 1:
        raise RuntimeError("wipe() kills every process that it can see, so it is for pid 1 of a container")
    with suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    return processes.end_all() and all(_empty(folder) for folder in WRITABLE)


def _empty(folder: str) -> bool:
    """Empty a folder that a program filled, however deep: what is below is moved up before it is looked into."""
    top = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for number in range(_ROUNDS):
            first = next(_entries(top), None)
            if first is None:
                return True
            _remove(top, first, number)
        return False
    except OSError:
        return False
    finally:
        os.close(top)


def _entries(descriptor: int) -> Iterator[str]:
    with os.scandir(descriptor) as found:
        for entry in found:
            yield entry.name


def _remove(top: int, name: str, number: int) -> None:
    if not stat.S_ISDIR(os.stat(name, dir_fd=top, follow_symlinks=False).st_mode):
        os.unlink(name, dir_fd=top)
        return
    os.chmod(name, 0o700, dir_fd=top)
    inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=top)
    try:
        for place, below in enumerate(list(_entries(inner))):
            if stat.S_ISDIR(os.stat(below, dir_fd=inner, follow_symlinks=False).st_mode):
                # A folder that forbids writing can't be moved: its entry for its parent changes.
                os.chmod(below, 0o700, dir_fd=inner)
                os.rename(below, f".wipe-{number}-{place}", src_dir_fd=inner, dst_dir_fd=top)
            else:
                os.unlink(below, dir_fd=inner)
    finally:
        os.close(inner)
    os.rmdir(name, dir_fd=top)
