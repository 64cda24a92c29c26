"""What an answer must be beside right: worked out, no restatement of its problem, and of the form that is asked for."""

import pytest

from agentrl.grading.latex import same_answer

ROWS = [
    # problem, expected answer, right answers, others that mean the same
    ("How much is it?", r"2\sqrt{13}", [r"\sqrt{52}", r"2\cdot\sqrt{13}"], [r"\sqrt{4^2+6^2}", r"\sqrt{13}+\sqrt{13}"]),
    ("How much is it?", r"21\pi", [r"\pi\cdot21", "21 pi"], [r"\frac13\pi\cdot3^2\cdot7", r"\frac{63\pi}{3}"]),
    ("How large?", r"\frac{\pi}{3}", [r"\pi/3", r"\frac13\pi"], [r"\arcsin\frac{\sqrt3}{2}", r"2\arctan 1-\pi/6"]),
    ("Find it.", r"3\ln 2", [r"\ln 8", r"3\cdot\ln 2"], [r"\ln 8+\ln 1"]),
    ("Find it.", r"2^{10}\pi", [r"1024\pi", r"2\cdot 2^9\pi"], []),
    ("Differentiate $x^4-3x^2$.", "4x^3-6x", ["-6x+4x^3", "2x(2x^2-3)"], ["4x^{4-1}-6x", "4x^3-x-5x"]),
    (r"Divide $x^2+3x+2$ by $x+1$.", "x+2", ["2+x"], [r"\frac{2+3x+x^2}{1+x}"]),
    ("Simplify $-10-4(n-5)$.", "10-4n", ["-4n+10", "2(5-2n)"], ["-10-4(n-5)", "4(5-n)-10"]),
    (r"Simplify $\frac{8i}{6-7i}$.", r"\frac{48i-56}{85}", [r"\frac{-56+48i}{85}"], [r"\frac{8i}{-7i+6}"]),
    ("Evaluate $(5-4i)+(8-4i)$", "13-8i", ["-8i+13"], ["(8-4i)+(5-4i)"]),
    (r"Is \(x^2+1\) or \(x^2-1\) reducible?", "x^{2}-1", ["-1+x^2"], []),
    # relations
    ("Solve $x^2-5x+6<0$.", "(2,3)", ["2<x<3", "3>x>2", r"x\in(2,3)"], ["6-5x+x^2<0", "(x-2)(x-3)<0", r"|2x-5|<1"]),
    (r"What is the range of $f$?", r"[-1,\infty)", [r"f(x)\ge-1", r"-1\le y"], [r"2y+2\ge 0"]),
    ("Solve $3x-4=11$.", "x=5", ["5=x", "5"], ["3x-4=11", "3x=15"]),
    ("Solve $S=L+2B$ for $L$.", "L=S-2B", ["S-2B=L"], ["S=2B+L", "2B=S-L"]),
    ("Find the circle $x^2+y^2-4x=7$ by centre and radius.", "(x-2)^2+y^2=11", ["11=(x-2)^2+y^2"], ["x^2-4x+y^2-7=0"]),
    ("Which line is it?", "y=2x+3", ["2x-y+3=0", "y=3+2x", "2x+3"], []),
    # forms
    (r"Write $0.2\overline{7}$ as a fraction.", r"\frac{5}{18}", ["5/18", "10/36"], [r"0.2\overline{7}"]),
    ("Write 0.5 as a common fraction.", r"\frac12", ["1/2"], ["0.5", ".50"]),
    ("What is the chance?", r"\frac12", ["1/2", "0.5", "2/4"], []),
    (r"Reduce $\frac{48}{18}$.", r"\frac{8}{3}", ["8/3", r"2\frac{2}{3}"], [r"\frac{48}{18}", r"\frac{16}{6}"]),
    ("Write it as a mixed number.", r"1\frac12", ["1 1/2"], ["3/2", "1.5"]),
    ("Write it as a decimal.", "0.75", [".75", "0.750"], ["3/4"]),
    ("Give it in simplest radical form.", r"2\sqrt3", [r"\sqrt3\cdot2"], [r"\sqrt{12}", r"\frac{6}{\sqrt3}"]),
    ("Factor $x^3-x$ completely.", "x(x-1)(x+1)", ["(x+1)(x-1)x"], ["x(x^2-1)", "-x+x^3"]),
    ("Expand it.", "x^2+2x+1", ["1+2x+x^2"], ["(x+1)^2", "x(x+2)+1"]),
    ("Give the line as $y = mx + b$.", "y=3x-5", ["3x-5"], ["y=3(x-2)+1"]),
]  # fmt: skip


@pytest.mark.parametrize(("problem", "expected", "right", "wrong"), ROWS, ids=range(len(ROWS)))
def test_form(problem: str, expected: str, right: list[str], wrong: list[str]) -> None:
    for answer in [expected, *right]:
        assert same_answer(answer, expected, problem=problem), answer
    for answer in wrong:
        assert same_answer(answer, expected), answer
        assert not same_answer(answer, expected, problem=problem), answer
