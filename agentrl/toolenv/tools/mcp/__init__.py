"""The tools of an MCP server: a program that is started here and spoken to over its pipes, or a server at a URL.

Every environment instance has a session of its own for each episode, from the episode's first call to its end. So no
episode sees state of another, as far as the server keeps it by session. A program is started anew for each session,
which costs its start-up time; a server at a URL is yours to run and serves all sessions, which share whatever it keeps
beyond them. The list of tools is asked for once per process.

With ``shared=True`` all episodes of this process share one session, from the first call of any of them to the end of
the process or to :func:`close_sessions`: right for a server without state, such as a search.

Not covered: a started program runs with the rights of this process, in no sandbox.
"""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import pydantic_core

from agentrl.errors import UsageError
from agentrl.toolenv.tools.function import ToolContext, ToolError, check_limits, cut_middle
from agentrl.toolenv.tools.mcp.sessions import Connection, Server, close_sessions, list_tools, shared_connection
from agentrl.toolenv.tools.timed import Overrun

if TYPE_CHECKING:
    from mcp import types

__all__ = ["McpTool", "close_sessions", "mcp_tools"]

_PYDANTIC_LINK = re.compile(r"\n[ \t]*For further information visit https://errors\.pydantic\.dev\S*")


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
    """Make all tools of an MCP server, for ``tools`` of an environment.

    Args:
        command: starts a server that is spoken to over its standard input and output, such as
            ``["python", "server.py"]``.
        url: of a running server that speaks streamable HTTP, such as ``"http://localhost:8000/mcp"``.
        env: variables for the command; of this process's own it gets only a few, such as PATH and HOME.
        headers: of every request to the URL.
        timeout: seconds per call.
        max_chars: characters of a result that the model reads; a longer one is cut in the middle.
        shared: all episodes of this process share one session, also those played side by side in threads, and those of
            other environments that use the same server. The order of their calls differs from run to run, so the server
            must keep no state that a call changes.

    Raises:
        UsageError: the package mcp is not installed, not exactly one of ``command`` and ``url`` is given, or the
            command can't be started.
        ConfigError: a limit is too small.
        InfrastructureError: the server does not list its tools.
    """
    if isinstance(command, str) or bool(command) == bool(url):
        raise UsageError("give mcp_tools either a command, as a list of words, or a url")
    check_limits("mcp_tools", timeout, max_chars)
    variables = (env if command else headers) or {}
    server = Server(command=tuple(command), url=url, variables=tuple(sorted(variables.items())))
    connection = shared_connection(server) if shared else Connection(server)
    return tuple(McpTool(listed, connection, timeout=timeout, max_chars=max_chars) for listed in list_tools(server))


class McpTool:
    """One tool of an MCP server; :func:`mcp_tools` makes them."""

    def __init__(self, listed: "types.Tool", connection: Connection, *, timeout: float, max_chars: int) -> None:
        self.name = listed.name
        self.description = (listed.description or "").strip()
        self.parameters: Mapping[str, object] = listed.input_schema
        self.timeout = timeout
        self.max_chars = max_chars
        self._connection = connection

    def call(self, arguments: Mapping[str, object], ctx: ToolContext | None = None) -> str:
        """Call the tool on the server, which checks the arguments.

        Raises:
            ToolError: the arguments are no JSON, the call took too long, or the server reports a failure.
            InfrastructureError: the server is gone.
        """
        try:
            # Through JSON and back, as the server will read them: a value that JSON can't hold is the model's mistake.
            plain = pydantic_core.from_json(pydantic_core.to_json(dict(arguments), inf_nan_mode="null"))
        except ValueError as error:
            raise ToolError(f"the arguments of {self.name} can't be written as JSON") from error
        call = self._connection.call(self.name, plain, self.timeout)
        if isinstance(error := call.exception(), Overrun):
            raise ToolError(f"stopped: {self.name} ran longer than {self.timeout:g} s") from error
        if error is not None:
            raise ToolError(cut_middle(str(error), self.max_chars)) from error
        result = call.result()
        text = _text(result)
        # A server's argument errors end with links to pydantic's documentation, which the model can't open.
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
            # Anything but text is base64, which is of no use to the model.
            content = part.resource.model_dump()
            return str(content.get("text", f"(file {part.resource.uri}, not shown)"))
