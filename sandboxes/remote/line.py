"""A client's connection to a server of sandboxes, which any thread may cut."""

import math
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from urllib.parse import urlencode

from pydantic import ValidationError

from agentrl.sandboxes.base import SandboxError, SandboxUnavailable
from agentrl.sandboxes.remote.address import KEY, missing
from agentrl.sandboxes.remote.wire import CLOSE_S, MAX_BYTES, SUBPROTOCOL, Answer, Hello, Opening, Order, Terms

if TYPE_CHECKING:
    from websockets.sync.client import ClientConnection

OPEN_S: Final = 20.0
"""In which a server must answer at first."""
_RETRY_S: Final = 15.0
"""For which a server that failed is left out."""
_PING_S: Final = 30.0
"""Between two pings, and for the answer to one: a server that is silent for twice as long has failed."""


class FullError(SandboxError):
    """The server has no room."""


@dataclass(slots=True, kw_only=True)
class Server:
    """One server, as its client sees it."""

    url: str
    """Where it is, as ``ws`` or ``wss``."""
    fault: str = ""
    """How it failed; empty where it works."""
    until: float = -math.inf
    """Left out until then, on the monotonic clock."""

    def leave_out(self, fault: str) -> None:
        """Note how it failed, and for how long it is left out."""
        self.fault, self.until = fault, time.monotonic() + _RETRY_S


class Line:
    """A connection to one server."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._stack = ExitStack()
        self._connection: ClientConnection | None = None
        self._cut = False

    def open(self, key: str, opening: Opening, seconds: float = OPEN_S) -> Terms:
        """Connect, and wait so many seconds for a session.

        Raises:
            FullError: The server has no room.
            SandboxUnavailable: It refuses the key, or the package websockets is missing.
            SandboxError: It can't be reached.
        """
        try:
            from websockets.exceptions import InvalidStatus, WebSocketException
            from websockets.sync.client import connect
            from websockets.typing import Subprotocol
        except ModuleNotFoundError as error:
            raise missing() from error
        # Others don't wait for a server that may be dead still.
        if self.server.fault:
            self.server.leave_out(self.server.fault)
        try:
            self._connection = self._stack.enter_context(
                connect(
                    f"{self.server.url}/?{urlencode(opening.model_dump(exclude_none=True))}",
                    additional_headers={"Authorization": f"Bearer {key}"},
                    subprotocols=[Subprotocol(SUBPROTOCOL)],
                    compression=None,
                    proxy=None,
                    open_timeout=OPEN_S,
                    close_timeout=CLOSE_S,
                    ping_interval=_PING_S,
                    ping_timeout=_PING_S,
                    max_size=MAX_BYTES,
                )
            )
            # Another thread may have cut it while it was made.
            if self._cut:
                self.cut()
            hello = Hello.model_validate_json(self._connection.recv(timeout=seconds))
        except InvalidStatus as error:
            fault = self._failed(error)
            if error.response.status_code == 401:
                message = f"the sandbox server {self.server.url} refuses the key: set {KEY} to the server's"
                raise SandboxUnavailable(message) from error
            raise fault from error
        except (OSError, WebSocketException, ValueError) as error:
            if opening.wait and isinstance(error, TimeoutError):
                raise FullError from error
            raise self._failed(error) from error
        self.server.fault, self.server.until = "", -math.inf
        if hello.full:
            raise FullError
        return hello.terms

    def ask(self, order: Order, part: Callable[[Answer], object], seconds: float) -> Answer:
        """Send an order and wait so many seconds for an answer that has this part, or an error.

        Raises:
            SandboxError: The server, or the way to it, has failed.
            ValueError: The order is too long to be sent.
        """
        from websockets.exceptions import WebSocketException

        assert self._connection is not None, "it is open"
        if len(text := order.model_dump_json()) > MAX_BYTES:
            raise ValueError(f"code, files and standard input must be shorter than {MAX_BYTES} bytes as JSON")
        try:
            self._connection.send(text)
            answer = Answer.model_validate_json(self._connection.recv(timeout=seconds))
            if answer.error is None and part(answer) is None:
                raise ValueError("it answers wrongly")
        except (OSError, WebSocketException, ValueError) as error:
            raise self._failed(error) from error
        return answer

    def cut(self) -> None:
        """End the connection, without waiting for the server; a call that waits for it raises."""
        self._cut = True
        if self._connection is not None:
            with suppress(OSError):
                self._connection.socket.shutdown(socket.SHUT_RDWR)
        self._stack.close()

    def _failed(self, error: Exception) -> SandboxError:
        """Leave the server out for a while, unless this side ended the connection."""
        # The words of an invalid answer are the server's own.
        why = "it answers wrongly" if isinstance(error, ValidationError) else str(error) or type(error).__name__
        if not self._cut:
            self.server.leave_out(why)
        return SandboxError(f"the sandbox server {self.server.url} has failed: {why}")
