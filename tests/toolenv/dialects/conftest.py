"""Two tools for every dialect, one of which takes a text, the other several arguments; and a dialect of one's own."""

import doctest
import re
import tomllib
from pathlib import Path
from typing import Any

from agentrl.toolenv import dialects
from agentrl.toolenv.tools.function import tool
from agentrl.types import ToolCall

TABLES: dict[str, Any] = tomllib.loads(Path(__file__).with_name("calls.toml").read_text(encoding="utf-8"))
"""Calls as somebody may write them, and what is read of each."""


@tool
def python(code: str) -> str:
    """Run."""
    return code


@tool
def add(a: int, b: list[int] | None = None, note: str = "") -> str:
    """Add numbers."""
    return str(a + sum(b or []))


def documented() -> dict[str, Any]:
    """What the example in the docstring of ``Dialect`` defines, as whoever writes a dialect would copy it."""
    offered = {name: getattr(dialects, name) for name in dialects.__all__}
    names: dict[str, Any] = {**offered, "ToolCall": ToolCall, "re": re, "__name__": "somebodys_dialects"}
    for example in doctest.DocTestParser().get_examples(dialects.Dialect.__doc__ or ""):
        exec(example.source, names)
    return names


Slash: type[dialects.Dialect] = documented()["Slash"]
"""Registered as ``slash``: every test of every dialect is one of this, too."""
