"""Conversations for servers that take messages and tell no tokens: every character is a token of its own."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from agentrl.render.renderer import Renderer
from agentrl.types import Message, Segment, Source

_FIRST = 0x110000
"""The first number that is no character: text can't spell what lies from here on."""
_ROLES = ("system", "user", "assistant", "tool")
_END = _FIRST + len(_ROLES)


class Transcript:
    """Writes messages character by character, in place of a :class:`agentrl.render.renderer.Renderer`.

    Ids are code points, and marks above them begin and end messages. Nothing here says how many tokens a model sees.
    """

    stop_ids = (_END,)
    """The mark that ends the assistant's turn."""

    def describing(self, _tools: Sequence[Mapping[str, object]], _marks: Sequence[str] = ()) -> "Transcript":
        """Return itself: no template describes tools."""
        return self

    def prompt(self, messages: Sequence[Message]) -> Segment:
        """Write the first prompt, up to where the assistant begins to speak."""
        ids = [one for message in messages for one in (_mark(message["role"]), *_ids(message["content"]))]
        return Segment("prompt", (*ids, _mark("assistant")))

    def extend(self, turn: Sequence[int], messages: Sequence[Message]) -> list[Segment]:
        """Write what follows a turn: its end where it was cut off, the new messages, and the next turn's beginning."""
        end = () if turn and turn[-1] == _END else (_END,)
        segments = [Segment("template", end)] if end else []
        for message in messages:
            source: Source = "tool" if message["role"] == "tool" else "prompt"
            segments += [Segment("template", (_mark(message["role"]),)), Segment(source, _ids(message["content"]))]
        return [*segments, Segment("template", (_mark("assistant"),))]

    def turn(self, text: str, *, whole: bool) -> tuple[int, ...]:
        """Write what a server has said, with its end where it is ``whole``."""
        return (*_ids(text), *((_END,) if whole else ()))

    def text(self, turn: Sequence[int]) -> str:
        """Read a turn, without its end."""
        return self.decode([one for one in turn if one != _END])

    def decode(self, token_ids: int | list[int], **_options: object) -> str:
        """Read any ids, marks as ``<|role|>``."""
        names = [*_ROLES, "end"]
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        return "".join(chr(one) if one < _FIRST else f"<|{names[one - _FIRST]}|>" for one in ids)

    def messages(self, token_ids: Sequence[int]) -> Iterator[dict[str, str]]:
        """Read the messages of a prompt as chat servers take them; what tools say is said by the user."""
        starts = [at for at, one in enumerate(token_ids) if _FIRST <= one < _END]
        for start, stop in pairwise(starts):
            role = _ROLES[token_ids[start] - _FIRST]
            # Servers refuse a tool's message that answers no call of theirs: ours are written in the text.
            yield {"role": "user" if role == "tool" else role, "content": self.text(token_ids[start + 1 : stop])}


Writer = Renderer | Transcript
"""What writes a conversation as tokens."""


def _mark(role: str) -> int:
    return _FIRST + _ROLES.index(role)


def _ids(text: str) -> tuple[int, ...]:
    # A lone surrogate can't be sent.
    return tuple(map(ord, text.encode(errors="replace").decode()))
