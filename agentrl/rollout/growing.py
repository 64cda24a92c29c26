"""Rows of an episode that is being played, and where its next turn is sampled."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from agentrl.segments import Segment

Key = tuple[object, ...]
"""A message as a value: equal where two spellings mean the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTurn:
    """A sampled turn where it stands in a row."""

    position: int
    """How many messages of the row come before it."""
    start: int
    """How many tokens of the row come before it."""
    token_ids: tuple[int, ...]
    """Its tokens."""

    @property
    def end(self) -> int:
        """How many tokens the row has up to its end."""
        return self.start + len(self.token_ids)


@dataclass(slots=True, kw_only=True)
class GrowingRow:
    """A row, and the history that its tokens spell."""

    token_ids: list[int]
    """All tokens, inherited ones included."""
    history: list[Key] = field(default_factory=list[Key])
    """The tools and messages that they spell, as values."""
    turns: list[RowTurn] = field(default_factory=list[RowTurn])
    """The turns that were sampled in this row."""
    segments: list[Segment] = field(default_factory=list[Segment])
    """The row's own segments."""
    parent: int | None = None
    """Index of the row that it continues."""
    fork: int = 0
    """Number of tokens inherited from there."""
    waits: bool = False
    """True while a turn is sampled at its end."""

    def ends_with(self, turn: RowTurn | None) -> bool:
        """Return True if nothing follows ``turn`` in this row."""
        return turn is not None and not self.waits and turn.end == len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class NextTurn:
    """Where the next turn is to be sampled."""

    history: list[Key]
    """The tools and messages that come before it, as values."""
    row: int | None
    """Index of the row that it continues, or that its own row begins like."""
    start: int
    """How many tokens it has from there."""
    new: Sequence[Segment]
    """What follows them."""
    cause: str
    """Why a new row begins; empty where the row is continued."""

    @property
    def tokens(self) -> int:
        """How many tokens come before the turn."""
        return self.start + sum(len(segment.token_ids) for segment in self.new)


def shared_tokens(left: Sequence[int], right: Sequence[int]) -> int:
    """Return how many tokens two rows share at their beginning."""
    differs = (index for index, (a, b) in enumerate(zip(left, right, strict=False)) if a != b)
    return next(differs, min(len(left), len(right)))


def after(segments: Sequence[Segment], start: int) -> Iterator[Segment]:
    """Yield the segments, or their parts, that come after ``start`` tokens."""
    for segment in segments:
        if start < len(segment.token_ids):
            yield Segment(segment.source, segment.token_ids[start:])
        start = max(0, start - len(segment.token_ids))
