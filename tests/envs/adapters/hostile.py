"""What every adapter must grade: an agent that tries all that raises has no fewer graded episodes than another."""

import json
from collections.abc import Iterable
from typing import Any

from agentrl.toolenv.base import ToolEnv

TEXTS = (
    "", " ", "\x00", "\ud800", "x" * 100_000, "{}", "[]", "null", '{"number": NaN}', '{"number": 1e999}', "9" * 5000,
    "[" * 20_000, r"\boxed{", "$(kill -9 $$)", "import os; os._exit(1)", "True", "-1", "0/0", "None",
)  # fmt: skip
"""Answers, and bodies of calls."""


def assert_all_are_graded(env: ToolEnv, turns: Iterable[str]) -> None:
    """Play an episode for each of the turns, and for each text as an answer and a call: all are graded, none wins."""
    fields: dict[str, Any] = {tool.name: tool.parameters["properties"] for tool in env.tools}
    bodies = [(name, text) for name in fields for text in TEXTS]
    bodies += [(name, json.dumps({field: text})) for name in fields for field in fields[name] for text in TEXTS]
    calls = [f"```{name}\n{body}\n```" for name, body in bodies]
    for turn in (*turns, *TEXTS, *calls):
        env.reset(seed=1, options={"task": env.task_set[0].id})
        _, _, terminated, truncated, _ = env.step(turn)
        if not (terminated or truncated):
            env.step("I give up.")
        parts = env.episode.parts
        assert parts is not None, f"not graded: {turn[:200]!r}"
        assert sum(parts[name] * weight for name, weight in env.reward_weights.items()) < env.best_return, turn[:200]
