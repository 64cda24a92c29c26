"""An episode whose turns are given, played by any driver."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.engines.base import Sampling
from agentrl.engines.scripted import ScriptedEngine
from agentrl.render.renderer import Renderer
from agentrl.rollout.collector import Collector
from agentrl.rollout.driver import Driver
from agentrl.rollout.plan import EpisodeSpec
from agentrl.rollout.player import EpisodeLimits
from agentrl.types import Trajectory


def play_script(
    driver: Driver,
    renderer: Renderer,
    env: tuple[str, Mapping[str, Any]],
    task: str,
    script: Sequence[Sequence[int]],
    **options: Any,
) -> Trajectory:
    """Play a task by a script of turns, each of which is recorded, without a fork."""
    spec = EpisodeSpec(task_id=task, seed=3, env="a", script=tuple(map(tuple, script)))
    limits = EpisodeLimits(episode_tokens=200_000)
    collector = Collector({"a": (env[0], dict(env[1]))}, renderer, limits=limits, driver=driver, **options)
    try:
        collected = asyncio.run(collector.collect([[spec]], ScriptedEngine([]), Sampling(max_tokens=500)))
    finally:
        collector.close()
    (episode,) = collected.groups[0].trajectories
    assert tuple(segment.token_ids for segment in episode.sampled) == spec.script and not episode.forks
    return episode
