"""Calls as tagged pairs of argument name and value, between two tags.

Some templates put further tags around all calls of a turn: they are written, and are text to the reader.
"""

# ruff: noqa: RUF001  # DeepSeek's bars are wide

import re
from collections.abc import Mapping, Sequence
from typing import ClassVar, cast

from agentrl.toolenv.dialects.base import Dialect
from agentrl.toolenv.dialects.hermes import Enveloped
from agentrl.toolenv.dialects.reading import MAX_NAME, UnreadableCall, malformed, read_json, write_json
from agentrl.types import ToolCall

_PYTHONS: Mapping[str, object] = {"True": True, "False": False, "None": None}
"""Python's constants: some chat templates write these, and so do the models trained on them."""

_HY_TAGS = ("think", "tool_calls", "tool_call", "arg_key", "arg_value")


def _pair(before: str, between: str, after: str, *, barred: str = "") -> re.Pattern[str]:
    """Return a pair's pattern from the patterns around its key and its value; no key has a letter of ``barred``."""
    return re.compile(rf"\s*{before}(?P<key>[^{barred}<>\n]{{1,128}}){between}(?P<value>.*?){after}", re.DOTALL)


class Pairs(Enveloped):
    """A name and pairs; a value is verbatim text where the schema takes a text, else JSON or a Python constant.

    The chat template describes the tools. An argument that the schema does not name is read as text, and the tool
    reports it. Where the schema takes any value, a value that is no JSON is text.
    """

    native = True
    head: ClassVar[re.Pattern[str]]
    """Matches the beginning of a call, with the group ``name``."""
    pair: ClassVar[re.Pattern[str]]
    """Matches a pair, with the groups ``key`` and ``value``, and ``string`` where it says whether it is a text."""
    tail: ClassVar[str] = ""
    """The end of a call."""
    written: ClassVar[str]
    """A whole call, with ``{name}`` and ``{pairs}`` to be filled in."""
    written_pair: ClassVar[str]
    """A pair, with ``{key}`` and ``{value}`` to be filled in, and ``{string}``, which is true of a text."""
    example: ClassVar[str]
    """An example call, shown to the model in errors."""

    def _call(self, body: str) -> ToolCall:
        head = self.head.match(body)
        if head is None:
            return malformed(f"a call looks like this: {self.example}")
        name, position = head["name"], head.end()
        arguments: dict[str, object] = {}
        while (pair := self.pair.match(body, position)) is not None:
            key, position = pair["key"], pair.end()
            if key in arguments:
                return malformed(f"the argument {key[:20]!r} is there twice", name)
            try:
                arguments[key] = self._value(name, key, pair)
            except UnreadableCall as error:
                return malformed(f"argument {key[:20]!r}: {error}", name)
        # Text that is no pair is an error, not ignored: it may be an argument that the model meant to give.
        if body[position:].strip() != self.tail:
            return malformed(f"a call looks like this: {self.example}", name)
        return ToolCall(name=name, arguments=arguments)

    def _value(self, name: str, key: str, pair: re.Match[str]) -> object:
        tool, value = self.tools.get(name), pair["value"]
        if tool is None or takes_text(tool.parameters, key):
            return value
        anything = _takes_anything(tool.parameters, key)
        # Without the mark, "5" for an argument that may be anything would become a number.
        if anything and pair.groupdict().get("string") == "true":
            return value
        try:
            return _PYTHONS[value] if value in _PYTHONS else read_json(value)
        except UnreadableCall:
            if anything:
                return value
            raise

    def write_call(self, name: str, arguments: Mapping[str, object]) -> str:
        """Write the call."""
        pairs = "".join(self._write_pair(key, value) for key, value in arguments.items())
        return self.written.format(name=name, pairs=pairs)

    def _write_pair(self, key: str, value: object) -> str:
        if isinstance(value, str):
            return self.written_pair.format(key=key, value=value, string="true")
        return self.written_pair.format(key=key, value=write_json(value), string="false")


class NativeQwen3Coder(Pairs):
    """``<function=name>`` with a ``<parameter=key>`` for each argument, its value on lines of its own: Qwen3-Coder."""

    name = "native-qwen3-coder"
    head = re.compile(rf"\s*<function=(?P<name>[^<>\s]{{1,{MAX_NAME}}})>")
    pair = _pair("<parameter=", r">\n?", r"\n?</parameter>")
    tail = "</function>"
    written = "<tool_call>\n<function={name}>\n{pairs}</function>\n</tool_call>"
    written_pair = "<parameter={key}>\n{value}\n</parameter>\n"
    example = "<function=name> <parameter=key> value </parameter> </function>"


class NativeGlm(Pairs):
    """The tool's name, then ``<arg_key>`` and ``<arg_value>`` for each argument: GLM-4.5."""

    name = "native-glm"
    marks = (*Enveloped.marks, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    head = re.compile(rf"\s*(?P<name>[^<>\s]{{1,{MAX_NAME}}})(?=\s|<|\Z)")
    pair = _pair("<arg_key>", r"</arg_key>\s*<arg_value>", "</arg_value>")
    written = "<tool_call>{name}\n{pairs}</tool_call>"
    written_pair = "<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"
    example = "name <arg_key>key</arg_key> <arg_value>value</arg_value>"


class NativeHy(Pairs):
    """As GLM-4.5's, with tags of its own: Hunyuan 3."""

    name = "native-hy"
    begin, end = "<tool_call:opensource>", "</tool_call:opensource>"
    marks = ("<tool_sep:opensource>", *(f"<{slash}{tag}:opensource>" for tag in _HY_TAGS for slash in ("", "/")))
    head = re.compile(rf"\s*(?P<name>[^<>\s]{{1,{MAX_NAME}}})<tool_sep:opensource>")
    pair = _pair("<arg_key:opensource>", r"</arg_key:opensource>\s*<arg_value:opensource>", "</arg_value:opensource>")
    written = (
        "<tool_calls:opensource>\n<tool_call:opensource>{name}<tool_sep:opensource>\n{pairs}</tool_call:opensource>\n"
        "</tool_calls:opensource>"
    )
    written_pair = NativeGlm.written_pair.replace(">", ":opensource>")
    example = "name<tool_sep:opensource> <arg_key:opensource>key</arg_key:opensource> <arg_value:opensource>…"


class NativeMinimax(Pairs):
    """``<invoke name="…">`` with a ``<parameter name="…">`` for each argument: MiniMax-M2."""

    name = "native-minimax"
    begin, end = "<invoke name=", "</invoke>"
    marks = (*Dialect.marks, "<minimax:tool_call>", "</minimax:tool_call>")
    head = re.compile(rf'"(?P<name>[^"<>\s]{{1,{MAX_NAME}}})">')
    pair = _pair('<parameter name="', '">', "</parameter>", barred='"')
    written = '<minimax:tool_call>\n<invoke name="{name}">\n{pairs}</invoke>\n</minimax:tool_call>'
    written_pair = '<parameter name="{key}">{value}</parameter>\n'
    example = '<invoke name="name"> <parameter name="key">value</parameter> </invoke>'


class NativeDsml(Pairs):
    """As MiniMax-M2's, in tags that begin with ``｜DSML｜``; a pair says whether it is a text: DeepSeek-V4."""

    name = "native-dsml"
    begin, end = "<｜DSML｜invoke name=", "</｜DSML｜invoke>"
    marks = (*Dialect.marks, "｜DSML｜")
    head = NativeMinimax.head
    pair = _pair('<｜DSML｜parameter name="', '" string="(?P<string>true|false)">', "</｜DSML｜parameter>", barred='"')
    written = '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="{name}">\n{pairs}</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
    written_pair = '<｜DSML｜parameter name="{key}" string="{string}">{value}</｜DSML｜parameter>\n'
    example = '<｜DSML｜invoke name="name"> <｜DSML｜parameter name="key" string="true">value</｜DSML｜parameter> …'


def _takes_anything(parameters: Mapping[str, object], key: str) -> bool:
    # Only asked after takes_text has found that the schema names ``key``.
    schema = cast(Mapping[str, object], parameters["properties"])[key]
    return schema is True or (
        isinstance(schema, Mapping) and not {"type", "$ref", "anyOf", "oneOf", "allOf"} & schema.keys()
    )


def takes_text(parameters: Mapping[str, object], key: str) -> bool:
    """Return True if the schema ``parameters`` takes a text for the argument ``key``, or does not name ``key``."""
    properties = parameters.get("properties")
    if not isinstance(properties, Mapping) or key not in properties:
        return True
    return _is_text(cast(object, properties[key]), parameters.get("$defs"), 8)


def _is_text(schema: object, definitions: object, depth: int) -> bool:
    # Definitions may refer to themselves: the depth ends the recursion.
    if not isinstance(schema, Mapping) or depth == 0:
        return False
    kind, reference, choices = schema.get("type"), schema.get("$ref"), schema.get("anyOf")
    if isinstance(reference, str) and isinstance(definitions, Mapping):
        return _is_text(definitions.get(reference.removeprefix("#/$defs/")), definitions, depth - 1)
    if isinstance(choices, Sequence):
        return any(_is_text(choice, definitions, depth - 1) for choice in choices)
    return kind == "string" or (isinstance(kind, list) and "string" in kind)
