"""The process that sessions are forked from: imports everything and never runs a program.

It is pid 1 of the sandbox: when it ends, the kernel kills every session with it.
"""

import gc
import importlib
import itertools
import json
import os
import select
import signal
import site
import socket
import sys
from collections.abc import Iterator
from typing import Final

from agentrl.sandboxes.inside import init, kernel, program, seccomp, wire
from agentrl.sandboxes.inside.interfaces import SessionSetup
from agentrl.sandboxes.inside.launcher import FIRST_USER, INSIDE, ZygoteConfig
from agentrl.sandboxes.inside.limits import Limits

STANDARD: Final = """
abc argparse array ast asyncio base64 bisect calendar cmath collections contextlib copy csv ctypes
dataclasses datetime decimal enum fractions functools hashlib heapq importlib.util inspect io itertools json
linecache logging math multiprocessing multiprocessing.pool numbers operator pathlib pickle platform pprint
queue random re secrets shutil signal socket statistics string struct subprocess tempfile textwrap threading
time timeit traceback types typing unicodedata uuid zlib
"""
"""Modules of the standard library that programs are likely to want."""
FOLDED: Final = ("numpy.random", "numpy.linalg", "numpy.fft")
"""Parts of numpy that load late and cost milliseconds in every session."""


def become_template(names: list[str]) -> None:
    """Import the standard library and these modules, then get ready to be copied and not to be looked into."""
    extra = [part for part in FOLDED if "numpy" in names]
    for name in [*STANDARD.split(), *names, *extra]:
        try:
            importlib.import_module(name)
        except ImportError as error:
            # Not installed, or broken: programs that import it will see the same error.
            print(f"not preloaded: {name}: {error}", file=sys.stderr)
    # A plain interpreter has exit(), quit() and help(); -S leaves them out.
    site.setquit()
    site.setcopyright()
    site.sethelper()
    # As in a REPL: modules in the working folder can be imported.
    sys.path.insert(0, "")
    sys.argv = [""]
    # A program that imports our modules must not get these.
    for name in [name for name in sys.modules if name.split(".")[0] == "agentrl"]:
        del sys.modules[name]
    # The collector of a fork would write to every object, and so copy the pages that all forks share.
    gc.collect()
    gc.freeze()
    # Programs run as the same user and must not read this process, which speaks with the host.
    kernel.set_dumpable(False)


def _users(count: int) -> Iterator[int]:
    """Return the sessions' users, one after the other; there is only this process's own where ``count`` is 0."""
    if not count:
        return itertools.repeat(INSIDE)
    # Other zygotes have the same range.
    start = int.from_bytes(os.urandom(4), "big")
    return (FIRST_USER + (start + number) % count for number in itertools.count())


def _clone_as(user: int) -> int:
    """Fork into fresh namespaces as another user, whom the copy may map then.

    Raises:
        OSError: There are too many namespaces or processes.
    """
    os.setresgid(user, user, INSIDE)
    os.setresuid(user, user, INSIDE)
    child = -1
    try:
        child = kernel.clone(kernel.NEW_ALL)
    finally:
        if child != 0:
            os.setresuid(INSIDE, INSIDE, INSIDE)
            os.setresgid(INSIDE, INSIDE, INSIDE)
            # The kernel forgets both where the user changes.
            kernel.set_dumpable(False)
            kernel.die_with_parent()
    return child


def _open_session(control: socket.socket, limits: Limits, instructions: bytes, close: list[int], user: int) -> bool:
    order, descriptors, _, _ = socket.recv_fds(control, 1 << 16, 3)
    if not order:
        return False
    channel, out, err = descriptors
    # A machine at its limit of namespaces or processes is no reason to end the sessions that live.
    try:
        child = _clone_as(user)
    except OSError as error:
        child = -1
        os.write(channel, wire.pack({"t": "fault", "why": f"no new namespaces: {error}", "errno": error.errno}))
    if child == 0:
        # A session must not use the control socket, nor keep it open: by it the host sees that the zygote has ended.
        for descriptor in close:
            os.close(descriptor)
        init.main(SessionSetup(channel=channel, out=out, err=err, limits=limits, seccomp=instructions, user=user))
    for descriptor in descriptors:
        os.close(descriptor)
    return True


def main() -> None:
    """Import, report to the host, then fork one session for every message from the host until the host is gone."""
    config: ZygoteConfig = json.loads(sys.argv[1])
    limits = Limits(**config["limits"])  # pyright: ignore[reportArgumentType]
    # Assembled once: every session has the same filter.
    instructions = seccomp.assemble(kernel.MACHINE, program.own_descriptors(limits)[0])
    # A terminal's signals are for the host; sessions that have ended are reaped by the kernel.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD):
        signal.signal(number, signal.SIG_IGN)
    become_template(config["preload"])
    control, life = socket.socket(fileno=config["control"]), config["life"]
    users = _users(config["users"])
    control.send(wire.pack({"t": "ready", "users": config["users"]}))
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(life, select.POLLIN)
    while True:
        # The end of the host closes the control socket too, unless another of its children holds a copy of it.
        ready = {descriptor for descriptor, _ in poll.poll()}
        if life in ready or not _open_session(control, limits, instructions, [control.fileno(), life], next(users)):
            os._exit(0)
