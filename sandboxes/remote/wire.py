"""The messages between client and server.

A session is a WebSocket connection, and ends with it: whichever side dies, the other learns it from the kernel, or from
pings that stay unanswered. No message is sent twice, so no code can run twice.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from agentrl.sandboxes.base import MIB, Limits, Result

SUBPROTOCOL: Final = "agentrl-sandbox-1"
"""Name and version of the messages below."""
MAX_BYTES: Final = 64 * MIB
"""Longest message, either way."""
CLOSE_S: Final = 2.0
"""Seconds for which the end of a connection is waited for."""

Fault = Literal["ForkRefused", "SandboxError", "ValueError", "OSError"]
"""What an answer raises at the client."""


class _Message(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", ser_json_bytes="base64", val_json_bytes="base64")


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a server runs programs with; all servers of a sandbox have the same."""

    limits: Limits
    """Limits of each session."""
    packages: tuple[str, ...]
    """Packages that programs may import beside the usual ones."""
    version: str
    """Its back end, interpreter and code."""


class Opening(BaseModel):
    """What the URL of a connection asks for."""

    model_config = ConfigDict(extra="forbid")
    seed: int = 0
    """The session's seed."""
    ticket: str | None = None
    """The fork or replay to take over, in place of a fresh session."""
    wait: bool = False
    """Wait for room where the server is full."""
    look: bool = False
    """Open no session."""


class Hello(_Message):
    """The server's first message."""

    terms: Terms
    full: bool = False
    """There is no room: the connection ends."""


class Order(_Message):
    """The client's messages. Text is sent as bytes, since half a surrogate pair is no JSON."""

    kind: Literal["run", "read", "fork", "replay"]
    code: bytes = b""
    timeout: float | None = None
    transaction: bool = True
    stdin: bytes = b""
    files: dict[str, bytes] = {}
    final: bool = False
    path: str = ""
    max_bytes: Annotated[int, Field(ge=0)] = 0


def _finite(result: Result) -> Result:
    if not all(0 <= seconds < math.inf for seconds in (result.wall_s, result.cpu_s, result.queue_s)):
        raise ValueError("seconds must be finite and not negative")
    return result


class Answer(_Message):
    """The server's answer to an order: one of result, data, ticket and error."""

    result: Annotated[Result, AfterValidator(_finite)] | None = None
    data: bytes | None = None
    ticket: str | None = None
    error: Fault | None = None
    message: Annotated[str, Field(max_length=2000)] = ""
    errno: int | None = None
