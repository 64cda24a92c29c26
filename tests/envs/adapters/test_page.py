"""The adapters of docs/task_sets.md, as they are written there."""

import json
import random
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import InfrastructureError
from agentrl.sandboxes.agents import AgentRun
from agentrl.toolenv.registry import make
from agentrl.types import Stop

from ...test_docs import importable
from .conftest import FAKE, REAL
from .hostile import assert_all_are_graded


@pytest.fixture
def page_files(tmp_path: Path, clean_registry: None) -> Iterator[Path]:
    """A folder with the files of the page, which is on the path."""
    with importable("task_sets.md", tmp_path) as folder:
        yield folder


def secret(seed: int) -> int:
    return random.Random(seed).randint(1, 10)


def guess(number: object) -> str:
    return f"```act\n\\boxed{{{number}}}\n```"


@pytest.mark.parametrize("real", [FAKE, REAL])
def test_gem_is_played_and_each_move_is_graded(page_files: Path, real: bool, make_python: Callable[..., str]) -> None:
    with closing(make("gem_env:gem/Game-v0", python=make_python("gem", real))) as env:
        env.reset(options={"task": "train:3"})
        seed = 6
        wrong = secret(seed) % 10 + 1
        _, reward, terminated, _, _ = env.step(guess(wrong))
        assert (reward, terminated) == (0.0, False)
        _, reward, terminated, _, _ = env.step(guess(secret(seed)))
        assert (reward, terminated, env.episode.stop) == (1.0, True, Stop.TERMINATED)
        assert env.episode.state["verdict"] == [0.0, 1.0]
        assert_all_are_graded(env, [guess("die"), guess(13), guess("x"), guess("9" * 5000), guess(99)])


@pytest.mark.parametrize(
    ("log", "parts"),
    [
        ({"scores": {"match": "C", "extra": 1}}, {"match": 1.0, "judge.tone": 0.0, "graded": 0.0}),
        ({"scores": {"match": "P", "judge": {"tone": 5}}}, {"match": 0.5, "judge.tone": 0.5, "graded": 1.0}),
        ({"scores": {"match": "N", "judge": {"tone": 1e6}}}, {"match": 0.0, "judge.tone": 0.0, "graded": 0.0}),
        ({"scores": {"match": "great", "judge": {"tone": None}}}, {"match": 0.0, "judge.tone": 0.0, "graded": 0.0}),
        (None, {"match": 0.0, "judge.tone": 0.0, "graded": 0.0}),
        ({"fault": "Connection error", "scores": {}}, "Inspect reports: Connection error"),
    ],
)
def test_scores_of_inspect_become_parts(page_files: Path, log: dict[str, Any] | None, parts: Any) -> None:
    files = {} if log is None else {"score.json": json.dumps({"fault": "", **log}).encode()}
    run = AgentRun(status="exit", code=0, output="", files=files)
    ranges = {"match": [0, 1], "judge.tone": [0, 10]}
    env = make("inspect_env:inspect/Task-v0", samples=[str(number) for number in range(9)], parts=ranges)
    env.reset(seed=0)
    env.record((), 1, {"agent": run})
    if isinstance(parts, str):
        with pytest.raises(InfrastructureError, match=parts):
            env.truncate(Stop.TERMINATED)
    else:
        env.truncate(Stop.TERMINATED)
        assert env.episode.parts == parts
