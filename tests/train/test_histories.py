"""Episodes of each history are trained on, saved, and read again."""

import asyncio
import random
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.engines.base import Completion, Sampling
from agentrl.engines.scripted import ScriptedEngine
from agentrl.models.load import ROUNDING
from agentrl.models.tiny import CHAT_TEMPLATE
from agentrl.render.renderer import Renderer
from agentrl.rollout.collector import Collector
from agentrl.rollout.driver import StepDriver
from agentrl.rollout.plan import EpisodeSpec
from agentrl.rollout.player import EpisodeLimits
from agentrl.runs.records import read_episodes, write_episodes
from agentrl.types import Group, Origin

from ..render.conftest import templated
from .conftest import Make
from .test_forests import SETTINGS, replace_source

FORGETS = CHAT_TEMPLATE.replace("message['content']", "message['content'].split('</think>')[-1]")
CALL = "```python\nabcdefgh abcdefgh abcdefgh abcdefgh {}\n```"


class Speaks(ScriptedEngine):
    """Calls the tool more often than not, after some thinking."""

    def __init__(self, renderer: Renderer) -> None:
        super().__init__(())
        self.renderer = renderer

    async def generate(self, prompt_ids: tuple[int, ...], sampling: Sampling, *, seed: int) -> Completion:
        rng = random.Random(seed)
        text = rng.choice([CALL] * 5 + ["AB"]).format(rng.randrange(100))
        ids = tuple(self.renderer.turn(f"<think>{rng.randrange(100)}</think>\n{text}"))
        return Completion(token_ids=ids, logprobs=(-1.0,) * len(ids), finish="stop", version=0)


@pytest.mark.parametrize(
    ("cause", "options"),
    [
        ("", {}),
        ("branch", {"history": "shorten", "budget": 100}),
        ("anew", {"history": "summarize", "budget": 100}),
        ("thinking", {"history": "template"}),
    ],
)
def test_each_history_is_trained_on_and_saved(
    small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cause: str, options: dict[str, Any]
) -> None:
    renderer = Renderer(templated(FORGETS))
    env, limits = ("test/Shout-v0", {"max_turns": 6}), EpisodeLimits(episode_tokens=600)
    specs = [[EpisodeSpec(task_id=f"train:{w}", seed=10 * n + m) for m in range(4)] for n, w in enumerate(("ab", "cd"))]
    with closing(Collector({"": env}, renderer, limits=limits, driver=StepDriver(**options))) as collector:
        played = asyncio.run(collector.collect(specs, Speaks(renderer), Sampling(max_tokens=100)))
    episodes = [episode for group in played.groups for episode in group]
    # Where a summary is spelled like an earlier one, the same history is continued again.
    assert {name for episode in episodes for name in episode.forks} - {"again"} == {cause} - {""}
    assert all(sum(episode.forks.values()) == len(episode.rows) - 1 for episode in episodes)
    assert sum(cause in episode.forks for episode in episodes) >= len(episodes) / 2 or not cause

    path = tmp_path / "episodes.jsonl.zst"
    sampling: dict[str, Any] = {"dialect": "fence", "temperature": 1.0, "turn_tokens": 100, "versions": {}}
    origin = Origin(env_id=env[0], env_args={}, split="train", best_return=1.0, **sampling)
    write_episodes(path, episodes, renderer.tokenizer, origin)
    assert [record.trajectory for record in read_episodes(path)] == episodes

    # Made-up log-probs and rewards, so that there is something to learn.
    monkeypatch.setitem(ROUNDING, torch.float32, 50.0)
    rng = random.Random(1)
    groups = [
        Group(tuple(replace(episode, rewards=tuple(rng.random() for _ in episode.rewards)) for episode in group))
        for group in played.groups
    ]
    run = small(*SETTINGS, "rollout.episode_tokens=600", "optim.max_tokens=3000", "algo.correction=none")
    before = run.weights()
    result = asyncio.run(replace_source(run.trainer(), groups).step(1))
    assert [len(numbers) for numbers in result.advantages] == [episode.n_sampled for episode in episodes]
    assert any(not torch.equal(before[name], weights) for name, weights in run.weights().items())
