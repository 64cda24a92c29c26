"""Programming data sets in their published layouts, three rows of our own each, through the real environment."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from .published import LAYOUTS, Row, play, played, publish


class Function(NamedTuple):
    text: str
    head: str
    """Its line ``def …:``; what follows ``def`` up to the bracket is its name."""
    body: str
    tests: tuple[str, ...]
    """Assert statements on ``f``."""

    @property
    def name(self) -> str:
        return self.head.partition(" ")[2].partition("(")[0]

    @property
    def values(self) -> Row:
        """What a layout may ask for; the method is the function as LeetCode wants it."""
        code, tests = f"{self.head}\n{self.body}\n", [test.replace("f(", f"{self.name}(") for test in self.tests]
        indented = [f"    {line}" for line in (self.head.replace("(", "(self, "), *self.body.splitlines())]
        checks = "".join(f"    {test.replace('f(', 'candidate(')}\n" for test in self.tests)
        method = "\n".join(["class Solution:", *indented, ""])
        return {
            **{**self._asdict(), "name": self.name, "code": code, "crlf": code.replace("\n", "\r\n")},
            **{"tests": tests, "first_tests": tests[:2], "last_tests": tests[2:]},
            **{"check": f"def check(candidate):\n{checks}", "method": method},
            "starter": f"class Solution:\n{indented[0]}",
        }


FUNCTIONS = (
    Function(
        "Write a function that gives the middle one of an odd number of items.",
        "def middle(items: list[int]) -> int:",
        "    return sorted(items)[len(items) // 2]",
        ("assert f([3, 1, 2]) == 2", "assert f([5]) == 5", "assert f([9, 1, 1]) == 1"),
    ),
    Function(
        "Write a function to find a digit in a text.",
        "def digit(text: str) -> object:",
        '    import re\n    return re.search("[0-9]", text)',
        ('assert f("a1")', 'assert not f("ab")', 'assert not f("")'),
    ),
    Function(
        "Write a function that doubles every number of a list, in order.",
        "def doubled(items: list[float]) -> list[float]:",
        "    return [2 * item for item in items]",
        ("assert f([1, 0.5]) == [2, 1.0]", "assert f([]) == []", "assert f([-1]) == [-2]"),
    ),
)


def check_programs(data: str, texts: Sequence[str], wrong: Sequence[str]) -> None:
    """Whether the environment asks for exactly these programs, and knows right from wrong."""
    asked: list[str] = []
    for env in played("agentrl/Code-v0", data=data):
        task = env.episode.task
        asked += [text for text in texts if text in task.prompt]
        turns = [env.step(turn) for turn in env.gold(task)]
        assert turns[-1][4]["parts"] == {"correct": 1.0, "passed": 1.0, "submitted": 1.0, "timeout": 0.0}
        assert env.episode.tool_runs[0].ok
        for code in wrong:
            assert play(env, task.id, f"```solution\n{code}\n```") == (0.0, True)
    assert sorted(asked) == sorted(texts)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS["functions"])
def test_functions(tmp_path: Path, layout: str) -> None:
    path = publish(tmp_path, "functions", layout, [function.values for function in FUNCTIONS])
    names = " = ".join(function.name for function in FUNCTIONS)
    wrong = f"def f(*_):\n    return 2\n{names} = f\nclass Solution:\n    {names} = f"
    wrongs = [wrong, wrong.replace("2", "None"), "", "raise SystemExit"]
    check_programs(path, [function.text for function in FUNCTIONS], wrongs)


@pytest.mark.parametrize("layout", LAYOUTS["programs"])
def test_programs(tmp_path: Path, layout: str) -> None:
    method = "class Solution:\n    def flip(self, text):\n        return text[::-1]"
    twice = "import sys\nfor line in sys.stdin:\n    print(line.strip() * 2)"
    total = "print(sum(map(int, input().split())))"
    problems = (
        ("Print the sum.", total, {"inputs": ["1 2\n", "4"], "outputs": ["3\n", "4"]}),
        ("Print every line twice.", twice, {"inputs": ["a\nb"], "outputs": ["aa\nbb"]}),
        ("Turn a text around.", method, {"fn_name": "flip", "inputs": [["ab"], ["xyz"]], "outputs": ["ba", ["zyx"]]}),
    )
    rows = [
        {"text": text, "solutions": json.dumps([code, "print()"]), "tests": json.dumps(tests)}
        for text, code, tests in problems
    ]
    path = publish(tmp_path, "programs", layout, rows)
    wrong = ["print(3)", "class Solution:\n    def flip(self, text):\n        return text"]
    check_programs(path, [text for text, _, _ in problems], wrong)
