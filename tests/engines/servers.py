"""A server that follows a script, and what it may say."""

import asyncio
import json
from collections.abc import Callable
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from agentrl.engines import make_engine
from agentrl.engines.base import Completion, Sampling

KEY = "sk-very-secret"
Reply = tuple[int, object]


class Fake(ThreadingHTTPServer):
    """Answers with what ``answer`` makes of a request's path and fields, and keeps the requests."""

    daemon_threads = True

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any], str]] = []
        self.answer: Callable[[str, dict[str, Any]], Reply] = lambda _path, _fields: (500, {})
        self.hangs_up = False
        """Whether it ends connections without an answer."""
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def follow(self, *replies: Reply) -> None:
        """Answer with one reply after the other."""
        left = iter(replies)
        self.answer = lambda _path, _fields: next(left)


class Handler(BaseHTTPRequestHandler):
    server: Fake

    def do_POST(self) -> None:
        fields = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, fields, self.headers["Authorization"]))
        if self.server.hangs_up:
            return
        status, reply = self.server.answer(self.path, fields)
        data = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("retry-after-ms", "1")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


def spoken(text: object, finish: str = "stop", **message: object) -> Reply:
    reply = {"role": "assistant", "content": text, **message}
    choice = {"index": 0, "finish_reason": finish, "message": reply}
    return 200, {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice],
                 "usage": {"prompt_tokens": 11, "completion_tokens": 3, "total_tokens": 14}}  # fmt: skip


def sampled(finish: str = "stop", logprobs: object = None, **more: object) -> Reply:
    choice = {"index": 0, "finish_reason": finish, "text": "", "logprobs": logprobs, **more}
    return 200, {"id": "1", "object": "text_completion", "created": 0, "model": "m", "choices": [choice]}


def ask(fake: Fake, prompt: tuple[int, ...] = (5, 6), temperature: float = 1.0, **options: Any) -> Completion:
    engine = make_engine("openai", None, {"base_url": fake.url, "model": "m", "retries": 2, **options})
    sampling = Sampling(temperature=temperature, max_tokens=8, stop_ids=(7,))
    with closing(engine):
        return asyncio.run(engine.generate(prompt, sampling, seed=2**62 + 3))
