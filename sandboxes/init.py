"""Pid 1 of a session: trusted, outside the program's user namespace. Makes the file systems, then oversees."""

import os
import signal
import socket
from typing import NoReturn

from agentrl.sandboxes import kernel, rootfs, wire
from agentrl.sandboxes.launcher import INSIDE
from agentrl.sandboxes.overseer import Inheritance, Overseer


def main(start: Inheritance) -> NoReturn:
    """Make the session's file systems, start the program and serve the host until it lets go; never returns."""
    channel = socket.socket(fileno=start.channel)
    try:
        Overseer(channel, start, _prepare(start)).serve()
    except Exception as error:  # whatever it is, the session ends here, and the host must hear of it
        _tell_fault(channel, error)
    finally:
        os._exit(1)


def _tell_fault(channel: socket.socket, error: Exception) -> None:
    """Tell the host why the session can't go on, if it still listens."""
    try:
        channel.sendall(wire.pack({"t": "fault", "why": f"{type(error).__name__}: {error}", "errno": None}))
    except OSError:
        os._exit(1)


def _prepare(start: Inheritance) -> int:
    kernel.set_dumpable(True)
    kernel.write_maps(INSIDE, INSIDE, INSIDE)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    limits = start.limits
    safe = kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("proc", "/proc", "proc", safe | kernel.MS_NOEXEC, "subset=pid")
    writable = os.open("/proc", os.O_PATH | os.O_DIRECTORY)
    kernel.mount("/proc", "/proc", None, kernel.MS_BIND)
    kernel.set_mount_attributes("/proc", kernel.ATTR_RDONLY, recursive=False)
    kernel.mount("tmpfs", "/tmp", "tmpfs", safe, f"size={limits.tmp_bytes},nr_inodes={limits.tmp_inodes},mode=1777")
    kernel.mount("tmpfs", "/dev/shm", "tmpfs", safe, f"size={limits.shm_bytes},nr_inodes=256,mode=1777")
    # Everything of ours is loaded: programs need not see our source, nor the paths that its bytecode names.
    kernel.mount("none", rootfs.RUNNER, "tmpfs", kernel.MS_RDONLY | safe, "size=4k,mode=755")
    kernel.set_dumpable(False)
    return writable
