"""One gradient step: the losses of its packs, and what the step's metrics and records keep of them.

Legend: S sampled tokens of all episodes of the step end to end, each episode in the order of its turns.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor
from transformers import PreTrainedModel

from agentrl import algos
from agentrl.algos.aggregate import Aggregate, pack_shares
from agentrl.algos.head import TokenStats
from agentrl.algos.losses import LossOut
from agentrl.algos.regularizers import regularizer
from agentrl.batch import Batch
from agentrl.config import AlgoSettings
from agentrl.train.credit import Scored
from agentrl.train.diagnostics import Drift
from agentrl.train.invariants import check_first_ratio, check_logp
from agentrl.train.metrics import pass_flops
from agentrl.train.tokens import TokenRecord


@dataclass(slots=True)
class Observations:
    """What a step keeps of its updates."""

    record: TokenRecord
    """What the first update of each token has made of it."""
    drift: Drift = field(default_factory=Drift)
    """Distance of the policy from *old*."""
    tokens: int = 0
    """Tokens of all packs, prompts and tool output included."""
    flops: float = 0.0
    """Floating-point operations that a forward and a backward pass need; 0 for a mixture of experts."""

    def metrics(self) -> dict[str, float]:
        """Return the step's metrics of its updates; operations where they are known."""
        flops = {"update_flops": self.flops} if self.flops else {}
        return self.drift.metrics() | {"trained_tokens": self.tokens} | flops


class Update:
    """The losses of one gradient step, pack by pack.

    Args:
        algo: names the loss and the regularizers.
        scored: the rows of the step, with their advantages.
        weights: importance weight old/sampler of each token [S].
        packs: the rows of this update, as the learner packs them.
        repeatable: largest |log θ/old| that rounding explains where θ is still *old*; None after the first update.
    """

    def __init__(
        self, algo: AlgoSettings, scored: Scored, weights: Tensor, packs: Sequence[Batch], repeatable: float | None
    ) -> None:
        self._algo, self._scored, self._weights, self._packs = algo, scored, weights, packs
        self._repeatable = repeatable
        self._aggregate: Aggregate = algos.aggregation(algo.loss, algo.loss_options)
        # Packs differ in rows and tokens: weighed by these shares their gradients add up to the minibatch's own.
        self._shares = pack_shares(self._aggregate, [pack.episode_starts for pack in packs])
        self._seen: list[tuple[LossOut, Tensor]] = []
        """The policy loss of each pack, and its tokens' log-probs, on which the backward pass leaves their gradient."""
        self.total = 0.0
        """The loss of the packs so far, regularizers included."""

    def loss(self, number: int, stats: TokenStats) -> Tensor:
        """Compute what pack ``number`` contributes to the update's loss.

        Args:
            number: of the pack; packs come in order.
            stats: of its tokens under θ.

        Raises:
            InvariantError: a log-prob is none, or differs from *old* before the first update.
        """
        algo, pack = self._algo, self._packs[number]
        stats = TokenStats(*(pack.in_time(part) for part in stats))
        index, starts = pack.in_time(pack.index), pack.episode_starts
        # Autograd drops the gradient of a tensor that is no leaf, and the drift finds clipped tokens by it. The copy
        # gets the gradient of the policy loss alone, since the regularizer reads the original.
        logp = stats.logp.clone()
        logp.retain_grad()
        old_logp, advantages = self._scored.old_logp[index], self._scored.advantages[index]
        check_logp(logp.detach())
        # Before the very first update θ is *old*: scoring twice must compute the same log-probs.
        if self._repeatable is not None:
            check_first_ratio(logp.detach(), old_logp, self._repeatable)
        weights = self._weights[index]
        out = algos.loss(algo.loss, logp, old_logp, advantages, starts, weights=weights, **algo.loss_options)
        self._seen.append((out, logp))
        loss = out.loss
        if algo.kl_coef or algo.entropy_coef:
            loss = loss + self._regularizer(stats, index, starts)
        self.total += self._shares[number] * float(loss.detach())
        return self._shares[number] * loss

    def observe(self, observations: Observations, model: PreTrainedModel) -> None:
        """Add all packs to ``observations``, after the backward passes: before, log-probs have no gradient."""
        for pack, (out, logp) in zip(self._packs, self._seen, strict=True):
            index = pack.in_time(pack.index)
            old_logp = self._scored.old_logp[index]
            observations.drift.add(out, logp, old_logp, self._scored.advantages[index], pack.episode_starts)
            observations.record.add(index, logp)
            observations.tokens += len(pack.tokens)
            observations.flops += pass_flops(model, pack)

    def _regularizer(self, stats: TokenStats, index: Tensor, starts: Tensor) -> Tensor:
        algo, reference = self._algo, self._scored.reference_logp
        longest = algo.loss_options.get("max_tokens")
        return regularizer(
            stats.logp,
            stats.entropy,
            starts,
            reference_logp=None if reference is None else reference[index],
            kl_coef=algo.kl_coef,
            entropy_coef=algo.entropy_coef,
            aggregate=self._aggregate,
            max_tokens=longest if isinstance(longest, int) else None,
        )
