"""A small MCP server for tests: ``mcp_server.py stdio``, or ``mcp_server.py http PORT``."""

import asyncio
import os
import sys

from mcp.server.mcpserver import Image, MCPServer

server = MCPServer("small")
notes: list[str] = []


@server.tool()
def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def note(text: str) -> str:
    """Remember a text, and tell all that were remembered."""
    notes.append(text)
    return " | ".join(notes)


@server.tool()
def fail(why: str) -> str:
    """Raise."""
    raise ValueError(why)


@server.tool(structured_output=False)
def draw() -> list[object]:
    """Give a text and an image."""
    return ["a red dot", Image(data=b"\x89PNG", format="png")]


@server.tool()
def long(size: int) -> str:
    """Give a long text."""
    return "x" * size


@server.tool()
async def wait(seconds: float) -> str:
    """Wait."""
    await asyncio.sleep(seconds)
    return "waited"


@server.tool()
def die() -> str:
    """End the server."""
    os._exit(3)


@server.tool()
def whoami() -> str:
    """Tell the process's id."""
    return str(os.getpid())


if __name__ == "__main__":
    if sys.argv[1] == "stdio":
        server.run("stdio")
    else:
        server.run("streamable-http", port=int(sys.argv[2]))
