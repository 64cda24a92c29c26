"""Conversations for servers that take messages and report no tokens: every character is a token of its own."""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from agentrl.render.renderer import Renderer
from agentrl.segments import Segment, Source
from agentrl.types import Message, Role

_FIRST = 0x110000
"""The first number that is no character: text can't spell what lies from here on."""
_ROLES = ("system", "user", "assistant", "tool", "tools")
_END = _FIRST + len(_ROLES)
_CALL = _END + 1
"""Stands before the name of a call that a server has read, and before its arguments."""
_LESS = r"\u003c"


class Transcript:
    """Writes messages character by character, in place of a :class:`agentrl.render.renderer.Renderer`.

    Ids are code points, and marks above them begin and end messages. Nothing here says how many tokens a model sees.

    Args:
        tools: what the server's chat template is to describe, as JSON schemas.
    """

    stop_ids = (_END,)
    """The mark that ends the assistant's turn."""
    marks: Sequence[str] = ()
    """None: every mark is text."""

    def __init__(self, tools: Sequence[Mapping[str, object]] = ()) -> None:
        self._tools = tools

    def describing(self, tools: Sequence[Mapping[str, object]], _marks: Sequence[str] = ()) -> "Transcript":
        """Return one whose prompts hold ``tools``, for the server's template to describe."""
        return Transcript(tools)

    def prompt(self, messages: Sequence[Message]) -> Segment:
        """Write the first prompt, up to where the assistant begins to speak."""
        ids = [_mark("tools"), *_ids(json.dumps(self._tools))] if self._tools else []
        ids += [token for message in messages for token in (_mark(message["role"]), *_ids(message["content"]))]
        return Segment("prompt", (*ids, _mark("assistant")))

    def extend(self, turn: Sequence[int], messages: Sequence[Message]) -> list[Segment]:
        """Write what follows a turn: its end where it was cut off, the new messages, and the next turn's beginning."""
        end = () if turn and turn[-1] == _END else (_END,)
        segments = [Segment("template", end)] if end else []
        for message in messages:
            source: Source = "tool" if message["role"] == "tool" else "prompt"
            segments += [Segment("template", (_mark(message["role"]),)), Segment(source, _ids(message["content"]))]
        return [*segments, Segment("template", (_mark("assistant"),))]

    def turn(
        self, text: str, calls: Sequence[tuple[str, str]] = (), *, ended: bool = True, answered_by: Role = "user"
    ) -> tuple[int, ...]:
        """Write what a server has said.

        Args:
            text: the text.
            calls: name and arguments, as JSON, of each call that the server has read and cut out of the text.
            ended: whether the turn has its end mark.
            answered_by: who speaks next; it changes nothing here.
        """
        written = [token for call in calls for part in call for token in (_CALL, *_ids(part))]
        return (*_ids(text), *written, *((_END,) if ended else ()))

    def text(self, turn: Sequence[int]) -> str:
        """Read a turn, without its end; calls that the server has read are written as dialect ``hermes`` does."""
        text, calls = _parts(turn)
        # In JSON a "<" stands in texts alone: escaped, it can't spell the mark that ends the call.
        bodies = (f'{{"name": {json.dumps(name)}, "arguments": {arguments}}}' for name, arguments in calls)
        blocks = [f"<tool_call>\n{body.replace('<', _LESS)}\n</tool_call>" for body in bodies]
        return "\n".join([text, *blocks] if text or not blocks else blocks)

    def decode(self, token_ids: int | list[int], **_options: object) -> str:
        """Read any ids, marks as ``<|role|>``."""
        names = [*_ROLES, "end", "call"]
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        return "".join(chr(token) if token < _FIRST else f"<|{names[token - _FIRST]}|>" for token in ids)

    def tools(self, token_ids: Sequence[int]) -> Sequence[Mapping[str, object]]:
        """Read the tools of a prompt; none where the dialect describes them in its text."""
        if token_ids[0] != _mark("tools"):
            return ()
        end = next(index for index, token in enumerate(token_ids) if index and token >= _FIRST)
        return json.loads(self.decode(list(token_ids[1:end])))

    def messages(self, token_ids: Sequence[int]) -> Iterator[dict[str, Any]]:
        """Read the messages of a prompt as chat servers take them.

        A tool's result becomes a user's message, unless it answers a call that the server itself has read.
        """
        starts = [index for index, token in enumerate(token_ids) if _FIRST <= token < _END]
        waiting = list[str]()
        for number, (start, stop) in enumerate(pairwise(starts)):
            role, ids = _ROLES[token_ids[start] - _FIRST], token_ids[start + 1 : stop]
            if role == "tools":
                continue
            content, calls = _parts(ids)
            if not all(_is_object(arguments) for _, arguments in calls):
                # Templates fail on arguments that are no JSON: the model reads them as text, and why they are wrong.
                content, calls = self.text(ids), []
            if role == "tool" and waiting:
                yield {"role": role, "tool_call_id": waiting.pop(0), "content": content}
            elif calls:
                # Mistral's template takes ids of nine letters and digits.
                waiting = [f"call{number:03}{index:02}" for index in range(len(calls))]
                tool_calls = [
                    {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
                    for call_id, (name, arguments) in zip(waiting, calls, strict=True)
                ]
                yield {"role": role, "content": content or None, "tool_calls": tool_calls}
            else:
                # Servers refuse a tool's message that answers no call of theirs: ours are written in the text.
                waiting = []
                yield {"role": "user" if role == "tool" else role, "content": content}


Writer = Renderer | Transcript
"""What writes a conversation as tokens."""


def _mark(role: str) -> int:
    return _FIRST + _ROLES.index(role)


def _ids(text: str) -> tuple[int, ...]:
    # A lone surrogate can't be sent.
    return tuple(map(ord, text.encode(errors="replace").decode()))


def _parts(ids: Sequence[int]) -> tuple[str, list[tuple[str, str]]]:
    """Return the text of a message, and the name and the arguments of each call that a server has read in it."""
    parts = [""]
    for token in ids:
        if token == _CALL:
            parts.append("")
        elif token != _END:
            parts[-1] += chr(token)
    # Some servers give an empty text for no arguments.
    return parts[0], [(name, arguments or "{}") for name, arguments in zip(parts[1::2], parts[2::2], strict=True)]


def _is_object(arguments: str) -> bool:
    try:
        return isinstance(json.loads(arguments), dict)
    except (ValueError, RecursionError):
        return False
