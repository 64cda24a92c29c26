"""Pid 1 of a session: trusted, outside the program's user namespace. Makes the file systems, then supervises."""

import os
import signal
import socket
from typing import NoReturn

from agentrl.sandboxes.inside import kernel, rootfs, scratch
from agentrl.sandboxes.inside.interfaces import SessionSetup
from agentrl.sandboxes.inside.launcher import INSIDE
from agentrl.sandboxes.inside.session_group import SessionGroup


def main(setup: SessionSetup) -> NoReturn:
    """Make the session's file systems, start the program and serve the host until it lets go; never returns."""
    SessionGroup(setup, lambda: _prepare(setup)).serve()


def _prepare(setup: SessionSetup) -> int:
    kernel.set_dumpable(True)
    kernel.write_maps(INSIDE, setup.user, setup.user)
    # The saved ones are the zygote's still.
    os.setresgid(INSIDE, INSIDE, INSIDE)
    os.setresuid(INSIDE, INSIDE, INSIDE)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # A fresh namespace begins with the host's name.
    socket.sethostname("sandbox")
    safe = kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("proc", "/proc", "proc", safe | kernel.MS_NOEXEC, "subset=pid")
    # Opened before it becomes read-only: to start a program means to write its maps and its OOM score.
    writable = os.open("/proc", os.O_PATH | os.O_DIRECTORY)
    kernel.mount("/proc", "/proc", None, kernel.MS_BIND)
    kernel.set_mount_attributes("/proc", kernel.ATTR_RDONLY, recursive=False)
    scratch.mount(setup.limits)
    # Everything of ours is loaded: programs need not see our source, nor the paths that its bytecode names.
    kernel.mount("none", rootfs.RUNNER, "tmpfs", kernel.MS_RDONLY | safe, "size=4k,mode=755")
    kernel.set_dumpable(False)
    return writable
