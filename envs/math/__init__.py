"""``agentrl/Math-v0`` and ``agentrl/MathPython-v0``: mathematical problems from data sets."""

from agentrl.envs.math.env import Math

__all__ = ["Math"]
