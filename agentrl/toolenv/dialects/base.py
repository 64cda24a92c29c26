"""The base class of dialects: it finds calls outside of thinking, checks what it writes, and has a hash."""

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from agentrl.errors import DialectError
from agentrl.toolenv.dialects.bodies import Form, describe
from agentrl.toolenv.dialects.reading import UnreadableCall
from agentrl.toolenv.tools.function import Tool
from agentrl.types import ToolCall

THINKING = "(?P<think><think>)"
"""Part of every dialect's ``opening``, so that a call or a block of thinking wins, whichever begins earlier."""
THINK_TAG = "</?think>"
"""Escaped in arguments by dialects that can write a text in several ways."""
_THINK_END = "</think>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A stretch of an assistant's text."""

    kind: Literal["text", "thinking", "call"]
    """What it is."""
    text: str
    """It, without the tags of thinking, and with the marks of a call."""
    calls: tuple[ToolCall, ...] = ()
    """The calls in it, without ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A stretch of text that one opening begins."""

    end: int
    """The position where reading continues."""
    calls: tuple[ToolCall, ...] = ()
    """The calls in it, without ids; none where the block only looks like a call."""


class Dialect(ABC):
    r"""A way to write tool calls as text.

    Text inside ``<think>…</think>``, or after a ``<think>`` that stays open, holds no calls. Some chat templates open
    the block themselves: where the first ``</think>`` has no ``<think>`` before it, everything before it is thinking. A
    ``<think>`` inside a call belongs to the call.

    A dialect of your own defines ``opening``, ``read_block`` and ``write_call``, perhaps ``describe_tools``, and is
    registered by ``agentrl.register_dialect``. ``self.tools`` maps each tool's name to its name, description and JSON
    schema.

    Example:
        >>> class Slash(Dialect):
        ...     "A line ``/name {…}``."
        ...
        ...     opening = re.compile(rf"{THINKING}|^/(?P<name>[\w-]+) (?P<arguments>.*)$", re.MULTILINE)
        ...
        ...     def read_block(self, text, opening):
        ...         try:
        ...             call = ToolCall(name=opening["name"], arguments=read_object(opening["arguments"]))
        ...         except UnreadableCall as error:
        ...             call = malformed(str(error), opening["name"])
        ...         return Block(end=opening.end(), calls=(call,))
        ...
        ...     def write_call(self, name, arguments):
        ...         return f"/{name} {write_json(dict(arguments))}"
        >>> register_dialect("slash", Slash)

    Args:
        tools: the tools whose calls are read and written.

    Raises:
        EnvContractError: a tool's parameters are not JSON.
    """

    name: ClassVar[str] = ""
    """The name in the table of dialects; ``register_dialect`` sets it."""
    form: ClassVar[int] = 1
    """Version of how calls are read and written; part of the hash."""
    native: ClassVar[bool] = False
    """True if the chat template describes the tools, so that the system message does not."""
    marks: ClassVar[tuple[str, ...]] = ("<think>", "</think>")
    """Marks that are single tokens of models taught this dialect; a renderer writes the turns of ``gold`` with them."""
    opening: re.Pattern[str]
    """Matches the beginning of a call or, as the group ``think``, of a block of thinking."""

    def __init__(self, tools: Sequence[Tool] = ()) -> None:
        self.tools = {tool.name: Form.of(tool) for tool in tools}

    @property
    def template_tools(self) -> tuple[Mapping[str, object], ...]:
        """The tools' JSON schemas for the chat template where it describes them; else empty."""
        return tuple(tool.schema for tool in self.tools.values()) if self.native else ()

    @property
    def hash(self) -> str:
        """Hash of all that the agent's behaviour depends on: name, form, tools and instructions [16 hex digits]."""
        tools = [tool.schema for tool in self.tools.values()]
        text = json.dumps([self.name, self.form, tools, self.instructions()], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def label(self) -> str:
        """Name and hash, as a run records them."""
        return f"{self.name} {self.hash}"

    def instructions(self) -> str:
        """Describe the tools and how to call them; empty where the chat template does."""
        return "" if self.native or not self.tools else self.describe_tools()

    def parse(self, text: str) -> tuple[ToolCall, ...]:
        """Return the calls in the assistant's ``text``, in order; a text without one is a final answer. Never raises.

        A call that can't be read has an ``error`` in words for the model.
        """
        calls = (call for piece in self.pieces(text) for call in piece.calls)
        return tuple(replace(call, id=f"call_{number}") for number, call in enumerate(calls))

    def pieces(self, text: str) -> Iterator[Piece]:
        """Cut the assistant's ``text`` into what it says, thinks and calls, in order. Never raises."""
        position = _after_opened_thinking(text)
        if position:
            yield Piece(kind="thinking", text=text[:position].removesuffix(_THINK_END))
        start = position
        while (opening := self.opening.search(text, position)) is not None:
            if opening["think"] is not None:
                end, kind, calls = _after(text.find(_THINK_END, opening.end()), text), "thinking", ()
                inside = text[opening.end() : end].removesuffix(_THINK_END)
            else:
                block = self.read_block(text, opening)
                # A dialect's own read_block may return any end: the loop has to advance all the same.
                end, kind, calls = max(block.end, position + 1), "call", block.calls
                inside = text[opening.start() : end]
            if calls or kind == "thinking":
                yield Piece(kind="text", text=text[start : opening.start()])
                yield Piece(kind=kind, text=inside, calls=calls)
                start = end
            position = end
        yield Piece(kind="text", text=text[start:])

    def render(self, name: str, arguments: Mapping[str, object]) -> str:
        """Write a call of tool ``name`` that ``parse`` reads back as the same call.

        Raises:
            DialectError: that is impossible, such as for a text that holds the mark of a call's end, or for an argument
                that is no JSON value.
        """
        try:
            text = self.write_call(name, arguments)
        except (TypeError, ValueError, RecursionError) as error:
            raise DialectError(f"dialect {self.name} can't write this call of {name!r}: {error}") from error
        # Read back at once: a warm start must never teach a call that the environment reads differently.
        if self.parse(text) != (ToolCall(name=name, arguments=arguments, id="call_0"),):
            raise DialectError(
                f"dialect {self.name} can't write this call of {name!r}: it would be read as another one; use other "
                "arguments, or the dialect hermes, which writes every JSON value"
            )
        return text

    @abstractmethod
    def read_block(self, text: str, opening: re.Match[str]) -> Block:
        """Read the block that ``opening`` begins; its end lies after the opening."""

    @abstractmethod
    def write_call(self, name: str, arguments: Mapping[str, object]) -> str:
        """Write a call as text.

        Raises:
            TypeError: an argument has no text form.
            ValueError: likewise.
        """

    def describe_tools(self) -> str:
        """Write the instructions, by default with an example for each tool; only called where there is one."""
        return "\n".join(describe(tool, self.write_call) for tool in self.tools.values())


def _after_opened_thinking(text: str) -> int:
    # The chat template may have opened the block in the prompt: then the turn's text holds its end alone.
    end = text.find(_THINK_END)
    return 0 if end < 0 or text.find("<think>", 0, end) >= 0 else _after(end, text)


def _after(think_end: int, text: str) -> int:
    return len(text) if think_end < 0 else think_end + len(_THINK_END)


def find_tool(tools: Mapping[str, Form], name: str) -> Form:
    """Look up the tool called ``name``.

    Raises:
        UnreadableCall: there is no such tool; a block of that name would be read as text.
    """
    if name not in tools:
        raise UnreadableCall(f"there is no such tool; the tools are: {', '.join(tools)}")
    return tools[name]
