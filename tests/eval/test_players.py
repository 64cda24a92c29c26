"""A perfect player wins every task of the environments that come along, and one that knows nothing wins none."""

import asyncio
import importlib.util
import random
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import pytest

import agentrl
from agentrl.engines.base import Completion, Sampling
from agentrl.engines.scripted import ScriptedEngine
from agentrl.eval.table import Evaluation, summarise
from agentrl.grading.latex import close_graders
from agentrl.render.transcript import Transcript
from agentrl.rollout.collector import Collector
from agentrl.rollout.plan import EpisodeSpec, TaskSource
from agentrl.rollout.policy import EpisodeLimits

WRITER = Transcript()
LEVELS = {"level": [1, 2, 3, 4]}
ENVS: list[tuple[str, dict[str, Any]]] = [
    *((f"agentrl/{name}-v0", LEVELS) for name in ("Arithmetic", "Calculus", "Countdown", "LinearSystems")),
    *((f"agentrl/{name}-v0", {}) for name in ("Math", "MathPython", "Code")),
    ("reasoning-gym/chain_sum-v0", {}),
]


def test_all_that_come_along_are_played_here() -> None:
    # Of reasoning-gym's tasks this is one; tests/envs/test_reasoning_gym.py plays the answers to all.
    ours = {env_id for env_id in agentrl.list_envs() if env_id.startswith("agentrl/")}
    assert {env_id for env_id, _ in ENVS} == {*ours, "reasoning-gym/chain_sum-v0"}


class Noise(ScriptedEngine):
    """Says anything."""

    async def generate(self, prompt_ids: tuple[int, ...], sampling: Sampling, *, seed: int) -> Completion:
        words = random.Random(seed).choices(["it is", r"\boxed{x}", "?", "```python\nprint()\n```", "<think>"], k=5)
        turn = WRITER.turn(" ".join(words), ended=True)
        return Completion(token_ids=turn, logprobs=(0.0,) * len(turn), finish="stop", version=0)


def played(source: TaskSource, turns: Callable[[str], Sequence[str] | None]) -> Evaluation:
    """Two attempts at each of four tasks; None plays noise."""

    def script(task_id: str) -> tuple[tuple[int, ...], ...] | None:
        texts = turns(task_id)
        return None if texts is None else tuple(tuple(WRITER.turn(text, ended=True)) for text in texts)

    specs = [
        [EpisodeSpec(task_id=task.id, seed=seed, script=script(task.id)) for seed in range(2)]
        for task in source.pick(4)
    ]
    envs = {"": (source.env_id, {**source.env_args, "split": "test"})}
    sampling, limits = Sampling(max_tokens=100_000), EpisodeLimits(episode_tokens=1_000_000)
    with closing(Collector(envs, WRITER, limits=limits)) as collector:
        collected = asyncio.run(collector.collect(specs, Noise(()), sampling))
    return summarise(collected.groups, best_return=source.best_return)


@pytest.mark.slow
@pytest.mark.parametrize(("env_id", "args"), ENVS)
def test_players_bracket_every_environment(env_id: str, args: dict[str, Any], require: Any) -> None:
    for package in ("math_verify", *(("reasoning_gym",) if "gym" in env_id else ())):
        require(importlib.util.find_spec(package) is not None, f"needs {package}")
    source = TaskSource(env_id, args, "test")
    gold = {task.id: source.gold(task, "this test plays", "") for task in source.pick(4)}
    best, worst = played(source, gold.__getitem__), played(source, lambda _: None)
    assert best.success == best.pass_at[2] == 1.0 and worst.success == worst.pass_at[2] == 0.0
    assert (best.majority, worst.majority) == ((None, None) if "Code" in env_id else (1.0, 0.0))
    close_graders()
