"""Agents that people ship, and agents written with their libraries, play an episode in the sandbox: docs/agents."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from agentrl.config import parse_config
from agentrl.endpoint.driver import AgentDriver
from agentrl.render.renderer import Renderer
from agentrl.rollout.driver import StepDriver
from agentrl.toolenv.base import Episode, ToolEnv
from agentrl.toolenv.registry import make, register
from agentrl.toolenv.tools.context import ToolContext
from agentrl.types import Stop, Task

from .played import play_script

ROOT = Path(__file__).parents[2]
AGENTS = ROOT / "build" / "agents"
PACKAGES = "@anthropic-ai/claude-code @openai/codex opencode-ai"
LIBRARIES = "openai anthropic openai-agents langgraph langchain-openai"
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
    options = parse_config(
        tomllib.loads((ROOT / "docs" / "agents" / f"{name}.toml").read_text())
    ).rollout.driver.options
    tool, arguments = SHELLS[name]
    call = json.dumps({"name": tool, "arguments": arguments})
    turns = tuple(tuple(renderer.turn(text)) for text in (f"<tool_call>{call}</tool_call>", "It is done."))
    episode = play_script(AgentDriver(**options), renderer, ("test/Copy-v0", {}), "0", turns)
    assert (episode.stop, episode.ret, len(episode.rows)) == (Stop.TERMINATED, 1.0, 1)


@pytest.mark.ci
@pytest.mark.parametrize("name", ["openai_chat", "anthropic_messages", "openai_agents", "langgraph_react"])
def test_an_agent_of_a_library_is_recorded_as_our_own_loop_would(renderer: Renderer, name: str, require: Any) -> None:
    packages = next(iter(AGENTS.glob("venv/lib/python3*/site-packages")), AGENTS)
    require(packages != AGENTS, f"python -m venv build/agents/venv; build/agents/venv/bin/pip install {LIBRARIES}")
    command = ["{python}", f"{name}.py"]
    driver = AgentDriver(command, files=[str(ROOT / "docs" / "agents" / f"{name}.py")], packages=str(packages))
    env = make("agentrl/Arithmetic-v0", level=1)
    task, dialect = env.task_set[0], env.dialect
    # A template may end a turn otherwise where a tool answers it.
    ends = ("tool", "user")
    described = renderer.describing(dialect.template_tools, dialect.marks)
    turns = tuple(
        tuple(described.turn(text, answered_by=role)) for text, role in zip(env.gold_turns(task), ends, strict=True)
    )
    arithmetic = ("agentrl/Arithmetic-v0", {"level": 1})
    ours, theirs = (play_script(by, renderer, arithmetic, task.id, turns) for by in (StepDriver(), driver))
    assert (theirs.segments, theirs.rewards, theirs.stop) == (ours.segments, ours.rewards, ours.stop)
    assert theirs.messages == ours.messages and not theirs.forks
