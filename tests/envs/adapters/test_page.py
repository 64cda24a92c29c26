"""The adapters of docs/task_sets.md, as they are written there."""

import json
import random
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from agentrl.endpoint.driver import AgentDriver
from agentrl.errors import FaultRateError, InfrastructureError
from agentrl.render.renderer import Renderer
from agentrl.sandboxes.agents import AgentRun
from agentrl.toolenv.registry import make
from agentrl.toolenv.tasks import split_of
from agentrl.types import Stop, Trajectory

from ...conftest import ROOT
from ...endpoint.played import play_script
from ...test_docs import importable
from .conftest import FAKE, HERE, INSTALLED, REAL
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


@pytest.mark.ci
def test_inspect_plays_its_samples_with_the_policy(page_files: Path, tokenizer: Any, require: Any) -> None:
    packages = next(iter((INSTALLED / "inspect").glob("lib/python3*/site-packages")), INSTALLED)
    require(packages != INSTALLED, "run scripts/install_task_sets.sh")
    driver = AgentDriver(
        ["{python}", "inspect_sample.py"],
        files=[str(ROOT / "docs/agents/inspect_sample.py"), str(HERE / "theirs" / "inspect_sums.py")],
        env={"INSPECT_TASK": "inspect_sums.py", "HOME": "/tmp"},
        packages=str(packages),
        memory_mb=4096,
    )
    renderer = Renderer(tokenizer)

    def played(sample: str, *turns: str) -> Trajectory:
        args = {"samples": ["sum", "broken"], "parts": {"match": [0, 1]}, "split": split_of(sample, 5)}
        env, script = ("inspect_env:inspect/Task-v0", args), [renderer.turn(turn) for turn in turns]
        return play_script(driver, renderer, env, sample, script, max_fault_rate=0.4)

    call = '<tool_call>\n{"name": "add", "arguments": {"x": 17, "y": 25}}\n</tool_call>'
    for answer, parts in (("42", {"match": 1.0, "graded": 1.0}), ("43", {"match": 0.0, "graded": 1.0})):
        assert played("sum", call, answer).parts == parts
    with pytest.raises(FaultRateError, match="the task is broken"):
        played("broken", "42")
