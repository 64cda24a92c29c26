"""A small MCP server for tests: ``mcp_server.py stdio``, or ``mcp_server.py http PORT``.

``mcp_server.py plain`` speaks as ``stdio`` does, without the package mcp, which takes a second to import.
"""

import asyncio
import inspect
import json
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

notes: list[str] = []


def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


def note(text: str) -> str:
    """Remember a text, and tell all that were remembered."""
    notes.append(text)
    return " | ".join(notes)


def fail(why: str) -> str:
    """Raise."""
    raise ValueError(why)


def draw() -> list[object]:
    """Return a text and an image."""
    from mcp.server.mcpserver import Image

    return ["a red dot", Image(data=b"\x89PNG", format="png")]


def long(size: int) -> str:
    """Return a long text."""
    return "x" * size


async def wait(seconds: float) -> str:
    """Wait."""
    await asyncio.sleep(seconds)
    return "waited"


def die() -> str:
    """End the server."""
    os._exit(3)


def whoami() -> str:
    """Return the process's id."""
    return str(os.getpid())


TOOLS: tuple[Callable[..., Any], ...] = (add, note, fail, draw, long, wait, die, whoami)


def describe(tool: Callable[..., Any]) -> dict[str, object]:
    types = {int: "integer", float: "number", str: "string"}
    parameters = inspect.signature(tool).parameters.values()
    properties = {parameter.name: {"type": types[parameter.annotation]} for parameter in parameters}
    required = [parameter.name for parameter in parameters if parameter.default is parameter.empty]
    schema = {"type": "object", "properties": properties, "required": required}
    return {"name": tool.__name__, "description": tool.__doc__, "inputSchema": schema}


def answer(asked: Any) -> None:
    reply: dict[str, object] = {"error": {"code": -32601, "message": "Method not found"}}
    if asked["method"] == "initialize":
        version, server = asked["params"]["protocolVersion"], {"name": "small", "version": "1"}
        reply = {"result": {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": server}}
    elif asked["method"] == "tools/list":
        reply = {"result": {"tools": [describe(tool) for tool in TOOLS]}}
    elif asked["method"] == "tools/call":
        value = globals()[asked["params"]["name"]](**asked["params"]["arguments"])
        text = str(asyncio.run(value) if inspect.iscoroutine(value) else value)
        reply = {"result": {"content": [{"type": "text", "text": text}]}}
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", "id": asked["id"], **reply}) + "\n")
    sys.stdout.flush()


def main(kind: str, *port: str) -> None:
    if kind == "plain":
        for line in sys.stdin:
            if "id" in (asked := json.loads(line)):
                threading.Thread(target=answer, args=(asked,), daemon=True).start()
        return
    from mcp.server.mcpserver import MCPServer

    server = MCPServer("small")
    for tool in TOOLS:
        server.tool(structured_output=False if tool is draw else None)(tool)
    if kind == "stdio":
        server.run("stdio")
    else:
        server.run("streamable-http", port=int(*port))


if __name__ == "__main__":
    main(*sys.argv[1:])
