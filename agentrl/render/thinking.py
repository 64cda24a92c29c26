"""Which part of each earlier turn a chat template shows: it is rendered with marks in place of thinking and answer.

Templates take ``<think>…</think>`` out of some earlier turns, such as all before the newest question.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from agentrl.errors import RenderError
from agentrl.render import harmony
from agentrl.render.template import ChatTemplate, Piece, Shape, Slot, shapes_of
from agentrl.types import Message

_BEGIN, _END = "<think>", "</think>"
_MARK = "Zq2x{}{}xq2Z"
_MARKS = re.compile(r"Zq2x(\d+)(thought|answer)xq2Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What a template shows of an earlier turn."""

    number: int
    """The message's index."""
    start: int
    """The character of the turn's text from which on it is shown; 0 for the whole turn."""


def drops_thinking(template: ChatTemplate) -> bool:
    """Return True if the template takes thinking out of a turn that a question follows.

    Raises:
        RenderError: the template is gpt-oss's, whose thinking is a channel of its own.
    """
    if template.lead == harmony.LEAD:
        raise RenderError("gpt-oss's thinking can't be dropped as its template does: use history = 'append'")
    turn = Shape(role="assistant", content=_marked(0, f"{_BEGIN}x{_END}x"))
    question = Shape(role="user", content="x")
    with suppress(RenderError):  # what the template refuses, such as a second question, is no reason to rewrite
        _, marks = _split(template.write((question, turn, question)))
        return (0, "thought") not in marks
    return False


def write(template: ChatTemplate, messages: Sequence[Message]) -> Iterator[Piece | Shown]:
    """Yield a conversation up to where the assistant speaks next.

    Raises:
        RenderError: the template refuses the messages, or skips, repeats or changes one.
    """
    texts, items = _rendered(template, messages)
    # White space between thinking and answer is shown as far as the text before the answer grows by it.
    bare, others = _rendered(template, messages, blanks=False)
    answers = [item[0] for item in items if not isinstance(item, Slot) and item[1] == "answer"]
    if items != others or answers != [i for i, message in enumerate(messages) if message["role"] == "assistant"]:
        raise RenderError("the chat template does not show each answer once, in order: use history = 'append'")
    whole = -1
    for text, shorter, item in zip(texts, bare, items, strict=False):
        if isinstance(item, Slot):
            yield from (text, item)
            continue
        number, part = item
        content = messages[number]["content"]
        thinking, closed, answer = content.rpartition(_END)
        opened = _opened(template, text, thinking)
        # Blank thinking has no mark, but an end. Some templates put an empty block in place of thinking.
        blank = not thinking.removeprefix(_BEGIN).strip() and _END in text.removeprefix(opened)
        if part == "thought" or (whole != number and (not closed or blank)):
            whole = number
            yield from (opened, Shown(number=number, start=0))
        elif whole != number:
            blanks = len(answer) - len(answer.lstrip()) - (len(text) - len(shorter))
            yield from (shorter, Shown(number=number, start=len(content) - len(answer) + blanks))
    yield texts[-1]


def _rendered(
    template: ChatTemplate, messages: Sequence[Message], *, blanks: bool = True
) -> tuple[list[str], list[Slot | tuple[int, str]]]:
    shapes = [
        replace(shape, content=_marked(number, messages[number]["content"], blanks=blanks))
        if shape.role == "assistant"
        else shape
        for number, shape in enumerate(shapes_of(messages))
    ]
    return _split(template.write(tuple(shapes)))


def _opened(template: ChatTemplate, text: str, thinking: str) -> str:
    """Return the template's text up to where the turn was sampled, which is shown whole."""
    before, opening, _ = text.rpartition(template.opening or "\0")
    if opening:
        return before + opening
    return text.rpartition(_BEGIN)[0] if thinking.startswith(_BEGIN) and _BEGIN in text else text


def _marked(number: int, text: str, *, blanks: bool = True) -> str:
    """Return a turn with marks in place of its thinking, unless that is blank, and of its answer."""
    thinking, closed, answer = text.rpartition(_END)
    mark = _MARK.format(number, "answer")
    if not closed:
        return mark
    begin = _BEGIN if _BEGIN in thinking else ""
    inside = thinking.rpartition(_BEGIN)[2]
    inside = _MARK.format(number, "thought") if inside.strip() else inside
    between = answer[: len(answer) - len(answer.lstrip())] if blanks else ""
    return f"{begin}{inside}{_END}{between}{mark}"


def _split(pieces: Sequence[Piece]) -> tuple[list[str], list[Slot | tuple[int, str]]]:
    """Split at slots and marks: the texts around them, one more than slots and marks, and these in order."""
    texts, items = [""], list[Slot | tuple[int, str]]()
    for piece in pieces:
        if isinstance(piece, Slot):
            items.append(piece)
            texts.append("")
            continue
        text, *rest = _MARKS.split(piece)
        texts[-1] += text
        items += [(int(number), part) for number, part in zip(rest[::3], rest[1::3], strict=True)]
        texts += rest[2::3]
    return texts, items
