"""The tools of an MCP server: a program that is started here and spoken to over its pipes, or a server at a URL.

Every environment instance has a session of its own, which lasts one episode: it begins with the episode's first call
and ends when the episode does. So no episode sees what another left behind, as far as a server keeps that by session. A
program is started anew for each session, which costs what its start costs; a server at a URL is yours to run, serves
all sessions, and what it keeps beyond them is shared. The list of tools is asked for once per process.

With ``shared=True`` there is one session for all episodes of this process, begun with the first call of any of them and
ended with the process or by :func:`close_sessions`: right for a server that only answers, such as a search.

Not covered: a started program runs with the rights of this process, in no sandbox.
"""

import asyncio
import atexit
import functools
import os
import re
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TextIO, cast

import pydantic_core

from agentrl.background import BackgroundLoop, Outcome, Overrun
from agentrl.errors import ConfigError, InfrastructureError, UsageError
from agentrl.tools import MIN_CHARS, ToolContext, ToolError, cut_middle

if TYPE_CHECKING:
    import mcp
    from mcp import types

START_SECONDS = 60.0
"""How long a server may take until it has told its tools, or begun a session."""
_CLOSE_SECONDS = 15.0
_STDERR_CHARS = 500
_PYDANTIC_LINK = re.compile(r"\n[ \t]*For further information visit https://errors\.pydantic\.dev\S*")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Server:
    """How to reach a server; equal ones have the same tools."""

    command: tuple[str, ...]
    url: str
    variables: tuple[tuple[str, str], ...]
    """Of the environment of a command, or headers of the requests to a URL."""

    def __str__(self) -> str:
        return f"MCP server {self.url or ' '.join(self.command)!r}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Listed:
    """What a server says of one of its tools."""

    name: str
    description: str
    parameters: Mapping[str, object] = field(hash=False)


def mcp_tools(
    command: Sequence[str] = (),
    *,
    url: str = "",
    env: Mapping[str, str] | None = None,
    headers: Mapping[str, str] | None = None,
    timeout: float = 30.0,
    max_chars: int = 2000,
    shared: bool = False,
) -> "tuple[McpTool, ...]":
    """All tools of an MCP server, for ``tools`` of an environment.

    Args:
        command: starts a server that is spoken to over its standard input and output, such as
            ``["python", "server.py"]``.
        url: of a server that runs already and speaks streamable HTTP, such as ``"http://localhost:8000/mcp"``.
        env: variables for the command; of this process's own it gets only a few, such as PATH and HOME.
        headers: of every request to the URL.
        timeout: seconds per call.
        max_chars: characters of a result that the model gets to read; more is cut in the middle.
        shared: all episodes of this process share one session, also those that are played side by side in threads, and
            also those of other environments that ask for the same server. What one episode leaves in the server the
            others find there, in no order that is the same twice; so the server must keep nothing that a call changes.

    Raises:
        UsageError: the package mcp is not installed, not exactly one of ``command`` and ``url`` is given, or the
            command can't be started.
        ConfigError: a limit is too small.
        InfrastructureError: the server does not tell its tools.
    """
    if isinstance(command, str) or bool(command) == bool(url):
        raise UsageError("give mcp_tools either a command, as a list of words, or a url")
    if not timeout > 0 or max_chars < MIN_CHARS:
        raise ConfigError(
            f"mcp_tools got timeout={timeout} and max_chars={max_chars}: use more than 0 seconds and at least "
            f"{MIN_CHARS} characters"
        )
    variables = (env if command else headers) or {}
    server = _Server(command=tuple(command), url=url, variables=tuple(sorted(variables.items())))
    connection = _shared_connection(server) if shared else _Connection(server)
    return tuple(McpTool(listed, connection, timeout=timeout, max_chars=max_chars) for listed in _listing(server))


class McpTool:
    """One tool of an MCP server; :func:`mcp_tools` makes them."""

    def __init__(self, listed: _Listed, connection: "_Connection", *, timeout: float, max_chars: int) -> None:
        self.name = listed.name
        self.description = listed.description
        self.parameters = listed.parameters
        self.timeout = timeout
        self.max_chars = max_chars
        self._connection = connection

    def call(self, arguments: Mapping[str, object], ctx: ToolContext | None = None) -> str:
        """Call the tool on the server, which checks the arguments.

        Raises:
            ToolError: the arguments are no JSON, the call took too long, or the server says that it failed.
            InfrastructureError: the server is gone.
        """
        try:
            given = pydantic_core.from_json(pydantic_core.to_json(dict(arguments), inf_nan_mode="null"))
        except ValueError as error:
            raise ToolError(f"the arguments of {self.name} can't be written as JSON") from error
        outcome = self._connection.call(self.name, given, self.timeout)
        if isinstance(outcome.error, Overrun):
            raise ToolError(f"stopped: {self.name} ran longer than {self.timeout:g} s") from outcome.error
        if outcome.error is not None:
            raise ToolError(cut_middle(str(outcome.error), self.max_chars)) from outcome.error
        result = cast("types.CallToolResult", outcome.value)
        text = _text(result)
        if result.is_error:
            raise ToolError(cut_middle(_PYDANTIC_LINK.sub("", text) or f"{self.name} failed", self.max_chars))
        return cut_middle(text, self.max_chars)

    def open(self, seed: int) -> None:
        """Begin an episode: the next call gets a new session, unless all episodes share one."""
        self._connection.end_episode()

    def close(self) -> None:
        """End the session, and the program that was started for it, unless all episodes share it."""
        self._connection.end_episode()


def _text(result: "types.CallToolResult") -> str:
    if not result.content and result.structured_content is not None:
        return pydantic_core.to_json(result.structured_content).decode()
    return "\n".join(_part(part) for part in result.content) or "(no output)"


def _part(part: "types.ContentBlock") -> str:
    match part.type:
        case "text":
            return part.text
        case "image" | "audio":
            return f"({part.type} of type {part.mime_type}, not shown)"
        case "resource_link":
            return f"({part.name}: {part.uri})"
        case "resource":
            # What is not text is base64, of no use to a reader.
            content = part.resource.model_dump()
            return str(content.get("text", f"(file {part.resource.uri}, not shown)"))


class _Connection:
    """The session that the tools of one ``mcp_tools`` share; opened when it is needed."""

    def __init__(self, server: _Server) -> None:
        self._server = server
        self._session: _Session | None = None

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

    def _ready(self) -> "_Session":
        if self._session is None or not self._session.is_open:
            self._session = _Session.begin(self._server)
        return self._session


class _SharedConnection(_Connection):
    """The session of all episodes of this process; any thread may call."""

    def __init__(self, server: _Server) -> None:
        super().__init__(server)
        self.beginning = threading.Lock()

    def __reduce__(self) -> tuple[object, ...]:
        # A copy for another instance is the same one; another process makes its own.
        return _shared_connection, (self._server,)

    def end_episode(self) -> None:
        """The others go on."""

    def _ready(self) -> "_Session":
        with self.beginning:
            return super()._ready()


class _Session:
    """One session, which a single task on the background loop enters and leaves."""

    def __init__(self, server: _Server) -> None:
        self._server = server
        self._stderr = cast(TextIO, tempfile.TemporaryFile("w+", errors="replace"))  # noqa: SIM115 (closed in close)
        self._client: mcp.Client | None = None
        self._leave: asyncio.Event | None = None
        self._task: asyncio.Task[None] | None = None
        self._reading = threading.Lock()
        self._said = ""

    @classmethod
    def begin(cls, server: _Server) -> "_Session":
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

    async def _tools(self) -> tuple[_Listed, ...]:
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
            _Listed(name=one.name, description=(one.description or "").strip(), parameters=one.input_schema)
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
def _listing(server: _Server) -> tuple[_Listed, ...]:
    session = _Session.begin(server)
    try:
        outcome = session.tools()
        if outcome.error is not None:
            reason = f"{_reason(outcome.error)}{session.last_words}"
            raise InfrastructureError(f"{server} does not tell its tools: {reason}") from outcome.error
    finally:
        session.close()
    return cast(tuple[_Listed, ...], outcome.value)


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


def _shared_connection(server: _Server) -> _SharedConnection:
    with _lock:
        return _shared.setdefault(server, _SharedConnection(server))


_lock = threading.Lock()
_open: set[_Session] = set()
_shared: dict[_Server, _SharedConnection] = {}
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
