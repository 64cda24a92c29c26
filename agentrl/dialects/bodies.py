"""What stands inside a block whose mark names the tool: its one text argument as it is, or one JSON object."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from agentrl.dialects.reading import Unreadable, malformed, read_object, write_json
from agentrl.dialects.sample import sample_arguments
from agentrl.errors import EnvContractError
from agentrl.tools import Tool
from agentrl.types import ToolCall

_SELF_EXPLANATORY = {"python"}
"""Names of languages, of which every model knows what such a block does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What a dialect knows of a tool, asked once: a tool may make its schema anew each time, which costs much.

    Raises:
        EnvContractError: its parameters are not JSON.
    """

    name: str
    """What calls it."""
    description: str
    """One or two sentences for the model."""
    parameters: Mapping[str, object]
    """The JSON schema of its arguments, as plain data."""

    @classmethod
    def of(cls, tool: Tool) -> "Form":
        """The form of ``tool``."""
        try:
            parameters = json.loads(json.dumps(tool.parameters))
        except (TypeError, ValueError) as error:
            raise EnvContractError(f"the parameters of tool {tool.name!r} are not a JSON schema: {error}") from error
        return cls(name=tool.name, description=tool.description, parameters=parameters)

    @property
    def schema(self) -> dict[str, object]:
        """The tool as chat templates and model servers take it."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}

    @property
    def example(self) -> dict[str, object]:
        """Arguments that the tool takes: an argument's own name where it is a text."""
        return sample_arguments(self.parameters, optional=bool(self.text_argument))

    @property
    def text_argument(self) -> str:
        """The name of the only argument, where that is a text; else empty."""
        properties = self.parameters.get("properties")
        if not isinstance(properties, Mapping) or len(properties) != 1:
            return ""
        ((name, kind),) = properties.items()
        return str(name) if isinstance(kind, Mapping) and kind.get("type") == "string" else ""


def read_body(tool: Form, body: str) -> ToolCall:
    """The call whose body this is; one without text has no arguments."""
    if argument := tool.text_argument:
        return ToolCall(name=tool.name, arguments={argument: body})
    try:
        return ToolCall(name=tool.name, arguments=read_object(body) if body.strip() else {})
    except Unreadable as error:
        return malformed(f"{tool.name} takes one JSON object: {error}", tool.name)


def cut_off(tool: Form, body: str, error: str) -> ToolCall:
    """The malformed call of a block that was never closed."""
    argument = tool.text_argument
    return ToolCall(name=tool.name, arguments={argument: body} if argument else {}, error=error)


def write_body(tool: Form, arguments: Mapping[str, object], protect: re.Pattern[str] | None = None) -> str:
    """What :func:`read_body` reads.

    Raises:
        TypeError: an argument is no JSON value.
        ValueError: likewise, or the tool takes one text and this is something else.
    """
    argument = tool.text_argument
    if not argument:
        return write_json(dict(arguments), protect)
    value = arguments.get(argument)
    if not isinstance(value, str) or len(arguments) != 1:
        raise Unreadable(f"it takes one argument, {argument}, a text")
    return value


def describe(tool: Form, write: Callable[[str, Mapping[str, object]], str]) -> str:
    """How to call ``tool``, shown by a call that is read as one.

    Args:
        tool: with its description, unless its name says it all.
        write: writes a call of a tool of that name.
    """
    lines = [f"To use {tool.name}, write", write(tool.name, tool.example)]
    if not tool.text_argument and tool.parameters.get("properties"):
        lines.append(f"with one JSON object that fits this schema: {write_json(dict(tool.parameters))}")
    if not tool.text_argument or tool.name not in _SELF_EXPLANATORY:
        lines.append(tool.description)
    return "\n".join(lines).rstrip()
