"""Has imported what training needs, and forks a process for every order: seconds less than a new Python each time.

An order is a line of JSON on standard input: ``{"words", "cwd", "env", "logs"}`` is answered with a process id, and
``{"wait"}`` with an exit code.
"""

import atexit
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

# What every command would import by itself, each time anew.
import agentrl.cli
import agentrl.engines.transformers
import agentrl.envs.generated.arithmetic
import agentrl.eval.command
import agentrl.sandboxes.host.local
import agentrl.train.run
import agentrl.train.sharded  # noqa: F401
from agentrl.processes.parent import LAUNCHER
from agentrl.processes.zygote import end_with_parent

Popen = subprocess.Popen
FORKS = "agentrl-forks"
"""Name of the children that fork on request."""


def become(descriptors: Sequence[int], env: Mapping[str, str]) -> None:
    """Be a process of its own, with its own output; it inherits as little as a new Python would."""
    os.setsid()
    Path("/proc/self/comm").write_text("python")
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
    os.closerange(3, 1000)
    os.environ.clear()
    os.environ.update(env)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    ForkingPopen.forks = start_forks()
    # PyTorch's pool of threads is made anew, before autograd's threads race for it.
    torch.set_num_threads(int(env.get("OMP_NUM_THREADS", torch.get_num_threads())))


def run_words(words: Sequence[str]) -> None:
    """Do what ``python`` does with these words: ``-c CODE``, ``-m MODULE`` or a file, and its arguments."""
    kind, *rest = words
    if kind == "-m":
        sys.argv, sys.path[0] = rest, os.getcwd()
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv, sys.path[0] = ["-c", *rest[1:]], ""
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv, sys.path[0] = [*words], str(Path(kind).parent)
        runpy.run_path(kind, run_name="__main__")  # a folder's __main__.py too


class Forks:
    """A process's link to its forking child: that one has a single thread, so what it forks waits for no other's lock.

    An order is a message of JSON: ``{"words", "cwd", "env"}`` with a file for the output is answered with a process id,
    and ``{"wait"}`` with an exit code.
    """

    def __init__(self, link: socket.socket) -> None:
        self._link, self._lock = link, threading.Lock()

    def ask(self, order: Mapping[str, object], *files: int) -> int:
        """The forking child's answer."""
        with self._lock:
            socket.send_fds(self._link, [json.dumps(order).encode()], files)
            return int(self._link.recv(100))


def start_forks() -> Forks:
    """Fork the child that forks on request. It ends with this process, and so do those that it has forked."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    if os.fork():
        theirs.close()
        return Forks(ours)
    ours.close()
    os.setsid()  # a Ctrl-C is for its parent
    end_with_parent(parent, signal.SIGKILL)
    Path("/proc/self/comm").write_text(FORKS)
    while message := socket.recv_fds(theirs, 1 << 18, 1):
        if not message[0]:
            break
        order = json.loads(message[0])
        if "wait" in order:
            answer = wait_for(order["wait"])
        elif (answer := fork()) == 0:
            # The launcher would be started with these words; here the parent is the forking child.
            _, number, *words = order["words"]
            os.chdir(order["cwd"])
            end_with_parent(os.getppid(), int(number))
            log, nothing = message[1][0], os.open(os.devnull, os.O_RDONLY)
            os._exit(run_as_python(words, (nothing, log, log), order["env"]))
        for descriptor in message[1]:
            os.close(descriptor)
        theirs.send(str(answer).encode())
    os._exit(0)


class Forked:
    """A forked process, with the few methods of ``Popen`` that a run's own processes need."""

    def __init__(self, forks: Forks, pid: int) -> None:
        self.pid, self.returncode = pid, None
        self._forks, self._end, self._lock = forks, os.pidfd_open(pid), threading.Lock()

    def poll(self, seconds: float | None = 0) -> int | None:
        if self.returncode is None and select.select([self._end], [], [], seconds)[0]:
            with self._lock:
                if self.returncode is None:
                    self.returncode = self._forks.ask({"wait": self.pid})
        return self.returncode

    def wait(self) -> int | None:
        return self.poll(None)

    def send_signal(self, sig: int) -> None:
        with self._lock:
            if self.returncode is None:
                os.kill(self.pid, sig)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkingPopen(Popen[bytes]):
    """Forks what a run starts of this Python, which is a sweep's runs and the other ranks; starts anything else."""

    forks: Forks

    def __new__(cls, args: Any, **options: Any) -> Any:
        if not isinstance(args, list) or LAUNCHER not in args:
            return super().__new__(cls)
        assert options["stdin"] == subprocess.DEVNULL and options["stdout"] == options["stderr"]
        env = {**(options["env"] or os.environ)}
        order = {"words": args[args.index(LAUNCHER) + 1 :], "cwd": os.getcwd(), "env": env}
        return Forked(cls.forks, cls.forks.ask(order, options["stdout"].fileno()))


def run_as_python(words: Sequence[str], descriptors: Sequence[int], env: Mapping[str, str]) -> int:
    """Do what ``python WORDS`` does, and return its exit code."""
    try:
        become(descriptors, {**env})
        run_words(words)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def fork() -> int:
    """``os.fork``, of a process whose only thread calls it: another's locks would stay locked in the child for ever."""
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads must not fork"
    return os.fork()


def wait_for(pid: int) -> int:
    """The exit code of a child; a signal's number, negative, where one ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def serve() -> None:
    """Answer orders until standard input ends."""
    for line in sys.stdin:
        order: dict[str, Any] = json.loads(line)
        if "wait" in order:
            print(wait_for(order["wait"]), flush=True)
            continue
        opened = [os.open(f"{order['logs']}/{name}", os.O_RDWR | os.O_CREAT, 0o600) for name in ("in", "out", "err")]
        pid = fork()
        if pid == 0:
            os.chdir(order["cwd"])
            code = run_as_python(order["words"], opened, order["env"])
            # As Python ends, but for taking its modules apart: of so many that takes more than a second.
            threading._shutdown()  # pyright: ignore
            atexit._run_exitfuncs()
            sys.stdout.flush()
            os._exit(code)
        print(pid, flush=True)
        for descriptor in opened:
            os.close(descriptor)


if __name__ == "__main__":
    get_checkpoint_conversion_mapping("llama")  # compiles hundreds of patterns, once in a process
    subprocess.Popen = ForkingPopen  # type: ignore[misc]
    gc.freeze()  # or each child's collector would write to all that it shares with this process
    serve()
