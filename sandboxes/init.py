"""Pid 1 of a session: trusted, outside the program's user namespace. Makes the file systems, then oversees."""

import os
import signal
import socket
from typing import NoReturn

from agentrl.sandboxes import kernel, rootfs, scratch
from agentrl.sandboxes.family import Family
from agentrl.sandboxes.inheritance import Inheritance
from agentrl.sandboxes.launcher import INSIDE


def main(start: Inheritance) -> NoReturn:
    """Make the session's file systems, start the program and serve the host until it lets go; never returns."""
    Family(start, lambda: _prepare(start)).serve()


def _prepare(start: Inheritance) -> int:
    kernel.set_dumpable(True)
    kernel.write_maps(INSIDE, INSIDE, INSIDE)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    socket.sethostname("sandbox")  # a fresh namespace begins with the host's name
    safe = kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("proc", "/proc", "proc", safe | kernel.MS_NOEXEC, "subset=pid")
    writable = os.open("/proc", os.O_PATH | os.O_DIRECTORY)
    kernel.mount("/proc", "/proc", None, kernel.MS_BIND)
    kernel.set_mount_attributes("/proc", kernel.ATTR_RDONLY, recursive=False)
    scratch.mount(start.limits)
    # Everything of ours is loaded: programs need not see our source, nor the paths that its bytecode names.
    kernel.mount("none", rootfs.RUNNER, "tmpfs", kernel.MS_RDONLY | safe, "size=4k,mode=755")
    kernel.set_dumpable(False)
    return writable
