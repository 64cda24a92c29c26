"""Segments, the runs of tokens of an episode, and rows of segments."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from agentrl.errors import TrajectoryError

Source = Literal["prompt", "policy", "tool", "template"]
Swaps = tuple[tuple[int, int], ...]
"""Where new weights came while tokens were sampled: index of the first token that they sampled, and their version."""
_MOST_TOKENS = 1 << 26
"""Most tokens of an episode, those that rows inherit counted in each: a small file could name any number of them."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of token ids from one source.

    Log-probs and a weight version exist exactly where the source is ``"policy"``.

    Example:
        >>> Segment("policy", (5, 9), (-0.1, -2.3), 0).trained
        True

    Raises:
        TrajectoryError: log-probs are missing, superfluous, of another length, not finite or above 0, or the swaps are
            not in order.
    """

    source: Source
    """Who produced the tokens."""
    token_ids: tuple[int, ...]
    """The ids, exactly as sampled or rendered [n]."""
    logprobs: tuple[float, ...] | None = None
    """Log-prob of each token under the distribution it was sampled from [n], in nats."""
    version: int | None = None
    """The version of the weights that sampled the tokens, up to the first swap."""
    cut: bool = False
    """True if a token limit ended the turn, not the policy."""
    swaps: Swaps = ()
    """Where new weights came meanwhile."""
    turn: int | None = None
    """Orders the sampled turns of an episode in time, over all of its rows; None: in order of appearance."""

    def __post_init__(self) -> None:
        if self.source not in ("prompt", "policy", "tool", "template"):
            raise TrajectoryError(f"unknown segment source {self.source!r}: use prompt, policy, tool or template")
        # Callers may give lists; a tuple keeps the record from changing with them.
        object.__setattr__(self, "token_ids", tuple(self.token_ids))
        if self.source != "policy":
            if (self.logprobs, self.version, self.turn) != (None, None, None) or self.cut or self.swaps:
                raise TrajectoryError(
                    f"a {self.source} segment was not sampled: it has no log-probs, version or turn, and is never cut"
                )
            return
        if self.logprobs is None or self.version is None:
            raise TrajectoryError("a policy segment needs the log-probs it was sampled with and its weights' version")
        if self.turn is not None and (isinstance(self.turn, bool) or self.turn < 0):
            raise TrajectoryError(f"a turn is a number from 0, not {self.turn!r}")
        object.__setattr__(self, "logprobs", tuple(self.logprobs))
        object.__setattr__(self, "swaps", tuple((start, version) for start, version in self.swaps))
        starts = [0, *(start for start, _ in self.swaps)]
        if starts != sorted({*starts}) or starts[-1] >= max(1, len(self.token_ids)):
            raise TrajectoryError(f"weights can't be swapped at {starts[1:]} of {len(self.token_ids)} sampled tokens")
        if len(self.logprobs) != len(self.token_ids):
            raise TrajectoryError(f"{len(self.token_ids)} sampled tokens came with {len(self.logprobs)} log-probs")
        # One NaN would spread through the loss of the whole batch.
        for logprob in self.logprobs:
            if not (math.isfinite(logprob) and logprob <= 0.0):
                raise TrajectoryError(f"{logprob} is no log-prob of a sampled token: it must be finite and at most 0")

    @property
    def trained(self) -> bool:
        """True if the policy sampled these tokens: only those enter the loss."""
        return self.source == "policy"

    @property
    def versions(self) -> tuple[int, ...]:
        """Versions of all weights that sampled some of the tokens, in order; none where nothing was sampled."""
        return () if self.version is None else (self.version, *(version for _, version in self.swaps))

    @property
    def token_versions(self) -> tuple[int, ...]:
        """Version of the weights that sampled each token [n]; none where nothing was sampled."""
        starts = (0, *(start for start, _ in self.swaps), len(self.token_ids))
        return tuple(
            version for version, (a, b) in zip(self.versions, pairwise(starts), strict=False) for _ in range(a, b)
        )


@dataclass(frozen=True, slots=True)
class Row:
    """Segments that the model reads as one sequence, after the tokens that the row inherits from another one.

    A sampled turn is a policy segment of exactly one row, the row that owns it. In all other rows its tokens are
    context: inherited, or copied into a segment of another source.

    Example:
        An agent's second turn is sampled after its first one was cut down to a summary::

            rows = (Row((prompt[20], policy[9])), Row((prompt[12], policy[7])))

        A turn that continues the first row after 25 of its tokens is ``Row((tool[8], policy[5]), parent=0, fork=25)``.

    Raises:
        TrajectoryError: a row without a parent inherits tokens or does not begin with a prompt, or one with a parent
            inherits none.
    """

    segments: tuple[Segment, ...]
    """The row's own tokens, in order."""
    parent: int | None = None
    """Index of the row that it continues, among the rows of the episode; None where it begins anew."""
    fork: int = 0
    """How many of its parent's first tokens the row begins with, those that the parent inherits included."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "segments", tuple(self.segments))
        if self.parent is None and (self.fork or not self.segments or self.segments[0].source != "prompt"):
            raise TrajectoryError("a row that continues no other begins with a prompt of its own, and inherits nothing")
        if self.parent is not None and (self.parent < 0 or self.fork < 1):
            raise TrajectoryError(f"a row can't inherit {self.fork} tokens of row {self.parent}")

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The row's own tokens, without those that it inherits."""
        return tuple(token for segment in self.segments for token in segment.token_ids)


def parents_first(rows: Sequence[Row]) -> list[int]:
    """Return the indices of ``rows`` in an order in which each row comes after its parent.

    Raises:
        TrajectoryError: the first row continues another one, a row continues one that is missing or that continues it,
            or inherits more tokens than that has, or all rows together are too long.
    """
    if rows[0].parent is not None:
        raise TrajectoryError("the first row of an episode continues another one: put the row with its opening first")
    order, children = list[int](), dict[int, list[int]]()
    for number, row in enumerate(rows):
        (order if row.parent is None else children.setdefault(row.parent, [])).append(number)
    lengths = [row.fork + sum(len(segment.token_ids) for segment in row.segments) for row in rows]
    for number in order:  # grows meanwhile
        for child in children.get(number, ()):
            if rows[child].fork > lengths[number]:
                raise TrajectoryError(f"row {child} inherits {rows[child].fork} tokens of a row of {lengths[number]}")
            order.append(child)
    if missing := {*range(len(rows))} - {*order}:
        raise TrajectoryError(f"row {min(missing)} continues row {rows[min(missing)].parent}, which begins nowhere")
    if sum(lengths) > _MOST_TOKENS:
        raise TrajectoryError(f"the rows of an episode have {sum(lengths)} tokens together, more than {_MOST_TOKENS}")
    return order


def shared_length(a: Sequence[object], b: Sequence[object]) -> int:
    """Return how many items both begin with."""
    differing = (index for index, (left, right) in enumerate(zip(a, b, strict=False)) if left != right)
    return next(differing, min(len(a), len(b)))


def complete_rows(rows: Sequence[Row]) -> list[tuple[int, ...]]:
    """Return all tokens of each row, those that it inherits included; raises as ``parents_first``."""
    complete: dict[int, tuple[int, ...]] = {}
    for number in parents_first(rows):
        row = rows[number]
        inherited = () if row.parent is None else complete[row.parent][: row.fork]
        complete[number] = inherited + row.token_ids
    return [complete[number] for number in range(len(rows))]


def turn_order(segments: Sequence[Segment]) -> list[int]:
    """Return the indices of the sampled segments, counted among them alone, in the order of their turns.

    Raises:
        TrajectoryError: some have a turn and others none, or two have the same.
    """
    turns = [segment.turn for segment in segments if segment.trained]
    numbers = [turn for turn in turns if turn is not None]
    if numbers and len({*numbers}) < len(turns):
        raise TrajectoryError("each sampled turn of an episode needs a number of its own, or none has one")
    return sorted(range(len(turns)), key=numbers.__getitem__) if numbers else list(range(len(turns)))


def turn_positions(segments: Sequence[Segment]) -> list[tuple[int, range]]:
    """Return each sampled segment's turn, counted from 0 in time, and its tokens' positions among all sampled ones.

    Example:
        Turns numbered 7 and 3, of two and four tokens, are ``[(1, range(4, 6)), (0, range(0, 4))]``.

    Raises:
        TrajectoryError: as ``turn_order``.
    """
    lengths = [len(segment.token_ids) for segment in segments if segment.trained]
    turns, done = [(0, range(0))] * len(lengths), 0
    for turn, index in enumerate(turn_order(segments)):
        turns[index] = turn, range(done, done := done + lengths[index])
    return turns
