"""What every dialect has in common: finding calls outside of thinking, checked writing, and a hash."""

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from agentrl.dialects.bodies import Form
from agentrl.dialects.reading import Unreadable
from agentrl.errors import DialectError
from agentrl.tools import Tool
from agentrl.types import ToolCall

THINKING = "(?P<think><think>)"
"""Goes into every pattern of openings, so that whichever comes first counts."""
THINK_TAG = "</?think>"
"""What dialects that can write a text in several ways keep out of arguments."""
_THINK_END = "</think>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A stretch of text that one opening begins."""

    end: int
    """Where reading goes on."""
    calls: tuple[ToolCall, ...] = ()
    """The calls in it, without ids; none where it only looks like a call."""


class Dialect(ABC):
    r"""A way to write tool calls as text; one object reads and writes them for training, warm start and evaluation.

    What is inside ``<think>…</think>`` is no call, nor is anything after a ``<think>`` that stays open. Some chat
    templates open the block themselves: where the first ``</think>`` has no ``<think>`` before it, everything before it
    is thinking. A ``<think>`` inside a call belongs to the call.

    One of your own gives ``opening``, ``read_block``, ``write_call`` and ``describe_tools``, and is named by
    ``agentrl.register_dialect``. ``self.tools`` holds name, description and JSON schema of each tool by its name.

    Example:
        >>> class Slash(Dialect):
        ...     "A line ``/name {…}``."
        ...
        ...     opening = re.compile(rf"{THINKING}|^/(?P<name>[\w-]+) (?P<arguments>.*)$", re.MULTILINE)
        ...
        ...     def read_block(self, text, opening):
        ...         try:
        ...             call = ToolCall(name=opening["name"], arguments=read_object(opening["arguments"]))
        ...         except Unreadable as error:
        ...             call = malformed(str(error), opening["name"])
        ...         return Block(end=opening.end(), calls=(call,))
        ...
        ...     def write_call(self, name, arguments):
        ...         return f"/{name} {write_json(dict(arguments))}"
        ...
        ...     def describe_tools(self):
        ...         return "\n".join(describe(tool, self.write_call) for tool in self.tools.values())
        >>> register_dialect("slash", Slash)

    Args:
        tools: whose calls are read and written.

    Raises:
        EnvContractError: a tool's parameters are not JSON.
    """

    name: ClassVar[str] = ""
    """The name in the table of dialects; ``register_dialect`` sets it."""
    form: ClassVar[int] = 1
    """Counts the changes of how calls are read and written; part of the hash."""
    native: ClassVar[bool] = False
    """Whether the chat template describes the tools, so that the system message does not."""
    marks: ClassVar[tuple[str, ...]] = ("<think>", "</think>")
    """What models that were taught this dialect have a token for; a renderer writes the turns of ``gold`` with them."""
    opening: re.Pattern[str]
    """Where a call or a block of thinking may begin; the latter is the group ``think``."""

    def __init__(self, tools: Sequence[Tool] = ()) -> None:
        self.tools = {tool.name: Form.of(tool) for tool in tools}

    @property
    def template_tools(self) -> tuple[Mapping[str, object], ...]:
        """The tools' JSON schemas where the chat template is to describe them; else empty."""
        return tuple(tool.schema for tool in self.tools.values()) if self.native else ()

    @property
    def hash(self) -> str:
        """Changes with whatever changes the game that the agent plays: name, form, tools and instructions [16 hex]."""
        tools = [tool.schema for tool in self.tools.values()]
        text = json.dumps([self.name, self.form, tools, self.instructions()], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def label(self) -> str:
        """Name and hash, as a run records them."""
        return f"{self.name} {self.hash}"

    def instructions(self) -> str:
        """Tell the model which tools there are and how to call them; empty where the chat template does."""
        return "" if self.native or not self.tools else self.describe_tools()

    def parse(self, text: str) -> tuple[ToolCall, ...]:
        """The calls in the assistant's ``text``, in order; none makes it a final answer. Never raises.

        A call that can't be read has an ``error`` in words for the model.
        """
        calls: list[ToolCall] = []
        position = _after_opened_thinking(text)
        while (found := self.opening.search(text, position)) is not None:
            if found["think"] is None:
                block = self.read_block(text, found)
                calls += block.calls
                position = max(block.end, position + 1)  # whatever a block says of its end, reading comes to one
            else:
                position = _after(text.find(_THINK_END, found.end()), text)
        return tuple(replace(call, id=f"call_{number}") for number, call in enumerate(calls))

    def render(self, name: str, arguments: Mapping[str, object]) -> str:
        """Write a call of tool ``name``, such that ``parse`` reads this very call.

        Raises:
            DialectError: the call can't be written so, such as a text that holds the mark of a call's end, or an
                argument that is no JSON value.
        """
        try:
            text = self.write_call(name, arguments)
        except (TypeError, ValueError, RecursionError) as error:
            raise DialectError(f"dialect {self.name} can't write this call of {name!r}: {error}") from error
        if self.parse(text) != (ToolCall(name=name, arguments=arguments, id="call_0"),):
            raise DialectError(
                f"dialect {self.name} can't write this call of {name!r}: it would be read as another one; use other "
                "arguments, or the dialect hermes, which writes every JSON value"
            )
        return text

    @abstractmethod
    def read_block(self, text: str, opening: re.Match[str]) -> Block:
        """The calls of the block that ``opening`` begins; its end lies after the opening."""

    @abstractmethod
    def write_call(self, name: str, arguments: Mapping[str, object]) -> str:
        """A call as text.

        Raises:
            TypeError: an argument has no text form.
            ValueError: likewise.
        """

    @abstractmethod
    def describe_tools(self) -> str:
        """The instructions of a dialect that has at least one tool."""


def _after_opened_thinking(text: str) -> int:
    end = text.find(_THINK_END)
    return 0 if end < 0 or text.find("<think>", 0, end) >= 0 else _after(end, text)


def _after(think_end: int, text: str) -> int:
    return len(text) if think_end < 0 else think_end + len(_THINK_END)


def known(tools: Mapping[str, Form], name: str) -> Form:
    """The tool called ``name``.

    Raises:
        Unreadable: there is none; a block of that name would stay text.
    """
    if name not in tools:
        raise Unreadable(f"there is no such tool; the tools are: {', '.join(tools)}")
    return tools[name]
