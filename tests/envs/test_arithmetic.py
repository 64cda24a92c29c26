"""Arithmetic-v0: problems, splits, steps that stay hidden, and what is rewarded."""

import itertools
from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.envs.generated.arithmetic import Arithmetic, problem_of
from agentrl.envs.generated.arithmetic_problems import LEVELS, Expression, canonical, evaluate, make_problem, write
from agentrl.errors import ConfigError
from agentrl.types import Message

from ..grading.test_formulas import value_of_python
from .published import play

EVERY = tuple(LEVELS)


@pytest.fixture
def staged() -> Generator[Arithmetic]:
    env = Arithmetic(level=5)
    env.reset(seed=0, options={"task": "train-5:0"})
    yield env
    env.close()


def call(code: str) -> str:
    return f"```python\n{code}\n```"


def users(messages: tuple[Message, ...]) -> list[str]:
    return [message["content"] for message in messages if message["role"] == "user"]


numbers = st.integers(0, 9999)
expressions: st.SearchStrategy[Expression] = st.recursive(
    numbers, lambda inner: st.tuples(st.sampled_from("+-*"), inner, inner), max_leaves=6
)


@given(expressions)
def test_what_is_written_has_the_value(expression: Expression) -> None:
    for text in (write(expression), write(expression, " "), canonical(expression)):
        assert value_of_python(text) == evaluate(expression)


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        *((("*", ("+", 1, 2), 3), "(1+2)*3"), (("-", ("*", 1, 2), 3), "1*2-3"), (("-", 1, ("-", 2, 3)), "1-(2-3)")),
        *((("-", ("-", 1, 2), 3), "1-2-3"), (("+", 1, ("+", 2, 3)), "1+2+3")),
    ],
)
def test_only_needed_parentheses_are_written(expression: Expression, text: str) -> None:
    assert write(expression) == text


@given(numbers, numbers, numbers)
def test_twins_are_one_problem(a: int, b: int, c: int) -> None:
    assert canonical(("*", a, b)) == canonical(("*", b, a))
    assert canonical(("*", ("+", a, b), c)) == canonical(("*", c, ("+", b, a)))
    assert canonical(("+", a, b)) == canonical(("+", b, a))
    assert (canonical(("-", a, b)) == canonical(("-", b, a))) == (a == b)


@pytest.mark.parametrize("level", LEVELS)
def test_problems_are_many_and_the_same_each_time(level: int) -> None:
    problems = [make_problem("train", level, index) for index in range(1000)]
    assert problems == [make_problem("train", level, index) for index in range(1000)]
    assert len({problem.prompts for problem in problems}) > 990
    for problem in problems:
        assert problem.values[-1] == evaluate(problem.expression) > 0
        assert len(problem.prompts) == len(problem.sums) == {4: 2, 5: 3}.get(level, 1)
        assert [value_of_python(text) for text in problem.sums] == list(problem.values)
        assert all(len(prompt) < 100 for prompt in problem.prompts)


def test_steps_are_told_one_by_one(staged: Arithmetic) -> None:
    task = staged.episode.task
    problem = problem_of(task)
    assert task.prompt == problem.prompts[0]
    assert len(problem.prompts) == 3
    assert problem.prompts[2].startswith("Last step: ")
    for step, action in enumerate(staged.gold(task)):
        messages = staged.step(action)[0]
        assert users(messages) == list(problem.prompts[step + 1 : step + 2])
    assert users(staged.episode.messages) == list(problem.prompts)


def test_a_step_is_not_told_early_nor_twice(staged: Arithmetic) -> None:
    staged.max_turns = 100
    problem = problem_of(staged.episode.task)
    step_1, step_2, step_3 = problem.values
    for code in (
        *("print('hello')", "1/0", f"print({step_1}0, 1{step_1}, 'a{step_1}', {step_1}.5, -{step_1}, '{step_1},5')"),
        *(f"raise ValueError({step_1})", f"print({step_3})", f"print({step_2})"),
    ):
        assert users(staged.step(call(code))[0]) == [], code
    assert users(staged.step(f"```python\nprint({step_1})")[0]) == []
    assert users(staged.step(call(f"print('It is {step_1}.')"))[0]) == [problem.prompts[1]]
    assert users(staged.step(call(f"print({step_1})"))[0]) == []
    assert users(staged.step(f"{call('1')}\n{call(f'{step_2}')}\n{call('2')}")[0]) == [problem.prompts[2]]
    for value in (step_1, step_2, step_3):
        assert users(staged.step(call(f"print({value})"))[0]) == []
    assert staged.step(rf"\boxed{{{step_3}}}")[1] == 1.0


@pytest.mark.parametrize("level", [1, 4])
def test_what_is_rewarded(level: int) -> None:
    env = Arithmetic(level=level)
    task = env.task_set[0]
    right, wrong = task.answer, str(int(task.answer) + 1)
    for text, reward in {
        **{rf"\boxed{{{right}}}": 1.0, rf"It is \boxed{{{int(right):,}}}.": 1.0},
        **{rf"\boxed{{{wrong}}}, no, \boxed{{{right}}}": 1.0, rf"\boxed{{{right}}} or \boxed{{{wrong}}}": 0.0},
        **{rf"\boxed{{{problem_of(task).sums[-1]}}}": 0.0, rf"\boxed{{{wrong}}}": 0.0, r"\boxed{}": 0.0, right: 0.0},
        **{"": 0.0, task.prompt: 0.0},
    }.items():
        assert play(env, task.id, text) == (reward, True), text
    env.close()


def test_levels_take_turns() -> None:
    env = Arithmetic(level=EVERY)
    tasks = list(itertools.islice(env.task_set, 50))
    for index, task in enumerate(tasks):
        assert problem_of(task) == make_problem("train", EVERY[index % 5], index // 5)
        assert env.task_set.find(task.id) == task
    assert tasks[7].id == "train-1-2-3-4-5:7"


@pytest.mark.parametrize("level", [0, 6, [], [1, 9], "12"])
def test_other_levels_are_refused(level: Any) -> None:
    with pytest.raises(ConfigError, match="level is"):
        Arithmetic(level=level)
