"""Runs untrusted cells in a process that drops every right first, and that the cells may change.

A program can reach everything here, so pid 1 takes what comes from this process as a claim.
"""

import ast
import base64
import builtins
import fcntl
import io
import linecache
import os
import resource
import signal
import socket
import sys
import tempfile
import traceback
import types
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Final, TextIO, cast

from agentrl.sandboxes.inside import kernel, program_files, seccomp, seeding, wire
from agentrl.sandboxes.inside.interfaces import SessionSetup
from agentrl.sandboxes.inside.limits import QUEUED_SIGNALS, Limits

_SPARE: Final = 16
"""Descriptors beyond the program's own limit: this module needs some when the program has used up its own."""
_CPU_CEILING_S: Final = 3600
_CHAIN: Final = 20
_SIGNALS: Final = frozenset(map(int, signal.valid_signals()))
# Without its wrapper, which makes an enumeration's session of every signal: 0.3 ms for each cell.
_set_mask: Final[Callable[[int, Collection[int]], set[int]]] = sys.modules["_signal"].pthread_sigmask


def main(channel: int, setup: SessionSetup) -> None:
    """Drop every right, report to pid 1, and run cells; never returns.

    Args:
        channel: Socket to pid 1.
        setup: The session's descriptors and settings.
    """
    code = 1
    try:
        _confine(channel, setup)
        _Program(setup.limits).serve()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    finally:
        os._exit(code)


def _confine(channel: int, setup: SessionSetup) -> None:
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.set_wakeup_fd(-1)
    # Under memory pressure the kernel takes the program before anything of ours.
    proc = f"/proc/self/fd/{setup.proc}/self"
    kernel.set_dumpable(True)
    with open(f"{proc}/oom_score_adj", "w") as file:
        file.write("1000")
    # A user namespace of its own: the program has no power over pid 1, although both have one user id outside.
    if (inside := setup.inside) is not None:
        kernel.unshare(kernel.NEWUSER)
        kernel.write_maps(inside, inside, inside, proc)
        fcntl.flock = program_files.flock
    _move_descriptors((channel, setup.out, setup.err), own_descriptors(setup.limits))
    os.chdir(program_files.HOME)
    _limit(setup.limits)
    # Last, since what comes before needs rights and calls that end here.
    kernel.drop_privileges()
    seccomp.install(setup.seccomp)


def own_descriptors(limits: Limits) -> tuple[int, int, int]:
    """Return the numbers of the channel and the two outputs: above the descriptors that the program can open."""
    channel = limits.open_files
    return channel, channel + 1, channel + 2


def _move_descriptors(originals: tuple[int, int, int], targets: tuple[int, int, int]) -> None:
    channel, out, err = targets
    # First above every target, so that no dup2 closes a descriptor that is still to be moved.
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, err + 1) for descriptor in originals]
    for descriptor, target in zip(moved, targets, strict=True):
        os.dup2(descriptor, target, inheritable=False)
    os.closerange(err + 1, 1 << 20)
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.closerange(3, channel)


def _limit(limits: Limits) -> None:
    # What the zygote has mapped comes with the fork; the limit is on what the program adds.
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    for kind, value in (
        (resource.RLIMIT_AS, size + limits.memory_bytes),
        (resource.RLIMIT_NPROC, limits.processes),
        (resource.RLIMIT_FSIZE, limits.file_bytes),
        (resource.RLIMIT_NOFILE, limits.open_files + _SPARE),
        (resource.RLIMIT_CPU, _CPU_CEILING_S),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_RTPRIO, 0),
        (resource.RLIMIT_SIGPENDING, QUEUED_SIGNALS),
    ):
        # gVisor has limits that it can only be started with.
        if resource.getrlimit(kind) != (value, value):
            resource.setrlimit(kind, (value, value))


class _Program:
    """Executes the orders of pid 1."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._descriptors = own_descriptors(limits)
        self._channel = socket.socket(fileno=self._descriptors[0])
        self._module = types.ModuleType("__main__")
        self._globals = self._module.__dict__
        self._globals["__builtins__"] = builtins
        sys.modules["__main__"] = self._module
        self._cells = 0
        self._recursion = sys.getrecursionlimit()
        self._streams: list[TextIO] = [_writer(1), _writer(2)]
        self._pid = os.getpid()
        self._mask = _set_mask(signal.SIG_BLOCK, ())

    def serve(self) -> None:
        frames = wire.Decoder(wire.MAX_ORDER)
        self._tell({"t": "up"})
        while (received := wire.receive_with(self._channel, frames)) is not None:
            order, descriptors = received
            # This may be a copy by now, woken after a rollback or as a fork.
            self._pid = os.getpid()
            if order["t"] in ("snapshot", "fork"):
                self._copy(cast(str, order["t"]), descriptors)
            elif order["t"] == "wake":
                self._let_signals_in()
                self._hold_signals()
                self._tell({"t": "awake"})
            elif order["t"] == "read":
                path, offset, size = cast(str, order["path"]), cast(int, order["offset"]), cast(int, order["max"])
                self._tell(program_files.read(path, offset, size))
            elif self._run(order):
                return

    def _tell(self, claim: wire.Message) -> None:
        self._channel.sendall(wire.pack(claim))

    def _copy(self, kind: str, descriptors: list[int]) -> None:
        """Make a copy that waits, stopped, for orders over descriptors of its own, out of the next cell's reach.

        A snapshot has the outputs of its original, and its files; a fork has outputs and copied files of its own.
        """
        targets = self._descriptors if kind == "fork" else self._descriptors[:1]
        pid, why = 0, "the program runs threads, which a copy would lack"
        if len(descriptors) != len(targets):
            why = "the program has too many files open"
        # A fork keeps one thread only, so a process with more can't be copied truly.
        elif len(os.listdir("/proc/self/task")) == 1:
            try:
                left_open = program_files.left_open() if kind == "fork" else None
                pid = kernel.clone_sibling()
            except OSError as error:
                why = f"its program can't be copied: {error.strerror}"
            else:
                if pid == 0:
                    _stop_with(descriptors, targets)
                    # Woken with its own files under the same names.
                    if left_open is not None:
                        program_files.reopen(*left_open)
                    return
        for descriptor in descriptors:
            os.close(descriptor)
        self._tell({"t": kind, "pid": pid, "why": why})

    def _run(self, order: wire.Message) -> bool:
        self._cells += 1
        token, claim = order["token"], self._execute(order)
        self._flush()
        # A child that the cell forked came out at the cell's end: the result is its parent's.
        if os.getpid() != self._pid:
            os._exit(0)
        self._tell({"t": "done", "token": token, **claim})
        return bool(order["final"])

    def _prepare(self, order: wire.Message) -> None:
        # An earlier cell may have closed or redirected its output.
        os.dup2(self._descriptors[1], 1)
        os.dup2(self._descriptors[2], 2)
        self._streams = [
            _writer(number) if stream.closed else stream for number, stream in enumerate(self._streams, start=1)
        ]
        sys.stdout, sys.stderr = self._streams
        sys.stdin = io.TextIOWrapper(_input(cast(str, order["stdin"])), encoding="utf-8")
        sys.setrecursionlimit(self._recursion)
        for name, content in cast(dict[str, str], order["files"]).items():
            os.makedirs(os.path.dirname(os.path.join(program_files.HOME, name)), exist_ok=True)
            with open(os.path.join(program_files.HOME, name), "wb") as file:
                file.write(base64.b64decode(content))
        if order["seed"] is not None:
            seeding.seed(cast(int, order["seed"]))

    def _flush(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (ValueError, OSError, AttributeError):
                continue  # the program closed or replaced it: what it held is lost, as in a plain interpreter

    def _execute(self, order: wire.Message) -> wire.Message:
        name = f"<cell {self._cells}>"
        self._let_signals_in()
        try:
            self._prepare(order)
            _allow_descriptors(self._limits.open_files)
            value = _evaluate(cast(str, order["code"]), name, self._globals)
            # repr may return a subclass of str whose methods lie, even about its length.
            shown = None if value is None else str.__add__("", repr(value))
        except SystemExit as error:
            return {**wire.NOTHING, "status": "exit", "exit_code": _exit_code(error)}
        except BaseException as error:
            kind = "memory" if isinstance(error, MemoryError) else "error"
            report = wire.cut(_report(error), self._limits.traceback_chars)
            return {**wire.NOTHING, "status": kind, "exc_type": _name(type(error))[:200], "traceback": report}
        finally:
            self._hold_signals()
            _allow_descriptors(self._limits.open_files + _SPARE)
        value = None if shown is None else wire.cut(shown, self._limits.value_chars)
        return {**wire.NOTHING, "status": "ok", "value": value}

    def _let_signals_in(self) -> None:
        # A signal that came before the cell, and its handler's exception, are not the cell's doing.
        with suppress(BaseException):
            _set_mask(signal.SIG_SETMASK, self._mask)

    def _hold_signals(self) -> None:
        """Block signals until the next cell: an alarm would end what is being copied, and all variables with it."""
        with suppress(BaseException):
            self._mask = _set_mask(signal.SIG_BLOCK, _SIGNALS)


def _stop_with(descriptors: list[int], targets: tuple[int, ...]) -> None:
    """Put descriptors in place of the original's, then stop until pid 1 needs this copy."""
    # A process group of the original's session could be joined and orphaned, and the kernel wakes what is orphaned.
    os.setsid()
    for descriptor, target in zip(descriptors, targets, strict=True):
        os.dup2(descriptor, target, inheritable=False)
        os.close(descriptor)
    os.kill(os.getpid(), signal.SIGSTOP)


def _allow_descriptors(most: int) -> None:
    """Set the limit of open descriptors, within the hard limit, which the program may have lowered."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, hard), hard))


def _writer(descriptor: int) -> TextIO:
    return open(descriptor, "w", encoding="utf-8", errors="backslashreplace", closefd=False)


def _input(text: str) -> io.BufferedReader:
    # A file and no pipe: nobody need write it while the program reads, and child processes can read it too.
    if text:
        with tempfile.TemporaryFile(dir=program_files.HOME) as file:
            file.write(text.encode("utf-8", "surrogatepass"))
            file.flush()
            descriptor = os.dup(file.fileno())
        os.lseek(descriptor, 0, os.SEEK_SET)
    else:
        descriptor = os.open("/dev/null", os.O_RDONLY)
    os.dup2(descriptor, 0)
    os.close(descriptor)
    return open(0, "rb", closefd=False)


def _evaluate(code: str, name: str, scope: dict[str, object]) -> object:
    # Tracebacks quote the cell's source; no file holds it.
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    tree = ast.parse(code, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec"), scope)
    if last is None:
        return None
    return eval(compile(ast.Expression(cast(ast.Expr, last).value), name, "eval"), scope)


def _exit_code(error: SystemExit) -> int:
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return int.__and__(error.code, 0xFF)
    print(error.code, file=sys.stderr)
    return 1


def _name(kind: type) -> str:
    """Return a class's name without running its metaclass."""
    return type.__dict__["__name__"].__get__(kind)


def _report(error: BaseException) -> str:
    # Tracebacks begin with the program's own code, as in a plain interpreter.
    trace = error.__traceback__
    while trace is not None and not trace.tb_frame.f_code.co_filename.startswith("<cell "):
        trace = trace.tb_next
    _shorten_chain(error)
    try:
        # Looked up when it is needed: a program that breaks it breaks its own report.
        return "".join(traceback.format_exception(type(error), error, trace))
    except Exception as failure:
        return f"(an exception that can't be shown: {_name(type(failure))})"


def _shorten_chain(error: BaseException) -> None:
    # A chain of a million exceptions would be formatted for minutes, on the cell's clock.
    current: BaseException | None = error
    for _ in range(_CHAIN):
        if current is None:
            return
        current = current.__cause__ or current.__context__
    if current is not None:
        current.__cause__ = current.__context__ = None
