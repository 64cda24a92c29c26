"""Where agents that run elsewhere ask for a session, and say when they are done."""

import asyncio
import hmac
from collections.abc import Mapping
from typing import Any

from agentrl.endpoint.wire import BadRequestError
from agentrl.sandboxes.agents import AgentRun

_WAIT_S = 20.0
"""Seconds for which a request for a session waits where there is none."""


class Desk:
    """Hands sessions out to agents, and takes their ends.

    Args:
        key: the run's key, which opens the desk.
    """

    def __init__(self, key: str) -> None:
        self._key = key
        self._waiting = asyncio.Queue[tuple[str, Mapping[str, Any], asyncio.Event]]()
        self._ends = dict[str, asyncio.Future[AgentRun]]()

    def opens(self, key: str) -> bool:
        """Return True if the key is the run's, in constant time."""
        return hmac.compare_digest(self._key.encode(), key.encode())

    async def offer(self, name: str, task: Mapping[str, Any], seconds: float) -> AgentRun:
        """Offer a session until an agent takes it, and wait for its end.

        Args:
            name: of the session.
            task: what the agent is told.
            seconds: wall seconds that the agent has.
        """
        taken, self._ends[name] = asyncio.Event(), asyncio.get_running_loop().create_future()
        await self._waiting.put((name, task, taken))
        try:
            await taken.wait()
            async with asyncio.timeout(seconds):
                return await self._ends[name]
        except TimeoutError:
            return AgentRun(status="timeout", code=0, output="", files={})
        finally:
            del self._ends[name]

    async def take(self) -> Mapping[str, Any] | None:
        """Return the next session's task; None where there is none for a while."""
        while True:
            try:
                async with asyncio.timeout(_WAIT_S):
                    name, task, taken = await self._waiting.get()
            except TimeoutError:
                return None
            # Its episode may have been cancelled meanwhile.
            if name in self._ends:
                taken.set()
                return task

    def end(self, name: str, body: Mapping[str, Any]) -> None:
        """End a session.

        Raises:
            BadRequestError: the body is no account of an end, or the session has ended.
        """
        code, output, files = body.get("code", 0), body.get("output", ""), body.get("files", {})
        readable = isinstance(files, dict) and all(isinstance(text, str) for text in files.values())
        if type(code) is not int or not isinstance(output, str) or not readable:
            raise BadRequestError("an end has a code, a whole number, an output, a text, and files, texts by name")
        if name not in self._ends or self._ends[name].done():
            raise BadRequestError("this session has ended already")
        data = {str(path): text.encode("utf-8", "replace") for path, text in files.items()}
        self._ends[name].set_result(AgentRun(status="exit", code=code, output=output, files=data))
