"""Episodes whose turns are given, played by any driver."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

from agentrl.engines.base import Engine, Sampling
from agentrl.engines.scripted import ScriptedEngine
from agentrl.render.renderer import Renderer
from agentrl.render.transcript import Writer
from agentrl.rollout.collector import Collected, Collector
from agentrl.rollout.driver import Driver
from agentrl.rollout.plan import EpisodeSpec
from agentrl.rollout.player import EpisodeLimits
from agentrl.types import Trajectory

Env = tuple[str, Mapping[str, Any]]
"""An environment's id and arguments."""


def collect(
    env: Env, writer: Writer, specs: list[list[EpisodeSpec]], engine: Engine, tokens: int = 4000, **options: Any
) -> Collected:
    """Play episodes of an environment, a row of which may have so many tokens."""
    limits = EpisodeLimits(episode_tokens=tokens)
    with closing(Collector({"": (env[0], dict(env[1]))}, writer, limits=limits, **options)) as collector:
        return asyncio.run(collector.collect(specs, engine, Sampling(max_tokens=500)))


def play_script(
    driver: Driver, renderer: Renderer, env: Env, task: str, script: Sequence[Sequence[int]], **options: Any
) -> Trajectory:
    """Play a task by a script of turns, each of which is recorded, without a fork."""
    spec = EpisodeSpec(task_id=task, seed=3, script=tuple(map(tuple, script)))
    collected = collect(env, renderer, [[spec]], ScriptedEngine([]), 200_000, driver=driver, **options)
    (episode,) = collected.groups[0].trajectories
    assert tuple(segment.token_ids for segment in episode.sampled) == spec.script and not episode.forks
    return episode
