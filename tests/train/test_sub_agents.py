"""Training on episodes whose sub-agents the same policy played."""

import asyncio
from typing import Any

import gymnasium
import torch

import agentrl
from agentrl.types import Message

from .conftest import Make, Shout, steps_of


@agentrl.tool(timeout=None)
async def ask(question: str, context: agentrl.ToolContext) -> str:
    """Let two sub-agents answer."""
    questions = ([Message(role="user", content=f"{question} {number}")] for number in range(2))
    return " ".join(await asyncio.gather(*map(context.policy.turn_async, questions)))


class Asks(Shout):
    """The first turn calls the tool, whatever its text is."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.tools = (ask,)

    def step(self, action: str) -> Any:
        return super().step(self.dialect.render("ask", {"question": "What?"}) if not self.episode.turns else action)


def test_a_step_learns_from_sub_agents(small: Make) -> None:
    gymnasium.register("test/Asks-v0", entry_point=Asks)  # pyright: ignore[reportArgumentType]
    run = small("env.id=test/Asks-v0", "rollout.episode_tokens=250", "run.deterministic=true")
    before = run.weights()
    (result,) = steps_of(run, 1)
    assert result.metrics["rows_mean"] == 3.0 and result.metrics["turns_mean"] == 4.0
    assert any(not torch.equal(weights, before[name]) for name, weights in run.weights().items())
    for episode in result.trajectories:
        assert len(episode.rows) == 3 and {part.turn for part in episode.sampled} == {*range(4)}
