"""Two tools for every dialect: one takes a text, the other several arguments that are none."""

from agentrl.tools import tool


@tool
def python(code: str) -> str:
    """Run."""
    return code


@tool
def add(a: int, b: list[int] | None = None, note: str = "") -> str:
    """Add numbers."""
    return str(a + sum(b or []))
