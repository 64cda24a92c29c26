"""A chat template as text and slots: it is rendered with marks in place of the contents, and split at the marks.

No content passes through the template, so none can steer it. A second rendering shows what the template does to
contents, such as trimming; the slot then does the same.

Some templates raise at a system message, a tool's result or two messages of one role in a row, or skip one. For them,
all messages between two of the assistant's turns become one user message, with a blank line between the texts.
"""

import contextlib
import datetime
import functools
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from agentrl.errors import ConfigError, RenderError, nearest
from agentrl.render import harmony
from agentrl.render.tokens import ChatTokenizer
from agentrl.types import Message, Role

_MARK = "Zq0x{}xq0Z"
_MARKS = re.compile(r"Zq0x(\d+)xq0Z")
# White space around a content, removed where the template trims. Neither is a rotation of the other. Else it would be
# unclear which of the two remains where the template itself writes white space.
_LEFT, _RIGHT = "\n ", "\t "
_CHANGED = (
    "the chat template does not write every message's content once, in order, as it is: set tokenizer.chat_template to "
    "one that does"
)
_OURS = {"messages", "tools", "documents", "add_generation_prompt", "strftime_now", "raise_exception"}
"""Variables that the renderer sets, not the user."""
_TODAY = datetime.datetime(2025, 1, 1)
"""The date for templates that ask for one, fixed so that a run resumed tomorrow shows the same prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A message as the template sees it."""

    role: Role
    """The speaker."""
    content: str | None = None
    """A fixed text; None makes the content a slot."""
    name: str = ""
    """The tool's name."""
    call_id: str = ""
    """The call that a tool's result answers."""
    calls: str = ""
    """The tool that an assistant's turn calls."""
    count: int = 1
    """The number of these calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A place for a message's content."""

    number: int
    """The message's index."""
    trim_left: bool = False
    """True if the template strips leading white space."""
    trim_right: bool = False
    """True if the template strips trailing white space."""
    quoted: bool = False
    """True if the template writes the content as a JSON string; the quotes belong to the template."""

    def fill(self, content: str) -> str:
        """Return the text that the template would write for ``content``."""
        content = content.lstrip() if self.trim_left else content
        content = content.rstrip() if self.trim_right else content
        return json.dumps(content, ensure_ascii=False)[1:-1] if self.quoted else content


Piece = str | Slot
_Row = dict[str, object]
_RowsOf = Callable[[Sequence[Shape]], list[_Row]]
_QUESTION: _Row = {"role": "user", "content": "x"}
_BEGUN = (Shape(role="user", content="x"), Shape(role="assistant"))
"""The shortest conversation in which the assistant has spoken."""
# Templates differ in the variable that holds the thinking: all names are set, and each reads its own.
_THOUGHT, _SAID, _CALLED = (_MARK.format(number) for number in range(3))
_THINKING = dict.fromkeys(("reasoning_content", "reasoning", "thinking"), _THOUGHT)
_CALL = {"type": "function", "id": "call00000", "function": {"name": _CALLED, "arguments": {}}}
_TOOL = "Zq1xcall"
"""The name of a tool that is called, where the text after its calls is wanted."""
_TURNS: Sequence[_Row] = (
    {"content": _SAID, **_THINKING},
    {"content": f"<think>{_THOUGHT}</think>{_SAID}"},
    {"content": [{"type": "thinking", "thinking": _THOUGHT}, {"type": "text", "text": _SAID}]},
    {"content": "", "tool_calls": [_CALL], **_THINKING},
    {"content": _SAID, "tool_calls": [_CALL]},
)
"""Turns with more than one part, in the forms that templates take; only the last one has no thinking."""


class Refusal(RenderError):
    """The template raised, or skipped a message."""


def shapes_of(messages: Sequence[Message]) -> tuple[Shape, ...]:
    """Strip the messages of their contents.

    Only an empty content is kept, since templates may write other text around it.
    """
    return tuple(_shape(message, number) for number, message in enumerate(messages))


class ChatTemplate:
    """A tokenizer's chat template.

    Args:
        tokenizer: has the template.
        args: further variables of the template, such as ``enable_thinking``.
        tools: schemas of the tools that it is to describe; of named templates they choose ``tool_use``.

    Raises:
        ConfigError: the template has no such variable.
    """

    def __init__(
        self, tokenizer: ChatTokenizer, args: Mapping[str, object], tools: Sequence[Mapping[str, object]] = ()
    ) -> None:
        self._tokenizer = tokenizer
        # Without tools, ``tools`` is not set: even an empty list would choose the named template ``tool_use``.
        self._args = {"strftime_now": _TODAY.strftime, **args, **({"tools": list(tools)} if tools else {})}
        self.write = functools.lru_cache(maxsize=256)(self._write)
        # Any word of the source counts as a variable: enough to catch a typo, without parsing Jinja.
        words = set(re.findall(r"[A-Za-z_]\w*", str(tokenizer.chat_template))) - _OURS
        for name in args:
            if name not in words:
                raise ConfigError(f"the chat template has no variable {name!r} to set; {nearest(name, words)}")

    @functools.cached_property
    def opening(self) -> str:
        """The generation prompt, which opens the assistant's turn; empty where the template has none."""
        closed, opened = (self._render([_QUESTION], opened=opened) for opened in (False, True))
        return opened.removeprefix(closed) if opened.startswith(closed) else ""

    @functools.cached_property
    def lead(self) -> str:
        """Text between the generation prompt and a past turn's content: white space, or harmony's channel."""
        prompt, (before, _) = self._render([_QUESTION]), self._around_turn()
        lead = before.removeprefix(prompt)
        return lead if before.startswith(prompt) and (lead.isspace() or lead == harmony.LEAD) else ""

    @functools.cached_property
    def closing(self) -> str:
        """Text after a turn that nobody answers."""
        return self._around_turn(opened=False)[1]

    def _around_turn(self, *, opened: bool = True) -> tuple[str, str]:
        """Render a question and a turn; return the text before the turn's content and the text after it."""
        turn = {"role": "assistant", "content": _MARK.format(0)}
        before, _, after = self._render([_QUESTION, turn], opened=opened).partition(_MARK.format(0))
        return before, after

    def inside_turns(self) -> Iterator[str]:
        """Yield the template's text inside a turn: after thinking and, where it describes tools, before a call."""
        for turn in _TURNS if "tools" in self._args else _TURNS[:-1]:
            with contextlib.suppress(Refusal):  # a form that this template does not take
                text = self._render([_QUESTION, {"role": "assistant", **turn}], opened=False)
                yield from _split(text)[0][1:-1]

    def after_turn(self, shapes: tuple[Shape, ...]) -> tuple[Piece, ...]:
        """Render what follows the assistant's turn when ``shapes`` answer it, up to where the assistant speaks again.

        It is the text after the first turn of a conversation.

        Raises:
            RenderError: the template refuses the messages, or skips, repeats or changes one.
        """
        if "tools" in self._args and shapes and shapes[0].role == "tool" and (called := self._after_calls(shapes)):
            return called
        pieces = self.write((*_BEGUN, *shapes))
        turn = next(index for index, piece in enumerate(pieces) if isinstance(piece, Slot))
        return _renumbered(pieces[turn + 1 :])

    def _after_calls(self, shapes: tuple[Shape, ...]) -> tuple[Piece, ...]:
        """Render what follows a turn that calls, where the template takes results only after its own calls.

        Returns:
            Nothing where it takes them after any turn too, or where such a turn ends otherwise than others.
        """
        with contextlib.suppress(Refusal):
            self._read((*_BEGUN, *(replace(shape, content=None) for shape in shapes)), _as_they_are)
            return ()
        count = sum(1 for _ in itertools.takewhile(lambda shape: shape.role == "tool", shapes))
        turn = replace(_BEGUN[1], content="", calls=_TOOL, count=count)
        # A slot at least stands behind the calls: the results, or what follows them.
        with contextlib.suppress(RenderError, ValueError):
            calls, *others = self._read((_BEGUN[0], turn, *shapes), _as_they_are)
            text, end = str(calls), self.closing.strip()
            return _renumbered((text[text.index(end, text.rindex(_TOOL)) :], *others)) if end else ()
        return ()

    def after_call(self, shapes: tuple[Shape, ...]) -> tuple[Piece, ...]:
        """Render what follows a turn of harmony's that calls a tool, when ``shapes`` answer it.

        Raises:
            RenderError: as of :meth:`after_turn`.
        """
        turn = Shape(role="assistant", content="", calls=shapes[0].name)
        call, *others = self.write((_BEGUN[0], turn, *shapes))
        return _renumbered((str(call).rpartition(harmony.CALL)[2], *others))

    def check_turns(self, shapes: tuple[Shape, ...]) -> None:
        """Check that the template does not number its messages.

        The texts after the second and the third turn are compared. So a template may announce the first tool's output
        of a conversation in words of its own.

        Raises:
            RenderError: the text after the second turn differs from that after the third.
        """
        second, third = (self._text_after(shapes, turns) for turns in (1, 2))
        if second is not None and third is not None and second != third:
            raise RenderError(
                "the chat template counts: what it writes changes from turn to turn "
                f"({_differing(second, third)}); set tokenizer.chat_template to one that writes every turn alike"
            )

    def _text_after(self, shapes: tuple[Shape, ...], turns: int) -> str | None:
        played = [replace(shape, content="x") for shape in (Shape(role="assistant"), *shapes)] * turns
        conversation = (_BEGUN[0], *played, _BEGUN[1], *shapes)
        try:
            text = self._render(_as_they_are(_with_contents(conversation, _mark)))
        except Refusal:  # templates that insist on turns of user and assistant refuse a second tool call
            return None
        return _MARKS.sub("...", text.partition(_MARK.format(len(played) + 1))[2])

    def _write(self, shapes: tuple[Shape, ...]) -> tuple[Piece, ...]:
        """Render a conversation as text and slots, up to where the assistant speaks.

        Raises:
            RenderError: the template refuses the messages, or skips, repeats or changes one.
        """
        # A skipped message with empty content has no mark that would be missing, so every content is tried as a slot.
        as_slots = tuple(shape if shape.role == "assistant" else replace(shape, content=None) for shape in shapes)
        try:
            if as_slots != shapes:
                self._read(as_slots, _as_they_are)
            return self._read(shapes, _as_they_are)
        except Refusal as refusal:
            try:
                return self._read(shapes, _folded)
            except Refusal:
                # The first refusal is about the messages as the user knows them.
                raise refusal from None

    def _read(self, shapes: Sequence[Shape], rows_of: _RowsOf) -> tuple[Piece, ...]:
        slots = [number for number, shape in enumerate(shapes) if shape.content is None]
        texts, marks = _split(self._render(rows_of(_with_contents(shapes, _mark))))
        # Marks missing but in order: the template skipped messages, which folding may cure, unlike other faults.
        if marks != slots:
            raise (Refusal if marks == [slot for slot in slots if slot in marks] else RenderError)(_CHANGED)
        padded, twice = _split(self._render(rows_of(_with_contents(shapes, _padded_mark))))
        if twice != [number for number in slots for _ in range(2)]:
            raise RenderError(_CHANGED)
        pieces = itertools.chain.from_iterable(zip(texts, _make_slots(slots, texts, padded), strict=False))
        return tuple(piece for piece in (*pieces, texts[-1]) if piece != "")

    def _render(self, messages: Sequence[Mapping[str, object]], *, opened: bool = True) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=opened, **self._args
            )
        except Exception as error:  # templates raise whatever their author chose
            reason = " ".join(str(error).split())
            remedy = "set tokenizer.chat_template to one that takes them"
            raise Refusal(f"the chat template refuses these messages: {reason}; {remedy}") from error
        return str(text)


def _shape(message: Message, number: int) -> Shape:
    content = None if message["content"] else ""
    if message["role"] != "tool":
        return Shape(role=message["role"], content=content, name=_plain(message.get("name", "")))
    call_id = message.get("tool_call_id", "")
    # The strictest templates demand nine letters and digits.
    call_id = call_id if re.fullmatch("[A-Za-z0-9]{9}", call_id) and not _MARKS.search(call_id) else f"call{number:05d}"
    return Shape(role="tool", content=content, name=_plain(message.get("name", "")), call_id=call_id)


def _plain(name: str) -> str:
    # The model wrote the name, and it passes through the template: it must not spell a control token or a mark.
    return name if re.fullmatch(r"[\w.-]{0,64}", name) and not _MARKS.search(name) else "unknown"


def _mark(number: int, _shape: Shape) -> str:
    return _MARK.format(number)


def _padded_mark(number: int, shape: Shape) -> str:
    """Return a content that shows whether the template trims or quotes it.

    The assistant's has no white space to trim, since sampled tokens stay as they are.
    """
    mark = _MARK.format(number)
    return f'{mark}"{mark}' if shape.role == "assistant" else f'{_LEFT}{mark}"{mark}{_RIGHT}'


def _with_contents(shapes: Sequence[Shape], write: Callable[[int, Shape], str]) -> list[Shape]:
    """Return the shapes with ``write``'s contents in place of slots."""
    numbered = enumerate(shapes)
    return [replace(shape, content=write(i, shape)) if shape.content is None else shape for i, shape in numbered]


def _message(shape: Shape) -> _Row:
    row: _Row = {"role": shape.role, "content": shape.content}
    row |= {"name": shape.name} if shape.name else {}
    if shape.calls:
        row["tool_calls"] = [{"type": "function", "function": {"name": shape.calls, "arguments": {}}}] * shape.count
    return row | ({"tool_call_id": shape.call_id} if shape.call_id else {})


def _as_they_are(shapes: Sequence[Shape]) -> list[_Row]:
    return [_message(shape) for shape in shapes]


def _folded(shapes: Sequence[Shape]) -> list[_Row]:
    """Join all messages between two of the assistant's turns into one user message."""
    rows: list[_Row] = []
    for assistant, side in itertools.groupby(shapes, lambda shape: shape.role == "assistant"):
        if assistant:
            rows += map(_message, side)
        else:
            rows.append({"role": "user", "content": "\n\n".join(shape.content for shape in side if shape.content)})
    return rows


def _split(text: str) -> tuple[list[str], list[int]]:
    """Split at the marks: the texts around them, one more than marks, and the marks' numbers."""
    parts = _MARKS.split(text)
    return parts[::2], [int(part) for part in parts[1::2]]


def _make_slots(numbers: Sequence[int], texts: Sequence[str], padded: Sequence[str]) -> list[Slot]:
    """Find out what the template does to each content, in order.

    Args:
        numbers: the messages' indices.
        texts: the texts around the contents.
        padded: the texts around and inside of the padded marks, alternating.

    Raises:
        RenderError: the template does something else than trimming or quoting.
    """
    # Between the two marks of a content is one quotation mark, which JSON escapes.
    quoted = [{'"': False, '\\"': True}.get(inside) for inside in padded[1::2]]
    trims: list[tuple[bool, bool]] = []
    # Each text has the padding of the content before it and of the one after it, or lacks what was trimmed.
    for index, (text, with_padding) in enumerate(zip(texts, padded[::2], strict=True)):
        lefts = _forms(_RIGHT, quoted[index - 1]) if index else [""]
        rights = _forms(_LEFT, quoted[index]) if index < len(quoted) else [""]
        match = [(left, right) for left in lefts for right in rights if left + text + right == with_padding]
        if not match or None in quoted:
            raise RenderError(_CHANGED)
        trims.append((not match[0][0], not match[0][1]))
    return [
        Slot(number=number, trim_left=trims[index][1], trim_right=trims[index + 1][0], quoted=bool(quoted[index]))
        for index, number in enumerate(numbers)
    ]


def _forms(blanks: str, quoted: bool | None) -> list[str]:
    return [json.dumps(blanks)[1:-1] if quoted else blanks, ""]


def _renumbered(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """Number the slots from the first message after ``_BEGUN``."""
    return tuple(p if isinstance(p, str) else replace(p, number=p.number - len(_BEGUN)) for p in pieces)


def _differing(*texts: str) -> str:
    """Quote two texts from where they differ, short enough for a sentence."""
    start = next((i for i, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), 0)
    return " and ".join(repr(text[max(0, start - 10) : start + 20]) for text in texts)
