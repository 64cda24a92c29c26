"""Sessions with MCP servers: their begin, calls and end, and the connections that share them."""

import asyncio
import functools
import tempfile
import threading
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO, cast

from agentrl.errors import InfrastructureError, UsageError
from agentrl.processes.per_process import PerProcess
from agentrl.toolenv.tools.timed import BackgroundLoop, Outcome, Overrun

if TYPE_CHECKING:
    import mcp
    from mcp import types

START_SECONDS = 60.0
"""Time limit of a server for listing its tools, and for beginning a session."""
_CLOSE_SECONDS = 15.0
_STDERR_CHARS = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """The address of a server; equal addresses have the same tools."""

    command: tuple[str, ...]
    """Starts the server; empty where it runs at a URL."""
    url: str
    """The server's address; empty where it is started."""
    variables: tuple[tuple[str, str], ...]
    """Environment variables of a command, or headers of the requests to a URL."""

    def __str__(self) -> str:
        return f"MCP server {self.url or ' '.join(self.command)!r}"


class Connection:
    """The session that the tools of one ``mcp_tools`` call share, opened at first use."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._session: Session | None = None

    def call(self, name: str, arguments: dict[str, object], timeout: float) -> Outcome:
        """Call a tool; the outcome's error is the server's refusal or ``Overrun``.

        Raises:
            InfrastructureError: the server is gone.
        """
        session = self._ready()
        outcome = session.call(name, arguments, timeout)
        if outcome.error is None or isinstance(outcome.error, Overrun) or _is_refusal(outcome.error):
            return outcome
        # Read before closing, which closes the file that they are in.
        last_words = session.last_words
        session.close()
        raise InfrastructureError(f"{self._server} is gone: {_reason(outcome.error)}{last_words}") from outcome.error

    def end_episode(self) -> None:
        """Close the session, so that the next episode begins another."""
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def _ready(self) -> "Session":
        if self._session is None or not self._session.is_open:
            self._session = Session.begin(self._server)
        return self._session


class SharedConnection(Connection):
    """The session of all episodes of this process; any thread may call."""

    def __reduce__(self) -> tuple[object, ...]:
        # Copying for another instance gives the same object; unpickling in another process makes that process's own.
        return shared_connection, (self._server,)

    def end_episode(self) -> None:
        """Do nothing: other episodes go on with the session."""

    def _ready(self) -> "Session":
        # Two threads that come at once must not begin two sessions.
        with _beginning.get(self._server):
            return super()._ready()


class Session:
    """One session. A single task on the background loop enters and leaves it, as anyio's cancel scopes demand."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._home = _homes.get()
        self._stderr = cast(TextIO, tempfile.TemporaryFile("w+", errors="replace"))  # noqa: SIM115 (closed in close)
        self._client: mcp.Client | None = None
        self._leave: asyncio.Event | None = None
        self._task: asyncio.Task[None] | None = None
        self._reading = threading.Lock()
        self._said = ""

    @classmethod
    def begin(cls, server: Server) -> "Session":
        """Connect to the server.

        Raises:
            UsageError: the package mcp is not installed, or the command can't be started.
            InfrastructureError: there is no server, or it does not answer.
        """
        try:
            import mcp as _  # noqa: F401
        except ModuleNotFoundError as error:
            raise UsageError("MCP servers need the package mcp: pip install 'agentrl[mcp]'") from error
        session = cls(server)
        # Registered before it is entered, so that closing all sessions meanwhile finds it.
        session._home.open.add(session)
        outcome = session._home.loop.call(session._enter, START_SECONDS)
        if outcome.error is None:
            return session
        last_words = session.last_words
        session.close()
        if isinstance(outcome.error, FileNotFoundError | PermissionError | NotADirectoryError):
            raise UsageError(f"{server} can't be started: {outcome.error}") from outcome.error
        raise InfrastructureError(f"{server} does not answer: {_reason(outcome.error)}{last_words}") from outcome.error

    @property
    def is_open(self) -> bool:
        """True until it is closed; in a forked child none of the parent's sessions is open."""
        return self in self._home.open

    @property
    def last_words(self) -> str:
        """The end of the program's standard error, to be appended to a sentence."""
        with self._reading:
            if not self._stderr.closed:  # else another thread has closed it, and had read it before
                self._stderr.seek(0)
                self._said = self._stderr.read().strip()[-_STDERR_CHARS:]
        return f"; its last words: {self._said}" if self._said else ""

    def call(self, name: str, arguments: dict[str, object], timeout: float) -> Outcome:
        """Call a tool."""
        client = self._client
        assert client is not None, "begin gives no session that has not been entered"
        return self._home.loop.call(lambda: client.call_tool(name, arguments), timeout)

    def tools(self) -> Outcome:
        """List all tools, as a tuple."""
        return self._home.loop.call(self._tools, START_SECONDS)

    def close(self) -> None:
        """Leave the session, and wait until the program that was started is gone."""
        try:
            self._home.open.remove(self)
        except KeyError:  # it was closed before, perhaps by another thread, or is the parent's
            return
        self._home.loop.call(self._exit, _CLOSE_SECONDS)
        with self._reading:
            self._stderr.close()

    async def _enter(self) -> None:
        # Waits for whichever comes first: the session is entered, or its task has failed.
        self._leave = asyncio.Event()
        self._task = asyncio.create_task(self._live(entered := asyncio.Event()))
        waiting = asyncio.create_task(entered.wait())
        try:
            await asyncio.wait({self._task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        # Raises what made the task fail.
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

        # No limit on reading: a tool may take long, and every call has a time limit of its own.
        http = httpx2.AsyncClient(headers=variables, timeout=httpx2.Timeout(START_SECONDS, read=None))
        await stack.enter_async_context(http)
        return mcp.Client(streamable_http_client(self._server.url, http_client=http))

    async def _tools(self) -> "tuple[types.Tool, ...]":
        assert self._client is not None
        page = await self._client.list_tools()
        found = page.tools
        while page.next_cursor is not None:
            page = await self._client.list_tools(cursor=page.next_cursor)
            found += page.tools
        return tuple(found)

    async def _exit(self) -> None:
        if self._task is None or self._leave is None:
            return
        self._leave.set()
        # Still connecting: the task does not wait for ``_leave`` yet.
        if self._client is None:
            self._task.cancel()
        # Errors are dropped: nobody waits for an answer of this server any more.
        await asyncio.gather(self._task, return_exceptions=True)


@functools.lru_cache(maxsize=256)
def listing(server: Server) -> "tuple[types.Tool, ...]":
    """List a server's tools; the server is asked once per process.

    Raises:
        UsageError: the package mcp is not installed, or the command can't be started.
        InfrastructureError: the server does not list its tools.
    """
    session = Session.begin(server)
    try:
        outcome = session.tools()
        if outcome.error is not None:
            reason = f"{_reason(outcome.error)}{session.last_words}"
            raise InfrastructureError(f"{server} does not tell its tools: {reason}") from outcome.error
    finally:
        session.close()
    return cast("tuple[types.Tool, ...]", outcome.value)


def _is_refusal(error: BaseException) -> bool:
    """Return True if ``error`` is the server's answer, False if the server did not answer."""
    from mcp import MCPError
    from mcp.types import CONNECTION_CLOSED

    return isinstance(error, MCPError) and error.code != CONNECTION_CLOSED


def _reason(error: BaseException) -> str:
    if isinstance(error, Overrun):
        return f"it took longer than {START_SECONDS:g} s"
    return str(error) or type(error).__name__


def _innermost(error: BaseException) -> BaseException:
    # anyio's task groups wrap the one error that matters in a group each.
    while isinstance(error, BaseExceptionGroup):
        error = cast(BaseExceptionGroup[BaseException], error).exceptions[0]
    return error


def shared_connection(server: Server) -> SharedConnection:
    """This process's one shared connection to a server."""
    # setdefault, because two threads that ask at once must get the same connection.
    return _shared.setdefault(server, SharedConnection(server))


class _Home:
    """The sessions of a process and their own event loop, which no user's async tool can block."""

    def __init__(self) -> None:
        self.loop = BackgroundLoop("agentrl-mcp")
        self.open: set[Session] = set()

    def close(self) -> None:
        for session in list(self.open):
            session.close()
        self.loop.close()


_homes = PerProcess(_Home, close=_Home.close, forget=lambda home: home.open.clear())
_beginning: PerProcess[threading.Lock, Server] = PerProcess(lambda _: threading.Lock())
_shared: dict[Server, SharedConnection] = {}
close_sessions = _homes.close
"""End every session of this process and the programs that were started for them."""
