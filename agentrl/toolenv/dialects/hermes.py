"""``hermes``: one JSON object with name and arguments between ``<tool_call>`` and ``</tool_call>``."""

import re
from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from agentrl.toolenv.dialects.base import THINK_TAG, THINKING, Block, Dialect
from agentrl.toolenv.dialects.reading import UnreadableCall, malformed, read_call, read_json, write_json
from agentrl.types import ToolCall

_TAGS = re.compile(f"</?tool_call>|{THINK_TAG}")
_INTRODUCTION = "To use a tool, write one JSON object with its name and its arguments, between these tags:"


class Enveloped(Dialect):
    """A call between two tags, by default ``<tool_call>`` and ``</tool_call>``; subclasses read what is inside.

    The tags count anywhere, even inside a text argument. A call that another ``<tool_call>`` or the end of the text
    interrupts is malformed.
    """

    marks = (*Dialect.marks, "<tool_call>", "</tool_call>")
    begin: ClassVar[str] = "<tool_call>"
    """The tag before a call."""
    end: ClassVar[str] = "</tool_call>"
    """The tag after it."""
    _tag: ClassVar[re.Pattern[str]]

    def __init_subclass__(cls) -> None:
        cls.opening = re.compile(f"{THINKING}|{re.escape(cls.begin)}")
        cls._tag = re.compile(f"{re.escape(cls.begin)}|{re.escape(cls.end)}")

    def read_block(self, text: str, opening: re.Match[str]) -> Block:
        """Read the block."""
        tag = self._tag.search(text, opening.end())
        body = text[opening.end() : tag.start() if tag else len(text)]
        # The next opening tag ends this call but stays unread, so that its own call is read.
        if tag is None or tag.group() == self.begin:
            call = malformed(f"the call is not closed: end it with {self.end}")
            return Block(end=tag.start() if tag else len(text), calls=(call,))
        return Block(end=tag.end(), calls=(self._call(body),))

    @abstractmethod
    def _call(self, body: str) -> ToolCall:
        """Read the call between the tags."""


class Hermes(Enveloped):
    r"""``{"name": …, "arguments": {…}}`` between the tags, every JSON value allowed.

    Where an argument's text holds one of the tags, the tag's ``<`` is written as ``\u003c``.
    """

    name = "hermes"

    def _call(self, body: str) -> ToolCall:
        try:
            return read_call(read_json(body))
        except UnreadableCall as error:
            return malformed(str(error))

    def write_call(self, name: str, arguments: Mapping[str, object]) -> str:
        """Write the call."""
        call = write_json({"name": name, "arguments": dict(arguments)}, _TAGS)
        return f"<tool_call>\n{call}\n</tool_call>"

    def describe_tools(self) -> str:
        """Describe the tools."""
        tools = self.tools.values()
        example = next(self.write_call(tool.name, tool.example) for tool in tools)
        return "\n".join(
            [_INTRODUCTION, example, "The tools are:", *(write_json(tool.schema["function"]) for tool in tools)]
        )
