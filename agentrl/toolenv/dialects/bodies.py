"""The body of a block whose mark names the tool: the tool's one text argument verbatim, or one JSON object."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from agentrl.errors import EnvContractError
from agentrl.toolenv.dialects.reading import UnreadableCall, malformed, read_object, write_json
from agentrl.toolenv.dialects.sample import sample_arguments
from agentrl.toolenv.tools.function import Tool
from agentrl.types import ToolCall

_SELF_EXPLANATORY = {"python"}
"""Tools named after a language: every model knows what such a block does, so no description is needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A dialect's copy of a tool's properties, asked once: a tool may rebuild its schema each time, which is costly.

    Raises:
        EnvContractError: the tool's parameters are not JSON.
    """

    name: str
    """The name that the model calls."""
    description: str
    """One or two sentences for the model."""
    parameters: Mapping[str, object]
    """The JSON schema of its arguments, as plain data."""

    @classmethod
    def of(cls, tool: Tool) -> "Form":
        """Copy the properties of ``tool``."""
        try:
            # Through JSON: plain data, which the tool can't change later, and a bad schema is found here.
            parameters = json.loads(json.dumps(tool.parameters))
        except (TypeError, ValueError) as error:
            raise EnvContractError(f"the parameters of tool {tool.name!r} are not a JSON schema: {error}") from error
        return cls(name=tool.name, description=tool.description, parameters=parameters)

    @property
    def schema(self) -> dict[str, object]:
        """The tool's schema in the form that chat templates and model servers take."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}

    @property
    def example(self) -> dict[str, object]:
        """Example arguments; a text argument gets its own name as value."""
        # The one text argument is the block's body, so it is shown even where it is optional.
        return sample_arguments(self.parameters, optional=bool(self.text_argument))

    @property
    def text_argument(self) -> str:
        """The name of the only argument if it is a text; else empty."""
        properties = self.parameters.get("properties")
        if not isinstance(properties, Mapping) or len(properties) != 1:
            return ""
        ((name, kind),) = properties.items()
        return str(name) if isinstance(kind, Mapping) and kind.get("type") == "string" else ""


def read_body(tool: Form, body: str, error: str = "") -> ToolCall:
    """Read a call from its body; an empty body has no arguments.

    Args:
        tool: the tool that the block's mark names.
        body: the text between the marks.
        error: says that the block was never closed, which makes the call malformed; empty where it was.
    """
    if argument := tool.text_argument:
        return ToolCall(name=tool.name, arguments={argument: body}, error=error)
    if error:
        return malformed(error, tool.name)
    try:
        return ToolCall(name=tool.name, arguments=read_object(body) if body.strip() else {})
    except UnreadableCall as reason:
        return malformed(f"{tool.name} takes one JSON object: {reason}", tool.name)


def write_body(tool: Form, arguments: Mapping[str, object], protect: re.Pattern[str] | None = None) -> str:
    """Write a body that :func:`read_body` reads.

    Raises:
        TypeError: an argument is no JSON value.
        ValueError: likewise, or the tool takes one text and this is something else.
    """
    argument = tool.text_argument
    if not argument:
        return write_json(dict(arguments), protect)
    value = arguments.get(argument)
    if not isinstance(value, str) or len(arguments) != 1:
        raise UnreadableCall(f"it takes one argument, {argument}, a text")
    return value


def describe(tool: Form, write: Callable[[str, Mapping[str, object]], str]) -> str:
    """Describe how to call ``tool``, by an example that the dialect would read as a call.

    Args:
        tool: the tool; its description is skipped where its name says enough.
        write: writes a call, given the tool's name and arguments.
    """
    lines = [f"To use {tool.name}, write", write(tool.name, tool.example)]
    if not tool.text_argument and tool.parameters.get("properties"):
        lines.append(f"with one JSON object that fits this schema: {write_json(dict(tool.parameters))}")
    if not tool.text_argument or tool.name not in _SELF_EXPLANATORY:
        lines.append(tool.description)
    return "\n".join(lines).rstrip()
