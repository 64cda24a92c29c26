"""How a model writes a tool call and reads a result.

One object parses, renders and describes calls, for training, warm start, evaluation and replay alike: a parser that
differs between two of them trains an agent for another game.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Protocol

from agentrl.errors import UnknownNameError
from agentrl.tools import Tool
from agentrl.types import ToolCall


class Dialect(Protocol):
    """A way to write tool calls as text."""

    @property
    def name(self) -> str:
        """The name in the table of dialects."""
        ...

    def parse(self, text: str) -> tuple[ToolCall, ...]:
        """The calls in the assistant's ``text``, in order; none makes it a final answer. Never raises."""
        ...

    def render(self, name: str, argument: str) -> str:
        """Write a call of tool ``name`` with its single text argument."""
        ...

    def instructions(self, tools: Sequence[Tool]) -> str:
        """Tell the model which tools there are and how to call them."""
        ...


_OPEN = re.compile(r"^```([A-Za-z_][\w-]*)[ \t]*$", re.MULTILINE)
_CLOSE = re.compile(r"^```[ \t]*$", re.MULTILINE)


class Fence:
    """A fenced Markdown block whose language is the tool's name.

    A block runs from a line ```` ```name ```` to the next line that is ```` ``` ````. One that is never closed is a
    malformed call. Only tools with one text argument can be called; ``argument`` names it per tool.
    """

    name = "fence"

    def __init__(self, argument: Mapping[str, str] | None = None) -> None:
        self._argument = dict(argument or {"python": "code"})

    def parse(self, text: str) -> tuple[ToolCall, ...]:
        """Every block whose language is a known tool."""
        calls: list[ToolCall] = []
        position = 0
        while (opening := _OPEN.search(text, position)) is not None:
            closing = _CLOSE.search(text, opening.end())
            end = closing.start() if closing else len(text)
            position = closing.end() if closing else len(text)
            name = opening.group(1)
            if name in self._argument:
                body = text[opening.end() + 1 : end].removesuffix("\n")
                error = "" if closing else f"the ```{name} block is not closed: end it with a line ```"
                call_id = f"call_{len(calls)}"
                calls.append(ToolCall(name=name, arguments={self._argument[name]: body}, id=call_id, error=error))
        return tuple(calls)

    def render(self, name: str, argument: str) -> str:
        """A fenced block."""
        return f"```{name}\n{argument}\n```"

    def instructions(self, tools: Sequence[Tool]) -> str:
        """One line per tool, each with an example of the fence."""
        return "\n".join(f"To use {tool.name}, write ```{tool.name} code ```." for tool in tools)


DIALECTS: Mapping[str, type[Fence]] = {"fence": Fence}


def get_dialect(name: str) -> Dialect:
    """The dialect called ``name``.

    Raises:
        UnknownNameError: there is none of that name.
    """
    if name not in DIALECTS:
        raise UnknownNameError("dialect", name, DIALECTS)
    return DIALECTS[name]()
