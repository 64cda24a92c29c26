"""``collate`` turns episodes into packed tensors; only here are rows concatenated, shifted and filtered.

Algorithms see tensors in *sampled coordinates* only: the S sampled tokens of all episodes, concatenated, each episode
in the order of its turns, with the offsets of the episodes. No algorithm sees a mask, padding or a tool token.

Legend: E episodes, R ≥ E rows, T packed model-input tokens, S sampled tokens.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain, groupby

import torch
from torch import Tensor

from agentrl.errors import TrajectoryError
from agentrl.segments import Row, complete_rows, turn_positions
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

    A row that continues another one begins with that one's tokens. They are sampled tokens in the row that owns them.
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
    episode: Tensor
    """The batch's episode that each row belongs to, counted in the order of their first rows, int64 [R]."""
    index: Tensor
    """Position of each sampled token among those of all episodes given to ``collate``, each in time, int64 [S]."""

    def __len__(self) -> int:
        return len(self.group)

    @property
    def episode_starts(self) -> Tensor:
        """Offsets of the episodes in the sampled tokens in time, int64 [E+1]."""
        counts = torch.zeros(self._episodes, dtype=torch.int64, device=self.starts.device)
        return torch.nn.functional.pad(counts.index_add(0, self.episode, self.starts.diff()).cumsum(0), (1, 0))

    @property
    def episode_group(self) -> Tensor:
        """The group of each episode, int64 [E]."""
        group = torch.zeros(self._episodes, dtype=torch.int64, device=self.group.device)
        return group.scatter(0, self.episode, self.group)

    def in_time(self, values: Tensor) -> Tensor:
        """Sort [S] from the order of rows into that of time: episodes end to end, each in the order of its turns."""
        return values[self._order()]

    def in_rows(self, values: Tensor) -> Tensor:
        """Sort [S] from the order of time back into that of rows."""
        return torch.empty_like(values).index_copy(0, self._order(), values)

    def _order(self) -> Tensor:
        # The index numbers an episode's tokens in time. A pack may have its episodes in another order than the step.
        of_token = torch.repeat_interleave(self.episode, self.starts.diff())
        by_index = self.index.argsort()
        return by_index[of_token[by_index].argsort(stable=True)]

    @property
    def _episodes(self) -> int:
        return int(self.episode.max()) + 1 if len(self.episode) else 0

    def to(self, device: torch.device | str) -> "Batch":
        """Copy the batch to another device."""
        return replace(self, **{field.name: getattr(self, field.name).to(device) for field in fields(self)})

    @property
    def sampled_rows(self) -> Tensor:
        """Rows that own a sampled token: not, for example, that of an episode whose prompt left no room [≤ R]."""
        return torch.nonzero(self.starts.diff() > 0)[:, 0]

    def split(self, max_tokens: int, rows: Sequence[int] | None = None) -> list["Batch"]:
        """Split into packs of complete rows, in order.

        The rows of an episode are in one pack where that holds them.

        Args:
            max_tokens: most tokens of a pack.
            rows: which rows, in which order; all of them by default.

        Raises:
            TrajectoryError: a row alone is longer than ``max_tokens``.
        """
        rows = range(len(self)) if rows is None else rows
        lengths, episode = self._checked_lengths(max_tokens, rows), self.episode.tolist()
        packs: list[list[int]] = []
        room = 0
        for _, grouped in groupby(rows, key=episode.__getitem__):
            piece = list(grouped)
            fits = _size(lengths, piece) <= max_tokens
            for part in [piece] if fits else [[row] for row in piece]:
                size = _size(lengths, part)
                # Next fit and not best fit: rows keep their order, so packs concatenate to the rows in order.
                if not packs or size > room:
                    packs.append([])
                    room = max_tokens
                packs[-1].extend(part)
                room -= size
        return [self._select(chosen, self.episode[chosen]) for chosen in map(torch.tensor, packs)]

    def balanced(self, max_tokens: int, episodes: Sequence[int]) -> list["Batch"]:
        """Split episodes into few packs that take about equally long, by the sum of their rows' squared lengths.

        Episodes of a group stay together where a pack holds them: tokens that they share are computed once per pack.

        Args:
            max_tokens: most tokens of a pack; an episode that has more is a pack of its own.
            episodes: which episodes; those of a pack keep their order.

        Raises:
            TrajectoryError: a row alone is longer than ``max_tokens``.
        """
        rows_of: dict[int, list[int]] = {}
        # A row without a sampled token, such as a prompt that left no room, has nothing to compute.
        for row in self.sampled_rows.tolist():
            rows_of.setdefault(int(self.episode[row]), []).append(row)
        # An episode may be asked for twice. So the pieces hold positions in ``episodes``.
        rows = [rows_of.get(episode, []) for episode in episodes]
        lengths = self._checked_lengths(max_tokens, list(chain.from_iterable(rows)))
        sizes, costs = ([_size(lengths, own, power) for own in rows] for power in (1, 2))
        group, pieces = self.episode_group.tolist(), dict[int, list[list[int]]]()
        for position, episode in enumerate(episodes):
            of_group = pieces.setdefault(group[episode], [[]])
            if of_group[-1] and _size(sizes, [*of_group[-1], position]) > max_tokens:
                of_group.append([])
            of_group[-1].append(position)
        packs: list[list[int]] = [[] for _ in range(-(-sum(sizes) // max_tokens))]
        # Greedy: the most expensive piece comes first, and each goes to the cheapest pack that has room.
        for piece in sorted(chain.from_iterable(pieces.values()), key=lambda piece: -_size(costs, piece)):
            fitting = [pack for pack in packs if not pack or _size(sizes, [*pack, *piece]) <= max_tokens]
            if not fitting:
                packs.append([])
                fitting = packs[-1:]
            min(fitting, key=lambda pack: _size(costs, pack)).extend(piece)
        labels = [[(row, position) for position in sorted(pack) for row in rows[position]] for pack in packs]
        return [self._select(*torch.tensor(pack).T) for pack in labels if pack]

    def _checked_lengths(self, max_tokens: int, rows: Iterable[int]) -> list[int]:
        lengths = self.row_starts.diff().tolist()
        longest = max((lengths[row] for row in rows), default=0)
        if longest > max_tokens:
            raise TrajectoryError(
                f"an episode of {longest} tokens does not fit into max_tokens={max_tokens}: raise it, or lower the "
                "token budget of an episode"
            )
        return lengths

    def _select(self, rows: Tensor, episode: Tensor) -> "Batch":
        """Make a batch of ``rows``, of which those with equal numbers in ``episode`` are of one episode."""
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
            episode=_numbered(episode),
            index=self.index[sampled],
        )


def collate(groups: Sequence[Group], *, max_tokens: int) -> list[Batch]:
    """Turn groups into packs of at most ``max_tokens`` tokens.

    Concatenated, the packs' sampled coordinates are those of all episodes in order.

    Args:
        groups: the groups of one training step.
        max_tokens: most model-input tokens of a pack.

    Raises:
        TrajectoryError: one row alone is longer than ``max_tokens``, or as of ``as_batch``.
    """
    return as_batch(groups).split(max_tokens)


def as_batch(groups: Sequence[Group]) -> Batch:
    """Make one batch of all episodes of ``groups``, whatever its size.

    Raises:
        TrajectoryError: there is no group, an episode's prompt is empty, or a reward has no token to stand on.
    """
    if not groups:
        raise TrajectoryError("there is no group to make a batch of")
    episodes = [(number, trajectory) for number, group in enumerate(groups) for trajectory in group]
    rows = [(row, trajectory) for _, trajectory in episodes for row in trajectory.rows]
    tokens = [row for _, trajectory in episodes for row in complete_rows(trajectory.rows)]
    policy = [[segment for segment in row.segments if segment.trained] for row, _ in rows]
    row_starts = _offsets([len(row) for row in tokens])
    sampled = [
        offset + position
        for (row, trajectory), offset in zip(rows, row_starts.tolist(), strict=False)
        for position in _sampled_positions(row, trajectory)
    ]
    total = int(row_starts[-1])
    index = torch.tensor(_ranks([trajectory for _, trajectory in episodes]), dtype=torch.int64)
    rewards = torch.tensor([r for _, trajectory in episodes for r in _rewards(trajectory)], dtype=torch.float32)
    counts = torch.tensor([len(trajectory.rows) for _, trajectory in episodes])
    return Batch(
        tokens=torch.tensor([token for row in tokens for token in row]),
        # Each row counts from 0: rows do not attend to each other.
        positions=torch.arange(total) - torch.repeat_interleave(row_starts[:-1], row_starts.diff()),
        row_starts=row_starts,
        # The dtype is named because torch makes floats of an empty list.
        sampled=torch.tensor(sampled, dtype=torch.int64),
        starts=_offsets([sum(len(segment.token_ids) for segment in owned) for owned in policy]),
        group=torch.repeat_interleave(torch.tensor([number for number, _ in episodes]), counts),
        rewards=rewards[index],
        sampler_logp=torch.tensor(
            [lp for owned in policy for segment in owned for lp in segment.logprobs or ()], dtype=torch.float32
        ),
        episode=torch.repeat_interleave(counts),
        index=index,
    )


def _sampled_positions(row: Row, trajectory: Trajectory) -> list[int]:
    """Return the positions of the tokens that were sampled in a row."""
    positions: list[int] = []
    position = row.fork
    for segment in row.segments:
        if segment.trained:
            positions.extend(range(position, position + len(segment.token_ids)))
        position += len(segment.token_ids)
    # A token is predicted at the position before it, and position 0 has none.
    if positions and positions[0] == 0:
        raise TrajectoryError(f"episode of task {trajectory.task_id!r} has an empty prompt: nothing predicts its turn")
    return positions


def _ranks(episodes: Sequence[Trajectory]) -> list[int]:
    """Return the position of each sampled token, in the order of rows, among all in the order of time."""
    ranks: list[int] = []
    for episode in episodes:
        done = len(ranks)
        ranks += [done + position for _, positions in turn_positions(episode.segments) for position in positions]
    return ranks


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
    if rewards:
        rewards[-1] -= trajectory.penalty
    return rewards


def _size(lengths: Sequence[int], rows: Sequence[int], power: int = 1) -> int:
    """Sum the lengths of ``rows``, or their squares."""
    return sum(lengths[row] ** power for row in rows)


def _offsets(lengths: Sequence[int]) -> Tensor:
    return torch.nn.functional.pad(torch.tensor(lengths, dtype=torch.int64).cumsum(0), (1, 0))


def _numbered(labels: Tensor) -> Tensor:
    """Number labels in the order in which they first appear."""
    _, number = torch.unique(labels, return_inverse=True)
    begins = torch.full((int(number.max()) + 1 if len(number) else 0,), len(labels))
    begins = begins.scatter_reduce(0, number, torch.arange(len(labels)), "amin")
    return begins.argsort().argsort()[number]


def _gather_rows(starts: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices of all tokens of ``rows``, concatenated, and the offsets of the rows among them."""
    counts = starts.diff()[rows]
    offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    # A token's index is its position within its row plus the row's old start: this avoids a Python loop over rows.
    within = torch.arange(int(offsets[-1])) - torch.repeat_interleave(offsets[:-1], counts)
    return torch.repeat_interleave(starts[rows], counts) + within, offsets
