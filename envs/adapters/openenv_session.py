"""A session with an OpenEnv server: JSON messages over its WebSocket, without a package of theirs.

What the server sends is parsed strictly. A fault that the agent's action can cause is a ``ToolError``, which the agent
reads. Everything else, such as a server that is gone, is an ``InfrastructureError``.
"""

import json
import urllib.request
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from http.client import HTTPException
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import pydantic_core
from pydantic import BaseModel, ConfigDict, Field, JsonValue, TypeAdapter

from agentrl.errors import InfrastructureError, UsageError
from agentrl.toolenv.tools.function import ToolError, cut_middle

if TYPE_CHECKING:
    from websockets.sync.client import ClientConnection

_MAX_BYTES = 1 << 24
"""Limit of a message, either way; uvicorn's own limit is the same."""
_TOO_BIG = 1009
_LEAVING = (1001, 1012, 1013)
"""Codes by which a server closes whatever was asked: it goes away, starts again, or is overloaded."""
_CLOSE_SECONDS = 2.0
_CONTROL_SECONDS = 30.0
"""In which a server answers whose action takes too long, or else the server is at fault."""
_MAX_CHARS = 500
"""Characters of an error that are quoted."""


class SessionLost(ToolError):
    """The agent's action cost the session, while the server works: the episode is over."""


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class Observed(_Part):
    """What a reset or a step has shown."""

    observation: dict[str, JsonValue]
    reward: bool | float | None
    """None where the server says nothing, which is not a 0."""
    done: bool
    metadata: dict[str, JsonValue] | None = None

    @property
    def text(self) -> str:
        """The observation for the agent: a single field alone, several as JSON."""
        seen = {key: value for key, value in self.observation.items() if key not in ("metadata", "done", "reward")}
        shown = next(iter(seen.values())) if len(seen) == 1 else seen
        return shown if isinstance(shown, str) else json.dumps(shown, ensure_ascii=False)


class _Complaint(BaseModel):
    loc: list[str | int]
    msg: str


class _Failure(BaseModel):
    message: str
    code: str
    errors: list[_Complaint] = []

    def __str__(self) -> str:
        # "Invalid message" is all that the message says: the reasons are beside it.
        reasons = [f"{'.'.join(map(str, complaint.loc))}: {complaint.msg}" for complaint in self.errors]
        return cut_middle(": ".join([self.message, *(["; ".join(reasons)] if reasons else [])]), _MAX_CHARS)


class _Observation(_Part):
    type: Literal["observation"]
    data: Observed


class _Error(_Part):
    type: Literal["error"]
    data: _Failure


_Answer = TypeAdapter[_Observation | _Error](Annotated[_Observation | _Error, Field(discriminator="type")])


class _Action(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    type: Literal["object"]
    properties: dict[str, dict[str, JsonValue]]


class _Schema(BaseModel):
    action: _Action


def action_schema(url: str, seconds: float) -> dict[str, JsonValue]:
    """Return the JSON schema of the server's actions.

    Raises:
        InfrastructureError: the server can't be reached, or names no action of fields.
    """
    try:
        with urllib.request.urlopen(f"{url}/schema", timeout=seconds) as answer:
            schema = _Schema.model_validate_json(answer.read(_MAX_BYTES)).action.model_dump()
    except (OSError, HTTPException, ValueError) as error:
        raise InfrastructureError(f"{url}/schema does not answer with an action's schema: {error}") from error
    # It is for the server's own notes, and the agent has none.
    schema["properties"].pop("metadata", None)
    return schema


class Session:
    """One episode's connection.

    Args:
        url: of the server, such as ``http://localhost:8000``.
        seconds: wall time of an answer.

    Raises:
        UsageError: the package websockets is missing.
        InfrastructureError: the server can't be reached.
    """

    def __init__(self, url: str, seconds: float) -> None:
        try:
            from websockets.exceptions import WebSocketException
            from websockets.sync.client import connect
        except ModuleNotFoundError as error:
            raise UsageError("OpenEnv servers need the package websockets: pip install 'agentrl[openenv]'") from error
        self._url, self._seconds = url, seconds
        self._stack = ExitStack()
        try:
            self._socket: ClientConnection = self._stack.enter_context(
                # No pings: a step that keeps the server busy would end the connection before its own limit.
                connect(
                    f"ws{url.removeprefix('http')}/ws",
                    open_timeout=seconds,
                    close_timeout=_CLOSE_SECONDS,
                    ping_interval=None,
                    max_size=_MAX_BYTES,
                )
            )
        except (OSError, WebSocketException) as error:
            raise InfrastructureError(f"the OpenEnv server at {url} can't be reached: {error}") from error

    def reset(self, arguments: Mapping[str, JsonValue]) -> Observed:
        """Begin the episode.

        Raises:
            InfrastructureError: the server fails.
        """
        try:
            answer = self._exchange("reset", arguments)
        except TimeoutError as error:
            raise InfrastructureError(f"the OpenEnv server at {self._url} resets nothing in time") from error
        return answer if isinstance(answer, Observed) else self._fail(answer)

    def step(self, action: Mapping[str, object]) -> Observed:
        """Take an action.

        Raises:
            ToolError: the server refuses it, or fails on it.
            SessionLost: it has cost the session.
            InfrastructureError: the server fails on its own.
        """
        try:
            answer = self._exchange("step", action)
        except TimeoutError as error:
            action_schema(self._url, _CONTROL_SECONDS)  # raises where the server answers nobody
            raise SessionLost(f"the action took longer than {self._seconds:g} s, and the episode is over") from error
        if isinstance(answer, Observed):
            return answer
        match answer.code:
            case "VALIDATION_ERROR" | "EXECUTION_ERROR":
                raise ToolError(str(answer))
            # The server ends so where it can't even write down what is wrong with the action.
            case "SESSION_ERROR":
                raise SessionLost(f"the action has ended the episode: {answer}")
            case _:
                self._fail(answer)

    def close(self) -> None:
        """End the session."""
        self._stack.close()

    def _exchange(self, kind: str, data: Mapping[str, object]) -> Observed | _Failure:
        from websockets.exceptions import ConnectionClosed

        try:
            text = pydantic_core.to_json({"type": kind, "data": data}, inf_nan_mode="null")
        except ValueError as error:
            raise ToolError("the action can't be written as JSON") from error
        if len(text) > _MAX_BYTES:
            raise ToolError("the action is too long")
        try:
            # A server that refuses the session says so, and closes: that can be read after a failed send.
            with suppress(ConnectionClosed):
                self._socket.send(text.decode())
            return _Answer.validate_json(self._socket.recv(timeout=self._seconds)).data
        except TimeoutError:
            raise
        except ConnectionClosed as error:
            if kind == "step" and error.sent is not None and error.sent.code == _TOO_BIG:
                raise SessionLost("the action's answer is too long, and the episode is over") from error
            if kind == "step" and error.rcvd is not None and error.rcvd.code not in _LEAVING:
                action_schema(self._url, _CONTROL_SECONDS)  # raises where the server answers nobody
                raise SessionLost("the server has closed the session, and the episode is over") from error
            raise InfrastructureError(f"the OpenEnv server at {self._url} has ended the session: {error}") from error
        except (OSError, ValueError) as error:
            raise InfrastructureError(f"the OpenEnv server at {self._url} answers wrongly: {error}") from error

    def _fail(self, failure: _Failure) -> NoReturn:
        remedy = ""
        if failure.code == "CAPACITY_REACHED":
            remedy = ": let it have more (max_concurrent_envs), or lower rollout.concurrency"
        raise InfrastructureError(f"the OpenEnv server at {self._url} reports {failure.code}, {failure}{remedy}")
