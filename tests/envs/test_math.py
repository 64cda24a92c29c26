"""Math-v0 and MathPython-v0: what is rewarded, the sample's answers, and the contract."""

import functools
import itertools
import json
import math
import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import sympy

import agentrl
from agentrl.envs.math.data import SAMPLE
from agentrl.envs.math.env import Math
from agentrl.errors import ConfigError, UsageError
from agentrl.grading.latex import same_answer

from .published import play, tables

pytestmark = pytest.mark.usefixtures("graders")
IDS = ("agentrl/Math-v0", "agentrl/MathPython-v0")
x, n = sympy.symbols("x n")


def chance(hits: Callable[..., bool], *ranges: range) -> Fraction:
    cases = list(itertools.product(*ranges))
    return Fraction(sum(hits(*case) for case in cases), len(cases))


def where(condition: Callable[[Fraction], bool]) -> set[Fraction]:
    """The points of a grid at which ``condition`` holds."""
    return {point for point in (Fraction(k, 4) for k in range(-60, 61)) if condition(point)}


REAL = sympy.Symbol("x", real=True)
CHECKS: dict[str, object] = {
    "int-01": 14 * 18 - 197,
    "int-02": sum(720 % d == 0 for d in range(1, 721)),
    "int-03": pow(7, 100, 13),
    "int-04": len(set(itertools.permutations("LEVEL"))),
    "int-05": math.gcd(1071, 462),
    "int-06": sum(k % 3 == 0 or k % 5 == 0 for k in range(1, 1001)),
    "int-07": sum(p for p in sympy.primerange(10, 100) if p % 10 == 3),
    "int-08": sum((9 - side) ** 2 for side in range(1, 9)),
    "int-09": next(k for k in range(1, 100) if str(math.factorial(k)).endswith("0" * 7)),
    "int-10": sum(not mask & (mask << 1) for mask in range(1024)),
    "int-11": functools.reduce(lambda passengers, _: passengers - passengers // 4 + 16, range(3), 256),
    "int-12": (pow(3, 2024, 10) + pow(2, 2024, 10)) % 10,
    "frac-01": chance(lambda a, b: a + b == 8, range(1, 7), range(1, 7)),
    "frac-02": Fraction(2, 10) + Fraction(7, 90),
    "frac-03": Fraction(1, 4) + Fraction(1, 6),
    "frac-04": sympy.solve(3 / x + sympy.Rational(1, 2) - sympy.Rational(7, 4), x)[0],
    "frac-05": chance(lambda a, b: a < 4 and b < 3, range(10), range(9)),
    "frac-06": sympy.summation(sympy.Rational(1, 3) ** n, (n, 1, sympy.oo)),
    "frac-07": Fraction(-1 - 5, 6 + 2),
    "frac-08": sympy.integrate(x**2 * (1 - x), (x, 0, 1)),
    "surd-01": sympy.sqrt(50) + sympy.sqrt(18),
    "surd-02": sympy.sqrt(4**2 + 6**2),
    "surd-03": sympy.Rational(1, 2) * 6 * 6 * sympy.sin(sympy.pi / 3),
    "surd-04": sympy.radsimp(4 / (sympy.sqrt(5) - 1)),
    "surd-05": max(sympy.solve(x**2 - 4 * x - 1, x)),
    "surd-06": math.isqrt(2**2 + 3**2 + 6**2),
    "pi-01": sympy.pi * (10 * sympy.pi / (2 * sympy.pi)) ** 2,
    "pi-02": sympy.pi * 3**2 * 7 / 3,
    "pi-03": min(sympy.solve(sympy.sin(x) - sympy.sqrt(3) / 2, x)),
    "pi-04": sympy.integrate(1 / (1 + x**2), (x, -1, 1)),
    "ival-01": where(lambda v: v * v - 5 * v + 6 < 0),
    "ival-02": where(lambda v: 9 - v * v >= 0),
    "ival-03": where(lambda v: abs(2 * v - 1) <= 5),
    "ival-04": where(lambda v: v + 1 >= 0),  # x² - 2x = (x - 1)² - 1
    "ival-05": where(lambda v: v != -2 and (v - 1) / (v + 2) >= 0),
    "ival-06": where(lambda v: v > 0 and v <= 2**3),
    "set-01": {v for v in range(-9, 10) if v**3 == 4 * v},
    "set-02": {p for p in sympy.primerange(100) if 2310 % p == 0},
    "set-03": {v for v in range(-20, 20) if v != -1 and 6 % (v + 1) == 0 and 6 // (v + 1) > 1},
    "set-04": {v * v % 8 for v in range(8)},
    "set-05": set(sympy.solveset(2 * sympy.cos(x) - 1, x, sympy.Interval.Ropen(0, 2 * sympy.pi))),
    "set-06": set(sympy.solve(x**2 - 6 * x + 7, x)),
    "tup-01": next((a, b) for a in range(12) for b in range(12) if a + b == 11 and 3 * a - b == 9),
    "tup-02": next((a, 2 * a - 7) for a in range(12) if 2 * a - 7 == -a + 5),
    "tup-03": (Fraction(4, 2), Fraction(-10, 2)),
    "tup-04": (Fraction(1 + 6, 2), Fraction(-4 + 2, 2)),
    "tup-05": next(
        t for t in itertools.product(range(7), repeat=3) if (t[0] + t[1], t[1] + t[2], t[0] + t[2]) == (3, 5, 6)
    ),
    "poly-01": sympy.expand((x - 2) * (x**2 + 2 * x + 4)),
    "poly-02": sympy.div(2 * x**3 + 3 * x**2 - 8 * x + 3, x + 3)[0],
    "poly-03": sympy.diff(x**4 - 3 * x**2 + 5 * x, x),
    "poly-04": sympy.expand((x + 4) * (x - 7)),
    "poly-05": sympy.factor(sympy.summation(2 * x - 1, (x, 1, n))),
    "poly-06": sympy.expand(3 * (x - 2) + 1),
    "pct-01": Fraction(80 - 68, 80) * 100,
    "pct-02": (Fraction(110, 100) * Fraction(120, 100) - 1) * 100,
    "pct-03": Fraction(250 - 215, 250) * 100,
    "unit-01": Fraction(42) / (1 + Fraction(45, 60)),
    "unit-02": 4 * 5 * 9,
    "unit-03": Fraction((10 - 2) * 180, 10),
    "unit-04": Fraction(910, 7) * 3 / 100,
}
"""Every answer of the sample, found another way: by counting, by sympy, or on a grid."""


def sample() -> list[dict[str, Any]]:
    return [json.loads(line) for line in SAMPLE.read_text(encoding="utf-8").splitlines()]


def inside(answer: str, point: Fraction) -> bool:
    """Whether an interval as the sample writes it, or a union of them, holds ``point``."""
    for opening, low, high, closing in re.findall(r"([(\[])([^,]+),([^)\]]+)([)\]])", answer):
        left = -math.inf if "infty" in low else Fraction(low)
        right = math.inf if "infty" in high else Fraction(high)
        above = point > left or (opening == "[" and point == left)
        if above and (point < right or (closing == "]" and point == right)):
            return True
    return False


@pytest.mark.parametrize("row", sample(), ids=lambda row: row["id"])
def test_the_samples_answers_are_right(row: dict[str, Any]) -> None:
    checked, answer = CHECKS[row["id"]], row["answer"]
    if row["field"] == "interval":
        assert checked == where(lambda point: inside(answer, point))
    elif isinstance(checked, set):
        texts = [sympy.latex(value) for value in checked]
        assert same_answer(rf"\{{{', '.join(texts)}\}}", answer)
        assert not same_answer(", ".join(texts[1:]), answer)
    elif isinstance(checked, tuple):
        assert same_answer(f"({', '.join(map(str, checked))})", answer)
        assert not same_answer(f"({', '.join(map(str, reversed(checked)))})", answer)
    else:
        text = str(checked) if isinstance(checked, int | Fraction) else sympy.latex(checked)
        assert same_answer(text, answer)
        assert not same_answer(f"{text}+1", answer)


TABLES = tables("math")
REWARDED = [(text, reward) for reward, texts in ((1.0, TABLES["right"]), (0.0, TABLES["wrong"])) for text in texts]


@pytest.mark.parametrize(("text", "reward"), [*REWARDED, (r"\boxed{" + "9" * 100_000 + "}", 0.0)])
def test_what_is_rewarded(text: str, reward: float) -> None:
    assert play(Math(split="test"), "surd-01", text) == (reward, True)


@pytest.mark.parametrize(("task", "answer"), TABLES["unworked"].items())
def test_an_unworked_answer_scores_nothing(task: str, answer: str) -> None:
    env = Math(split=next(row["split"] for row in sample() if row["id"] == task))
    assert play(env, task, rf"\boxed{{{answer}}}") == (0.0, True)


def test_python_helps_and_a_box_beside_a_call_is_no_answer() -> None:
    env = Math(tool=True, split="test", max_turns=2)
    env.reset(seed=0, options={"task": "surd-01"})
    assert env.step("```python\nx = 8\n```")[1:4] == (0.0, False, False)
    assert env.step(r"\boxed{8\sqrt{2}}" + "\n```python\nprint(x)\n```")[1:4] == (0.0, False, True)
    assert env.episode.messages[-1]["content"] == "8"
    env.close()


@pytest.mark.parametrize("env_id", IDS)
def test_gold_is_perfect(env_id: str) -> None:
    for split in ("train", "test"):
        env = agentrl.make(env_id, split=split)
        for task in env.task_set if env_id == IDS[0] else itertools.islice(env.task_set, 2):
            assert play(env, task.id, *env.gold(task)) == (1.0, True)
        env.close()


def test_gold_lets_python_work_out_the_equation_of_a_row(tmp_path: Path) -> None:
    rows = [("( 76.0 - 25.5 )", "print(( 76 - 25.5 ))", "50.5"), ("__import__('os')", "print('50.5')", "50.5")]
    for number, (equation, code, printed) in enumerate(rows):
        path = tmp_path / f"{number}.json"
        path.write_text(json.dumps([{"Question": "How much is 76 less 25.5?", "Equation": equation, "Answer": 50.5}]))
        env = Math(tool=True, split="test", data={"test": str(path)})
        env.reset(seed=0)
        call, answer = env.gold(env.episode.task)
        assert code in call and env.step(call)[0][-1]["content"] == printed
        assert env.step(answer)[1] == 1.0
        env.close()


def test_arguments_reach_the_data(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"text": "What is 1+1?", "value": 2}\n{"text": ""}\n')
    options = {"data": str(path), "columns": {"prompt": "text", "answer": "value"}, "skip_bad_rows": True}
    with pytest.warns(UserWarning, match=r"mine\.jsonl line 2 has no problem in 'text'"):
        assert agentrl.make(IDS[0], **options).reset(seed=0)[0][-1]["content"] == "What is 1+1?"
    with pytest.raises(UsageError, match=r"no task of .*mine\.jsonl is in the split 'test': give data="):
        agentrl.make(IDS[1], split="test", **options).reset(seed=0)
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    with pytest.raises(UsageError, match=r"no task of .*empty\.jsonl is in the split 'test'"):
        agentrl.make(IDS[0], split="test", data={"test": str(empty)}).reset(seed=0)


@pytest.mark.parametrize(
    "options", [{"columns": ["problem"]}, {"columns": "problem"}, {"columns": {"prompt": 1}}, {"data": Path("a.jsonl")}]
)
def test_what_is_no_table_of_texts_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"(columns|data) is .*: give a .*table of texts"):
        Math(**options)
