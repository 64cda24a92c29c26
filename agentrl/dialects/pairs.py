"""Calls as marked pairs of an argument's name and value, between ``<tool_call>`` and ``</tool_call>``."""

import re
from collections.abc import Mapping, Sequence
from typing import ClassVar, cast

from agentrl.dialects.hermes import Enveloped
from agentrl.dialects.reading import MAX_NAME, Unreadable, malformed, read_json, write_json
from agentrl.types import ToolCall

_PYTHONS: Mapping[str, object] = {"True": True, "False": False, "None": None}
"""Some chat templates write these so, and so do the models that were taught by them."""


class Pairs(Enveloped):
    """A name and pairs; a value is a text as it is where the tool's schema takes one, else JSON or Python's constants.

    An argument that the schema does not name is a text: the tool says what is wrong with it. Where the schema takes
    anything, what is no JSON is a text.
    """

    head: ClassVar[re.Pattern[str]]
    """The beginning of a call, with the group ``name``."""
    pair: ClassVar[re.Pattern[str]]
    """A pair, with the groups ``key`` and ``value``."""
    tail: ClassVar[str] = ""
    """The end of a call."""
    example: ClassVar[str]
    """What a call looks like, for the model."""

    def _call(self, body: str) -> ToolCall:
        head = self.head.match(body)
        if head is None:
            return malformed(f"a call looks like this: {self.example}")
        name, position = head["name"], head.end()
        arguments: dict[str, object] = {}
        while (found := self.pair.match(body, position)) is not None:
            key, position = found["key"], found.end()
            if key in arguments:
                return malformed(f"the argument {key[:20]!r} is there twice", name)
            try:
                arguments[key] = self._value(name, key, found["value"])
            except Unreadable as error:
                return malformed(f"argument {key[:20]!r}: {error}", name)
        if body[position:].strip() != self.tail:
            return malformed(f"a call looks like this: {self.example}", name)
        return ToolCall(name=name, arguments=arguments)

    def _value(self, name: str, key: str, value: str) -> object:
        tool = self.tools.get(name)
        if tool is None or takes_text(tool.parameters, key):
            return value
        try:
            return _PYTHONS[value] if value in _PYTHONS else read_json(value)
        except Unreadable:
            if _takes_anything(tool.parameters, key):
                return value
            raise

    def _text(self, value: object) -> str:
        return value if isinstance(value, str) else write_json(value)

    def describe_tools(self) -> str:
        """Describe the tools."""
        raise AssertionError("the chat template describes the tools")


class Qwen3Coder(Pairs):
    """``<function=name>`` with a ``<parameter=key>`` for each argument, its value on lines of its own."""

    head = re.compile(rf"\s*<function=(?P<name>[^<>\s]{{1,{MAX_NAME}}})>")
    pair = re.compile(r"\s*<parameter=(?P<key>[^<>\n]{1,128})>\n?(?P<value>.*?)\n?</parameter>", re.DOTALL)
    tail = "</function>"
    example = "<function=name> <parameter=key> value </parameter> </function>"

    def write_call(self, name: str, arguments: Mapping[str, object]) -> str:
        """Write the call."""
        pairs = "".join(f"<parameter={key}>\n{self._text(value)}\n</parameter>\n" for key, value in arguments.items())
        return f"<tool_call>\n<function={name}>\n{pairs}</function>\n</tool_call>"


class Glm(Pairs):
    """The tool's name, then ``<arg_key>`` and ``<arg_value>`` for each argument."""

    marks = (*Enveloped.marks, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")

    head = re.compile(rf"\s*(?P<name>[^<>\s]{{1,{MAX_NAME}}})(?=\s|<|\Z)")
    pair = re.compile(
        r"\s*<arg_key>(?P<key>[^<>\n]{1,128})</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>", re.DOTALL
    )
    example = "name <arg_key>key</arg_key> <arg_value>value</arg_value>"

    def write_call(self, name: str, arguments: Mapping[str, object]) -> str:
        """Write the call."""
        pairs = "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{self._text(value)}</arg_value>\n"
            for key, value in arguments.items()
        )
        return f"<tool_call>{name}\n{pairs}</tool_call>"


def _takes_anything(parameters: Mapping[str, object], key: str) -> bool:
    schema = cast(Mapping[str, object], parameters["properties"])[key]
    return schema is True or (
        isinstance(schema, Mapping) and not {"type", "$ref", "anyOf", "oneOf", "allOf"} & schema.keys()
    )


def takes_text(parameters: Mapping[str, object], key: str) -> bool:
    """Whether the schema ``parameters`` takes a text for the argument ``key``, or does not name it."""
    properties = parameters.get("properties")
    if not isinstance(properties, Mapping) or key not in properties:
        return True
    return _is_text(cast(object, properties[key]), parameters.get("$defs"), 8)


def _is_text(schema: object, definitions: object, depth: int) -> bool:
    if not isinstance(schema, Mapping) or depth == 0:
        return False
    kind, reference, choices = schema.get("type"), schema.get("$ref"), schema.get("anyOf")
    if isinstance(reference, str) and isinstance(definitions, Mapping):
        return _is_text(definitions.get(reference.removeprefix("#/$defs/")), definitions, depth - 1)
    if isinstance(choices, Sequence):
        return any(_is_text(choice, definitions, depth - 1) for choice in choices)
    return kind == "string" or (isinstance(kind, list) and "string" in kind)
