"""``agentrl/Code-v0``: programming problems from data sets, judged by hidden tests."""

from agentrl.envs.code.env import Code

__all__ = ["Code"]
