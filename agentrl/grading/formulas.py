r"""Parse formulas in untrusted text into a tree; ``agentrl.grading.values`` evaluates them.

The text was written by the agent under training, and is never evaluated as Python. The parser reads numbers,
``+ - * / ^``, parentheses, implied products, the usual LaTeX, and the names and functions that the caller allows.
Length and depth are bounded, and parsing takes linear time.

``1/2x`` is ``(1/2)·x``, as Python reads it; ``\sin 2x`` is ``sin(2x)``. A number right before ``\frac`` is refused,
since it may be meant as a sum.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from fractions import Fraction
from typing import TypeAlias

Formula: TypeAlias = "Fraction | str | tuple[str, Formula] | tuple[str, Formula, Formula]"
"""A number, a name, ``(function or "neg", argument)``, or ``(operator, left, right)`` with one of ``+ - * / ^``."""

FUNCTIONS = ("sqrt", "exp", "log", "sin", "cos", "tan", "atan")
"""Functions of one argument; ``ln`` and ``arctan`` are other ways to write ``log`` and ``atan``."""
MAX_CHARS = 500
"""A longer text is unreadable."""
MAX_DEPTH = 50
"""Limit of nested parentheses, signs and powers: the parser recurses, and must stay within Python's stack."""

_TOKEN = re.compile(r"[0-9]+(?:\.[0-9]*)?|\.[0-9]+|\\[A-Za-z]+|\\[,;:! ]|[A-Za-z]+|\*\*|[-+*/^(){}\[\]]|\S")
_SPACING = frozenset([r"\left", r"\right", r"\,", r"\;", r"\:", r"\!", r"\displaystyle"]) | {"\\ ", "$"}
_SYNONYMS = {"ln": "log", "arctan": "atan"}
_SPELLING: Mapping[str, str] = {
    **dict.fromkeys(("**",), "^"),
    **dict.fromkeys((r"\cdot", r"\times", "\N{MULTIPLICATION SIGN}", "\N{MIDDLE DOT}"), "*"),
    **dict.fromkeys((r"\div", "\N{DIVISION SIGN}"), "/"),
    **dict.fromkeys((r"\dfrac", r"\tfrac"), r"\frac"),
    **{"\N{MINUS SIGN}": "-", "\N{GREEK SMALL LETTER PI}": "pi"},
    **_SYNONYMS,
}
_CLOSING = {"(": ")", "{": "}", "[": "]"}
_BINDS = {"+": 10, "-": 10, "*": 20, "/": 20, "^": 40}
_SIGN = 15  # -x^2 is -(x^2) and -x+1 is (-x)+1


class Unreadable(ValueError):
    """The text is no formula that can be parsed here, or its value is out of bounds."""


def parse(text: str, *, names: Collection[str] = (), functions: Collection[str] = ()) -> Formula:
    r"""Parse ``text`` as a formula.

    Args:
        text: Python or LaTeX, dollar signs allowed.
        names: letters and constants that may occur, such as ``("x", "e", "pi")``.
        functions: those of ``FUNCTIONS`` that may be applied; ``\sqrt`` is one of them.

    Raises:
        Unreadable: it is none.

    Example:
        >>> parse(r"2x + \frac{1}{3}", names=["x"])
        ('+', ('*', Fraction(2, 1), 'x'), ('/', Fraction(1, 1), Fraction(3, 1)))
    """
    if len(text) > MAX_CHARS:
        raise Unreadable
    reader = _Reader(list(_tokens(text, names, functions)), frozenset(names), frozenset(functions))
    formula = reader.formula(0)
    if reader.next:
        raise Unreadable
    return formula


def write(formula: Formula) -> str:
    """Write ``formula`` as Python, in parentheses wherever it is not a number or a name."""
    match formula:
        case Fraction():
            return str(formula) if formula.denominator == 1 else f"({formula})"
        case str():
            return formula
        case ("neg", argument):
            return f"(-{write(argument)})"
        case (function, argument):
            return f"{function}({write(argument)})"
        case (operator, left, right):
            return f"({write(left)}{'**' if operator == '^' else operator}{write(right)})"


def parts(formula: Formula) -> Iterator[Formula]:
    """Yield ``formula`` and all its subformulas."""
    yield formula
    if isinstance(formula, tuple):
        for part in formula[1:]:
            yield from parts(part)


def _tokens(text: str, names: Collection[str], functions: Collection[str]) -> Iterator[str]:
    allowed = {*names, *functions, *(name for name, plain in _SYNONYMS.items() if plain in functions)}
    # Longest first, so that the alternation below prefers exp to e.
    words: list[str] = sorted(allowed, key=len, reverse=True)
    word = re.compile("|".join(map(re.escape, words)) or r"(?!)")
    tokens: list[str] = _TOKEN.findall(text)
    for token in tokens:
        if token in _SPACING:
            continue
        plain = _SPELLING.get(token, token)
        if plain == token and token.startswith("\\"):
            plain = token if token in (r"\frac", r"\sqrt") else _SYNONYMS.get(token[1:], token[1:])
        if not plain.isalpha() or plain in words:
            yield plain
            continue
        # Letters run together are a product: xe is x·e.
        factors: list[str] = word.findall(plain)
        if "".join(factors) != plain:
            raise Unreadable
        yield from (_SPELLING.get(name, name) for name in factors)


class _Reader:
    """A top-down operator precedence parser (V. Pratt, 1973)."""

    def __init__(self, tokens: list[str], names: frozenset[str], functions: frozenset[str]) -> None:
        self._tokens = tokens
        self._names = names
        self._functions = functions
        self._at = 0
        self._depth = 0

    @property
    def next(self) -> str:
        """The token to come; empty at the end."""
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def take(self, expected: str = "") -> str:
        """Consume the next token, which must be ``expected`` unless that is empty."""
        token = self.next
        if not token or (expected and token != expected):
            raise Unreadable
        self._at += 1
        return token

    def formula(self, least: int) -> Formula:
        """Parse the longest formula whose operators bind tighter than ``least``."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise Unreadable
        left = self._signed(least)
        while (operator := self._operator(left)) and _BINDS[operator] > least:
            # An implied product has no token to consume.
            if self.next in (operator, "^"):
                self.take()
            # A power is worked out from the right: 2^3^2 is 2^9.
            left = (operator, left, self.formula(_BINDS[operator] - (operator == "^")))
        self._depth -= 1
        return left

    def _operator(self, left: Formula) -> str:
        if self.next in _BINDS:
            return self.next
        if not self._begins_operand(self.next) or (isinstance(left, Fraction) and self.next == r"\frac"):
            return ""
        # Two numbers side by side are no product.
        return "" if self._is_number(self.next) else "*"

    def _begins_operand(self, token: str) -> bool:
        return token in ("(", "{", r"\frac", r"\sqrt") or token in self._names or token in self._functions

    @staticmethod
    def _is_number(token: str) -> bool:
        return token.isascii() and token.lstrip(".")[:1].isdigit()

    def _signed(self, least: int) -> Formula:
        if self.next in ("-", "+"):
            sign = self.take()
            # At least as tight as the operator to the left: in 2^-x+1 the sign takes x alone.
            operand = self.formula(max(least, _SIGN))
            return ("neg", operand) if sign == "-" else operand
        return self._operand()

    def _operand(self) -> Formula:
        token = self.take()
        if self._is_number(token):
            return Fraction(token)
        if token in ("(", "{"):
            inside = self.formula(0)
            self.take(_CLOSING[token])
            return inside
        if token == r"\frac":
            return ("/", self._group(), self._group())
        if token == r"\sqrt" and "sqrt" in self._functions:
            return self._root()
        if token in self._functions:
            return self._applied(token)
        if token in self._names:
            return token
        raise Unreadable

    def _group(self) -> Formula:
        r"""Parse a formula in braces, or a single digit or letter: ``\frac12``."""
        if self.next == "{":
            return self._operand()
        token = self.take()
        if self._is_number(token) and token.isdigit():
            # \frac12 came as one token: the second digit is left for the next group.
            if len(token) > 1:
                self._at -= 1
                self._tokens[self._at : self._at + 1] = [token[0], token[1:]]
                self._at += 1
            return Fraction(token[0])
        if token in self._names:
            return token
        raise Unreadable

    def _root(self) -> Formula:
        if self.next != "[":
            return ("sqrt", self._group())
        self.take()
        degree = self.formula(0)
        self.take("]")
        return ("^", self._group(), ("/", Fraction(1), degree))

    def _applied(self, function: str) -> Formula:
        power: Formula | None = None
        if self.next == "^":
            self.take()
            power = self._group()
            # sin^{-1} may be meant as the inverse function.
            if not (isinstance(power, Fraction) and power > 0):
                raise Unreadable
        applied: Formula = (function, self._argument())
        return applied if power is None else ("^", applied, power)

    def _argument(self) -> Formula:
        if self.next in ("(", "{", r"\frac", r"\sqrt"):
            return self._operand()
        argument: Formula | None = None
        while self._is_number(self.next) or self.next in self._names:
            # \sin x2 may be sin(x)·2 or sin(2x).
            if argument is not None and self._is_number(self.next):
                raise Unreadable
            factor = self._operand()
            if self.next == "^":
                self.take()
                factor = ("^", factor, self.formula(_BINDS["^"] - 1))
            argument = factor if argument is None else ("*", argument, factor)
        if argument is None:
            raise Unreadable
        return argument
