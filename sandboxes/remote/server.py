"""Serves the sessions of a local back end to clients on other machines, a session for each connection.

The boundary is that of the back end. Who holds the key may run programs in it, and may choose neither the back end, nor
its limits, packages and runtime. Not covered: key and programs travel in clear unless a proxy in front speaks TLS, and
who reaches the port without the key can use up its connections.
"""

import asyncio
import hashlib
import hmac
import logging
import platform
import secrets
import signal
import socket
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Final, get_args
from urllib.parse import parse_qsl, urlsplit

from pydantic import ValidationError

from agentrl.sandboxes.base import Cell, ForkRefused, Sandbox, SandboxError
from agentrl.sandboxes.host.sessions import WorkerSandbox, WorkerSession
from agentrl.sandboxes.remote.address import missing
from agentrl.sandboxes.remote.wire import CLOSE_S, MAX_BYTES, SUBPROTOCOL, Answer, Fault, Hello, Opening, Order, Terms

if TYPE_CHECKING:
    from websockets.asyncio.server import Server, ServerConnection
    from websockets.http11 import Request, Response

_POLICY_VIOLATION: Final = 1008
_CHARS: Final = 2000
_KINDS: Final[Mapping[Fault, type[Exception]]] = dict(
    zip(get_args(Fault), (ForkRefused, SandboxError, ValueError, OSError), strict=True)
)


class SandboxServer:
    """Serves a sandbox.

    Args:
        sandbox: A ``local`` or ``docker`` one, which runs the programs; whoever opened it closes it.
        key: Clients must have it.
        limit: Sessions at a time.
        packages: Those with which the sandbox was opened.
        silence_s: Seconds after which a client that answers no ping has its session closed.
    """

    def __init__(
        self, sandbox: Sandbox, key: str, *, limit: int = 128, packages: Sequence[str] = (), silence_s: float = 60
    ) -> None:
        if not isinstance(sandbox, WorkerSandbox):
            raise TypeError(f"only the back ends local and docker can be served, not {sandbox.backend}")
        self._sandbox, self._key, self._silence_s = sandbox, key, silence_s
        self.terms = Terms(limits=sandbox.limits, packages=tuple(sorted(packages)), version=_version(sandbox))
        """What clients learn of it."""
        self._room = asyncio.Semaphore(limit)
        # A thread for each session: calls that wait for a core are queued where that is counted.
        self._threads = ThreadPoolExecutor(limit, thread_name_prefix="agentrl-remote")
        self._branches = dict[str, WorkerSession]()
        """Forks and replays that wait for their own connections, by their tickets."""

    @asynccontextmanager
    async def listening(self, host: str, port: int) -> "AsyncGenerator[Server]":
        """Listen; at the end every session is closed.

        Raises:
            OSError: The port is taken, or there is no such host.
            SandboxUnavailable: The package websockets is missing.
        """
        try:
            from websockets.asyncio.server import serve
            from websockets.typing import Subprotocol
        except ModuleNotFoundError as error:
            raise missing() from error
        async with serve(
            self._visit,
            host,
            port,
            process_request=self._check_key,
            subprotocols=[Subprotocol(SUBPROTOCOL)],
            compression=None,
            max_size=MAX_BYTES,
            max_queue=1,
            close_timeout=CLOSE_S,
            ping_interval=self._silence_s / 2,
            ping_timeout=self._silence_s / 2,
            server_header=None,
            # Who knocks at an open port is no news.
            logger=logging.Logger("agentrl.sandboxes.remote", logging.CRITICAL),
        ) as server:
            yield server
        self._threads.shutdown()

    def _check_key(self, connection: "ServerConnection", request: "Request") -> "Response | None":
        key = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if hmac.compare_digest(key.encode("utf-8", "replace"), self._key.encode()):
            return None
        return connection.respond(HTTPStatus.UNAUTHORIZED, "this key opens no sandbox\n")

    async def _visit(self, connection: "ServerConnection") -> None:
        """Serve one connection until it ends, and its session with it."""
        from websockets.exceptions import ConnectionClosed

        assert connection.request is not None, "the handshake is over"
        try:
            opening = Opening.model_validate(dict(parse_qsl(urlsplit(connection.request.path).query)))
            session = None if opening.ticket is None else self._branches.pop(opening.ticket)
        except (ValidationError, KeyError):
            return await connection.close(_POLICY_VIOLATION, "this opens no session")
        tickets = list[str]()
        with suppress(ConnectionClosed):
            # A fork has its room already.
            if session is None:
                if opening.look or (self._room.locked() and not opening.wait):
                    return await connection.send(Hello(terms=self.terms, full=not opening.look).model_dump_json())
                await self._room.acquire()
            try:
                session = session or self._sandbox.session(opening.seed)
                await self._serve(connection, session, tickets)
            finally:
                unclaimed = [self._branches.pop(ticket) for ticket in tickets if ticket in self._branches]
                for ended in (session, *unclaimed):
                    if ended is not None:
                        await asyncio.to_thread(ended.close)
                    self._room.release()
        return None

    async def _serve(self, connection: "ServerConnection", session: WorkerSession, tickets: list[str]) -> None:
        async def end() -> None:
            await connection.wait_closed()
            await asyncio.to_thread(session.close)

        # A call that runs ends with the connection: its thread is woken.
        ending = asyncio.create_task(end())
        try:
            await connection.send(Hello(terms=self.terms).model_dump_json())
            async for text in connection:
                answer = await self._answer(session, text, tickets)
                if len(line := answer.model_dump_json()) > MAX_BYTES:
                    line = Answer(error="ValueError", message="the file is too long to be sent").model_dump_json()
                await connection.send(line)
        finally:
            ending.cancel()

    async def _answer(self, session: WorkerSession, text: str | bytes, tickets: list[str]) -> Answer:
        loop = asyncio.get_running_loop()
        try:
            order = Order.model_validate_json(text)
            match order.kind:
                case "run":
                    return Answer(result=await loop.run_in_executor(self._threads, session.execute, _cell(order)))
                case "read":
                    read = loop.run_in_executor(self._threads, session.read_file, order.path, order.max_bytes)
                    return Answer(data=await read)
                case _:
                    tickets.append(ticket := await self._branch(session, order.kind == "fork"))
                    return Answer(ticket=ticket)
        except (SandboxError, ValueError, OSError) as error:
            kind: Fault = next(kind for kind, family in _KINDS.items() if isinstance(error, family))
            number = error.errno if isinstance(error, OSError) else None
            return Answer(error=kind, message=str(error)[:_CHARS], errno=number)

    async def _branch(self, session: WorkerSession, fork: bool) -> str:
        """Fork or replay a session; return the ticket with which the client takes it over."""
        if self._room.locked():
            full = "the server has no room for another session"
            raise ForkRefused(full) if fork else SandboxError(full)
        await self._room.acquire()
        try:
            make = session.fork if fork else session.replay
            made = await asyncio.get_running_loop().run_in_executor(self._threads, make)
        except BaseException:
            self._room.release()
            raise
        self._branches[ticket := secrets.token_hex(16)] = made
        return ticket


async def serve_until_stopped(server: SandboxServer, host: str, port: int, announce: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM comes; ``announce`` receives the URL.

    Raises:
        OSError: The port is taken, or there is no such host.
        SandboxUnavailable: The package websockets is missing.
    """
    stopped = asyncio.Event()
    async with server.listening(host, port) as listening:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stopped.set)
        name = socket.gethostname() if host in ("", "0.0.0.0", "::") else f"[{host}]" if ":" in host else host
        announce(f"http://{name}:{listening.sockets[0].getsockname()[1]}")
        await stopped.wait()


def _cell(order: Order) -> Cell:
    return Cell(
        code=order.code.decode("utf-8", "surrogatepass"),
        timeout=order.timeout,
        transaction=order.transaction,
        stdin=order.stdin.decode("utf-8", "surrogatepass"),
        files=order.files,
        final=order.final,
    )


def _version(sandbox: WorkerSandbox) -> str:
    folder = Path(__file__).parents[1]
    code = b"".join(hashlib.blake2b(path.read_bytes()).digest() for path in sorted(folder.rglob("*.py")))
    digest = hashlib.blake2b(code, digest_size=6).hexdigest()
    return " ".join(filter(None, [sandbox.backend, sandbox.version, f"python {platform.python_version()}", digest]))
