"""Programming data sets in their published layouts, three rows of our own each, through the real environment."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from .published import Row, played, write


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
    def code(self) -> str:
        return f"{self.head}\n{self.body}\n"

    @property
    def check(self) -> str:
        return "def check(candidate):\n" + "".join(f"    {test.replace('f(', 'candidate(')}\n" for test in self.tests)

    @property
    def method(self) -> str:
        """The function as LeetCode wants it."""
        lines = [self.head.replace("(", "(self, "), *self.body.splitlines()]
        return "class Solution:\n" + "".join(f"    {line}\n" for line in lines)


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
IMPORTS = "from typing import *\nimport math\n\ninf = float('inf')\n"


def human_eval(i: int, one: Function) -> Row:
    prompt = f'import math\n\n\n{one.head}\n    """ {one.text}\n    """\n'
    row = {"task_id": f"OurEval/{i}", "prompt": prompt, "entry_point": one.name, "canonical_solution": f"{one.body}\n"}
    return {**row, "test": f"\n\nMETADATA = {{\n    'author': 'us'\n}}\n\n\n{one.check}"}


def mbpp(i: int, one: Function) -> Row:
    tests = [test.replace("f(", f"{one.name}(") for test in one.tests]
    row = {"text": one.text, "code": one.code.replace("\n", "\r\n"), "task_id": 600 + i, "test_setup_code": ""}
    return {**row, "test_list": tests[:2], "challenge_test_list": tests[2:]}


def sanitized(i: int, one: Function) -> Row:
    row = {"source_file": "Ours.ipynb", "task_id": 600 + i, "prompt": one.text, "code": one.code}
    tests = [test.replace("f(", f"{one.name}(") for test in one.tests]
    return {**row, "test_imports": ["import math"], "test_list": tests}


def leetcode(i: int, one: Function) -> Row:
    row = {"task_id": f"ours-{i}", "prompt": IMPORTS, "completion": one.method, "entry_point": f"Solution().{one.name}"}
    return {
        **row,
        "test": one.check,
        "response": "We…",
        "input_output": [{"input": "items = [3, 1, 2]", "output": "2"}],
    }


def starter(one: Function) -> str:
    return "\n".join(one.method.splitlines()[:2])


def leetcode_0_1(i: int, one: Function) -> Row:
    query = f"{one.text}\n \nPlease complete the following python code precisely:\n```python\n{starter(one)}\n```"
    meta = {"question_id": i, "difficulty": "Easy", "question_title": one.text, "lang_code": starter(one)}
    return {**leetcode(i, one), "query": query, "meta": meta}


def leetcode_0_2(i: int, one: Function) -> Row:
    return {name: value for name, value in leetcode_0_1(i, one).items() if name not in ("meta", "response")}


def leetcode_0_3(i: int, one: Function) -> Row:
    row = {
        "question_id": i,
        "difficulty": "Easy",
        "tags": ["Array"],
        "query": "You are…",
        "problem_description": one.text,
    }
    return {**leetcode(i, one), **row, "starter_code": f"{starter(one)}\n        ", "estimated_date": "2024-08-04"}


OF_FUNCTIONS: dict[str, tuple[str, Callable[[int, Function], Row]]] = {
    "HumanEval": ("HumanEval.jsonl", human_eval),
    "HumanEval packed": ("HumanEval.jsonl.gz", human_eval),
    "HumanEval in Parquet": ("test-00000-of-00001.parquet", human_eval),
    "MBPP": ("mbpp.jsonl", mbpp),
    "MBPP in Parquet": ("full.parquet", mbpp),
    "MBPP sanitized": ("sanitized-mbpp.json", sanitized),
    "MBPP sanitized in Parquet": ("sanitized.parquet", sanitized),
    "LeetCodeDataset 0.1": ("LeetCodeDataset-v0.1.0-test.jsonl.gz", leetcode_0_1),
    "LeetCodeDataset 0.2": ("LeetCodeDataset-v0.2.0-test.jsonl.gz", leetcode_0_2),
    "LeetCodeDataset 0.3.1": ("LeetCodeDataset-v0.3.1-test.jsonl.gz", leetcode_0_3),
    "LeetCodeDataset in Parquet": ("train.parquet", leetcode_0_3),
}


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
            env.reset(seed=0, options={"task": task.id})
            assert env.step(f"```solution\n{code}\n```")[1] == 0.0
    assert sorted(asked) == sorted(texts)


@pytest.mark.slow
@pytest.mark.parametrize("layout", OF_FUNCTIONS)
def test_functions(tmp_path: Path, layout: str) -> None:
    name, build = OF_FUNCTIONS[layout]
    path = write(tmp_path / name, [build(i, one) for i, one in enumerate(FUNCTIONS)])
    names = " = ".join(one.name for one in FUNCTIONS)
    wrong = f"def f(*_):\n    return 2\n{names} = f\nclass Solution:\n    {names} = f"
    check_programs(path, [one.text for one in FUNCTIONS], [wrong, wrong.replace("2", "None"), "", "raise SystemExit"])


def apps(i: int, text: str, code: str, tests: Row) -> Row:
    row = {"id": i, "question": text, "solutions": json.dumps([code, "print()"]), "input_output": json.dumps(tests)}
    return {**row, "difficulty": "introductory", "url": "https://example.org", "starter_code": ""}


def taco(i: int, text: str, code: str, tests: Row) -> Row:
    row = {**apps(i, text, code, tests), "difficulty": "EASY", "raw_tags": "['strings']", "name": None, "source": "us"}
    row |= {"tags": "['String algorithms']", "skill_types": "[]", "Expected Auxiliary Space": None, "picture_num": "0"}
    row |= {"time_limit": "2.0 seconds", "date": "2020-01-01", "memory_limit": "64 megabytes"}
    return {name: value for name, value in row.items() if name != "id"} | {"Expected Time Complexity": None}


@pytest.mark.parametrize(("name", "build"), [("test.jsonl", apps), ("train-00000-of-00009.parquet", taco)])
def test_programs(tmp_path: Path, name: str, build: Callable[[int, str, str, Row], Row]) -> None:
    method = "class Solution:\n    def flip(self, text):\n        return text[::-1]"
    twice = "import sys\nfor line in sys.stdin:\n    print(line.strip() * 2)"
    total = "print(sum(map(int, input().split())))"
    problems = (
        ("Print the sum.", total, {"inputs": ["1 2\n", "4"], "outputs": ["3\n", "4"]}),
        ("Print every line twice.", twice, {"inputs": ["a\nb"], "outputs": ["aa\nbb"]}),
        ("Turn a text around.", method, {"fn_name": "flip", "inputs": [["ab"], ["xyz"]], "outputs": ["ba", ["zyx"]]}),
    )
    path = write(tmp_path / name, [build(i, *one) for i, one in enumerate(problems)])
    wrong = ["print(3)", "class Solution:\n    def flip(self, text):\n        return text"]
    check_programs(path, [text for text, _, _ in problems], wrong)
