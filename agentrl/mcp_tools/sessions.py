"""Sessions with MCP servers: how one is begun, called and ended, and which calls share it."""

import asyncio
import atexit
import functools
import os
import tempfile
import threading
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TextIO, cast

from agentrl.background import BackgroundLoop, Outcome, Overrun
from agentrl.errors import InfrastructureError, UsageError

if TYPE_CHECKING:
    import mcp
    from mcp import types

START_SECONDS = 60.0
"""How long a server may take until it has told its tools, or begun a session."""
_CLOSE_SECONDS = 15.0
_STDERR_CHARS = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """How to reach a server; equal ones have the same tools."""

    command: tuple[str, ...]
    """Starts it; empty where it runs at a URL."""
    url: str
    """Where it runs; empty where it is started."""
    variables: tuple[tuple[str, str], ...]
    """Of the environment of a command, or headers of the requests to a URL."""

    def __str__(self) -> str:
        return f"MCP server {self.url or ' '.join(self.command)!r}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """What a server says of one of its tools."""

    name: str
    """What calls it."""
    description: str
    """For the model."""
    parameters: Mapping[str, object] = field(hash=False)
    """The JSON schema of its arguments."""


class Connection:
    """The session that the tools of one ``mcp_tools`` share; opened when it is needed."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._session: Session | None = None

    def call(self, name: str, arguments: dict[str, object], timeout: float) -> Outcome:
        """The server's answer, or as an error its refusal or ``Overrun``."""
        session = self._ready()
        outcome = session.call(name, arguments, timeout)
        if outcome.error is None or isinstance(outcome.error, Overrun) or _is_refusal(outcome.error):
            return outcome
        last_words = session.last_words
        session.close()
        raise InfrastructureError(f"{self._server} is gone: {_reason(outcome.error)}{last_words}") from outcome.error

    def end_episode(self) -> None:
        """Nothing is left for the next one."""
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def _ready(self) -> "Session":
        if self._session is None or not self._session.is_open:
            self._session = Session.begin(self._server)
        return self._session


class SharedConnection(Connection):
    """The session of all episodes of this process; any thread may call."""

    def __init__(self, server: Server) -> None:
        super().__init__(server)
        self.beginning = threading.Lock()

    def __reduce__(self) -> tuple[object, ...]:
        # A copy for another instance is the same one; another process makes its own.
        return shared_connection, (self._server,)

    def end_episode(self) -> None:
        """The others go on."""

    def _ready(self) -> "Session":
        with self.beginning:
            return super()._ready()


class Session:
    """One session, which a single task on the background loop enters and leaves."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._stderr = cast(TextIO, tempfile.TemporaryFile("w+", errors="replace"))  # noqa: SIM115 (closed in close)
        self._client: mcp.Client | None = None
        self._leave: asyncio.Event | None = None
        self._task: asyncio.Task[None] | None = None
        self._reading = threading.Lock()
        self._said = ""

    @classmethod
    def begin(cls, server: Server) -> "Session":
        """Connect.

        Raises:
            UsageError: the package mcp is not installed, or the command can't be started.
            InfrastructureError: there is no server, or it does not answer.
        """
        try:
            import mcp as _  # noqa: F401
        except ModuleNotFoundError as error:
            raise UsageError("MCP servers need the package mcp: pip install 'agentrl[mcp]'") from error
        session = cls(server)
        with _lock:
            _open.add(session)
        outcome = _loop().call(session._enter, START_SECONDS)
        if outcome.error is None:
            return session
        last_words = session.last_words
        session.close()
        if isinstance(outcome.error, FileNotFoundError | PermissionError | NotADirectoryError):
            raise UsageError(f"{server} can't be started: {outcome.error}") from outcome.error
        raise InfrastructureError(f"{server} does not answer: {_reason(outcome.error)}{last_words}") from outcome.error

    @property
    def is_open(self) -> bool:
        """Whether it was not closed; in a forked child none of the parent's is open."""
        return self in _open

    @property
    def last_words(self) -> str:
        """The end of what the program wrote to its standard error, to be put behind a sentence."""
        with self._reading:
            if not self._stderr.closed:  # by another thread, which has read it
                self._stderr.seek(0)
                self._said = self._stderr.read().strip()[-_STDERR_CHARS:]
        return f"; its last words: {self._said}" if self._said else ""

    def call(self, name: str, arguments: dict[str, object], timeout: float) -> Outcome:
        """Call a tool."""
        client = self._client
        assert client is not None, "begin gives no session that has not been entered"
        return _loop().call(lambda: client.call_tool(name, arguments), timeout)

    def tools(self) -> Outcome:
        """A tuple of all tools."""
        return _loop().call(self._tools, START_SECONDS)

    def close(self) -> None:
        """Leave, and wait until the program that was started is gone."""
        with _lock:
            if self not in _open:
                return
            _open.remove(self)
        _loop().call(self._exit, _CLOSE_SECONDS)
        with self._reading:
            self._stderr.close()

    async def _enter(self) -> None:
        self._leave = asyncio.Event()
        self._task = asyncio.create_task(self._live(entered := asyncio.Event()))
        waiting = asyncio.create_task(entered.wait())
        try:
            await asyncio.wait({self._task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        if self._task.done():
            self._task.result()

    async def _live(self, entered: asyncio.Event) -> None:
        assert self._leave is not None
        try:
            async with AsyncExitStack() as stack:
                self._client = await stack.enter_async_context(await self._make_client(stack))
                entered.set()
                await self._leave.wait()
        except BaseExceptionGroup as errors:
            raise _innermost(errors) from errors

    async def _make_client(self, stack: AsyncExitStack) -> "mcp.Client":
        import mcp
        from mcp.client.stdio import StdioServerParameters, stdio_client
        from mcp.client.streamable_http import streamable_http_client

        variables = dict(self._server.variables)
        if self._server.command:
            program, *words = self._server.command
            parameters = StdioServerParameters(command=program, args=words, env=variables)
            return mcp.Client(stdio_client(parameters, errlog=self._stderr))
        import httpx2

        http = httpx2.AsyncClient(headers=variables, timeout=httpx2.Timeout(START_SECONDS, read=None))
        await stack.enter_async_context(http)
        return mcp.Client(streamable_http_client(self._server.url, http_client=http))

    async def _tools(self) -> tuple[Listed, ...]:
        assert self._client is not None
        found: list[types.Tool] = []
        cursor: str | None = None
        while True:
            page = await self._client.list_tools(cursor=cursor)
            found += page.tools
            cursor = page.next_cursor
            if cursor is None:
                break
        return tuple(
            Listed(name=one.name, description=(one.description or "").strip(), parameters=one.input_schema)
            for one in found
        )

    async def _exit(self) -> None:
        if self._task is None or self._leave is None:
            return
        self._leave.set()
        if self._client is None:
            self._task.cancel()
        # However it ends, it is over: an error here is one of a server that nobody asks anything any more.
        await asyncio.gather(self._task, return_exceptions=True)


@functools.lru_cache(maxsize=256)
def listing(server: Server) -> tuple[Listed, ...]:
    """What a server says of its tools, asked once per process.

    Raises:
        UsageError: the package mcp is not installed, or the command can't be started.
        InfrastructureError: the server does not tell its tools.
    """
    session = Session.begin(server)
    try:
        outcome = session.tools()
        if outcome.error is not None:
            reason = f"{_reason(outcome.error)}{session.last_words}"
            raise InfrastructureError(f"{server} does not tell its tools: {reason}") from outcome.error
    finally:
        session.close()
    return cast(tuple[Listed, ...], outcome.value)


def _is_refusal(error: BaseException) -> bool:
    """Whether it is the server's answer, rather than the lack of one."""
    from mcp import MCPError
    from mcp.types import CONNECTION_CLOSED

    return isinstance(error, MCPError) and error.code != CONNECTION_CLOSED


def _reason(error: BaseException) -> str:
    if isinstance(error, Overrun):
        return f"it took longer than {START_SECONDS:g} s"
    return str(error) or type(error).__name__


def _innermost(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = cast(BaseExceptionGroup[BaseException], error).exceptions[0]
    return error


def shared_connection(server: Server) -> SharedConnection:
    """The one connection of this process to a server that episodes share."""
    with _lock:
        return _shared.setdefault(server, SharedConnection(server))


_lock = threading.Lock()
_open: set[Session] = set()
_shared: dict[Server, SharedConnection] = {}
_loops: list[BackgroundLoop] = []


def _loop() -> BackgroundLoop:
    """A loop that no tool of a user's can block."""
    with _lock:
        if not _loops:
            _loops.append(BackgroundLoop("agentrl-mcp"))
        return _loops[0]


def close_sessions() -> None:
    """End every session of this process and the programs that were started for them."""
    for session in list(_open):
        session.close()
    with _lock:
        loops = _loops.copy()
        _loops.clear()
    for loop in loops:
        loop.close()


def _forget() -> None:
    """A forked child has none of its parent's threads, so none of its sessions."""
    global _lock
    _lock = threading.Lock()
    _open.clear()
    _loops.clear()
    for connection in _shared.values():
        connection.beginning = threading.Lock()


atexit.register(close_sessions)
os.register_at_fork(after_in_child=_forget)
