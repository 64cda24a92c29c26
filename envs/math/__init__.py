"""``agentrl/Math-v0`` and ``agentrl/MathPython-v0``: mathematical problems from data sets."""
