"""Training's numbers for each sampled token of a step, for the file of its episodes.

Legend: S sampled tokens of all episodes of the step end to end, each episode in the order of its turns.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.algos.ratios import cumulative_log_ratio
from agentrl.config import AlgoSettings
from agentrl.train.credit import Scored, credit_terms


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRecord:
    """A step's tensors, which ``by_episode`` turns into lists where the step's episodes are saved."""

    algo: AlgoSettings
    """Names the advantage."""
    scored: Scored
    """The rows as credited before the first update."""
    logp: Tensor
    """Log-prob of each token at its first pass, in nats; NaN where no update has seen it [S]."""
    clipped: Tensor
    """True where the loss cut the token's gradient at its first pass, bool [S]."""

    @classmethod
    def of(cls, algo: AlgoSettings, scored: Scored) -> "TokenRecord":
        """Begin the record of a step."""
        logp = torch.full_like(scored.old_logp, torch.nan)
        return cls(algo=algo, scored=scored, logp=logp, clipped=torch.zeros_like(scored.in_loss))

    def add(self, index: Tensor, logp: Tensor) -> None:
        """Add a pack after its backward pass, which has left a gradient on ``logp``; later passes change nothing.

        Args:
            index: the pack's tokens among all of the step.
            logp: their log-probs, in nats.
        """
        assert logp.grad is not None
        new = self.logp[index].isnan()
        self.logp[index[new]] = logp.detach()[new]
        # Without an advantage a token has no gradient anyway: only the others can be called cut off by the loss.
        self.clipped[index[new]] = (logp.grad[new] == 0) & (self.scored.advantages[index[new]] != 0)

    def by_episode(self) -> list[dict[str, list[float]]]:
        """Return each episode's numbers, one per sampled token, by their names in ``agentrl.runs.records.TRAINING``.

        An episode that no update has seen lacks the numbers about updates.
        """
        scored, starts = self.scored, self.scored.starts
        # An update sees all tokens of an episode, so one with NaN has NaN throughout.
        logp = torch.where(self.logp.isnan(), scored.old_logp, self.logp)
        updated = {
            "log_ratio": logp - scored.old_logp,
            "cumulative_log_ratio": cumulative_log_ratio(logp, scored.old_logp, starts),
            "clipped": self.clipped.long(),
        }
        of_all = {"old_logp": scored.old_logp, "entropy": scored.entropy}
        if terms := credit_terms(self.algo, scored):
            of_all |= {"realized_energy": terms.realized, "baseline": terms.baseline}
        episodes: list[dict[str, list[float]]] = []
        for begin, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
            of_episode = of_all if self.logp[begin:end].isnan().any() else of_all | updated
            episodes.append({name: values[begin:end].tolist() for name, values in of_episode.items()})
        return episodes
