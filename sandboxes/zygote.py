"""The process that sessions are forked from: it has imported everything and never runs a program.

It is pid 1 of the sandbox: when it ends, the kernel ends every session with it.
"""

import gc
import importlib
import json
import os
import select
import signal
import site
import socket
import sys
from typing import Final

from agentrl.sandboxes import init, kernel, program, seccomp, wire
from agentrl.sandboxes.base import Limits
from agentrl.sandboxes.inheritance import Inheritance
from agentrl.sandboxes.launcher import Orders

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


def preload(names: list[str]) -> list[str]:
    """Import the standard library and these modules and give the names of those that are there."""
    loaded: list[str] = []
    extra = [part for part in FOLDED if "numpy" in names]
    for name in [*STANDARD.split(), *names, *extra]:
        try:
            importlib.import_module(name)
        except ImportError as error:
            # Not installed, or broken: programs that import it will see the same error.
            print(f"not preloaded: {name}: {error}", file=sys.stderr)
        else:
            loaded.append(name)
    # A plain interpreter has exit(), quit() and help(); -S leaves them out.
    site.setquit()
    site.setcopyright()
    site.sethelper()
    # As in a REPL: modules in the working folder can be imported.
    sys.path.insert(0, "")
    return loaded


def forget_ourselves() -> None:
    """Take our modules out of ``sys.modules``: a program that imports them must not get ours."""
    for name in [name for name in sys.modules if name.split(".")[0] == "agentrl"]:
        del sys.modules[name]


def _open_session(control: socket.socket, limits: Limits, instructions: bytes, close: list[int]) -> bool:
    order, descriptors, _, _ = socket.recv_fds(control, 1 << 16, 3)
    if not order:
        return False
    channel, out, err = descriptors
    try:
        child = kernel.clone(kernel.NEW_ALL)
    except OSError as error:
        fault: wire.Message = {"t": "fault", "why": f"no new namespaces: {error}", "errno": error.errno}
        with socket.socket(fileno=channel) as answer:
            answer.sendall(wire.pack(fault))
        os.close(out)
        os.close(err)
        return True
    if child == 0:
        for descriptor in close:
            os.close(descriptor)
        init.main(Inheritance(channel=channel, out=out, err=err, limits=limits, seccomp=instructions))
    for descriptor in descriptors:
        os.close(descriptor)
    return True


def main() -> None:
    """Import, tell the host, then fork one session for every message from the host until the host is gone."""
    config: Orders = json.loads(sys.argv[1])
    sys.argv = [""]
    limits = Limits(**config["limits"])  # pyright: ignore[reportArgumentType]
    instructions = seccomp.program(kernel.MACHINE, program.ours(limits)[0])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD):
        signal.signal(number, signal.SIG_IGN)
    loaded = preload(config["preload"])
    forget_ourselves()
    gc.collect()
    gc.freeze()
    kernel.set_dumpable(False)
    control, life = socket.socket(fileno=config["control"]), config["life"]
    control.send(wire.pack({"t": "ready", "modules": loaded}))
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(life, select.POLLIN)
    while True:
        ready = {descriptor for descriptor, _ in poll.poll()}
        if life in ready or not _open_session(control, limits, instructions, [control.fileno(), life]):
            os._exit(0)
