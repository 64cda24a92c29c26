"""``xml``: a block ``<name>…</name>`` around the arguments of the tool of that name."""

import re
from collections.abc import Mapping, Sequence

from agentrl.toolenv.dialects.base import THINK_TAG, THINKING, Block, Dialect, find_tool
from agentrl.toolenv.dialects.bodies import read_body, write_body
from agentrl.toolenv.tools.function import Tool


class Xml(Dialect):
    """A block runs from ``<name>`` to the next ``</name>``, where a tool has that name.

    The body is the tool's one text argument verbatim, less one line end at either side; for a tool with other arguments
    it is one JSON object. A block that is never closed is a malformed call. Tags that name no tool are text, since a
    model writes HTML too.
    """

    name = "xml"

    def __init__(self, tools: Sequence[Tool] = ()) -> None:
        super().__init__(tools)
        names = "|".join(map(re.escape, self.tools))
        # Without tools the alternation would be empty and match "<>".
        self.opening = re.compile(rf"{THINKING}|<(?P<name>{names})>" if names else THINKING)

    def read_block(self, text: str, opening: re.Match[str]) -> Block:
        """Read the block."""
        name = opening["name"]
        closing = text.find(f"</{name}>", opening.end())
        end = closing if closing >= 0 else len(text)
        body = text[opening.end() : end].removeprefix("\n").removesuffix("\n")
        error = "" if closing >= 0 else f"the <{name}> block is not closed: end it with </{name}>"
        # A block that is never closed is read to the end of the text, and what follows that is nothing.
        return Block(end=end + len(name) + 3, calls=(read_body(self.tools[name], body, error),))

    def write_call(self, name: str, arguments: Mapping[str, object]) -> str:
        """Write the call."""
        body = write_body(find_tool(self.tools, name), arguments, re.compile(f"{re.escape(f'</{name}>')}|{THINK_TAG}"))
        return f"<{name}>\n{body}\n</{name}>"
