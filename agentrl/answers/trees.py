r"""Formulas in LaTeX as sympy's trees, term for term as they are written; runs in the graders' processes only.

latex2sympy reads them, and whatever it can't read, or what is undefined or too large to evaluate, is refused.
"""

import re
from typing import TypeAlias

import sympy

from agentrl.answers.shape import nesting

Tree: TypeAlias = "sympy.Basic | sympy.MatrixBase"

_DECIMAL = re.compile(r"(?<![0-9.])([0-9]*)\.([0-9]+)(?![0-9.])")
_MAX_EXPONENT = 10_000
"""No exponent and no argument of a function may be larger: their values would not fit into any memory."""
_MAX_NODES = 1000
_MAX_LENGTH = 500
_MAX_NESTING = 20
_MAX_SIGNS = 40
"""Longer and deeper formulas are nobody's answer, and latex2sympy takes exponential time for some of them."""


class Unreadable(Exception):
    """The text is no formula, or one that is not worked out here."""


def read(text: str, *, any_length: bool = False) -> Tree:
    """The formula that ``text``, which is tidied, writes.

    Args:
        text: LaTeX.
        any_length: whether it may be as long and deep as it likes, as only an expected answer may.

    Raises:
        Unreadable: it writes none, or one that is undefined, too long, too deep or too large.
    """
    long = len(text) > _MAX_LENGTH or nesting(text) > _MAX_NESTING or max(map(text.count, "^|_")) > _MAX_SIGNS
    if long and not any_length:
        raise Unreadable
    from latex2sympy2_extended.latex2sympy2 import NormalizationConfig, latex2sympy, normalize_latex

    looks = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none")
    try:
        latex = normalize_latex(_DECIMAL.sub(_as_fraction, text), config=looks)
        tree = latex2sympy(latex, is_real=True, convert_degrees=True, normalization_config=None)
    except MemoryError:
        raise
    except Exception as error:  # the parser raises whatever its input leads it to
        raise Unreadable from error
    if not isinstance(tree, sympy.Basic | sympy.MatrixBase):
        raise Unreadable
    _tame(tree)
    return tree


def with_imaginary(tree: Tree) -> Tree:
    """``tree`` with the letter i as the root of -1, which sympy works out at once.

    Raises:
        Unreadable: it is undefined then.
    """
    replaced = tree.xreplace({symbol: sympy.I for symbol in tree.free_symbols if str(symbol) == "i"})
    _tame(replaced)
    return replaced


def _as_fraction(found: re.Match[str]) -> str:
    # A decimal is exact: 0.1 is a tenth, not the nearest binary float.
    return rf"(\frac{{{int(found.group(1) + found.group(2))}}}{{{10 ** len(found.group(2))}}})"


def _tame(tree: Tree) -> None:
    """Refuse what is undefined or too large to evaluate, looking at every part before what it is a part of."""
    for count, part in enumerate(sympy.postorder_traversal(tree)):
        if count > _MAX_NODES or part in (sympy.nan, sympy.zoo):
            raise Unreadable
        arguments = (
            part.args[1:] if isinstance(part, sympy.Pow) else part.args if isinstance(part, sympy.Function) else ()
        )
        for argument in arguments:
            if not argument.free_symbols and isinstance(argument, sympy.Expr):
                size = abs(argument.evalf(15))
                if not (size.is_Float or size.is_Integer or size.is_infinite) or (size > _MAX_EXPONENT) is sympy.true:
                    raise Unreadable
