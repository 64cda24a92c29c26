"""Drivers: whoever plays an episode, with an environment and the policy."""

from typing import Any, Protocol

from agentrl.errors import TokenLimitError
from agentrl.rollout.history import make_history
from agentrl.rollout.plan import EpisodeSpec
from agentrl.rollout.policy import Policy
from agentrl.toolenv.base import ToolEnv
from agentrl.types import Message, Stop


class Driver(Protocol):
    """Plays episodes, any number at a time."""

    async def play(self, env: ToolEnv, policy: Policy, spec: EpisodeSpec) -> None:
        """Play an episode to its end.

        Args:
            env: an environment of the episode's own, not reset yet; its blocking methods are called by ``policy.run``.
            policy: samples turns, and takes rewards by ``policy.pay``.
            spec: task and seed of the episode.

        Raises:
            InfrastructureError: a sandbox or the engine failed.
        """
        ...


class StepDriver:
    """Plays an environment step by step.

    Args:
        history: what the policy is shown of the past: "append", "template", "shorten" or "summarize".
        options: the history's own, such as ``budget``.

    Raises:
        UnknownNameError: there is no such history.
        ConfigError: the history does not take these options.
    """

    def __init__(self, history: str = "append", **options: Any) -> None:
        self._history = make_history(history, options)

    async def play(self, env: ToolEnv, policy: Policy, spec: EpisodeSpec) -> None:
        """Play the episode; its end is asked for its grade in each case."""
        messages, _ = await policy.run(env.reset, seed=spec.seed % 2**32, options={"task": spec.task_id})
        ended = False
        while not ended:
            try:
                messages = await self._history.shown(policy, messages)
                action = await policy.turn(messages, past=self._history.past)
                policy.steps.append(len(policy.rewards) - 1)
            except TokenLimitError:
                policy.pay(await policy.run(env.truncate, Stop.TOKEN_LIMIT))
                return
            answer, reward, terminated, truncated, _ = await policy.run(env.step, action)
            policy.pay(reward)
            messages = (*messages, Message(role="assistant", content=str(action)), *answer)
            ended = terminated or truncated
