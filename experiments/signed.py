"""``agentrl/SignedArithmetic-v0``: Arithmetic that pays +1 for success and −1 for failure, for runs of PLAN.md."""

from collections.abc import Mapping
from typing import ClassVar

import gymnasium

from agentrl.envs.generated.arithmetic import Arithmetic
from agentrl.toolenv.base import Episode

ENV_ID = "agentrl/SignedArithmetic-v0"


class SignedArithmetic(Arithmetic):
    """The same problems; an episode that the token budget ends before it is graded gets 0."""

    reward_weights: ClassVar[Mapping[str, float]] = {"correct": 1.0, "wrong": -1.0}

    def reward(self, episode: Episode) -> Mapping[str, float]:
        """Return 1 for one of both parts and 0 for the other."""
        correct = super().reward(episode)["correct"]
        return {"correct": correct, "wrong": 1.0 - correct}


gymnasium.register(ENV_ID, entry_point=SignedArithmetic)
