"""What the tests of the checker share: environments registered for the length of a test."""

import itertools
from collections.abc import Callable
from typing import Any

import gymnasium
import pytest

from agentrl.toolenv.base import ToolEnv
from agentrl.toolenv.checker import rewards, subject

Register = Callable[..., str]


@pytest.fixture
def short_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two thousand characters at most: a hundred thousand take half of a check's time, and show what is slow alone."""
    monkeypatch.setattr(subject, "LONG", 2000)
    monkeypatch.setattr(subject, "NOISE", tuple(text[:2000] for text in subject.NOISE))
    monkeypatch.setattr(rewards, "_COUNTS", rewards._COUNTS[:2])


@pytest.fixture
def register(clean_registry: None) -> Register:
    """Register a class by its name with its arguments, or a function as it is; gives the id."""
    numbers = itertools.count()

    def register(kind: Callable[..., ToolEnv]) -> str:
        env_id = f"test/Checked{next(numbers)}-v0"
        point = f"{kind.__module__}:{kind.__qualname__}"
        entry_point: Any = kind if "<" in point else point
        gymnasium.register(env_id, entry_point=entry_point, kwargs=dict(getattr(kind, "arguments", {})))
        return env_id

    return register
