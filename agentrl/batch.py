"""``collate`` turns episodes into packed tensors; only here are rows concatenated, shifted and filtered.

Algorithms see tensors in *sampled coordinates* only: the S sampled tokens of all rows, concatenated, with row offsets.
No algorithm sees a mask, padding or a tool token.

Legend: R rows (one episode each), T packed model-input tokens, S sampled tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from agentrl.errors import TrajectoryError
from agentrl.types import Group, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rows packed for one forward pass of the model.

    Example:
        Rows ``p p p s s t s`` and ``p p s`` (p prompt, s sampled, t tool)::

            tokens     = [p p p s s t s | p p s]     T = 10
            positions  = [0 1 2 3 4 5 6 | 0 1 2]
            row_starts = [0, 7, 10]
            sampled    = [3, 4, 6, 9]                S = 4
            starts     = [0, 3, 4]
    """

    tokens: Tensor
    """Token ids of all rows, concatenated, int64 [T]."""
    positions: Tensor
    """Position of each token within its row, int64 [T]."""
    row_starts: Tensor
    """Offsets of the rows in ``tokens``, int64 [R+1]."""
    sampled: Tensor
    """Index into T of each sampled token, int64 [S]; the model predicts it from the hidden state at ``sampled - 1``."""
    starts: Tensor
    """Offsets of the rows in sampled coordinates, int64 [R+1]."""
    group: Tensor
    """Which group each row belongs to, counted over all groups given to ``collate``, int64 [R]."""
    rewards: Tensor
    """Zero except on the last sampled token of a turn, float32 [S]."""
    sampler_logp: Tensor
    """Log-prob of each sampled token as the engine reported it, float32 [S]."""
    index: Tensor
    """Position of each sampled token in the sampled coordinates of all episodes given to ``collate``, int64 [S]."""

    def __len__(self) -> int:
        return len(self.group)

    def to(self, device: torch.device | str) -> "Batch":
        """Copy the batch to another device."""
        return replace(self, **{field.name: getattr(self, field.name).to(device) for field in fields(self)})

    @property
    def sampled_rows(self) -> Tensor:
        """Rows that hold a sampled token; an episode whose prompt left no room for a turn is none of them [≤ R]."""
        return torch.nonzero(self.starts.diff() > 0)[:, 0]

    def split(self, max_tokens: int, rows: Sequence[int] | None = None) -> list["Batch"]:
        """Split into packs of complete rows, in order.

        Args:
            max_tokens: most tokens of a pack.
            rows: which rows, in which order; all of them by default.

        Raises:
            TrajectoryError: a row alone is longer than ``max_tokens``.
        """
        rows = range(len(self)) if rows is None else rows
        return [self._select(torch.tensor(pack)) for pack in self._fill(rows, max_tokens)]

    def balanced(self, max_tokens: int, rows: Sequence[int]) -> list["Batch"]:
        """Split rows into few packs that take about equally long, by the sum of their squared lengths.

        Rows of a group stay together where a pack holds them: tokens that they share are computed once per pack.

        Args:
            max_tokens: most tokens of a pack.
            rows: which rows; those of a pack keep their order.

        Raises:
            TrajectoryError: a row alone is longer than ``max_tokens``.
        """
        lengths, group = self.row_starts.diff().tolist(), self.group.tolist()
        members: dict[int, list[int]] = {}
        for row in rows:
            members.setdefault(group[row], []).append(row)
        pieces = [piece for rows_of_group in members.values() for piece in self._fill(rows_of_group, max_tokens)]

        def size(rows: Sequence[int], power: int = 1) -> int:
            return sum(lengths[row] ** power for row in rows)

        packs: list[list[int]] = [[] for _ in range(-(-size(rows) // max_tokens))]
        # Greedy: the most expensive piece comes first, and each goes to the cheapest pack that has room.
        for piece in sorted(pieces, key=lambda piece: -size(piece, 2)):
            fitting = [pack for pack in packs if size(pack) + size(piece) <= max_tokens]
            if not fitting:
                packs.append([])
                fitting = packs[-1:]
            min(fitting, key=lambda pack: size(pack, 2)).extend(piece)
        position = {row: number for number, row in enumerate(rows)}
        return [self._select(torch.tensor(sorted(pack, key=position.__getitem__))) for pack in packs]

    def _fill(self, rows: Sequence[int], max_tokens: int) -> list[list[int]]:
        """Fill packs with complete rows, one after the other."""
        lengths = self.row_starts.diff().tolist()
        packs: list[list[int]] = []
        room = 0
        for row in rows:
            if lengths[row] > max_tokens:
                raise TrajectoryError(
                    f"an episode of {lengths[row]} tokens does not fit into max_tokens={max_tokens}: raise it, or "
                    "lower the token budget of an episode"
                )
            # Next fit and not best fit: rows keep their order, so packs concatenate to the episodes in order.
            if not packs or lengths[row] > room:
                packs.append([])
                room = max_tokens
            packs[-1].append(row)
            room -= lengths[row]
        return packs

    def _select(self, rows: Tensor) -> "Batch":
        tokens, row_starts = _gather_rows(self.row_starts, rows)
        sampled, starts = _gather_rows(self.starts, rows)
        # ``sampled`` points into ``tokens``, so it moves by as much as its row moved.
        shift = row_starts[:-1] - self.row_starts[rows]
        counts = starts.diff()
        return Batch(
            tokens=self.tokens[tokens],
            positions=self.positions[tokens],
            row_starts=row_starts,
            sampled=self.sampled[sampled] + torch.repeat_interleave(shift, counts),
            starts=starts,
            group=self.group[rows],
            rewards=self.rewards[sampled],
            sampler_logp=self.sampler_logp[sampled],
            index=self.index[sampled],
        )


def collate(groups: Sequence[Group], *, max_tokens: int) -> list[Batch]:
    """Turn groups into packs of at most ``max_tokens`` tokens.

    Concatenated, the packs' sampled coordinates are those of all episodes in order.

    Args:
        groups: the groups of one training step.
        max_tokens: most model-input tokens of a pack.

    Raises:
        TrajectoryError: one episode alone is longer than ``max_tokens``, or as of ``as_batch``.
    """
    return as_batch(groups).split(max_tokens)


def as_batch(groups: Sequence[Group]) -> Batch:
    """Make one batch of all episodes of ``groups``, whatever its size.

    Raises:
        TrajectoryError: there is no group, an episode's prompt is empty, or a reward has no token to stand on.
    """
    if not groups:
        raise TrajectoryError("there is no group to make a batch of")
    rows = [(number, trajectory) for number, group in enumerate(groups) for trajectory in group]
    lengths = [len(trajectory.token_ids) for _, trajectory in rows]
    counts = [trajectory.n_sampled for _, trajectory in rows]
    row_starts, starts = _offsets(lengths), _offsets(counts)
    total = int(row_starts[-1])
    sampled = [
        offset + position
        for (_, trajectory), offset in zip(rows, row_starts.tolist(), strict=False)
        for position in _sampled_places(trajectory)
    ]
    policy = [segment for _, trajectory in rows for segment in trajectory.sampled]
    return Batch(
        tokens=torch.tensor([token for _, trajectory in rows for token in trajectory.token_ids]),
        # Each row counts from 0: rows do not attend to each other.
        positions=torch.arange(total) - torch.repeat_interleave(row_starts[:-1], row_starts.diff()),
        row_starts=row_starts,
        # The dtype is named because torch makes floats of an empty list.
        sampled=torch.tensor(sampled, dtype=torch.int64),
        starts=starts,
        group=torch.tensor([number for number, _ in rows]),
        rewards=torch.tensor([r for _, trajectory in rows for r in _rewards(trajectory)], dtype=torch.float32),
        sampler_logp=torch.tensor([lp for segment in policy for lp in segment.logprobs or ()], dtype=torch.float32),
        index=torch.arange(len(sampled)),
    )


def _sampled_places(trajectory: Trajectory) -> list[int]:
    """Return the positions of the sampled tokens within their row."""
    places: list[int] = []
    position = 0
    for segment in trajectory.segments:
        if segment.trained:
            places.extend(range(position, position + len(segment.token_ids)))
        position += len(segment.token_ids)
    # A token is predicted at the position before it, and position 0 has none.
    if places and places[0] == 0:
        raise TrajectoryError(f"episode of task {trajectory.task_id!r} has an empty prompt: nothing predicts its turn")
    return places


def _rewards(trajectory: Trajectory) -> list[float]:
    """Put each turn's reward on its last sampled token, and an empty turn's on the sampled token before it."""
    rewards = [0.0] * trajectory.n_sampled
    end = 0
    for segment, reward in zip(trajectory.sampled, trajectory.rewards, strict=True):
        end += len(segment.token_ids)
        if reward and end == 0:
            raise TrajectoryError(f"episode of task {trajectory.task_id!r} has a reward before its first sampled token")
        if reward:
            # Added, not set: an empty turn shares the token with the turn before.
            rewards[end - 1] += reward
    return rewards


def _offsets(lengths: Sequence[int]) -> Tensor:
    return torch.nn.functional.pad(torch.tensor(lengths, dtype=torch.int64).cumsum(0), (1, 0))


def _gather_rows(starts: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices of all tokens of ``rows``, concatenated, and the offsets of the rows among them."""
    counts = starts.diff()[rows]
    offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    # A token's index is its position within its row plus the row's old start: this avoids a Python loop over rows.
    within = torch.arange(int(offsets[-1])) - torch.repeat_interleave(offsets[:-1], counts)
    return torch.repeat_interleave(starts[rows], counts) + within, offsets
