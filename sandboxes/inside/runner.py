"""Pid 1 of a container: imports everything, runs no program itself, and serves one session after the other.

Each session gets the same supervisor and the same program as in the ``local`` back end, without namespaces of its own:
the container is its namespace. Between sessions every process but this one is killed and every file is removed.
"""

import os
import resource
import select
import signal
import stat
from collections.abc import Iterator
from typing import Final

from agentrl.sandboxes.inside import kernel, processes, program, seccomp, wire, zygote
from agentrl.sandboxes.inside.interfaces import SessionManager, SessionSetup
from agentrl.sandboxes.inside.limits import Limits
from agentrl.sandboxes.inside.mux import Mux, SessionEnded
from agentrl.sandboxes.inside.supervisor import POLL_MS, Supervisor

WRITABLE: Final = ("/tmp", "/dev/shm")
"""Folders that a program can write into."""
# Ends that endanger nobody else; a container whose filter or protocol was tried is not used again.
_ORDINARY: Final = {"ok", "error", "exit", "timeout", "memory", "output_limit", "killed"}
_ROUNDS: Final = 100_000


def main() -> None:
    """Import, report to the host, then serve one session for every ``open`` until the host is gone; never returns."""
    mux = Mux()
    try:
        limits, preload = _receive_settings(mux)
        # Pid 1 gets only the signals that it handles, so it handles none.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_IGN)
        zygote.become_template(preload)
        before = inheritable()
        mux.send_control({"t": "ready"})
        while True:
            messages = mux.receive_control()
            violations = set[object]()
            # Closed as soon as it was opened: there is no session to serve.
            if not any(message["t"] == "close" for message in messages):
                violations = _serve(mux, limits)
            mux.send_control({"t": "clean", "usable": wipe() and not violations and inheritable() == before})
    except Exception as error:  # whatever it is, the container ends here, and the host must hear of it
        mux.send_control({"t": "fault", "why": f"{type(error).__name__}: {error}"})
    finally:
        os._exit(1)


def _receive_settings(mux: Mux) -> tuple[Limits, list[str]]:
    """Take the first control message: the stream's key, which the mux gets, the limits, and the modules to import."""
    (message,) = mux.receive_control()
    limits, preload = message["limits"], message["preload"]
    if not isinstance(limits, dict) or not isinstance(preload, list):
        raise wire.WireError("the first message is not the settings")
    mux.key = wire.text(message, "key", 100) or ""
    return Limits(**limits), [str(name) for name in preload]


def _serve(mux: Mux, limits: Limits) -> set[object]:
    """Serve one session to its end, and return the violations that forbid to use this container again."""
    out, err = mux.open_pipes()
    proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY)
    instructions = seccomp.assemble(kernel.MACHINE, program.own_descriptors(limits)[0], shared_files=False)
    # The program has a copy of this process's memory, and the old key in it.
    setup = SessionSetup(
        **{"channel": -1, "out": out, "err": err, "proc": proc},
        limits=limits,
        seccomp=instructions,
        inside=None,
        spawned=mux.rotate_key,
    )
    supervisor = Supervisor(mux, setup, SessionManager())
    try:
        supervisor.spawn()
        while True:
            poll = select.poll()
            supervisor.register(poll)
            mux.register(poll)
            ready = dict(poll.poll(None if supervisor.idle else POLL_MS))
            mux.handle(ready)
            supervisor.handle(ready)
    except SessionEnded:
        return supervisor.statuses - _ORDINARY
    except OSError as error:
        # The session can't go on; the host ends it and takes another container.
        mux.sendall(wire.pack({"t": "fault", "why": f"{type(error).__name__}: {error}", "errno": error.errno}))
        mux.flush()
        while not any(message["t"] == "close" for message in mux.receive_control()):
            continue
        return {"fault"}
    finally:
        processes.end_all()
        supervisor.close()
        mux.close_pipes()
        for descriptor in (out, err, proc):
            os.close(descriptor)


def inheritable() -> tuple[object, ...]:
    """Return what the programs of later sessions inherit from this process: limits, priority, scheduling, cores.

    A program with the same user id, as on gVisor, may have changed them.
    """
    kinds = [kind for name, kind in sorted(vars(resource).items()) if name.startswith("RLIMIT_")]
    with open("/proc/self/oom_score_adj") as file:
        killed_at = file.read()
    scheduled = os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0), frozenset(os.sched_getaffinity(0))
    return (*map(resource.getrlimit, kinds), *scheduled, killed_at, signal.pthread_sigmask(signal.SIG_BLOCK, ()))


def wipe() -> bool:
    """Kill what is left, remove all files, and return whether nothing is left."""
    processes.signal_every(signal.SIGKILL)
    return processes.end_all() and all(_empty(folder) for folder in WRITABLE)


def _empty(folder: str) -> bool:
    """Empty a folder that a program filled, however deep: move folders to the top before looking into them."""
    top = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for number in range(_ROUNDS):
            name = next(_entries(top), None)
            if name is None:
                return True
            _remove(top, name, number)
        return False
    except OSError:
        return False
    finally:
        os.close(top)


def _entries(descriptor: int) -> Iterator[str]:
    with os.scandir(descriptor) as entries:
        for entry in entries:
            yield entry.name


def _remove(top: int, name: str, number: int) -> None:
    if not stat.S_ISDIR(os.stat(name, dir_fd=top, follow_symlinks=False).st_mode):
        os.unlink(name, dir_fd=top)
        return
    # Its mode may forbid its owner to look into it.
    os.chmod(name, 0o700, dir_fd=top)
    inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=top)
    try:
        for index, below in enumerate(list(_entries(inner))):
            if stat.S_ISDIR(os.stat(below, dir_fd=inner, follow_symlinks=False).st_mode):
                # A folder that forbids writing can't be moved: its entry for its parent changes.
                os.chmod(below, 0o700, dir_fd=inner)
                os.rename(below, f".wipe-{number}-{index}", src_dir_fd=inner, dst_dir_fd=top)
            else:
                os.unlink(below, dir_fd=inner)
    finally:
        os.close(inner)
    os.rmdir(name, dir_fd=top)
