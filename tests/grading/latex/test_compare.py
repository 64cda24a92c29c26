"""Which answers mean the same: known pairs, known traps, and values against sympy's own."""

import itertools
import random
import tomllib
from pathlib import Path

import pytest
import sympy
from hypothesis import example, given
from hypothesis import strategies as st

from agentrl.grading.latex import same_answer

TABLE: dict[str, dict[str, list[list[str]]]] = tomllib.loads(Path(__file__).with_name("answers.toml").read_text())
SAME = list(itertools.chain(*TABLE["same"].values()))
NEAR = [
    (str(sympy.pi.evalf(78)), r"\pi"),
    ("(e^{x+h}-e^{x-h})/(2h)".replace("h", r"(10^{-24}\pi)"), "e^x"),
    ("(8(e^{x+h}-e^{x-h})-e^{x+2h}+e^{x-2h})/(12h)".replace("h", r"(\pi/10^{12})"), "e^x"),
]
OTHER = [*itertools.chain(*TABLE["other"].values()), *NEAR]


@pytest.mark.parametrize(("answer", "expected"), SAME)
def test_the_same(answer: str, expected: str) -> None:
    assert same_answer(answer, expected)
    assert not same_answer(answer, "17.25")
    assert not same_answer(answer, r"\sqrt{17}+x")


@pytest.mark.parametrize(("answer", "expected"), OTHER)
def test_not_the_same(answer: str, expected: str) -> None:
    assert not same_answer(answer, expected)
    assert not same_answer(rf"\mathbf{{{answer}}}", expected)
    assert not same_answer(answer, rf"\text{{{expected}}}")


HOSTILE = [
    *("__import__('os').system('touch /tmp/agentrl_was_here')", "exec('1')", r"\operatorname{exec}(1)", "lambda: 1"),
    *("9^{9^{9^9}}", "10^{100000000}", "99999999!", r"e^{e^{e^{e^e}}}", "((x+1)^{999}+1)^{999}", "(x+1)^{99999}"),
    *("(" * 450 + "x" + ")" * 450, "{" * 300 + "x" + "}" * 300, r"\sin(" * 100 + "x" + ")" * 100, "x^" * 300 + "x"),
    *("-" * 900 + "x", "|" * 500, "|" * 36, "x=" * 300 + "1", "x<" * 200 + "y", r"\pm" * 200),
    *(r"\text{" * 160 + "}" * 160, "1," * 499, "\ud800", "\x00", "\n" * 900, "\\", "$" * 900, "%" * 900, "_" * 500),
    *(r"\frac" * 150, r"\begin{pmatrix}" * 50, r"\infty-\infty", r"\frac{0}{0}", "zoo", "oo", "I", "S.Infinity"),
    *("Symbol('x')", "x.__class__", "[].append(1)"),
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_answers_are_wrong_and_nothing_else(text: str) -> None:
    for expected in (r"\pi", "5", "x+1", "(1,2)", r"\{1,2\}", "y=2x"):
        assert same_answer(text, expected, seconds=0.7) is False
    assert not Path("/tmp/agentrl_was_here").exists()


@given(st.integers(-50, 50), st.integers(1, 30), st.integers(2, 30), st.integers(1, 9))
@example(-1, 1, 4, 1)
def test_surds_against_sympy(a: int, b: int, n: int, d: int) -> None:
    value = (a + b * sympy.sqrt(n)) / d
    text = rf"\frac{{{a}+{b}\sqrt{{{n}}}}}{{{d}}}"
    # Where the root is a whole number the answer is a calculation that was left undone.
    assert same_answer(text, sympy.latex(sympy.expand(value))) == (not value.is_rational)
    assert not same_answer(text, sympy.latex(sympy.expand(value) + sympy.sqrt(2) / 7))


@pytest.mark.parametrize("seed", range(10))
def test_polynomials_against_sympy(seed: int) -> None:
    rng = random.Random(seed)
    x, y = sympy.symbols("x y")
    factors = [rng.randint(1, 5) * x + rng.randint(-5, 5) * y + rng.randint(-5, 5) for _ in range(3)]
    product = sympy.Mul(*factors, evaluate=False)
    expanded = sympy.expand(product)
    assert same_answer(sympy.latex(product), sympy.latex(expanded))
    assert not same_answer(sympy.latex(product), sympy.latex(expanded + x - y))
