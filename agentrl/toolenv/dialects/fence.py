"""``fence``: a fenced Markdown block whose language is the tool's name."""

import re
from collections.abc import Mapping, Sequence

from agentrl.toolenv.dialects.base import THINK_TAG, THINKING, Block, Dialect, find_tool
from agentrl.toolenv.dialects.bodies import read_body, write_body
from agentrl.toolenv.tools.function import Tool

_TAGS = re.compile(THINK_TAG)
_CLOSE = re.compile(r"^```[ \t]*$", re.MULTILINE)


class Fence(Dialect):
    """A block runs from a line ```` ```name ```` to the next line that is ```` ``` ````, or is one line with its body.

    The body is the tool's one text argument verbatim; for a tool with other arguments it is one JSON object. A block
    that is never closed is a malformed call. A block whose language is no tool is text, as in any Markdown: neither the
    block nor a fence inside it is a call.
    """

    name, form = "fence", 2

    def __init__(self, tools: Sequence[Tool] = ()) -> None:
        super().__init__(tools)
        # Longest first: a shorter name may be the beginning of a longer one. Any language comes last: its block has to
        # be matched too, or a fence inside it would be read as a call.
        names = [*map(re.escape, sorted(self.tools, key=len, reverse=True)), r"[A-Za-z_][\w-]*"]
        one_line = r"[ \t](?P<body>[^`\n]*)```[ \t]*$"  # a body with backticks would have no certain end
        self.opening = re.compile(rf"{THINKING}|^```(?P<name>{'|'.join(names)})(?:[ \t]*$|{one_line})", re.MULTILINE)

    def read_block(self, text: str, opening: re.Match[str]) -> Block:
        """Read the block."""
        # A block on one line, such as ```python 1 + 1```, has matched completely.
        if opening["body"] is not None:
            tool = self.tools.get(opening["name"])
            return Block(end=opening.end(), calls=(read_body(tool, opening["body"].strip()),) if tool else ())
        closing = _CLOSE.search(text, opening.end())
        end, name = closing.end() if closing else len(text), opening["name"]
        if name not in self.tools:
            return Block(end=end)
        # The opening ends before the end of its line, which is no part of the body.
        body = text[opening.end() + 1 : closing.start() if closing else end].removesuffix("\n")
        error = "" if closing else f"the ```{name} block is not closed: end it with a line ```"
        return Block(end=end, calls=(read_body(self.tools[name], body, error),))

    def write_call(self, name: str, arguments: Mapping[str, object]) -> str:
        """Write the call."""
        return f"```{name}\n{write_body(find_tool(self.tools, name), arguments, _TAGS)}\n```"
