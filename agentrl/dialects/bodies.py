"""What stands inside a block whose mark names the tool: its one text argument as it is, or one JSON object."""

import re
from collections.abc import Callable, Mapping

from agentrl.dialects.reading import Unreadable, malformed, read_object, write_json
from agentrl.tools import Tool
from agentrl.types import ToolCall

_SELF_EXPLANATORY = {"python"}
"""Names of languages, of which every model knows what such a block does."""


def text_argument(tool: Tool) -> str:
    """The name of the tool's only argument, where that is a text; else empty."""
    properties = tool.parameters.get("properties")
    if not isinstance(properties, Mapping) or len(properties) != 1:
        return ""
    ((name, kind),) = properties.items()
    return str(name) if isinstance(kind, Mapping) and kind.get("type") == "string" else ""


def read_body(tool: Tool, body: str) -> ToolCall:
    """The call whose body this is; one without text has no arguments."""
    if argument := text_argument(tool):
        return ToolCall(name=tool.name, arguments={argument: body})
    try:
        return ToolCall(name=tool.name, arguments=read_object(body) if body.strip() else {})
    except Unreadable as error:
        return malformed(f"{tool.name} takes one JSON object: {error}", tool.name)


def cut_off(tool: Tool, body: str, error: str) -> ToolCall:
    """The malformed call of a block that was never closed."""
    argument = text_argument(tool)
    return ToolCall(name=tool.name, arguments={argument: body} if argument else {}, error=error)


def write_body(tool: Tool, arguments: Mapping[str, object], protect: re.Pattern[str] | None = None) -> str:
    """What :func:`read_body` reads.

    Raises:
        TypeError: an argument is no JSON value.
        ValueError: likewise, or the tool takes one text and this is something else.
    """
    argument = text_argument(tool)
    if not argument:
        return write_json(dict(arguments), protect)
    value = arguments.get(argument)
    if not isinstance(value, str) or len(arguments) != 1:
        raise Unreadable(f"it takes one argument, {argument}, a text")
    return value


def describe(tool: Tool, block: Callable[[str], str]) -> str:
    """One line that tells how to call ``tool``.

    Args:
        tool: with its description, unless its name says it all.
        block: writes the block around a body.
    """
    if argument := text_argument(tool):
        line = f"To use {tool.name}, write {block(argument)}."
        return line if tool.name in _SELF_EXPLANATORY else f"{line} {tool.description}".rstrip()
    rule = f"where JSON is one object that fits this schema: {write_json(dict(tool.parameters))}"
    return f"To use {tool.name}, write {block('JSON')}, {rule} {tool.description}".rstrip()
