"""Passes connections to a port of the loopback interface on to a socket of the host, where an agent asks for its turns.

It needs nothing of agentrl: in the container of a task its text is run by the container's own Python.
"""

import asyncio
import os
import socket
import sys
from contextlib import suppress

HOLE = "/run/agentrl.sock"
"""Where the host's socket appears."""
WORK = "/tmp/agent"
"""The agent's own folder."""
_CHUNK = 1 << 16


def listen(port: int) -> socket.socket:
    """Listen on a port of the loopback interface."""
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.bind(("127.0.0.1", port))
    listening.listen(256)
    return listening


def relay(listening: socket.socket) -> None:
    """Pass each connection on to the host's socket, for ever; one that can't be is closed."""

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(_CHUNK):
                writer.write(data)
                await writer.drain()
        # Whoever hangs up on one side hangs up on the other.
        writer.close()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_unix_connection(HOLE)
        except OSError:
            writer.close()
            return
        await asyncio.gather(copy(reader, far_writer), copy(far_reader, writer))

    async def serve() -> None:
        server = await asyncio.start_server(connect, sock=listening)
        await server.serve_forever()

    asyncio.run(serve())


def main() -> None:
    """Listen, and relay in a process of its own: this one ends as soon as agents can connect."""
    listening = listen(int(sys.argv[1]))
    if os.fork() == 0:
        os.setsid()
        relay(listening)


if __name__ == "__main__":
    main()
