r"""Parse LaTeX into sympy's trees, term for term as it is written; runs in the graders' processes only.

latex2sympy parses it. What it can't parse, and what is undefined or too large to evaluate, is refused.
"""

import re
from collections.abc import Mapping
from typing import Any, TypeAlias

import sympy

from agentrl.grading.latex.shape import nesting

Tree: TypeAlias = "sympy.Basic | sympy.MatrixBase"

_DECIMAL = re.compile(r"(?<![0-9.])([0-9]*)\.([0-9]+)(?![0-9.])")
_MAX_EXPONENT = 10_000
"""Limit of exponents and of functions' arguments: larger ones have values that fit into no memory."""
_MAX_NODES = 1000
_MAX_LENGTH = 500
_MAX_NESTING = 20
_MAX_SIGNS = 40
"""Limits of a formula: latex2sympy takes exponential time for some that are longer or deeper, and no answer is."""

LETTER_I = sympy.Symbol("i", real=True)
"""The letter i as it is parsed."""
_EULER = re.compile(r"\\[A-Za-z]+|e(?= ?\^)")
"""An e with an exponent, or a complete command, so that no letter e inside of a command matches."""


class UnreadableLatex(Exception):
    """The text is no formula, or one that is refused here."""


def read(text: str, *, any_length: bool = False) -> Tree:
    """Parse ``text``, which is tidied.

    Args:
        text: LaTeX.
        any_length: accept any length and depth; only for an expected answer, which is trusted.

    Raises:
        UnreadableLatex: it is no formula, or one that is undefined, too long, too deep or too large.
    """
    long = len(text) > _MAX_LENGTH or nesting(text) > _MAX_NESTING or max(map(text.count, "^|_")) > _MAX_SIGNS
    if long and not any_length:
        raise UnreadableLatex
    from latex2sympy2_extended.latex2sympy2 import NormalizationConfig, latex2sympy, normalize_latex

    looks = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none")
    try:
        # The parser evaluates powers of e, but not those of {e}.
        latex = _EULER.sub(lambda match: "{e}" if match[0] in ("e", r"\exponentialE") else match[0], text)
        latex = normalize_latex(_DECIMAL.sub(_as_fraction, latex), config=looks)
        tree = latex2sympy(latex, is_real=True, convert_degrees=True, normalization_config=None)
    # Out of memory is the grader's limit, not a property of the text: the process ends and the answer is retried.
    except MemoryError:
        raise
    except Exception as error:  # the parser raises whatever its input leads it to
        raise UnreadableLatex from error
    if not isinstance(tree, sympy.Basic | sympy.MatrixBase):
        raise UnreadableLatex
    _tame(tree)
    return tree


def with_imaginary(tree: Tree) -> Tree:
    """Replace the letter i by the root of -1, which makes sympy evaluate its powers.

    Raises:
        UnreadableLatex: it is undefined then.
    """
    replaced = imaginary(tree)
    _tame(replaced)
    return replaced


def imaginary(tree: Any) -> Any:
    """Return ``tree`` with the root of -1 for the letter i, which evaluates what holds it."""
    return tree.xreplace({LETTER_I: sympy.I})


def value_at(tree: Any, point: Mapping[Any, Any], digits: int) -> Any:
    """Return the value of ``tree`` at ``point``, where i is the root of -1; None where it has no value."""
    try:
        value = imaginary(tree).evalf(digits, subs=point, maxn=max(100, 4 * digits))
    except (ArithmeticError, TypeError, ValueError, AttributeError, NotImplementedError):  # whatever the tree holds
        return None
    return value if all(part.is_Float or part.is_Integer for part in value.as_real_imag()) else None


def _as_fraction(match: re.Match[str]) -> str:
    # A decimal is exact: 0.1 is a tenth, not the nearest binary float.
    return rf"(\frac{{{int(match.group(1) + match.group(2))}}}{{{10 ** len(match.group(2))}}})"


def _tame(tree: Tree) -> None:
    """Refuse a tree that is undefined or too large to evaluate.

    Postorder: an exponent's own parts are checked before ``evalf`` evaluates it.
    """
    for count, part in enumerate(sympy.postorder_traversal(tree)):
        if count > _MAX_NODES or part in (sympy.nan, sympy.zoo):
            raise UnreadableLatex
        arguments = (
            part.args[1:] if isinstance(part, sympy.Pow) else part.args if isinstance(part, sympy.Function) else ()
        )
        for argument in arguments:
            if not argument.free_symbols and isinstance(argument, sympy.Expr):
                size = abs(argument.evalf(15))
                if not (size.is_Float or size.is_Integer or size.is_infinite) or (size > _MAX_EXPONENT) is sympy.true:
                    raise UnreadableLatex
