"""Every family of generated problems: what is true of all of them, whatever is asked."""

import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest

import agentrl
from agentrl.envs.generated import linear_systems
from agentrl.envs.generated.arithmetic import problem_of
from agentrl.envs.generated.arithmetic_problems import canonical
from agentrl.envs.generated.base import GeneratedEnv

from ..conftest import python
from .published import play

FAMILIES = ["Arithmetic", "Calculus", "Countdown", "LinearSystems"]
ELSEWHERE = """
import itertools, agentrl
for family in {families}:
    name = f"agentrl/{{family}}-v0"
    env = agentrl.make(name, tool=False, split="test", level=list(agentrl.make(name).levels))
    print([*itertools.islice(env.task_set, 20)])
"""
HOSTILE = (
    *("", " ", "nan", "inf", "True", "None", "x", "__import__('os').system('true')", "().__class__", "lambda: 0", "[]"),
    *("9^9^9^9", "9**9**9**9", "(" * 5000, "-" * 5000, r"\frac" * 2000, "{" * 3000 + "}" * 3000, "1," * 3000, "1/0"),
    *("\x00", "\N{ARABIC-INDIC DIGIT ONE}", "=" * 2000, "1=1=1", "x=", "=1", "and and", r"\text{}", "exp(" * 99),
    "1e999",
)
"""Texts that answer no problem; none may raise, score or take time."""


def made(family: str, **options: object) -> GeneratedEnv:
    env = agentrl.make(f"agentrl/{family}-v0", **options)
    assert isinstance(env, GeneratedEnv)
    return env


def levels(family: str) -> list[int]:
    return list(made(family).levels)


@pytest.mark.parametrize(("family", "level"), [(family, level) for family in FAMILIES for level in levels(family)])
def test_gold_is_perfect(family: str, level: int) -> None:
    for split, count in zip(("train", "test"), (40, 20) if family == "Calculus" else (100, 50), strict=True):
        env = made(family, level=level, split=split, tool=False)
        for task in itertools.islice(env.task_set, count):
            assert len(task.prompt) < 300
            assert play(env, task.id, *env.gold(task)) == (1.0, True), task


@pytest.mark.parametrize("family", FAMILIES)
def test_gold_is_perfect_with_the_tool(family: str) -> None:
    env = made(family, level=levels(family))
    for task in itertools.islice(env.task_set, len(env.levels) * 2):
        assert play(env, task.id, *env.gold(task)) == (1.0, True), task
        assert all(run.ok for run in env.episode.tool_runs)
    env.close()


@pytest.mark.slow
def test_problems_are_the_same_in_every_process() -> None:
    envs = [made(family, tool=False, split="test", level=levels(family)) for family in FAMILIES]
    here = [str([*itertools.islice(env.task_set, 20)]) for env in envs]
    code = ELSEWHERE.format(families=FAMILIES)
    assert python("-c", code, PYTHONHASHSEED="1").stdout.splitlines() == here  # this process's seed is another one


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "count", "key"),
    [
        ("Arithmetic", 2500, lambda task: canonical(problem_of(task).expression)),
        ("Calculus", 60, lambda task: task.prompt),
        ("Countdown", 2000, lambda task: f"{sorted(task.data['numbers'])} {task.data['target']}"),
        ("LinearSystems", 2500, lambda task: linear_systems.key_of(linear_systems.system_of(task))),
    ],
)
def test_splits_share_no_problem(family: str, count: int, key: Callable[[Any], str]) -> None:
    sets = (made(family, split=split, level=levels(family), tool=False).task_set for split in ("train", "test"))
    train, test = ({key(task) for task in itertools.islice(tasks, count)} for tasks in sets)
    assert not train & test
    assert min(len(train), len(test)) >= 0.9 * count


@pytest.mark.parametrize(
    ("family", "seconds"), [("Arithmetic", 5), ("Calculus", 10), ("Countdown", 5), ("LinearSystems", 5)]
)
def test_hostile_answers_never_score_and_take_no_time(family: str, seconds: float) -> None:
    began = time.process_time()
    for level in levels(family):
        env = made(family, level=level, tool=False)
        task = env.task_set[0]
        for text in HOSTILE:
            assert not env.is_right(task, text), text[:60]
            assert play(env, task.id, rf"So it is $\boxed{{{text}}}$.") == (0.0, True), text[:60]
    assert time.process_time() - began < seconds


@pytest.mark.parametrize("family", FAMILIES)
def test_a_box_beside_a_call_or_before_another_is_no_answer(family: str) -> None:
    env = made(family, max_turns=1)
    task = env.task_set[0]
    call, box = env.dialect.render("python", {"code": "1"}), rf"\boxed{{{task.answer}}}"
    assert play(env, task.id, f"{call}\n{box}") == (0.0, False)
    assert play(env, task.id, rf"{box} or \boxed{{17/1234567}}") == (0.0, True)
    assert play(env, task.id, task.answer) == (0.0, True)
    env.close()
