"""Code-v0: what is submitted, what is rewarded, and that the sample's solutions are perfect."""

import json
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import agentrl
from agentrl.envs.code.env import Code, problem_of, submission
from agentrl.errors import ConfigError
from agentrl.sandboxes import SandboxUnavailable

from .published import tables

ID = "agentrl/Code-v0"
SAMPLE = [(split, task.id) for split in ("train", "test") for task in Code(split=split).task_set]


@pytest.fixture
def env() -> Generator[Code]:
    made = Code()
    yield made
    made.close()


def block(code: str, language: str = "solution") -> str:
    return f"```{language}\n{code}\n```"


def play(env: Code, text: str, task: str = "caesar") -> tuple[float, dict[str, float]]:
    env.reset(seed=0, options={"task": task})
    _, reward, terminated, truncated, info = env.step(text)
    assert (terminated, truncated) == (True, False)
    return reward, info["parts"]


TABLES = tables("code_graded")


@pytest.mark.parametrize(("text", "code"), [*TABLES["submissions"], *((text, None) for text in TABLES["nothing"])])
def test_the_submission_is_the_last_closed_block(text: str, code: str | None) -> None:
    assert submission(text) == code


@given(st.text("`solutin \n\r\t", max_size=80))
def test_any_text_has_a_submission_or_none(text: str) -> None:
    code = submission(text)
    assert code is None or f"\n{code}```" in text


@pytest.mark.parametrize(
    "piece", ["```solution\n", "```solution\n```", "```\n", " " * 9, "```solution" + " " * 50 + "x\n"]
)
def test_submissions_are_found_in_linear_time(piece: str) -> None:
    began = time.process_time()
    submission(piece * (1_000_000 // len(piece)))
    assert time.process_time() - began < 2.0


@pytest.mark.parametrize(("split", "task_id"), SAMPLE, ids=[task_id for _, task_id in SAMPLE])
def test_the_reference_is_perfect_and_half_of_it_is_not(split: str, task_id: str) -> None:
    env = Code(split=split)
    task = env.task_set.find(task_id)
    env.reset(seed=0, options={"task": task_id})
    turns = [env.step(action) for action in env.gold(task)]
    assert env.episode.tool_runs[0].ok or "sys.exit" in problem_of(task).solution
    assert [turn[1:4] for turn in turns] == [(0.0, False, False), (1.0, True, False)]
    assert turns[-1][4]["parts"] == {"correct": 1.0, "passed": 1.0, "submitted": 1.0, "timeout": 0.0}
    lines = problem_of(task).solution.splitlines()
    wrong = "\n".join(lines[: len(lines) // 2])
    env.reset(seed=0, options={"task": task_id})
    assert env.step(block(wrong))[1] == 0.0
    env.close()


@pytest.mark.slow
def test_parts_of_the_reward(env: Code) -> None:
    right = problem_of(env.task_set.find("caesar")).solution
    assert play(env, right)[1] == {"correct": 0.0, "passed": 0.0, "submitted": 0.0, "timeout": 0.0}
    reward, parts = play(env, block("def shift(text, by): return text"))
    assert (reward, parts) == (0.0, {"correct": 0.0, "passed": pytest.approx(2 / 6), "submitted": 1.0, "timeout": 0.0})
    slow = block(right.replace("moved = []", "moved = [str(i) for i in range(10**9) if i < 0]"))
    impatient = Code(test_timeout=0.2)
    assert play(impatient, slow) == (0.0, {"correct": 0.0, "passed": 0.0, "submitted": 1.0, "timeout": 1.0})


def test_a_submission_beside_a_call_is_none() -> None:
    env = Code(max_turns=1)
    env.reset(seed=0, options={"task": "caesar"})
    right = block(problem_of(env.episode.task).solution)
    assert env.step(f"{right}\n{block('1', 'python')}")[1:4] == (0.0, False, True)
    env.close()


def test_own_problems(tmp_path: Path) -> None:
    row: dict[str, Any] = {"id": "a", "split": "train", "prompt": "Print a.", "tests": [{"stdin": "", "stdout": "a"}]}
    path = tmp_path / "own.jsonl"
    path.write_text(json.dumps(row))
    env = agentrl.make(ID, data=str(path))
    observation, info = env.reset(seed=0)
    assert info["task_id"] == "a"
    assert observation[-1]["content"].startswith("Print a.")
    assert "```solution" in observation[0]["content"]
    assert env.step(block("print('a')"))[1] == 1.0
    with pytest.raises(NotImplementedError, match="no reference solution"):
        env.gold(env.task_set[0])
    with pytest.raises(ConfigError, match="is in the split 'test': give data="):
        agentrl.make(ID, data=str(path), split="test").reset()
    env.close()


def test_packages(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    row = {"id": "a", "split": "train", "prompt": "Sort.", "entry_point": "s", "setup": "import sortedcontainers as sc"}
    row |= {"solution": "def s(x): return [*sc.SortedList(x)]", "tests": [{"args": [[2, 1]], "expected": [1, 2]}]}
    path.write_text(json.dumps(row))
    with pytest.raises(ConfigError, match="sortedcontainers is imported and not named in packages"):
        agentrl.make(ID, data=str(path)).reset()
    env = agentrl.make(ID, data=str(path), packages=["sortedcontainers"])
    env.reset(seed=0)
    assert [env.step(action)[1] for action in env.gold(env.episode.task)] == [0.0, 1.0]
    assert env.episode.tool_runs[0].ok
    env.close()
    with pytest.raises(SandboxUnavailable, match=r"can't import no_such_package .*: install and name whatever"):
        agentrl.make(ID, packages=["no_such_package"])


@pytest.mark.parametrize("options", [{"timeout": 0}, {"test_timeout": -1}, {"test_timeout": float("nan")}])
def test_times_must_be_positive(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="above 0"):
        Code(**options)  # pyright: ignore


def test_solutions_and_tests_are_not_shown(env: Code) -> None:
    for task in env.task_set:
        observation, _ = env.reset(seed=0, options={"task": task.id})
        shown = "\n".join(message["content"] for message in observation)
        assert max(problem_of(task).solution.splitlines(), key=len) not in shown
