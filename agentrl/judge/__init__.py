"""Rewards where there is no grader: fixed models that judge answers, or play a user who is not trained.

``Judge`` grades texts by a rubric, and ``Chat`` is the model behind it. Asking needs ``pip install 'agentrl[openai]'``.
"""

from agentrl.judge.client import Chat
from agentrl.judge.grader import Judge
from agentrl.judge.quoting import plain

__all__ = ["Chat", "Judge", "plain"]
