"""An answer on its way: what the policy has said so far, sent while it is sampled."""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any, Protocol

from agentrl.endpoint.turns import Spoken, readable_lines
from agentrl.endpoint.wire import Answer, Event, Writer
from agentrl.toolenv.dialects import Dialect

_ALIVE_S = 20.0
"""Seconds without news after which a stream sends an empty delta: clients hang up after 300 of them."""
_LOOK_S = 0.2
"""Seconds between two looks at what a turn has said so far."""


class Reply(Protocol):
    """Where an answer is sent to; each method raises ``ClientGoneError`` if nobody reads it any more."""

    async def body(self, body: Mapping[str, Any]) -> None:
        """Send a whole answer."""
        ...

    async def events(self, events: Iterable[Event], *, last: bool = False) -> None:
        """Send events of a stream, the first of which begin it."""
        ...


class Speech:
    """Listens to the tokens of one turn, ends it at a stop text, and streams what it says.

    Args:
        dialect: reads the turn.
        stop: texts at which the turn ends.
        read: decodes tokens of a turn.
        reply: where the stream is sent to.
        writer: writes the stream; None where the answer is sent whole.
        begins: how the turn begins before its first token: a call that it must make, or thinking that is open.
    """

    def __init__(
        self,
        dialect: Dialect,
        stop: tuple[str, ...],
        read: Callable[[list[int]], str],
        reply: Reply,
        writer: Writer | None,
        begins: str = "",
    ) -> None:
        self.stopped_by: str | None = None
        """The stop text that has ended the turn."""
        self._dialect, self._stop, self._read, self._reply, self._writer = dialect, stop, read, reply, writer
        # A token decodes to at least one character, but for parts of one: four bytes at most.
        self._window = 4 * max(map(len, stop), default=0) + 8
        self._token_ids, self._sent = list[int](), Spoken(thinking="", text="", calls=())
        self._task = asyncio.create_task(self._speak(writer)) if writer is not None else None
        self._begins, self._begun, self._writing = begins, False, asyncio.Lock()

    def hear(self, token: int) -> bool:
        """Take the next token; return True if the turn ends with it."""
        self._token_ids.append(token)
        if self._stop:
            recent = self._read(self._token_ids[-self._window :])
            ended = (text for text in self._stop if text in recent)
            self.stopped_by = min(ended, key=recent.rfind, default=None)
        return self.stopped_by is not None

    def cut(self, text: str) -> str:
        """Return a turn's text up to the stop text that has ended it."""
        return text if self.stopped_by is None else text[: text.rfind(self.stopped_by)]

    async def end(self, answer: Answer, whole: Callable[[Answer], Mapping[str, Any]]) -> Answer:
        """Send the rest of the answer, or all of it; return it as it was sent."""
        # Not within a write, of which a part would be lost.
        async with self._writing:
            await self.close()
        if self._writer is None:
            await self._reply.body(whole(answer))
            return answer
        # What was sent stays sent, even where the end of the turn makes something else of it.
        sent = self._sent
        thinking = answer.thinking if not sent.text and answer.thinking.startswith(sent.thinking) else sent.thinking
        text = answer.text if answer.text.startswith(sent.text) else sent.text + answer.text
        answer = replace(answer, thinking=thinking, text=text)
        await self._more(self._writer, thinking, text)
        await self._write(self._writer, self._writer.end(answer), last=True)
        return answer

    async def close(self) -> None:
        """Stop streaming."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _speak(self, writer: Writer) -> None:
        heard, news_at = 0, time.monotonic()
        while True:
            await asyncio.sleep(_LOOK_S)
            if len(self._token_ids) > heard:
                heard = len(self._token_ids)
                # The end of the text may be a part of a stop text.
                text = self._begins + self._read(self._token_ids)
                spoken = readable_lines(self._dialect, text[: len(text) - max(map(len, self._stop), default=0)])
                async with self._writing:
                    if await self._more(writer, spoken.thinking, spoken.text):
                        news_at = time.monotonic()
            if time.monotonic() - news_at > _ALIVE_S:
                async with self._writing:
                    await self._write(writer, writer.text("") if self._sent.text else writer.thinking(""))
                news_at = time.monotonic()

    async def _more(self, writer: Writer, thinking: str, text: str) -> bool:
        """Send what is new; return True if anything is."""
        sent = self._sent
        # Thoughts behind a text that was sent can't be sent any more: a stream has them first.
        thinking = sent.thinking if sent.text else thinking
        if not (thinking.startswith(sent.thinking) and text.startswith(sent.text)):
            return False
        if thought := thinking[len(sent.thinking) :]:
            await self._write(writer, writer.thinking(thought))
        if spoken := text[len(sent.text) :]:
            await self._write(writer, writer.text(spoken))
        self._sent = Spoken(thinking=thinking, text=text, calls=())
        return bool(thought or spoken)

    async def _write(self, writer: Writer, events: Iterable[Event], *, last: bool = False) -> None:
        # Begun late, so that a history without room for an answer is an error with a status of its own.
        begin = () if self._begun else writer.begin()
        self._begun = True
        await self._reply.events(chain(begin, events), last=last)
