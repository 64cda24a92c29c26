"""Chooses the interpreter of a program by what the program would import.

The choice costs time only, never correctness: a program that imports more than its interpreter has just imports it.
"""

import re
from collections.abc import Iterable
from typing import Final, Literal

Profile = Literal["plain", "numpy", "sympy"]

PRELOADED: Final[dict[Profile, tuple[str, ...]]] = {"plain": (), "numpy": ("numpy",), "sympy": ("numpy", "sympy")}
"""Modules beside the standard library that the interpreters of a profile have imported."""

# Words rather than a syntax tree: the host's parser can be crashed or held up by a source made for that.
_FULLEST: Final = re.compile(r"\b(?:sympy|mpmath|exec|eval|__import__|importlib|import_module|runpy)\b")
_NUMPY: Final = re.compile(r"\b(?:numpy|scipy|pandas)\b")


def profile_of(code: str, files: Iterable[str | bytes] = ()) -> Profile:
    """Choose the interpreter of a session by its first cell.

    Args:
        code: The cell's source.
        files: Contents of the files that come with it, which it may import.

    Returns:
        The smallest profile that holds whatever the words of the source can import; the fullest where the source can
        import what it does not name.
    """
    sources = [code, *(content.decode("latin-1") if isinstance(content, bytes) else content for content in files)]
    if any(_FULLEST.search(source) for source in sources):
        return "sympy"
    return "numpy" if any(_NUMPY.search(source) for source in sources) else "plain"
