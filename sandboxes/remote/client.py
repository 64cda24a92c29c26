"""The ``remote`` back end: sessions on servers that ``agentrl sandbox serve`` started.

A session goes to the server with the fewest. One that fails is left out for a while; what ran there raises
``SandboxError``, and nothing is sent twice. What a server sends is parsed strictly. Not covered: a server can lie about
what a program did.
"""

import errno
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final, TypeVar

from agentrl.sandboxes.base import (
    MIB,
    Cell,
    Counters,
    Files,
    ForkRefused,
    Health,
    Limits,
    Result,
    Sandbox,
    SandboxClosed,
    SandboxError,
    SandboxUnavailable,
    Session,
)
from agentrl.sandboxes.host.counters import Meter
from agentrl.sandboxes.host.messages import run_order
from agentrl.sandboxes.remote.address import KEY, find_key, servers_of
from agentrl.sandboxes.remote.line import OPEN_S, FullError, Line, Server
from agentrl.sandboxes.remote.wire import Answer, Opening, Order, Terms

T = TypeVar("T")
_QUEUE_S: Final = 600.0
"""How much longer than its cells a call may take: it may wait for a core."""
_BUSY: Final = 10.0
"""On a busy machine a cell may take so many times its wall limit; see ``Limits.wall_factor``."""
_LONGEST_S: Final = 1e6
_WAIT_S: Final = 300.0
"""How long to wait for room where all servers are full."""


class RemoteSession(Session):
    """A session on a server, which is chosen when the first call comes."""

    def __init__(self, sandbox: "RemoteSandbox", seed: int) -> None:
        self._open = True
        self.line: Line | None = None
        """Its connection, or the last attempt at one."""
        self._sandbox, self._seed = sandbox, seed
        self._lock = threading.RLock()
        self._answered = False
        self._queue_s = 0.0
        self._allowed_s = _QUEUE_S
        """Longest time of a call: the server may have to run all cells again."""

    def run(self, code: str, timeout: float | None = None, transaction: bool = True) -> Result:
        """Run one cell; see :meth:`Session.run`."""
        return self.execute(Cell(code=code, timeout=timeout, transaction=transaction))

    def execute(self, cell: Cell) -> Result:
        """Run one cell with all its settings.

        Raises:
            SandboxError: The server, or the way to it, failed.
            ValueError: The code or the files are longer than the limit, or the timeout is not positive.
        """
        limits, meter = self._sandbox.limits, self._sandbox.meter
        wall_s = run_order(cell, self._seed, limits)["wall"]
        assert isinstance(wall_s, float)
        order = Order(
            kind="run",
            code=cell.code.encode("utf-8", "surrogatepass"),
            timeout=cell.timeout,
            transaction=cell.transaction,
            stdin=cell.stdin.encode("utf-8", "surrogatepass"),
            files={name: text.encode() if isinstance(text, str) else text for name, text in cell.files.items()},
            final=cell.final,
        )

        def call() -> Result:
            with self._lock:
                self._allowed_s += _BUSY * wall_s
                result = self._ask(order, lambda answer: answer.result)
                queue_s, self._queue_s = self._queue_s, 0.0
                return replace(result, queue_s=result.queue_s + queue_s, backend=self._sandbox.backend)

        result = meter.measure(call)
        if result.attempts > 1:
            meter.rerun()
        return result

    def replay(self) -> "RemoteSession":
        """Run this session's cells again; see :meth:`Session.replay`."""
        return self._branch(Order(kind="replay"))

    def fork(self) -> "RemoteSession":
        """Copy this session; see :meth:`Session.fork`."""
        return self._branch(Order(kind="fork"))

    def _branch(self, order: Order) -> "RemoteSession":
        made = self._sandbox.session(self._seed)
        try:
            with self._lock, made._lock:
                made._allowed_s = self._allowed_s
                ticket = self._counted(order, lambda answer: answer.ticket)
                assert self.line is not None, "it has answered"
                self._sandbox.open(self.line.server, Opening(ticket=ticket), made.hold)
        except BaseException:
            made.close()
            raise
        return made

    def read_file(self, path: str, max_bytes: int = MIB) -> bytes:
        """Read the first ``max_bytes`` bytes of a file; see :meth:`Session.read_file`."""
        return self._counted(Order(kind="read", path=path, max_bytes=max_bytes), lambda answer: answer.data)

    def close(self) -> None:
        """End the connection, and thereby the session, without waiting for the server."""
        self._open = False
        if self.line is not None:
            self.line.cut()

    def __del__(self) -> None:
        self.close()

    @property
    def is_open(self) -> bool:
        """Its owner has not closed it, and it has not failed."""
        return self._open

    def hold(self, line: Line) -> None:
        """Note a connection before it is made, so that closing the session cuts it.

        Raises:
            SandboxClosed: The session was closed.
        """
        self.line = line
        if not self._open:
            raise SandboxClosed("this session was closed during the call")

    def _counted(self, order: Order, part: Callable[[Answer], T | None]) -> T:
        try:
            return self._ask(order, part)
        except SandboxError as error:
            self._sandbox.meter.fault(error)
            raise

    def _ask(self, order: Order, part: Callable[[Answer], T | None]) -> T:
        """Send an order and return the part of its answer; a lost server ends the session."""
        with self._lock:
            if not self._open:
                raise SandboxClosed("this session is closed")
            try:
                answer = self._exchange(order, part)
            except ValueError:
                raise
            except BaseException as error:
                # Also after Ctrl-C: the answer is still to come, and would be taken for the next order's.
                was_open = self._open
                self.close()
                if not was_open:
                    raise SandboxClosed("this session was closed during the call") from error
                raise
        if (value := part(answer)) is not None:
            self._answered = True
            return value
        match answer.error:
            case "SandboxError":
                # A server whose own sandboxes fail has the fewest sessions, and would attract all.
                if not self._answered and self.line is not None:
                    self.line.server.leave_out(answer.message)
                raise SandboxError(f"the sandbox server could not do it: {answer.message}")
            case "ForkRefused":
                raise ForkRefused(answer.message)
            case "OSError" if answer.errno is None:
                raise TimeoutError(answer.message)
            case "OSError":
                number = answer.errno if answer.errno in errno.errorcode else errno.EIO
                raise OSError(number, os.strerror(number or 0), order.path)
            case _:
                raise ValueError(answer.message)

    def _exchange(self, order: Order, part: Callable[[Answer], object]) -> Answer:
        if self.line is None:
            asked = time.monotonic()
            self._sandbox.connect(self.hold, self._seed)
            self._queue_s = time.monotonic() - asked
        assert self.line is not None, "it is connected"
        return self.line.ask(order, part, min(self._allowed_s, _LONGEST_S))


class RemoteSandbox(Sandbox):
    """Sandboxes on one server or several.

    Args:
        name: ``remote:`` and their URLs, with commas between them.
        key: Theirs; by default that of the environment.
        limits: What each session may use; the servers must have been started with the same. By default theirs.
        packages: Packages that programs may import beside the usual ones; the servers must have them.

    Raises:
        SandboxUnavailable: No server answers, one refuses the key, or they don't have what is asked for.
        ValueError: The name lists no servers.
    """

    backend = "remote"

    def __init__(self, name: str, *, key: str = "", limits: Limits | None = None, packages: Sequence[str] = ()) -> None:
        self._servers = [Server(url=url) for url in servers_of(name)]
        self._key = key or find_key()
        if not self._key:
            raise SandboxUnavailable(f"remote sandboxes need the key of their servers: set the variable {KEY}")
        self.meter = Meter()
        """Every call of its sessions is counted here."""
        self._lock = threading.Lock()
        self._sessions = weakref.WeakSet[RemoteSession]()
        self._closed = False
        answers = [(server, terms) for server in self._servers if (terms := self._look_at(server))]
        if not answers:
            raise SandboxUnavailable(f"{self._silent()}; start one with `agentrl sandbox serve`")
        _, self._terms = answers[0]
        for server, terms in answers:
            self._check(server, terms)
        self.limits, self.version = self._terms.limits, self._terms.version
        if limits not in (None, self.limits):
            raise SandboxUnavailable("the sandbox servers have other limits: start them with --limits NAME=VALUE")
        if lacking := {*packages} - {*self._terms.packages}:
            raise SandboxUnavailable(
                f"the sandbox servers lack packages: start them with --packages {' '.join(sorted(lacking))}"
            )

    def _look_at(self, server: Server) -> Terms | None:
        line = Line(server)
        try:
            return line.open(self._key, Opening(look=True))
        except SandboxUnavailable:
            raise
        except SandboxError:
            return None
        finally:
            line.cut()

    def _check(self, server: Server, terms: Terms) -> None:
        if terms != self._terms:
            server.leave_out("its limits, packages, Python or agentrl differ from those of another server")
            raise SandboxUnavailable(f"{server.url} can't be used: {server.fault}")

    def session(self, seed: int = 0) -> RemoteSession:
        """Open a session; see :meth:`Sandbox.session`."""
        session = RemoteSession(self, seed)
        with self._lock:
            if self._closed:
                raise SandboxClosed("this sandbox is closed")
            self._sessions.add(session)
        return session

    def run(
        self, code: str, *, timeout: float | None = None, stdin: str = "", files: Files | None = None, seed: int = 0
    ) -> Result:
        """Run one program in a fresh session; see :meth:`Sandbox.run`."""
        cell = Cell(code=code, timeout=timeout, transaction=False, stdin=stdin, files=files or {}, final=True)
        with self.session(seed) as session:
            return session.execute(cell)

    def connect(self, hold: Callable[[Line], None], seed: int) -> None:
        """Open a session on the server with the fewest of ours.

        Args:
            hold: Is told each connection before it is made, and raises where none is wanted any more.
            seed: The session's.

        Raises:
            SandboxError: No server answers, or all have been full for five minutes.
        """
        until = time.monotonic() + _WAIT_S
        while (left := until - time.monotonic()) > 0:
            full = list[Server]()
            for server in self._ranked():
                try:
                    return self.open(server, Opening(seed=seed), hold)
                except FullError:
                    full.append(server)
                except SandboxClosed:
                    raise
                except SandboxError:
                    continue
            if not full:
                raise SandboxError(self._silent())
            try:
                return self.open(full[0], Opening(seed=seed, wait=True), hold, left)
            except SandboxClosed:
                raise
            except SandboxError:
                continue
        raise SandboxError(
            f"all sandbox servers were full for {_WAIT_S:g} s: start them with a higher --limit, or start more"
        )

    def open(self, server: Server, opening: Opening, hold: Callable[[Line], None], seconds: float = OPEN_S) -> None:
        """Open a session on one server.

        Raises:
            SandboxError: It fails, is full, or runs programs differently.
        """
        hold(line := Line(server))
        try:
            self._check(server, line.open(self._key, opening, seconds))
        except BaseException:
            line.cut()
            raise

    def _ranked(self) -> list[Server]:
        """Return the servers to try; those that have failed lately only where no other is left."""
        now = time.monotonic()
        with self._lock:
            load = Counter(id(line.server) for session in self._sessions if session.is_open and (line := session.line))
        usable = [server for server in self._servers if server.until <= now] or self._servers
        return sorted(usable, key=lambda server: load[id(server)])

    def _silent(self) -> str:
        return "no sandbox server answers: " + "; ".join(f"{server.url}: {server.fault}" for server in self._servers)

    def counters(self) -> Counters:
        """Return what this sandbox has done so far."""
        return self.meter.snapshot()

    def health(self) -> Health:
        """Return whether a server is not left out; see :meth:`Sandbox.health`."""
        now = time.monotonic()
        states = {server.url: server.fault if server.until > now else "" for server in self._servers}
        with self._lock:
            sessions = sum(session.is_open for session in self._sessions)
        return Health(
            ok=not self._closed and not all(states.values()),
            backend=self.backend,
            sessions=sessions,
            ready=0,
            detail=", ".join(f"{url} {f'left out: {fault}' if fault else 'in use'}" for url, fault in states.items()),
        )

    def close(self) -> None:
        """End every session; the servers do so as soon as they notice."""
        with self._lock:
            self._closed = True
            sessions = list(self._sessions)
        for session in sessions:
            session.close()
