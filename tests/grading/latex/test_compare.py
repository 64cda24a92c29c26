"""Which answers mean the same: known pairs, known traps, and values against sympy's own."""

import random
from pathlib import Path

import pytest
import sympy
from hypothesis import example, given
from hypothesis import strategies as st

from agentrl.grading.latex import same_answer

SAME = [
    # numbers
    *((r"\frac12", "1/2"), (r"\dfrac{3}{4}", "0.75"), (r"-\frac{1}{2}", r"\frac{-1}{2}"), ("042", "42"), ("$5$", "5")),
    *((r"1\frac{1}{2}", r"\frac{3}{2}"), ("1 1/2", "1.5"), ("-2 1/3", r"-\frac{7}{3}"), ("{5}", "5"), ("5.", "5")),
    *((r"1.5\times 10^{3}", "1500"), ("1.5e3", "1500"), (r"2\cdot10^{-2}", "0.02"), (r"0.\overline{3}", r"\frac13")),
    *(("10,000", "10000"), ("10{,}000", "10000"), (r"10\,000", "10000"), (r"0.1\overline{6}", r"\frac{1}{6}")),
    *((r"\infty", r"+\infty"), ("12_8", "12_{8}"), ("12", "12_{8}"), ("2^{10}", "2^{10}"), ("1024", "2^{10}")),
    # per cent, units, words
    *((r"50\%", "50"), (r"50\%", "0.5"), ("50", r"50\%"), ("0.5", r"50\%"), ("50 percent", r"50\%")),
    *((r"30^\circ", "30"), (r"30^{\circ}", r"30 \text{ degrees}"), (r"\$5", "5"), ("5 dollars", r"\$5")),
    *((r"5 \text{ cm}", "5"), ("5 cm", r"5\text{ centimeters}"), (r"15\text{ square units}", "15")),
    *((r"9\pi \text{ cm}^2", r"9\pi"), (r"9\pi\text{ square centimeters}", r"9\pi \mathrm{cm}^2"), ("5 feet", "5 ft")),
    *((r"\text{Evelyn}", "Evelyn"), (r"\text{(C)}", "C"), ("(C)", "C"), (r"\textbf{(C)}", "(C)"), ("YES", "yes")),
    *((r"\text{no solution}", "No solution"), ("2:30", "2:30"), ("12 apples", "12"), (r"\mathbf{x}", "x")),
    # dress around all of a number or formula
    *((r"\text{38}", "38"), (r"\mathbf{7}", "7"), (r"\text{ 38 }", "38"), ("38", r"\textbf{38}"), (r"\bm{7}.", "7")),
    *((r"\text{$38$}", "38"), (r"$\text{38}$", "38"), (r"\mathrm{\text{7}}", "7"), (r"\text{1,000}", "1000")),
    *((r"\mathbf{\frac{1}{2}}", "0.5"), (r"\boldsymbol{x^2+1}", "1+x^2"), (r"\text{(1, 2)}", "(1,2)")),
    *((r"\mathit{\{1,2\}}", r"\{2,1\}"), (r"\textbf{50\%}", "50"), (r"\text{x = 5}", "5")),
    # names, lists, tuples, intervals
    *(("x = 5", "5"), ("5", "x=5"), ("f(x)=x^2", "x^2"), (r"\theta = \pi", r"\pi"), ("(x, y) = (1, 2)", "(1,2)")),
    *(("(1, 2)", "(1,2)"), (r"\left( \frac{1}{2}, -3\right)", "(0.5,-3)"), ("(0,1),(2,3)", "(2,3),(0,1)")),
    *((r"\{2,1\}", "1,2"), (r"1 \text{ or } 2", r"\{1,2\}"), ("1 or 2", "2, 1"), ("1, 2, and 3", "1,2,3")),
    *(("x=1, x=2", "1,2"), ("x = 1, 2", "2, 1"), (r"\{5\}", "5"), ("1,000, 2,000", "1000, 2000")),
    *(("x=1, y=2", "y=2, x=1"), (r"\pm 2", "2,-2"), (r"2\pm\sqrt{3}", r"2-\sqrt3, 2+\sqrt3")),
    *((r"x \in (1,2]", "(1,2]"), ("1<x<2", "(1,2)"), ("(1,2)", "1<x<2"), ("[2,3]", r"2\le x\le 3")),
    (r"(1,\infty)\cup(-\infty,1)", r"(-\infty,1)\cup(1,\infty)"),
    (r"\mathbb{R}\setminus\{1\}", r"(-\infty,1)\cup(1,\infty)"),
    # expressions
    *((r"\sqrt{8}", r"2\sqrt{2}"), (r"\frac{1}{\sqrt{2}}", r"\frac{\sqrt{2}}{2}"), (r"\frac{\pi}{2}", r"0.5\pi")),
    *((r"\frac{1+\sqrt{5}}{2}", r"\frac{2}{\sqrt5-1}"), (r"\sqrt[3]{2}", "2^{1/3}"), ("pi/2", r"\frac{\pi}{2}")),
    *(("(x+1)^2", "x^2+2x+1"), ("n(n+1)/2", r"\frac{n^2+n}{2}"), ("2*x", "2x"), (r"\frac{2}{3}x", "2x/3")),
    *(("3+4i", "4i+3"), ("(1+i)^2", "2i"), (r"e^{i\pi}+x", "x-1"), (r"\cos^2 x", r"1-\sin^2 x")),
    *((r"\sin 30^\circ + x", r"x+\frac12"), (r"\log_2 9", r"2\log_2 3"), (r"\ln x^2", r"2\ln x"), ("|x-1|", "|1-x|")),
    *((r"\tan^{-1} 1", r"\frac{\pi}{4}"), ("5!", "5!")),
    (r"\begin{pmatrix} 1 \\ 2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    # equations and inequalities
    *(("y=3+2x", "y=2x+3"), ("2x-y+3=0", "y=2x+3"), ("xy=2", r"y=\frac{2}{x}"), (r"x \le 5", r"5 \ge x")),
]  # fmt: skip
OTHER = [
    # a number has to be worked out
    *((r"\frac{2}{5}", "1/2"), ("10/2", "5"), ("2+3", "5"), ("2^{10}", "1024"), (r"\sqrt{16}", "4"), ("3=5", "5")),
    *(("0.333333", "1/3"), ("1.5708", r"\frac{\pi}{2}"), ("1.41421356237309504880168872421", r"\sqrt{2}")),
    *((r"\int_0^1 x dx", r"\frac12"), (r"\sum_{n=1}^{10} n", "55"), (r"\binom{5}{2}\pi", r"10\pi")),
    *((r"\frac{\sqrt{4}}{2}", "1"), ("5!", "120"), (r"3!\pi", r"6\pi"), (r"\frac{d}{dx}x^3", "3x^2")),
    *((r"\frac{\partial}{\partial x}x^3", "3x^2"), (r"\frac{d}{dx}(x^3\sin x)", r"3x^2\sin x+x^3\cos x")),
    *((r"\{14-5\}\cup\emptyset", "9"), (r"\{\sqrt{8}\}\cup\emptyset", r"2\sqrt2"), (r"\{1\}\cup\{2\}", "1,2")),
    # nor is what comes near
    (str(sympy.pi.evalf(78)), r"\pi"),
    ("(e^{x+h}-e^{x-h})/(2h)".replace("h", r"(10^{-24}\pi)"), "e^x"),
    ("(8(e^{x+h}-e^{x-h})-e^{x+2h}+e^{x-2h})/(12h)".replace("h", r"(\pi/10^{12})"), "e^x"),
    # brackets, order, number of values
    *((r"\{1,2\}", "(1,2)"), ("1,2", "(1,2)"), ("(1,2)", "1,2"), ("(2,1)", "(1,2)"), ("[1,2]", "(1,2)")),
    *(("(3,1)", "(2,1)"), ("(2,1)", r"\emptyset"), (r"(5,\infty)", r"[5,\infty)"), (r"(1,2)\cup(2,3)", "(1,3)")),
    *(("1", "1,2"), ("1,1", "1"), ("1,2,3", "1,2"), ("1,2", "1,2,2"), ("1,2 or 3", "1,2"), ("1 or 2", "1")),
    (r"\mathbb{R}", r"(0,\infty)"),
    (r"\begin{pmatrix} 2 \\ 1\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    # units, per cent, words
    *((r"5 \text{ cm}", r"5 \text{ m}"), ("5 cm", r"5\text{ cm}^2"), ("12_7", "12_8"), ("50", "0.5"), (r"5\%", "0.5")),
    *((r"\text{5}+\text{6}", "56"), (r"5\text{38}", "538"), (r"\text{3}8", "38"), (r"\text{5}\text{cm}", "5m")),
    *((r"\text{on 2}", r"\text{2 no}"), (r"\text{no}", r"\text{on}"), (r"\text{A1}", r"\text{1A}")),
    *(("yes", "sey"), ("on", "off"), ("(D)", "(C)"), ("A", "B"), ("1:15", "2:30"), (r"\text{Evelyn or Bob}", "Evelyn")),
    # equations
    *(("y=5", "x=5"), ("x=5", "x=6"), ("x=1, y=2", "x=2,y=1"), ("2, 1", "x=1,y=2"), ("x<5", r"x\le5"), ("x>5", "x<5")),
    *(("x^2=-2", "x^2=-1"), ("0=1", "x^2=-1"), ("0=0", "y=2x")),
    # values
    *((r"1\frac12", r"\frac12"), (r"\pi\cdot10^{-20}", r"2\pi\cdot 10^{-20}"), ("x", "x+10^{-30}"), ("x+y", "x-y")),
    *((r"\sin x", "x"), ("|x|", "x"), ("2x", "x"), ("x+1", "x+2"), ("f(x)", "g(x)"), (r"\frac{1}{0}", r"\infty")),
    # nothing and nonsense
    *(("", "5"), (" ", "5"), ("$", "5"), ("nan", r"\pi"), ("(", r"\pi"), (r"\text{}", "x"), ("{}", "x"), ("None", "0")),
]  # fmt: skip


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
