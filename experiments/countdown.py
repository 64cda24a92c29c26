"""``agentrl/SmallCountdown-v0``: Countdown in five levels, of which the tiny model learns some and fails at others."""

from collections.abc import Sequence
from functools import partial
from typing import ClassVar

import gymnasium

from agentrl.envs.generated.base import draw
from agentrl.envs.generated.countdown import Countdown, key_of, random_puzzle, task_of
from agentrl.types import Task

ENV_ID = "agentrl/SmallCountdown-v0"
_SIZES = {1: (2, 10), 2: (2, 99), 3: (3, 10), 4: (3, 99), 5: (4, 99)}
"""How many numbers each level has, and the largest of them; the last two are levels 1 and 2 of Countdown."""


class SmallCountdown(Countdown):
    """The same game in levels 1 to 5."""

    levels: ClassVar[Sequence[int]] = tuple(_SIZES)

    def make_task(self, split: str, level: int, index: int) -> Task:
        """Make a puzzle of a level's size."""
        count, largest = _SIZES[level]
        return task_of(draw(split, level, index, partial(random_puzzle, count=count, largest=largest), key_of))


gymnasium.register(ENV_ID, entry_point=SmallCountdown)
