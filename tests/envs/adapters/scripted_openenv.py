"""A server that speaks OpenEnv's protocol with all its traps: guess a number that follows from the seed."""

import json
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response
from websockets.sync.server import ServerConnection, serve

ACTION = {
    "description": "A guess.",
    "type": "object",
    "properties": {"number": {"type": "integer"}, "metadata": {"type": "object"}},
    "required": ["number"],
    "additionalProperties": False,
}
RAISES, BREAKS, HANGS, CHATTERS, OVERPAYS, PAYS_NAN, CLOSES, LEAVES = range(101, 109)
"""Guesses on which the server fails in some way."""


def secret(seed: int) -> int:
    return 1 + seed % 20


class Scripted:
    """The server's rules, which a test may change."""

    url = ""
    schema: object = {"action": ACTION}
    on_reset: object = None
    """What it sends in place of an observation."""
    opening = "Guess my number, from 1 to 20."

    def __init__(self) -> None:
        self.sessions, self.capacity, self.resets = 0, 8, list[dict[str, Any]]()
        self.hanging = threading.Event()

    def answer_http(self, connection: ServerConnection, request: Request) -> Response | None:
        if request.path == "/ws":
            return None
        body = json.dumps(self.schema).encode()
        return Response(HTTPStatus.OK, "OK", Headers({"Content-Length": str(len(body))}), body)

    def play(self, socket: ServerConnection) -> None:
        if self.sessions >= self.capacity:
            # The close code is that of a session which has ended well.
            send(socket, "error", message="no room", code="CAPACITY_REACHED", active_sessions=1, max_sessions=1)
            return
        self.sessions += 1
        seed = 0
        try:
            for text in socket:
                message = json.loads(text)
                if message["type"] == "reset":
                    self.resets.append(message["data"])
                    seed = message["data"]["seed"]
                    if self.on_reset == "close":
                        return
                    if self.on_reset is not None:
                        socket.send(json.dumps(self.on_reset))
                        continue
                    observe(socket, self.opening)
                elif not self.step(socket, message["data"], secret(seed)):
                    return
        except ConnectionClosed:
            pass
        finally:
            self.sessions -= 1

    def step(self, socket: ServerConnection, action: dict[str, Any], right: int) -> bool:
        """Answer an action; False where the session ends."""
        match action.get("number"):
            case int(number) if number == RAISES:
                send(socket, "error", message="division by zero", code="EXECUTION_ERROR")
            case int(number) if number == BREAKS:
                send(socket, "error", message="can't serialize ValueError", code="SESSION_ERROR")
                return False
            case int(number) if number == HANGS:
                self.hanging.wait()
            case int(number) if number == CHATTERS:
                observe(socket, "x" * (17 << 20))
            case int(number) if number in (CLOSES, LEAVES):
                socket.close(1000 if number == CLOSES else 1012)
                return False
            case int(number) if number == OVERPAYS:
                observe(socket, "well done", 1_000_000, done=True)
            case int(number) if number == PAYS_NAN:
                observe(socket, "well done", float("nan"), done=True)
            case int(number):
                won = number == right
                observe(socket, "right" if won else "wrong", 1 if won else None, done=won)
            case _:
                error = {"type": "int_parsing", "loc": ["number"], "msg": "should be an integer", "input": "x"}
                send(socket, "error", message="Invalid message", code="VALIDATION_ERROR", errors=[error])
        return True


def send(socket: ServerConnection, kind: str, **data: object) -> None:
    socket.send(json.dumps({"type": kind, "data": data}))


def observe(socket: ServerConnection, text: str, reward: float | None = None, *, done: bool = False) -> None:
    observation = {"text": text, "metadata": {"step": 1}}
    send(socket, "observation", observation=observation, reward=reward, done=done, metadata={"step": 1})


@contextmanager
def serving() -> Generator[Scripted]:
    """Serve in threads of this process."""
    rules = Scripted()
    with serve(rules.play, "127.0.0.1", 0, process_request=rules.answer_http, ping_interval=None) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        rules.url = f"http://127.0.0.1:{server.socket.getsockname()[1]}"
        try:
            yield rules
        finally:
            rules.hanging.set()
            server.shutdown()
            thread.join()
