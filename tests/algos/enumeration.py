"""Exact bias, variance and direction of every advantage estimator, by playing every group that can occur.

A world is a softmax policy so small that all its episodes can be listed. An estimator's gradient of a group of N rows,

    ĝ = 1/N Σ_i Σ_t A_t^i ∇ log π(y_t^i | y_<t^i),

is formed for every group, so its mean and variance are sums, not samples. Rows are exchangeable, so a group is listed
once, as a multiset, with the probability of all its orders.

Print the table of the README with ``python tests/algos/enumeration.py``.

Shapes: Y episodes, S tokens of all episodes end to end, P parameters, G groups.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl import algos
from agentrl.algos.head import token_energy

Episode = tuple[int, ...]
Reward = Callable[[Episode], Sequence[float]]
END = 0
"""The token that ends an episode."""

ESTIMATORS: Mapping[str, tuple[str, Mapping[str, object]]] = {
    **{name: (name, {}) for name in algos.ADVANTAGES if not algos.pools(name, {})},
    "otb, instantaneous": ("otb", {"energy_kind": "instantaneous"}),
    "otb, uniform": ("otb", {"energy_kind": "uniform"}),
    "otb, carry": ("otb", {"tail": "carry"}),
    "otb_loo, carry": ("otb_loo", {"tail": "carry"}),
}
"""Every estimator that is told by one group, and variants; ``test_pooled.py`` has the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """All episodes of a policy."""

    starts: Tensor
    """Offset of each episode [Y+1]."""
    probability: Tensor
    """Of each episode [Y]."""
    rewards: Tensor
    """Of each token [S]."""
    energy: Tensor
    """Of each token [S]."""
    score: Tensor
    """Gradient of each token's log-prob [S, P]."""

    @property
    def ordinal(self) -> Tensor:
        """Which token of its episode each token is, from 0 [S]."""
        lengths = self.starts.diff()
        return torch.arange(int(self.starts[-1])) - torch.repeat_interleave(self.starts[:-1], lengths)

    def by_position(self, weight: Tensor) -> Tensor:
        """E[weight; alive at t] of each position [T], from a weight of each token [S]."""
        chance = torch.repeat_interleave(self.probability, self.starts.diff()) * weight
        zeros = torch.zeros(int(self.ordinal.max()) + 1, dtype=torch.float64)
        return zeros.index_add(0, self.ordinal, chance)

    @property
    def to_go(self) -> Tensor:
        """Reward-to-go of each token [S]."""
        parts = self.rewards.split(self.starts.diff().tolist())
        return torch.cat([part.flip(0).cumsum(0).flip(0) for part in parts])

    @property
    def returns(self) -> Tensor:
        """Return of each episode [Y]."""
        return self.to_go[self.starts[:-1]]

    @property
    def gradient(self) -> Tensor:
        """The true gradient of the expected return [P]: every episode's return times its score."""
        weight = torch.repeat_interleave(self.probability * self.returns, self.starts.diff())
        return weight @ self.score

    def row_gradients(self, advantages: Tensor) -> Tensor:
        """Σ_t A_t ∇logp_t of each episode [Y, P]."""
        row = torch.repeat_interleave(torch.arange(len(self.probability)), self.starts.diff())
        zeros = torch.zeros(len(self.probability), self.score.shape[1], dtype=torch.float64)
        return zeros.index_add(0, row, advantages[:, None] * self.score)

    def row_noise(self, estimator: str) -> float:
        """Variance of one row's gradient over ‖g‖², with the baseline that an estimator tends to as groups grow.

        It is B_t = E[weight·G | alive at t] / E[weight | alive at t]; "none" has no baseline.
        """
        credit = self.to_go
        if estimator != "none":
            weight = weights_of(self)[estimator]
            credit = credit - (self.by_position(weight * credit) / self.by_position(weight))[self.ordinal]
        rows = self.row_gradients(credit)
        variance = self.probability @ (rows - self.probability @ rows).square().sum(1)
        return float(variance / self.gradient.square().sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Softmax policies over V tokens, of at most ``longest`` tokens; END ends an episode before."""

    logits: Tensor
    """One row of logits per block of parameters [B, V], float64."""
    block: Callable[[Episode], int]
    """Which block chooses the token after a prefix."""
    longest: int
    """Most tokens of an episode."""
    reward: Reward
    """The reward of each token of an episode."""

    def episodes(self) -> list[Episode]:
        """Every episode that can be played."""
        episodes: list[Episode] = []
        for length in range(1, self.longest + 1):
            for body in itertools.product(range(1, self.logits.shape[1]), repeat=length - 1):
                last = range(self.logits.shape[1]) if length == self.longest else [END]
                episodes.extend((*body, token) for token in last)
        return episodes

    def logp(self, logits: Tensor, episode: Episode) -> Tensor:
        """Log-prob of each token of an episode [n], differentiable."""
        return torch.stack(
            [torch.log_softmax(logits[self.block(episode[:t])], 0)[token] for t, token in enumerate(episode)]
        )

    def world(self) -> World:
        """List all episodes."""
        episodes = self.episodes()
        log_probs = torch.log_softmax(self.logits, 1)
        blocks = torch.tensor([self.block(episode[:t]) for episode in episodes for t in range(len(episode))])
        tokens = torch.tensor([token for episode in episodes for token in episode])
        logp, probs = log_probs[blocks, tokens], log_probs[blocks].exp()
        score = torch.zeros(len(tokens), *self.logits.shape, dtype=torch.float64)
        score[torch.arange(len(tokens)), blocks] = torch.eye(self.logits.shape[1], dtype=torch.float64)[tokens] - probs
        lengths = torch.tensor([len(episode) for episode in episodes])
        return World(
            starts=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
            probability=torch.stack([part.sum().exp() for part in logp.split(lengths.tolist())]),
            rewards=torch.tensor([float(r) for episode in episodes for r in self.reward(episode)], dtype=torch.float64),
            energy=token_energy(logp, probs.square().sum(1)),
            score=score.flatten(1),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Exact:
    """What an estimator comes to over all groups."""

    mean: Tensor
    """Expected gradient [P]."""
    variance: float
    """The mean of the squared distance of ĝ to its mean."""
    truth: Tensor
    """The true gradient [P]."""

    @classmethod
    def of(cls, probability: Tensor, estimates: Tensor, truth: Tensor) -> "Exact":
        """From the estimate ĝ of each case [C, P], and the probability of each [C]."""
        mean = probability @ estimates
        return cls(mean=mean, variance=float(probability @ (estimates - mean).square().sum(1)), truth=truth)

    @property
    def bias(self) -> float:
        """‖E ĝ − g‖ / ‖g‖."""
        return float((self.mean - self.truth).norm() / self.truth.norm())

    @property
    def noise(self) -> float:
        """Variance over ‖E ĝ‖²: what is left of the variance when an estimator's scale does not count."""
        return self.variance / float(self.mean.square().sum())

    @property
    def cosine(self) -> float:
        """Of the expected gradient to the true one."""
        return float(torch.cosine_similarity(self.mean, self.truth, dim=0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Every group of N episodes, as rows laid end to end."""

    world: World
    """Where the episodes come from."""
    size: int
    """N."""
    probability: Tensor
    """Of each group [G]."""
    token: Tensor
    """The world's token behind each token of the rows."""
    starts: Tensor
    """Offset of each row [G·N + 1]."""

    @classmethod
    def of(cls, world: World, size: int) -> "Groups":
        count = len(world.probability)
        members = torch.tensor(list(itertools.combinations_with_replacement(range(count), size)))
        orders = [
            math.factorial(size) / math.prod(math.factorial(row.count(y)) for y in set(row)) for row in members.tolist()
        ]
        rows = members.flatten()
        lengths = world.starts.diff()[rows]
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        within = torch.arange(int(starts[-1])) - torch.repeat_interleave(starts[:-1], lengths)
        return cls(
            world=world,
            size=size,
            probability=world.probability[members].prod(1) * torch.tensor(orders, dtype=torch.float64),
            token=torch.repeat_interleave(world.starts[rows], lengths) + within,
            starts=starts,
        )

    @property
    def group(self) -> Tensor:
        """The group of each row [G·N]."""
        return torch.arange(len(self.probability)).repeat_interleave(self.size)

    def rows_of(self, number: int) -> tuple[Tensor, Tensor]:
        """The world's token behind each token of one group, and the length of each of its rows [N]."""
        offsets = self.starts[number * self.size : (number + 1) * self.size + 1]
        return self.token[int(offsets[0]) : int(offsets[-1])], offsets.diff()

    def advantages(self, estimator: str) -> Tensor:
        """What an estimator of ``ESTIMATORS`` gives every token of every group."""
        name, options = ESTIMATORS[estimator]
        rewards, energy = self.world.rewards[self.token], self.world.energy[self.token]
        if name != "reinforce_pp":
            return algos.advantage(name, rewards, energy, self.starts, self.group, **options)
        # It whitens over the batch, so here a batch is one group.
        parts: list[Tensor] = []
        for offsets in self.starts.unfold(0, self.size + 1, self.size):
            here = slice(int(offsets[0]), int(offsets[-1]))
            digits = torch.zeros(self.size, dtype=torch.int64)
            parts.append(algos.advantage(name, rewards[here], energy[here], offsets - offsets[0], digits))
        return torch.cat(parts)

    def estimates(self, advantages: Tensor) -> Tensor:
        """The gradient that each group gives [G, P]."""
        credit = advantages[:, None] * self.world.score[self.token] / self.size
        zeros = torch.zeros(len(self.probability), credit.shape[1], dtype=torch.float64)
        return zeros.index_add(0, torch.repeat_interleave(self.group, self.starts.diff()), credit)

    def exact(self, estimator: str) -> Exact:
        """Mean and variance of the estimated gradient."""
        return Exact.of(self.probability, self.estimates(self.advantages(estimator)), self.world.gradient)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One group of each of several worlds, as rows laid end to end."""

    probability: float
    """Of these groups together."""
    tokens: Sequence[Tensor]
    """For each world, its token behind each token of its group."""
    rewards: Tensor
    """Of each token of all groups."""
    energy: Tensor
    """The same."""
    starts: Tensor
    """Offset of each row, and the end of the last."""
    group: Tensor
    """The group of each row."""


def steps(worlds: Sequence[World], size: int) -> Iterator[Step]:
    """List every step that has one group of N rows of each world."""
    crowds = [Groups.of(world, size) for world in worlds]
    group = torch.arange(len(worlds)).repeat_interleave(size)
    for numbers in itertools.product(*(range(len(crowd.probability)) for crowd in crowds)):
        chosen = list(zip(crowds, numbers, strict=True))
        tokens, lengths = zip(*(crowd.rows_of(number) for crowd, number in chosen), strict=True)
        pairs = list(zip(worlds, tokens, strict=True))
        yield Step(
            probability=math.prod(float(crowd.probability[number]) for crowd, number in chosen),
            tokens=tokens,
            rewards=torch.cat([world.rewards[token] for world, token in pairs]),
            energy=torch.cat([world.energy[token] for world, token in pairs]),
            starts=torch.nn.functional.pad(torch.cat(lengths).cumsum(0), (1, 0)),
            group=group,
        )


def by_position(policy_logits: Sequence[Sequence[float]], reward: Reward) -> Policy:
    """A policy without memory: one block of parameters for each position."""
    logits = torch.tensor(policy_logits, dtype=torch.float64)
    return Policy(logits=logits, block=len, longest=len(logits), reward=reward)


def terminal(score: Callable[[Episode], float]) -> Reward:
    """All reward on the last token."""
    return lambda episode: [0.0] * (len(episode) - 1) + [float(score(episode))]


def by_prefix(policy_logits: Mapping[Episode, Sequence[float]], longest: int, reward: Reward) -> Policy:
    """A policy with a block of parameters for each prefix."""
    prefixes = list(policy_logits)
    logits = torch.tensor([policy_logits[prefix] for prefix in prefixes], dtype=torch.float64)
    return Policy(logits=logits, block=prefixes.index, longest=longest, reward=reward)


def weights_of(world: World) -> dict[str, Tensor]:
    """What each estimator weighs a reward-to-go with, by name [S]."""
    realized = torch.cat([part.cumsum(0) for part in world.energy.split(world.starts.diff().tolist())])
    return {"otb": realized, "otb, instantaneous": world.energy, "otb, uniform": torch.ones_like(realized)}


POLICIES: Mapping[str, Policy] = {
    # Rewards token by token and no memory: here OTB's exact baseline is never worse than the mean.
    "stepwise": by_position(
        [[0.0, 1.0, 0.5], [-1.0, 0.5, 1.5], [0.0, 0.0, 2.0]], lambda episode: [(0.0, 1.0, 0.3)[y] for y in episode]
    ),
    # Four of five episodes succeed, and what fails was unlikely: failures carry the energy.
    "careful": by_position(
        [[-2.0, 3.0, 0.0], [-1.0, 3.0, 0.0], [3.0, 0.0, 0.0]], terminal(lambda episode: episode == (1, 1, 0))
    ),
    # One of fifty episodes succeeds, by an unlikely first token: success carries the energy.
    "rare": by_position(
        [[-4.0, -2.0, 2.0], [-3.0, 0.0, 0.0], [0.0, 0.0, 0.0]], terminal(lambda episode: episode[0] == 1)
    ),
    # The return is settled by the first token; what follows is idle, but inherits the first token's energy.
    "settled": by_position(
        [[math.log(0.1), math.log(0.1), math.log(0.8)], [0.0, 0.0, 0.0]],
        terminal(lambda episode: (0.0, 1.0, 0.5)[episode[0]]),
    ),
}
"""The policies of the README's table, over the tokens END, 1 and 2."""
SIZE = 4
"""N of that table."""


def table() -> str:
    """The README's two tables, in Markdown."""
    worlds = {name: policy.world() for name, policy in POLICIES.items()}
    head = " | ".join(f"`{name}`" for name in worlds)
    lines = [f"| N = {SIZE}: bias, noise, cosine | {head} |", "|---" * (len(worlds) + 1) + "|"]
    groups = [Groups.of(world, SIZE) for world in worlds.values()]
    for name in ESTIMATORS:
        exact_of = [group.exact(name) for group in groups]
        cells = " | ".join(f"{exact.bias:.3f}, {exact.noise:.3g}, {exact.cosine:.3f}" for exact in exact_of)
        lines.append(f"| {name} | {cells} |")
    lines += ["", f"| many episodes: noise of an episode | {head} |", "|---" * (len(worlds) + 1) + "|"]
    for name in ("otb", "otb, instantaneous", "otb, uniform", "none"):
        noises = [world.row_noise(name) for world in worlds.values()]
        lines.append(f"| {name} | " + " | ".join(f"{noise:.3g}" for noise in noises) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
