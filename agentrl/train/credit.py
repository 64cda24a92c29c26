"""Credit of a step's sampled tokens: rewards, advantages, importance weights, and which tokens are trained on.

Legend: E episodes of the step, S sampled tokens of all of them end to end, each episode in the order of its turns.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from agentrl import algos
from agentrl.algos.advantages import Terms
from agentrl.algos.ratios import behaviour_weights, rejection_mask
from agentrl.batch import Batch
from agentrl.config import AlgoSettings, Config
from agentrl.errors import ConfigError
from agentrl.types import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """All rows of a step with the inputs of the algorithms; most tensors are [S], one number per sampled token."""

    batch: Batch
    """The rows, in the order of the episodes."""
    environment: Tensor
    """The number of each episode's environment, from 0 [E]."""
    rewards: Tensor
    """Reward of each token, 0 except on the last one of a turn."""
    sampler_logp: Tensor
    """Log-prob of each token as the engine reported it, in nats."""
    age: Tensor
    """By how many steps the weights that sampled each token are older than those that scored it."""
    disagreement: float
    """Largest |Δ log-prob| of engine and trainer among tokens of age 0, in nats; 0 without any."""
    old_logp: Tensor
    """The trainer's log-prob of each token before any update, in nats."""
    reference_logp: Tensor | None
    """Log-prob of each token under the frozen reference, in nats; None without a KL to it."""
    entropy: Tensor
    """Entropy of the policy where each token was sampled, in nats."""
    energy: Tensor
    """Token energy ‖onehot(y) - π‖² (OTB, arXiv 2602.07078)."""
    in_loss: Tensor
    """The loss mask, bool: False for tokens that are not trained on; they still count in their group's baseline."""
    advantages: Tensor
    """Advantage of each token; 0 until credit is assigned, and for tokens that are not trained on."""

    @property
    def starts(self) -> Tensor:
        """Offsets of the episodes [E+1]."""
        return self.batch.episode_starts

    @property
    def trained_episodes(self) -> Tensor:
        """Episodes that hold a token to train on [≤ E]."""
        counts = torch.nn.functional.pad(self.in_loss.long().cumsum(0), (1, 0))[self.starts].diff()
        return torch.nonzero(counts > 0)[:, 0]


def loss_mask(config: Config, scored: Scored, episodes: Sequence[Trajectory]) -> Tensor:
    """Return which tokens are trained on, bool [S]: no rejected token, and none of a masked truncated episode."""
    mask = rejection_mask(scored.old_logp, scored.sampler_logp, scored.starts, config.algo.rejection)
    if config.rollout.truncated.mask:
        ended = torch.tensor([not episode.stop.truncated for episode in episodes])
        mask &= torch.repeat_interleave(ended, scored.starts.diff())
    return mask


def correction_weights(algo: AlgoSettings, scored: Scored) -> Tensor:
    """Compute the truncated weight old/sampler of each token [S]."""
    return behaviour_weights(
        scored.old_logp,
        scored.sampler_logp,
        scored.starts,
        kind=algo.correction.kind,
        cap=algo.correction.cap,
    )


def environments(episodes: Sequence[Trajectory]) -> Tensor:
    """Number the episodes' environments from 0 [E]."""
    names = sorted({episode.env for episode in episodes})
    return torch.tensor([names.index(episode.env) for episode in episodes], dtype=torch.int64)


def credit(algo: AlgoSettings, scored: Scored, logp: Tensor) -> Scored:
    """Compute the advantages of all rows of the step under a policy with log-probs ``logp`` [S]."""
    parts = [
        (tokens, algos.advantage(algo.advantage, *arguments, **options))
        for tokens, arguments, options in _inputs(algo, scored, logp)
    ]
    advantages = parts[0][1].new_zeros(len(scored.rewards))
    for tokens, of_tokens in parts:
        advantages[tokens] = of_tokens
    return replace(scored, advantages=advantages * scored.in_loss)


def credit_terms(algo: AlgoSettings, scored: Scored) -> Terms | None:
    """Compute the terms of the advantages before the first update; None where there is no baseline of each token."""
    whole = Terms(*torch.zeros(3, len(scored.rewards), dtype=torch.float64))
    for tokens, arguments, options in _inputs(algo, scored, scored.old_logp):
        terms = algos.terms(algo.advantage, *arguments, **options)
        if terms is None:
            return None
        for values, of_tokens in zip(whole, terms, strict=True):
            values[tokens] = of_tokens
    return whole


def _inputs(
    algo: AlgoSettings, scored: Scored, logp: Tensor
) -> Iterator[tuple[Tensor, tuple[Tensor, Tensor, Tensor, Tensor], dict[str, object]]]:
    """Yield which tokens an advantage is computed for, bool [S], and its arguments and options for these tokens.

    All tokens come at once; with a pool, those of one environment, since returns of different ones do not compare.
    """
    options, lengths = _options(algo, scored, logp), scored.starts.diff()
    pools = algos.pools(algo.advantage, algo.advantage_options)
    environment = scored.environment if pools else torch.zeros_like(scored.environment)
    for number in environment.unique():
        episodes = environment == number
        tokens = torch.repeat_interleave(episodes, lengths)
        starts = pad(lengths[episodes].cumsum(0), (1, 0))
        arguments = scored.rewards[tokens], scored.energy[tokens], starts, scored.batch.episode_group[episodes]
        yield (
            tokens,
            arguments,
            {name: value[tokens] if isinstance(value, Tensor) else value for name, value in options.items()},
        )


def pool_metrics(algo: AlgoSettings, scored: Scored) -> dict[str, float]:
    """Count the groups that had no other group to take a baseline from, where the advantage pools them."""
    if not algos.pools(algo.advantage, algo.advantage_options):
        return {}
    # An episode whose prompt left no room for a turn gives no other group a baseline.
    sampled = scored.starts.diff() > 0
    groups = torch.stack([scored.environment, scored.batch.episode_group])[:, sampled].unique(dim=1)
    return {"groups_unpooled": int((groups[0].bincount() == 1).sum())}


def _options(algo: AlgoSettings, scored: Scored, logp: Tensor) -> dict[str, object]:
    """Return the options of the advantage, with the weights that correct its energies."""
    options: dict[str, object] = {**algo.advantage_options}
    # The episodes are off-policy: the sampler's, while the energy is that of the trained policy. The ratio of the two
    # corrects for it. "old" is w ← ρ̄²w of OTB's released code, with the loss's weight as ρ̄.
    if options.get("weights") == "old":
        options["weights"] = correction_weights(algo, scored)
    elif options.get("weights") == "cumulative":
        options["weights"] = behaviour_weights(
            logp, scored.sampler_logp, scored.starts, kind="prefix", cap=algo.correction.cap
        )
    return options


ALONE = "set algo.advantage to 'otb_episode', 'reinforce_pp' or 'none'"
"""What to do about a group of one episode."""


def compares(algo: AlgoSettings) -> bool:
    """Return True if an advantage has no baseline for the one episode of a group."""
    pools = algos.pools(algo.advantage, algo.advantage_options)
    return algos.algorithm("advantage", algo.advantage).compares and not pools


def check_credit(config: Config) -> None:
    """Refuse settings of credit that contradict each other.

    Raises:
        ConfigError: a group has one episode and its advantage compares several, energies are weighed by no
            correction, the bounds of a rejection are no bounds, or all turns would be overlong.
    """
    algo, rollout = config.algo, config.rollout
    if rollout.group_size == 1 and compares(algo):
        raise ConfigError(
            f"algo.advantage={algo.advantage!r} compares the episodes of a task, and rollout.group_size is 1: raise "
            f"that, or {ALONE}"
        )
    if algo.advantage_options.get("weights") == "old" and algo.correction.kind == "none":
        raise ConfigError(
            "algo.advantage_options.weights='old' weighs energies by algo.correction, which is 'none': choose one"
        )
    token_logp = torch.zeros(1)
    rejection_mask(token_logp, token_logp, torch.tensor([0, 1]), algo.rejection)
    if rollout.truncated.penalty >= min(rollout.turn_tokens, rollout.episode_tokens):
        raise ConfigError(
            f"rollout.truncated.penalty={rollout.truncated.penalty} leaves no length without a penalty: it must be "
            f"below rollout.turn_tokens={rollout.turn_tokens} and rollout.episode_tokens={rollout.episode_tokens}"
        )
