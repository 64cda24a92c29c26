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

    def render(self, name: str, arguments: Mapping[str, object]) -> str:
        """Write a call of tool ``name``."""
        ...

    def instructions(self) -> str:
        """Tell the model which tools there are and how to call them."""
        ...


_OPEN = re.compile(r"^```([A-Za-z_][\w-]*)[ \t]*$", re.MULTILINE)
_CLOSE = re.compile(r"^```[ \t]*$", re.MULTILINE)


class Fence:
    """A fenced Markdown block whose language is the tool's name.

    A block runs from a line ```` ```name ```` to the next line that is ```` ``` ````. One that is never closed is a
    malformed call. Only tools with one text argument can be called.
    """

    name = "fence"

    def __init__(self, tools: Sequence[Tool] = ()) -> None:
        arguments = {tool.name: _text_argument(tool) for tool in tools}
        self._argument = {name: argument for name, argument in arguments.items() if argument}

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

    def render(self, name: str, arguments: Mapping[str, object]) -> str:
        """A fenced block."""
        return f"```{name}\n{arguments[self._argument.get(name, next(iter(arguments)))]}\n```"

    def instructions(self) -> str:
        """One line per tool, each with an example of the fence."""
        return "\n".join(f"To use {name}, write ```{name} {argument} ```." for name, argument in self._argument.items())


def _text_argument(tool: Tool) -> str:
    """The name of the tool's only argument, where that is a text; else empty."""
    properties = tool.parameters.get("properties")
    if not isinstance(properties, Mapping) or len(properties) != 1:
        return ""
    ((name, schema),) = properties.items()
    return str(name) if isinstance(schema, Mapping) and schema.get("type") == "string" else ""


DIALECTS: Mapping[str, type[Fence]] = {"fence": Fence}


def get_dialect(name: str, tools: Sequence[Tool] = ()) -> Dialect:
    """The dialect called ``name``, for calls of ``tools``.

    Raises:
        UnknownNameError: there is none of that name.
    """
    if name not in DIALECTS:
        raise UnknownNameError("dialect", name, DIALECTS)
    return DIALECTS[name](tools)
