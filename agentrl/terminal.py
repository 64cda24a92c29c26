"""What a person reads in a terminal: in colour where there is one, and never with control characters in it."""

import importlib.util
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    import rich.console


def visible(text: str) -> str:
    r"""``text`` with every character that can't be seen written as an escape, line ends and tabs excepted.

    What tools, tasks and models write may hold characters that move the cursor, change colours or turn the direction of
    writing; a terminal would obey them.

    Example:
        >>> visible("a\x1b[2Jb")
        'a\\x1b[2Jb'
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in "\n\t" else _escaped(char) for char in text)


class Terminal:
    """Writes for a person: in colour where ``out`` is a terminal and rich is installed, else plainly.

    Args:
        out: where to; standard output by default.
    """

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self._console: rich.console.Console | None = None
        if self._out.isatty() and importlib.util.find_spec("rich") is not None:
            from rich.console import Console

            self._console = Console(file=self._out, highlight=False)

    def write(self, text: str, style: str = "") -> None:
        """Write ``text`` and end the line.

        Args:
            text: anything; what can't be seen or encoded is escaped.
            style: how rich shows it, such as ``"bold red"``.
        """
        encoding = self._out.encoding or "utf-8"
        shown = visible(text).encode(encoding, "backslashreplace").decode(encoding)
        if self._console is None:
            print(shown, file=self._out, flush=True)
            return
        from rich.text import Text

        self._console.print(Text(shown, style=style), soft_wrap=True)


def _escaped(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")
