"""Gymnasium spaces for the texts that a language agent reads and writes."""

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import gymnasium

from agentrl.types import Message

_T = TypeVar("_T")
_ROLES: tuple[Any, ...] = ("system", "user", "assistant", "tool")
_SURROGATE = re.compile("[\ud800-\udfff]")
_ALPHABET = "abc XYZ 0189 +-*/=(){}[]\\\n`'\"<|>_éßπ漢字🙂"
_MOST = 1_000_000


class _Texts(gymnasium.Space[_T]):
    """A space of texts: all spaces of a class are equal."""

    @property
    def is_np_flattenable(self) -> bool:
        """Text has no flat array form."""
        return False

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self)

    def __hash__(self) -> int:
        return hash(type(self))

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def _drawn(self) -> str:
        """Return a short text that includes line ends, markup and characters outside ASCII."""
        return "".join(self.np_random.choice(list(_ALPHABET), size=self.np_random.integers(0, 65)).tolist())


class Unicode(_Texts[str]):
    """Any text of at most a million characters, empty text included.

    Gymnasium's own ``Text`` space has a fixed alphabet; a model's text has none.
    """

    def sample(self, mask: Any | None = None, probability: Any | None = None) -> str:
        """Return a short text that includes line ends, markup and characters outside ASCII."""
        return self._drawn()

    def contains(self, x: Any) -> bool:
        """Return True if ``x`` is a ``str`` that can be encoded and is not too long."""
        return _is_text(x)


class Messages(_Texts[tuple[Message, ...]]):
    """A tuple of chat messages, each with a known role and text content."""

    def from_jsonable(self, sample_n: list[Any]) -> list[tuple[Message, ...]]:
        """Read samples that ``to_jsonable`` has written; JSON turns their tuples into lists."""
        return [tuple(sample) for sample in sample_n]

    def sample(self, mask: Any | None = None, probability: Any | None = None) -> tuple[Message, ...]:
        """Return up to three messages with random roles and texts."""
        roles = self.np_random.integers(0, len(_ROLES), size=self.np_random.integers(0, 4)).tolist()
        return tuple(Message(role=_ROLES[role], content=self._drawn()) for role in roles)

    def contains(self, x: Any) -> bool:
        """Return True if ``x`` is a tuple of well-formed messages."""
        return isinstance(x, tuple) and all(map(_is_message, x))


def _is_message(message: Any) -> bool:
    return (
        isinstance(message, Mapping)
        and message.get("role") in _ROLES
        and {"role", "content"} <= set(message) <= {"role", "content", "name", "tool_call_id"}
        and all(map(_is_text, message.values()))
    )


def _is_text(value: object) -> bool:
    # A lone surrogate can't be written as UTF-8, so no log or checkpoint could hold it.
    return isinstance(value, str) and len(value) <= _MOST and _SURROGATE.search(value) is None
