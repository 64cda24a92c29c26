"""Rows of an episode that is being played, and where its next turn is sampled."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

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


@dataclass(slots=True, kw_only=True, eq=False)
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


class RowTurns:
    """The turns of all rows, to be found by the histories that they stand in.

    Each lookup takes as long as the history is, however many rows and turns there are.
    """

    def __init__(self) -> None:
        self._before = dict[int, tuple[int, RowTurn]]()
        """The turn that was sampled last after a history, by the history's hash."""
        self._with = dict[int, tuple[int, RowTurn]]()
        """The same, by the hash of the history that ends with the turn."""
        self._by_message = dict[Key, tuple[int, ...]]()

    def add(self, index: int, row: GrowingRow) -> None:
        """Add the turn at the end of a row."""
        turn = row.turns[-1]
        *_, before, after_it = _hashes(row.history[: turn.position + 1])
        self._before[before] = self._with[after_it] = index, turn
        self._by_message[row.history[turn.position]] = turn.token_ids

    def shared(self, history: Sequence[Key]) -> tuple[int | None, RowTurn | None]:
        """Return the row and the turn in it up to which ``history`` is the same, or which it ends before.

        It is the last such turn; where several rows have one, that which was sampled last.
        """
        hashes = _hashes(history)
        if (again := self._before.get(hashes[-1])) is not None:
            return again
        return next((self._with[number] for number in reversed(hashes) if number in self._with), (None, None))

    def at(self, history: Sequence[Key], position: int) -> tuple[int, ...] | None:
        """Return the tokens of the policy's own turn that stands at ``position`` of a history, if it is one."""
        _, turn = self._with.get(_hashes(history[: position + 1])[-1], (None, None))
        return self.of(history[position]) if turn is None else turn.token_ids

    def of(self, message: Key) -> tuple[int, ...] | None:
        """Return the tokens of the policy's own turn that became ``message``, wherever it stood."""
        return self._by_message.get(message)


def _hashes(history: Sequence[Key]) -> list[int]:
    """Compute a hash of each beginning of a history, the empty one first."""
    return list(accumulate(history, lambda number, key: hash((number, key)), initial=0))


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


def after(segments: Sequence[Segment], start: int) -> Iterator[Segment]:
    """Yield the segments, or their parts, that come after ``start`` tokens."""
    for segment in segments:
        if start < len(segment.token_ids):
            yield Segment(segment.source, segment.token_ids[start:])
        start = max(0, start - len(segment.token_ids))
