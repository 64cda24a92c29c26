"""Sessions with MCP servers: their begin, calls and end, and the connections that share them."""

import asyncio
import contextlib
import functools
import tempfile
import threading
from concurrent.futures import Future
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO, cast

from agentrl.errors import InfrastructureError, UsageError
from agentrl.processes.per_process import PerProcess
from agentrl.toolenv.tools.timed import Overrun, shared_loop

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
    """The session that the tools of one ``mcp_tools`` call share, opened at first use.

    Args:
        server: the session's server.
        shared: all episodes of this process share the session, and any thread may call. Else each episode has its own.
    """

    def __init__(self, server: Server, shared: bool = False) -> None:
        self._server = server
        self._shared = shared
        self._session: McpSession | None = None

    def __reduce__(self) -> tuple[object, ...]:
        # A copy for another instance is the same object where it is shared; unpickled in another process, it is that
        # process's own. Else the copy begins a session of its own.
        return shared_connection if self._shared else Connection, (self._server,)

    def call(self, name: str, arguments: dict[str, object], timeout: float) -> "Future[types.CallToolResult]":
        """Call a tool; the ended call's exception is the server's refusal or ``Overrun``.

        Raises:
            InfrastructureError: the server is gone.
        """
        session = self._ready()
        call = session.call(name, arguments, timeout)
        error = call.exception()
        if error is None or isinstance(error, Overrun) or _is_refusal(error):
            return call
        raise InfrastructureError(f"{self._server} is gone: {_reason(error)}{session.close()}") from error

    def end_episode(self) -> None:
        """Close the session, so that the next episode begins another; a shared one stays open."""
        if self._session is not None and not self._shared:
            self._session.close()

    def _ready(self) -> "McpSession":
        # Two threads that come at once must not begin two shared sessions.
        with _beginning.get(self._server) if self._shared else contextlib.nullcontext():
            if self._session is None or not self._session.is_open:
                self._session = McpSession.begin(self._server)
            return self._session


class McpSession:
    """One session. A single task on the shared loop enters and leaves it, as anyio's cancel scopes demand."""

    def __init__(self, server: Server) -> None:
        self._server = server
        # Before the set of sessions: at exit, what was made later is closed first.
        self._loop = shared_loop()
        self._open_sessions = _sessions.get()
        self._stderr = cast(TextIO, tempfile.TemporaryFile("w+", errors="replace"))  # noqa: SIM115 (closed in close)
        self._last_words = ""
        self._client: mcp.Client | None = None
        self._leave = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @classmethod
    def begin(cls, server: Server) -> "McpSession":
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
        session._open_sessions.add(session)
        error = session._loop.call(session._enter, START_SECONDS).exception()
        if error is None:
            return session
        last_words = session.close()
        if isinstance(error, FileNotFoundError | PermissionError | NotADirectoryError):
            raise UsageError(f"{server} can't be started: {error}") from error
        raise InfrastructureError(f"{server} does not answer: {_reason(error)}{last_words}") from error

    @property
    def is_open(self) -> bool:
        """True until it is closed or its loop is given up; in a forked child none of the parent's sessions is open."""
        return self in self._open_sessions and not self._loop.closed

    def call(self, name: str, arguments: dict[str, object], timeout: float) -> "Future[types.CallToolResult]":
        """Call a tool."""
        client = self._client
        assert client is not None, "begin returns no session that has not been entered"
        return self._loop.call(lambda: client.call_tool(name, arguments), timeout)

    def tools(self) -> "Future[tuple[types.Tool, ...]]":
        """List all tools."""
        return self._loop.call(self._tools, START_SECONDS)

    def close(self) -> str:
        """Leave the session, and wait until the program that was started is gone.

        Returns:
            The end of the program's standard error, to be appended to a sentence.
        """
        try:
            self._open_sessions.remove(self)
        except KeyError:  # it was closed before, perhaps by another thread, or is the parent's
            return self._last_words
        # A loop that is closed has cancelled the task, or will when nothing blocks the loop any more.
        if not self._loop.closed:
            self._loop.call(self._exit, _CLOSE_SECONDS)
        with self._stderr as file:
            file.seek(0)
            if words := file.read().strip()[-_STDERR_CHARS:]:
                self._last_words = f"; its last words: {words}"
        return self._last_words

    async def _enter(self) -> None:
        entered = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._live(entered))
        await asyncio.wait({self._task, entered}, return_when=asyncio.FIRST_COMPLETED)
        if not entered.done():
            self._task.result()  # raises what made the task fail

    async def _live(self, entered: asyncio.Future[None]) -> None:
        try:
            async with AsyncExitStack() as stack:
                self._client = await stack.enter_async_context(await self._make_client(stack))
                entered.set_result(None)
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
        tools = page.tools
        while page.next_cursor is not None:
            page = await self._client.list_tools(cursor=page.next_cursor)
            tools += page.tools
        return tuple(tools)

    async def _exit(self) -> None:
        if self._task is None:
            return
        self._leave.set()
        # Still connecting: the task does not wait for ``_leave`` yet.
        if self._client is None:
            self._task.cancel()
        # Errors are dropped: nobody waits for an answer of this server any more.
        await asyncio.gather(self._task, return_exceptions=True)


@functools.lru_cache(maxsize=256)
def list_tools(server: Server) -> "tuple[types.Tool, ...]":
    """List a server's tools; the server is asked once per process.

    Raises:
        UsageError: the package mcp is not installed, or the command can't be started.
        InfrastructureError: the server does not list its tools.
    """
    session = McpSession.begin(server)
    try:
        call = session.tools()
    finally:
        last_words = session.close()
    if (error := call.exception()) is not None:
        raise InfrastructureError(f"{server} does not list its tools: {_reason(error)}{last_words}") from error
    return call.result()


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


def shared_connection(server: Server) -> Connection:
    """Return this process's one shared connection to a server."""
    # setdefault, because two threads that ask at once must get the same connection.
    return _connections.setdefault(server, Connection(server, shared=True))


def _close_all(sessions: set[McpSession]) -> None:
    for session in list(sessions):
        session.close()


_sessions: PerProcess[set[McpSession]] = PerProcess(set, close=_close_all, forget=set.clear)
_beginning: PerProcess[threading.Lock, Server] = PerProcess(lambda _: threading.Lock())
_connections: dict[Server, Connection] = {}
close_sessions = _sessions.close
"""End every session of this process and the programs that were started for them."""
