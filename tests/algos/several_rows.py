"""Exact bias of what can be made of an episode's rows, where a driver drops the first turn from the context.

The first turn is ``END``, which ends the episode, or ``1 END`` or ``1 1``. Then the driver begins a second row: the
prompt and an answer to the first turn, without the turn. The second turn is ``END``, ``1 END`` or ``1 1``. So an
episode has one row or two, and the policy decides how many. A batch has every group of N episodes that can occur, and
weighs each by its probability.

Print the table of docs/rows.md with ``python -m tests.algos.several_rows``.

Shapes: S sampled tokens of all episodes of the batch, each in time; E episodes, R rows, B contexts, P parameters.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from agentrl import algos
from agentrl.algos.head import token_energy
from agentrl.batch import Batch, as_batch
from agentrl.segments import Row, Segment
from agentrl.types import Group, Stop, Trajectory

from . import reference
from .enumeration import END, Exact

Turns = tuple[tuple[int, ...], ...]
SIZE = 3
"""N."""
PROMPT = 9
ANSWER: Mapping[tuple[int, ...], int] = {(1, END): 7, (1, 1): 8}
"""What the second row has in place of the first turn."""
REWARDS: Mapping[Turns, tuple[float, ...]] = {
    ((END,),): (0.5,),
    ((1, END), (END,)): (0.0, 0.25),
    ((1, END), (1, END)): (0.0, 1.0),
    ((1, END), (1, 1)): (0.0, 0.0),
    ((1, 1), (END,)): (0.25, 0.0),
    ((1, 1), (1, END)): (0.25, 0.25),
    ((1, 1), (1, 1)): (0.25, 1.0),
}
"""The turns of every episode, and what each is paid; exact in float32, as a batch has rewards."""
CONTEXTS: list[tuple[int, ...]] = [(PROMPT, *answer, *written) for answer in [(), (7,), (8,)] for written in [(), (1,)]]
"""What the policy can read before a token; each has logits of its own."""
OLD = torch.tensor([[-0.5, 0.8], [0.6, 0.0], [0.0, 1.0], [0.3, -0.4], [0.9, 0.0], [-0.2, 0.5]], dtype=torch.float64)
"""Logits of the policy that samples, [B, 2]."""
NEW = OLD + torch.tensor(
    [[0.2, -0.1], [-0.15, 0.2], [0.1, -0.2], [-0.2, 0.1], [-0.1, 0.2], [0.15, -0.15]], dtype=torch.float64
)
"""Logits of the policy that is trained after some updates."""


def trajectory(turns: Turns) -> Trajectory:
    """The episode as a driver records it."""
    policy = [Segment("policy", turn, (-1.0,) * len(turn), 0) for turn in turns]
    rows = [Row((Segment("prompt", (PROMPT,)), policy[0]))]
    rows += [Row((Segment("tool", (ANSWER[turns[0]],)), part), parent=0, fork=1) for part in policy[1:]]
    return Trajectory(task_id="t", seed=0, rows=tuple(rows), rewards=REWARDS[turns], stop=Stop.TERMINATED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """Every group that can occur."""

    batch: Batch
    """Their episodes."""
    chance: Tensor
    """Probability of each group, in any order of its members [E/N]."""
    context: Tensor
    """In which context each token was sampled [S]."""
    token: Tensor
    """The token [S]."""
    energy: Tensor
    """Its energy under the policy that samples [S]."""
    rewards: Tensor
    """Its reward [S]."""

    @classmethod
    def all(cls) -> "Played":
        groups = list(itertools.combinations_with_replacement(REWARDS, SIZE))
        batch = as_batch([Group(tuple(map(trajectory, members))) for members in groups])
        begins = torch.repeat_interleave(batch.row_starts[:-1], batch.starts.diff()).tolist()
        sampled = zip(begins, batch.sampled.tolist(), strict=True)
        # Read from the packed rows, as a model reads them.
        contexts = [CONTEXTS.index(tuple(batch.tokens[begin:end].tolist())) for begin, end in sampled]
        context, token = batch.in_time(torch.tensor(contexts)), batch.in_time(batch.tokens[batch.sampled])
        logp = torch.log_softmax(OLD, 1)
        return cls(
            batch=batch,
            chance=torch.tensor([_orders(members) * _chance(members) for members in groups], dtype=torch.float64),
            context=context,
            token=token,
            energy=token_energy(logp[context, token], logp.exp().square().sum(1)[context]),
            rewards=batch.in_time(batch.rewards).double(),
        )

    def credit(self, advantage: str) -> Tensor:
        """The advantage of each token [S]."""
        batch = self.batch
        return algos.advantage(advantage, self.rewards, self.energy, batch.episode_starts, batch.episode_group)

    @property
    def returns(self) -> Tensor:
        """The return of each row's episode [R]."""
        batch = self.batch
        totals = [part.sum() for part in self.rewards.split(batch.episode_starts.diff().tolist())]
        return torch.stack(totals)[batch.episode]

    @property
    def group(self) -> Tensor:
        """The group of each token [S]."""
        return self.batch.episode_group.repeat_interleave(self.batch.episode_starts.diff())

    @property
    def of_episode(self) -> Tensor:
        """Weight of each token in the mean over the group's episodes [S]."""
        return self.chance[self.group] / SIZE

    @property
    def of_row(self) -> Tensor:
        """The same in the mean over the group's rows [S]."""
        return (self.chance / self.batch.group.bincount())[self.group]


Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Sums the loss of all tokens: from advantages [S], the offsets between which S and t run, and weights [S]."""


def in_time(played: Played, advantage: str, loss: Loss) -> Tensor:
    """What the trainer does."""
    return loss(played.credit(advantage), played.batch.episode_starts, played.of_episode)


def restarted(played: Played, advantage: str, loss: Loss) -> Tensor:
    """The same, with S and t from 0 in each row."""
    return loss(played.credit(advantage), played.batch.starts, played.of_episode)


def by_rows(played: Played, advantage: str, loss: Loss) -> Tensor:
    """The same as in time, with the mean over rows: an episode counts as often as it has rows."""
    return loss(played.credit(advantage), played.batch.episode_starts, played.of_row)


def apart(played: Played, advantage: str, loss: Loss) -> Tensor:
    """Each row as an episode of its own, which is paid the return of the episode that it is of."""
    starts = played.batch.starts
    rewards = torch.zeros_like(played.rewards).index_copy(0, starts[1:] - 1, played.returns)
    credit = algos.advantage(advantage, rewards, played.energy, starts, played.batch.group)
    return loss(credit, starts, played.of_row)


def copied(played: Played, advantage: str, loss: Loss) -> Tensor:
    """The advantage of the last rows among each other, of the return, from their last tokens to all of an episode's."""
    batch = played.batch
    last = torch.nonzero(pad(batch.episode.diff(), (0, 1), value=1))[:, 0]
    ends, lengths = batch.episode_starts[1:], batch.starts.diff()[last]
    pairs = zip(ends.tolist(), lengths.tolist(), strict=True)
    of_last = torch.cat([torch.arange(end - length, end) for end, length in pairs])
    rewards = torch.zeros_like(played.rewards).index_copy(0, ends - 1, played.returns[last])[of_last]
    offsets = pad(lengths.cumsum(0), (1, 0))
    credit = algos.advantage(advantage, rewards, played.energy[of_last], offsets, batch.episode_group)
    return loss(
        credit[offsets[1:] - 1].repeat_interleave(batch.episode_starts.diff()), batch.episode_starts, played.of_episode
    )


WAYS: Mapping[str, Callable[[Played, str, Loss], Tensor]] = {
    "in time over all rows, as here": in_time,
    "each row is an episode": apart,
    "the mean is over rows": by_rows,
    "the last row's advantage is copied": copied,
    "S and t restart in each row": restarted,
}
WIDE = {"clip_low": 100.0, "clip_high": 100.0, "clip_dual": None}
"""Options of CTPO without clipping."""
COLUMNS: Mapping[str, tuple[str, str, Tensor, Mapping[str, object]]] = {
    **{name: (name, "reinforce", OLD, {}) for name in ("none", "rloo", "otb_loo", "otb")},
    "ctpo without clipping": ("otb_loo", "ctpo", NEW, WIDE),
    "ctpo": ("otb_loo", "ctpo", NEW, {}),
}
"""The table's columns: advantage, loss, logits of the policy that is trained, and options of the loss."""


def mean_gradient(way: str, column: str) -> Tensor:
    """The expected direction in which an update moves the logits [P]."""
    advantage, name, trained, options = COLUMNS[column]
    played, logits = Played.all(), trained.clone().requires_grad_()
    logp, old = (torch.log_softmax(of, 1)[played.context, played.token] for of in (logits, OLD))

    def loss(credit: Tensor, starts: Tensor, weights: Tensor) -> Tensor:
        how: Mapping[str, object] = {"weights": weights, "aggregate": "token_sum_const", "max_tokens": 1, **options}
        # The aggregation divides by the number of rows, which the weights have done.
        return algos.loss(name, logp, old, credit, starts, **how).loss * (len(starts) - 1)

    return -torch.autograd.grad(WAYS[way](played, advantage, loss), logits)[0].flatten()


def exact(way: str, column: str) -> Exact:
    """What a way comes to, against the gradient of the expected return, or against what CTPO is off-policy."""
    truth = gradient() if COLUMNS[column][2] is OLD else definition(column)
    return Exact.of(torch.ones(1, dtype=torch.float64), mean_gradient(way, column)[None], truth)


# Slowly, from the turns alone: no row, batch or group of the package.


@cache
def gradient() -> Tensor:
    """The gradient of the expected return by the logits [P]."""
    logits = OLD.clone().requires_grad_()
    value = [math.fsum(paid) * torch.stack(logp_of(turns, logits)).sum().exp() for turns, paid in REWARDS.items()]
    return torch.autograd.grad(torch.stack(value).sum(), logits)[0].flatten()


@cache
def definition(column: str) -> Tensor:
    """E[1/N Σ_i Σ_t −slope_t ∇logp_t] over ordered groups [P], with advantages and slopes of loops over tokens."""
    advantage, name, trained, options = COLUMNS[column]
    widths: dict[str, Any] = {"low": 100.0, "high": 100.0, "dual": None} if options is WIDE else {}
    logits, total = trained.clone().requires_grad_(), torch.zeros((), dtype=torch.float64)
    pairs = {turns: (logp_of(turns, logits), list(map(float, logp_of(turns, OLD)))) for turns in REWARDS}
    for members in itertools.product(REWARDS, repeat=SIZE):
        rewards, energy = [_paid(turns) for turns in members], [_energy(turns) for turns in members]
        credit = reference.otb(rewards, energy, [0] * SIZE, leave_one_out=advantage == "otb_loo")
        steps = [[float(new.detach()) - old for new, old in zip(*pairs[turns], strict=True)] for turns in members]
        slopes = reference.ctpo(steps, credit, **widths)[1] if name == "ctpo" else [[-a for a in row] for row in credit]
        for turns, row in zip(members, slopes, strict=True):
            for logp, slope in zip(pairs[turns][0], row, strict=True):
                total = total - _chance(members) / SIZE * slope * logp
    return torch.autograd.grad(total, logits)[0].flatten()


def logp_of(turns: Turns, logits: Tensor) -> list[Tensor]:
    """Log-prob of each token of an episode, each in the context in which the driver asked for it."""
    logp: list[Tensor] = []
    for number, turn in enumerate(turns):
        read = (PROMPT, ANSWER[turns[0]]) if number else (PROMPT,)
        for position, token in enumerate(turn):
            logp.append(torch.log_softmax(logits[CONTEXTS.index((*read, *turn[:position]))], 0)[token])
    return logp


def _paid(turns: Turns) -> list[float]:
    return [r for turn, paid in zip(turns, REWARDS[turns], strict=True) for r in [*[0.0] * (len(turn) - 1), paid]]


def _energy(turns: Turns) -> list[float]:
    # Of two tokens that have probabilities p and 1 - p, ‖onehot - π‖² is 2(1 - p)².
    return [2 * (1 - math.exp(float(logp))) ** 2 for logp in logp_of(turns, OLD)]


@cache
def _chance(members: Sequence[Turns]) -> float:
    return math.exp(math.fsum(float(logp) for turns in members for logp in logp_of(turns, OLD)))


def _orders(members: Sequence[Turns]) -> int:
    return math.factorial(len(members)) // math.prod(math.factorial(members.count(turns)) for turns in set(members))


def table() -> str:
    """The page's table, in Markdown."""
    lines = [f"| N = {SIZE}: bias, cosine | {' | '.join(f'`{name}`' for name in COLUMNS)} |"]
    lines.append("|---" * (len(COLUMNS) + 1) + "|")
    for way in WAYS:
        cells = (exact(way, column) for column in COLUMNS)
        lines.append(f"| {way} | " + " | ".join(f"{cell.bias:.3f}, {cell.cosine:.4f}" for cell in cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
