"""Agents that run elsewhere get sessions with tasks, and end them."""

import asyncio
import socket
from typing import Any

import httpx2
import pytest

from agentrl.endpoint.driver import ServeDriver
from agentrl.engines.base import Sampling
from agentrl.engines.scripted import ScriptedEngine
from agentrl.errors import ConfigError
from agentrl.render.renderer import Renderer
from agentrl.rollout.collector import Collector
from agentrl.rollout.plan import EpisodeSpec
from agentrl.rollout.player import EpisodeLimits
from agentrl.toolenv.registry import make
from agentrl.types import Stop, Trajectory

KEY = "0123456789abcdef"
ENV = "agentrl/Arithmetic-v0", {"level": 1}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return listening.getsockname()[1]


async def play(renderer: Renderer, agent: Any, **options: Any) -> Trajectory:
    """Play an episode whose one turn is the right answer, with ``agent`` elsewhere."""
    port = free_port()
    env = make(ENV[0], **ENV[1])
    task = env.task_set[0]
    env.close()
    turn = tuple(renderer.turn(f"\\boxed{{{task.answer}}}"))
    spec = EpisodeSpec(task_id=task.id, seed=7, env="a", script=(turn,))
    driver = ServeDriver(port=port, key=KEY, **options)
    collector = Collector({"a": ENV}, renderer, limits=EpisodeLimits(episode_tokens=900), driver=driver)
    async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        playing = asyncio.create_task(collector.collect([[spec]], ScriptedEngine([]), Sampling(max_tokens=99)))
        while True:
            try:
                answer = await client.post("/sessions", json={}, headers={"x-api-key": KEY})
                break
            except httpx2.ConnectError:
                await asyncio.sleep(0.05)
        await agent(client, answer.json())
        collected = await playing
    collector.close()
    (episode,) = collected.groups[0].trajectories
    return episode


async def solve(client: httpx2.AsyncClient, session: dict[str, Any]) -> None:
    """Send one request, and end with a file."""
    headers = {"authorization": f"Bearer {session['key']}"}
    messages = [{"role": "user", "content": session["prompt"]}]
    url = f"{session['url']}/v1/chat/completions"
    answer = await client.post(url, json={"model": "m", "messages": messages}, headers=headers)
    assert "boxed" in answer.json()["choices"][0]["message"]["content"]
    path = f"/sessions/{session['session']}"
    assert (await client.post(path, json={"files": {"a": 1}}, headers=headers)).status_code == 400
    assert (await client.post(path, json={}, headers={"x-api-key": KEY})).status_code == 401
    assert (await client.post("/sessions", json={}, headers=headers)).status_code == 401
    assert (await client.post(path, json={"files": {"a": "b"}, "output": "ok"}, headers=headers)).json() == {}


def test_an_agent_elsewhere_plays_an_episode(renderer: Renderer) -> None:
    episode = asyncio.run(play(renderer, solve))
    assert (episode.stop, episode.ret) == (Stop.TERMINATED, 1.0)
    assert episode.tool_runs == () and not episode.forks


def test_an_agent_that_never_ends_has_a_time_limit(renderer: Renderer) -> None:
    async def leave(client: httpx2.AsyncClient, session: dict[str, Any]) -> None:
        """Take the task and go."""

    episode = asyncio.run(play(renderer, leave, seconds=0.2))
    assert (episode.stop, episode.ret, len(episode.sampled)) == (Stop.TIME_LIMIT, 0.0, 0)


def test_a_driver_without_a_key_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AGENTRL_SERVE_KEY", raising=False)
    with pytest.raises(ConfigError, match="AGENTRL_SERVE_KEY"):
        ServeDriver()
