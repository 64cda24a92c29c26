"""Agents that people ship play an episode in the sandbox, by the recipes of docs/agents."""

import asyncio
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from agentrl.config import parse_config
from agentrl.endpoint.driver import AgentDriver
from agentrl.engines.base import Sampling
from agentrl.engines.scripted import ScriptedEngine
from agentrl.render.renderer import Renderer
from agentrl.rollout.collector import Collector
from agentrl.rollout.plan import EpisodeSpec
from agentrl.rollout.player import EpisodeLimits
from agentrl.toolenv.base import Episode, ToolEnv
from agentrl.toolenv.registry import register
from agentrl.toolenv.tools.context import ToolContext
from agentrl.types import Stop, Task

ROOT = Path(__file__).parents[2]
AGENTS = ROOT / "build" / "agents"
PACKAGES = "@anthropic-ai/claude-code @openai/codex opencode-ai"
SHELLS = {
    "claude_code": ("Bash", {"command": "cat notes.txt > out.txt"}),
    "codex": ("exec_command", {"cmd": "cat notes.txt > out.txt"}),
    "opencode": ("bash", {"command": "cat notes.txt > out.txt", "description": "copy"}),
}


class Copy(ToolEnv):
    """A file is to be copied."""

    dialect = "hermes"  # pyright: ignore[reportAssignmentType]

    def tasks(self, split: str) -> list[Task]:
        return [Task(id="0", prompt="Copy notes.txt to out.txt.")]

    def open_episode(self, context: ToolContext) -> None:
        context.state["files"] = {"notes.txt": "alpha\n"}

    def reward(self, episode: Episode) -> dict[str, float]:
        return {"correct": episode.state["agent"].files.get("out.txt") == b"alpha\n"}


@pytest.mark.ci
@pytest.mark.parametrize("name", SHELLS)
def test_a_shipped_agent_is_recorded_in_one_row(
    renderer: Renderer, name: str, require: Any, clean_registry: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    require(AGENTS.is_dir(), f"npm install --prefix build/agents {PACKAGES}")
    monkeypatch.chdir(ROOT)
    register("test/Copy-v0", Copy)
    options = parse_config(tomllib.loads((ROOT / "docs" / "agents" / f"{name}.toml").read_text())).rollout.driver.options
    tool, arguments = SHELLS[name]
    call = json.dumps({"name": tool, "arguments": arguments})
    turns = tuple(tuple(renderer.turn(text)) for text in (f"<tool_call>{call}</tool_call>", "It is done."))
    spec = EpisodeSpec(task_id="0", seed=3, env="a", script=turns)
    limits = EpisodeLimits(episode_tokens=200_000)
    collector = Collector({"a": ("test/Copy-v0", {})}, renderer, limits=limits, driver=AgentDriver(**options))
    collected = asyncio.run(collector.collect([[spec]], ScriptedEngine([]), Sampling(max_tokens=300)))
    collector.close()
    (episode,) = collected.groups[0].trajectories
    assert (episode.stop, episode.ret, len(episode.rows)) == (Stop.TERMINATED, 1.0, 1) and not episode.forks
    assert tuple(segment.token_ids for segment in episode.sampled) == turns
