"""Gymnasium spaces for real text: what a language agent reads and writes."""

import re
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np

from agentrl.types import Message

_ROLES: tuple[Any, ...] = ("system", "user", "assistant", "tool")
_SURROGATE = re.compile("[\ud800-\udfff]")
_ALPHABET = "abc XYZ 0189 +-*/=(){}[]\\\n`'\"<|>_éßπ漢字🙂"


class Unicode(gymnasium.Space[str]):
    """Any text of at most ``max_length`` characters, empty text included.

    Gymnasium's own ``Text`` space has a fixed alphabet; what a model writes has none.
    """

    def __init__(self, max_length: int = 1_000_000, seed: int | np.random.Generator | None = None) -> None:
        self.max_length = max_length
        super().__init__(shape=None, dtype=None, seed=seed)

    def sample(self, mask: Any | None = None, probability: Any | None = None) -> str:
        """A short text that includes line ends, markup and characters outside ASCII."""
        size = int(self.np_random.integers(0, min(64, self.max_length) + 1))
        return "".join(self.np_random.choice(list(_ALPHABET), size=size).tolist())

    def contains(self, x: Any) -> bool:
        """Whether ``x`` is a ``str`` that can be encoded and is not too long."""
        return isinstance(x, str) and len(x) <= self.max_length and _SURROGATE.search(x) is None

    @property
    def is_np_flattenable(self) -> bool:
        """Text has no flat array form."""
        return False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Unicode) and other.max_length == self.max_length

    def __hash__(self) -> int:
        return hash(("Unicode", self.max_length))

    def __repr__(self) -> str:
        return f"Unicode(max_length={self.max_length})"


_ANY_TEXT = Unicode()


class Messages(gymnasium.Space[tuple[Message, ...]]):
    """A tuple of chat messages, each with a known role and text content."""

    def __init__(self, max_length: int = 1_000_000, seed: int | np.random.Generator | None = None) -> None:
        self.text = Unicode(max_length)
        super().__init__(shape=None, dtype=None, seed=seed)

    def seed(self, seed: int | None = None) -> int | list[int] | dict[str, int]:
        """Seed this space and the space of its texts: the seed that is given back does the same again."""
        used = super().seed(seed)
        self.text.seed(used if isinstance(used, int) else seed)
        return used

    def from_jsonable(self, sample_n: list[Any]) -> list[tuple[Message, ...]]:
        """Samples that ``to_jsonable`` has written: JSON makes lists of tuples."""
        return [tuple(sample) for sample in sample_n]

    def sample(self, mask: Any | None = None, probability: Any | None = None) -> tuple[Message, ...]:
        """Up to three messages with random roles and texts."""
        count = int(self.np_random.integers(0, 4))
        roles = self.np_random.integers(0, len(_ROLES), size=count).tolist()
        return tuple(Message(role=_ROLES[role], content=self.text.sample()) for role in roles)

    def contains(self, x: Any) -> bool:
        """Whether ``x`` is a tuple of well-formed messages."""
        return isinstance(x, tuple) and all(self._is_message(message) for message in x)

    def _is_message(self, message: Any) -> bool:
        return (
            isinstance(message, Mapping)
            and message.get("role") in _ROLES
            and self.text.contains(message.get("content"))
            and set(message) <= {"role", "content", "name", "tool_call_id"}
            and all(_ANY_TEXT.contains(value) for value in message.values())
        )

    @property
    def is_np_flattenable(self) -> bool:
        """Messages have no flat array form."""
        return False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Messages) and other.text == self.text

    def __hash__(self) -> int:
        return hash(("Messages", self.text))

    def __repr__(self) -> str:
        return f"Messages(max_length={self.text.max_length})"
