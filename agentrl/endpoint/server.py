"""The server that agents speak to as if it were a model's: a session for each episode, and nothing else."""

import asyncio
import contextlib
import hmac
import json
import secrets
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, cast

from agentrl.endpoint.chat import CHAT
from agentrl.endpoint.desk import Desk
from agentrl.endpoint.messages import MESSAGES
from agentrl.endpoint.responses import RESPONSES
from agentrl.endpoint.session import Options, Session
from agentrl.endpoint.wire import BadRequestError, ClientGoneError, Event, Wire, writable
from agentrl.errors import RenderError, TokenLimitError, UsageError
from agentrl.rollout.policy import Policy

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
SendMessage: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_WIRES: Mapping[str, Wire] = {"chat/completions": CHAT, "responses": RESPONSES, "messages": MESSAGES}
_COUNT = "messages/count_tokens"
_MODELS = "models"
_BODY_BYTES = 32 * 2**20
"""Largest request."""
_REQUESTS = 10_000
"""Most requests of a session."""
_PARALLEL = 64
"""Most requests of a session at a time."""
_ANSWER_S = 3600.0
"""Longest time for an answer."""
_CLOSE_S = 5.0
"""Seconds in which the answers under way must end where a session is closed."""
_JSON = [(b"content-type", b"application/json")]
_STREAM = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


@dataclass(slots=True, kw_only=True, eq=False)
class Ticket:
    """What an agent needs to reach its session."""

    name: str
    """Stands in the URL: the session's path is ``/s/NAME``."""
    key: str
    """The API key, by which alone the session can be reached too."""
    session: Session
    """The conversations."""
    asked: int = 0
    """How many requests there were."""
    running: set[asyncio.Task[Any]] = field(default_factory=set[asyncio.Task[Any]])
    """Those that are being answered."""


class Endpoint:
    """Serves sessions over HTTP on this machine, in the event loop that samples.

    Args:
        path: of a Unix socket in a folder of its own, which is removed at the end; without it the loopback interface
            is listened on.
        port: there; 0 takes a free one.
        options: how to treat what the policy can't follow.
        desk: hands the sessions out to agents that run elsewhere.
    """

    def __init__(
        self,
        path: Path | None = None,
        port: int = 0,
        options: Options | None = None,
        desk: Desk | None = None,
    ) -> None:
        self.path, self.desk = path, desk
        """Of the Unix socket."""
        self.url = ""
        """Where it listens on the loopback interface, once it has started."""
        self._port, self._options = port, options
        self._tickets = dict[str, Ticket]()
        self._server: Any = None
        self._serving: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()

    async def start(self) -> None:
        """Listen; starting twice is allowed.

        Raises:
            UsageError: uvicorn is not installed.
        """
        async with self._starting:
            if self._serving is None:
                await self._start()

    async def _start(self) -> None:
        try:
            import uvicorn
        except ModuleNotFoundError as error:
            raise UsageError("the endpoint needs uvicorn: pip install 'agentrl[endpoint]'") from error
        # By the protocol's number asyncio knows that answers are not to wait for acknowledgements.
        family, number = (socket.AF_UNIX, 0) if self.path else (socket.AF_INET, socket.IPPROTO_TCP)
        listening = socket.socket(family, socket.SOCK_STREAM, number)
        if not self.path:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(str(self.path) if self.path else ("127.0.0.1", self._port))
        if self.path:
            # Agents run as another user; the folder around it is this process's alone.
            self.path.chmod(0o666)
        else:
            self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        listening.listen(1024)
        config = uvicorn.Config(
            self._app,
            interface="asgi3",
            log_level="critical",
            lifespan="off",
            ws="none",
            access_log=False,
            proxy_headers=False,
            server_header=False,
        )
        self._server = uvicorn.Server(config)
        # Ctrl-C belongs to the run.
        self._server.capture_signals = contextlib.nullcontext
        self._serving = asyncio.create_task(self._serve(listening))
        while not self._server.started:
            await asyncio.sleep(0.01)

    async def stop(self) -> None:
        """Stop listening, and end what is being answered."""
        if self._serving is not None:
            self._server.should_exit = self._server.force_exit = True
            await self._serving
            self._serving = None

    async def _serve(self, listening: socket.socket) -> None:
        # Closed also where the event loop ends without stop().
        try:
            with listening:
                await self._server.serve(sockets=[listening])
        finally:
            if self.path:
                self.path.unlink(missing_ok=True)
                with contextlib.suppress(OSError):
                    self.path.parent.rmdir()

    def open(self, policy: Policy, dialect: str, seed: int) -> Ticket:
        """Open a session.

        Args:
            policy: samples its turns.
            dialect: name of the dialect in which the policy writes calls.
            seed: the episode's, unique over the run: call ids begin with it.
        """
        session = Session(policy, dialect, f"{seed:016x}", self._options)
        ticket = Ticket(name=secrets.token_hex(8), key=f"sk-{secrets.token_urlsafe(32)}", session=session)
        self._tickets[ticket.name] = ticket
        return ticket

    async def close(self, ticket: Ticket) -> None:
        """Close a session: its key is a stranger's from now on, and what is being sampled for it ends."""
        self._tickets.pop(ticket.name, None)
        for task in ticket.running:
            task.cancel()
        if ticket.running:
            # A client that reads nothing holds its answer up.
            await asyncio.wait(ticket.running, timeout=_CLOSE_S)

    async def _app(self, scope: Scope, receive: Receive, send: SendMessage) -> None:
        method, path = str(scope["method"]), str(scope["path"])
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        reply = _HttpReply(send)
        # Claude Code looks whether anybody is there; it names no key.
        if method == "HEAD":
            return await reply.status(200)
        if self.desk is not None and path.startswith("/sessions"):
            return await self._at_desk(self.desk, method, path, headers, receive, reply)
        name, rest = _split(path)
        wire = _WIRES.get("messages" if rest == _COUNT else rest, CHAT)
        ticket = self._ticket(name, headers)
        if ticket is None:
            return await reply.status(401, wire.error(401, "this key opens no session"))
        if rest == _MODELS and method == "GET":
            model = {"id": "policy", "object": "model", "type": "model", "created": 0, "owned_by": "agentrl"}
            return await reply.status(200, {"object": "list", "data": [model], "has_more": False})
        if method != "POST" or (rest not in _WIRES and rest != _COUNT):
            return await reply.status(404, wire.error(404, f"there is no {method} {rest[:60]} here"))
        if ticket.asked >= _REQUESTS or len(ticket.running) >= _PARALLEL:
            return await reply.status(400, wire.error(400, "this session has asked for too much"))
        ticket.asked += 1
        ticket.running.add(task := cast(asyncio.Task[Any], asyncio.current_task()))
        try:
            await self._post(ticket, wire, rest, headers, receive, reply)
        finally:
            ticket.running.discard(task)
        return None

    def _ticket(self, name: str, headers: Mapping[str, str]) -> Ticket | None:
        """Find the session that a key opens; every key is compared, in constant time."""
        key = _key(headers)
        opened = [ticket for ticket in self._tickets.values() if hmac.compare_digest(ticket.key.encode(), key.encode())]
        return next((ticket for ticket in opened if name in ("", ticket.name)), None)

    async def _at_desk(
        self, desk: Desk, method: str, path: str, headers: Mapping[str, str], receive: Receive, reply: "_HttpReply"
    ) -> None:
        """Hand out a session, or take its end."""
        name = path.removeprefix("/sessions").strip("/")
        if not (desk.opens(_key(headers)) if not name else self._ticket(name, headers)):
            return await reply.status(401, CHAT.error(401, "this key opens nothing here"))
        if method != "POST":
            return await reply.status(404, CHAT.error(404, f"there is no {method} here"))

        async def hand_out() -> None:
            task = await desk.take()
            await reply.status(204 if task is None else 200, task)

        try:
            body = await _body(receive)
            if name:
                desk.end(name, body)
                return await reply.status(200, {})
            await _unless_gone(receive, reply, hand_out())
        except ClientGoneError:
            return None
        except BadRequestError as error:
            return await reply.status(400, CHAT.error(400, str(error)))
        return None

    async def _post(
        self,
        ticket: Ticket,
        wire: Wire,
        rest: str,
        headers: Mapping[str, str],
        receive: Receive,
        reply: "_HttpReply",
    ) -> None:
        session = ticket.session
        try:
            async with asyncio.timeout(_ANSWER_S):
                request = wire.read(await _body(receive))
                if rest == _COUNT:
                    return await reply.status(200, {"input_tokens": session.count(request)})
                await _unless_gone(receive, reply, session.answer(wire, request, headers, reply))
        except ClientGoneError:
            session.counts["never delivered"] += 1
        except TokenLimitError as error:
            await reply.status(400, wire.error(400, str(error), too_long=True))
        except (BadRequestError, RenderError) as error:
            status = 413 if isinstance(error, _TooLargeError) else 400
            await reply.status(status, wire.error(status, str(error)))
        except TimeoutError:
            await reply.status(503, wire.error(503, "the answer took too long"))
        except Exception as error:
            # Whatever else has failed says nothing about the agent.
            session.fault = error
            await reply.status(500, wire.error(500, "the engine failed"))
        except asyncio.CancelledError:
            # Ended by its own retry, or by the end of the episode.
            session.counts["never delivered"] += 1
            await reply.status(503, wire.error(503, "the request was ended"))
        return None


class _TooLargeError(BadRequestError):
    """A body exceeds the limit."""


class _HttpReply:
    """Sends an answer, as a whole or as a stream."""

    def __init__(self, send: SendMessage) -> None:
        self._send, self._begun = send, False
        self.ended = False
        """True once all is sent."""
        self.gone = False
        """True once the client has hung up before that."""

    async def status(self, status: int, body: Mapping[str, Any] | None = None) -> None:
        """Send a body with a status; a stream that has begun is cut off instead."""
        # A response that is not completed has its connection closed, which its client takes for a fault.
        if self.gone or self._begun:
            return
        self._begun = True
        data = b"" if body is None else json.dumps(body).encode()
        length = [(b"content-length", str(len(data)).encode())]
        await self._send({"type": "http.response.start", "status": status, "headers": [*_JSON, *length]})
        await self._send({"type": "http.response.body", "body": data})
        self.ended = True

    async def body(self, body: Mapping[str, Any]) -> None:
        """Send a whole answer."""
        await self.status(200, body)
        self._check()

    async def events(self, events: Iterable[Event], *, last: bool = False) -> None:
        """Send events of a stream."""
        if not self._begun:
            self._begun = True
            await self._send({"type": "http.response.start", "status": 200, "headers": _STREAM})
        lines = list[str]()
        for name, data in events:
            text = data if isinstance(data, str) else json.dumps(data)
            lines.append(f"event: {name}\ndata: {text}\n\n" if name else f"data: {text}\n\n")
        await self._send({"type": "http.response.body", "body": "".join(lines).encode(), "more_body": not last})
        self.ended = last
        self._check()

    def _check(self) -> None:
        if self.gone:
            raise ClientGoneError("the client has hung up")


async def _unless_gone(receive: Receive, reply: _HttpReply, answering: Any) -> None:
    """Answer, and stop sampling where the client hangs up.

    Raises:
        ClientGoneError: it has.
    """
    answer = asyncio.create_task(answering)

    async def listen() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        # A server says so after the last message too.
        reply.gone = not reply.ended

    listening = asyncio.create_task(listen())
    try:
        await asyncio.wait([answer, listening], return_when=asyncio.FIRST_COMPLETED)
        if reply.gone and not answer.done():
            raise ClientGoneError("the client has hung up")
        await answer
    finally:
        for task in (answer, listening):
            task.cancel()
        await asyncio.wait([answer, listening])


async def _body(receive: Receive) -> Mapping[str, Any]:
    """Read a request's body.

    Raises:
        BadRequestError: it is no JSON object.
        _TooLargeError: it is larger than is allowed.
        ClientGoneError: the client hung up.
    """
    data, more = bytearray(), True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError("the client has hung up")
        data += message.get("body", b"")
        more = message.get("more_body", False)
        if len(data) > _BODY_BYTES:
            raise _TooLargeError(f"the request is larger than {_BODY_BYTES} bytes")
    try:
        body = json.loads(data)
        # A half of a surrogate pair, which no tokenizer takes, comes as an escape or as bytes of its own.
        if b"\\ud" in (lowered := bytes(data).lower()) or b"\xed" in lowered:
            body = json.loads(writable(json.dumps(body, ensure_ascii=False)))
    except (ValueError, RecursionError) as error:
        raise BadRequestError("the body is no JSON") from error
    if not isinstance(body, dict):
        raise BadRequestError("the body must be a JSON object")
    return body


def _key(headers: Mapping[str, str]) -> str:
    return headers.get("x-api-key") or headers.get("authorization", "").removeprefix("Bearer ")


def _split(path: str) -> tuple[str, str]:
    """Split a path into the session's name, which may be absent, and what follows ``/v1/``."""
    name = ""
    if path.startswith("/s/"):
        name, _, path = path.removeprefix("/s/").partition("/")
    return name, path.removeprefix("/").removeprefix("v1/")
