"""Has imported what training needs, and forks a process for every order: seconds less than a new Python each time.

An order is a line of JSON on standard input: ``{"words", "cwd", "env", "logs"}`` is answered with a process id, and
``{"wait"}`` with an exit code.
"""

import atexit
import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
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

Popen = subprocess.Popen


def become(descriptors: Sequence[int], env: Mapping[str, str]) -> None:
    """Be a process of its own, with its own output; it inherits as little as a new Python would."""
    os.setsid()
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
    os.closerange(3, 1000)
    os.environ.clear()
    os.environ.update(env)
    signal.signal(signal.SIGINT, signal.default_int_handler)
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


class Forked:
    """A forked process, with the few methods of ``Popen`` that a run's own processes need."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self, options: int = os.WNOHANG) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self) -> int | None:
        return self.poll(0)

    def send_signal(self, sig: int) -> None:
        # No poll, which would take the exit code away from a thread that waits for it.
        if self.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, sig)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkingPopen(Popen[bytes]):
    """Forks what a run starts of this Python, which is a sweep's runs and the other ranks; starts anything else."""

    def __new__(cls, args: Any, **options: Any) -> Any:
        if not isinstance(args, list) or args[:1] != [sys.executable] or "preexec_fn" not in options:
            return super().__new__(cls)
        assert options["stdin"] == subprocess.DEVNULL and options["stdout"] == options["stderr"]
        pid = os.fork()
        if pid:
            return Forked(pid)
        options["preexec_fn"]()
        log = options["stdout"].fileno()
        # Not sys.exit: what the parent has begun and has to end, on its stack, is not this process's.
        os._exit(run_as_python(args[1:], (os.open(os.devnull, os.O_RDONLY), log, log), options["env"] or os.environ))


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


def serve() -> None:
    """Answer orders until standard input ends."""
    for line in sys.stdin:
        order: dict[str, Any] = json.loads(line)
        if "wait" in order:
            print(os.waitstatus_to_exitcode(os.waitpid(order["wait"], 0)[1]), flush=True)
            continue
        opened = [os.open(f"{order['logs']}/{name}", os.O_RDWR | os.O_CREAT, 0o600) for name in ("in", "out", "err")]
        pid = os.fork()
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
