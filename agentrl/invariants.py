"""Checks that stop a run before it learns from wrong numbers.

Each states what must hold between engine, record and trainer; where one does not, training would go on and be wrong.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from agentrl.config import RolloutSettings
from agentrl.env import ToolEnv
from agentrl.errors import ConfigError, InvariantError
from agentrl.types import Group, flatten

_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.5}
"""Largest |Δ log-prob| between engine and trainer that rounding explains, by the type of computation, in nats."""


def refuse_biased_sampling(rollout: RolloutSettings) -> None:
    """Training needs the log-probs of the whole distribution.

    Raises:
        ConfigError: top_p, top_k or a repetition penalty is set.
    """
    for name, neutral in (("top_p", 1.0), ("top_k", 0), ("repetition_penalty", 1.0)):
        if getattr(rollout, name) != neutral:
            raise ConfigError(
                f"rollout.{name} must be {neutral} in training: sampling from a changed distribution biases every ratio"
            )


def check_agreement(logp: Tensor, sampler_logp: Tensor, dtype: torch.dtype) -> float:
    """Engine and trainer must give the same log-probs to the same tokens.

    Args:
        logp: the trainer's log-probs [S].
        sampler_logp: the engine's [S].
        dtype: of the computation.

    Returns:
        The largest |Δ log-prob|, in nats.

    Raises:
        InvariantError: a log-prob is above 0 or not finite, or the two disagree by more than rounding.
    """
    if not bool(torch.isfinite(logp).all()) or bool((logp > 0).any()):
        raise InvariantError("the trainer computed a log-prob that is above 0 or not finite: the weights are broken")
    largest = float((logp - sampler_logp).abs().max()) if len(logp) else 0.0
    if not largest <= _TOLERANCE[dtype]:
        raise InvariantError(
            f"engine and trainer disagree by up to {largest:.3g} nats on a token's log-prob (rounding explains "
            f"{_TOLERANCE[dtype]:g}): they do not run the same weights, tokens or temperature"
        )
    return largest


def check_first_ratio(logp: Tensor, old_logp: Tensor, dtype: torch.dtype) -> None:
    """On the first pass over a fresh batch nothing was updated yet, so every ratio is 1 within rounding.

    Raises:
        InvariantError: it is not.
    """
    largest = float((logp - old_logp).abs().max()) if len(logp) else 0.0
    if not largest <= _TOLERANCE[dtype]:  # NaN fails too
        raise InvariantError(
            f"before any update a token's log ratio is {largest:.3g}, not 0: scoring is not repeatable"
        )


def check_trained_tokens(groups: Sequence[Group], tokens: Tensor, sampled: Tensor) -> None:
    """The tokens that the loss will see are the very tokens that were sampled.

    Args:
        groups: the episodes of the step.
        tokens: packed tokens of all of them, in order [T].
        sampled: index into ``tokens`` of each sampled token [S].

    Raises:
        InvariantError: they are not.
    """
    trained = tokens[sampled].tolist()
    recorded = [token for trajectory in flatten(groups) for seg in trajectory.sampled for token in seg.token_ids]
    if trained != recorded:
        raise InvariantError("the tokens to be trained on are not the tokens that were sampled")


def check_tools_are_called(groups: Sequence[Group], env: ToolEnv) -> None:
    """An agent that never calls a tool can't learn to.

    Raises:
        InvariantError: the environment has tools, and no episode of the first batch called one.
    """
    episodes = flatten(groups)
    if env.tools and not any(trajectory.tool_runs for trajectory in episodes):
        cut = sum(trajectory.cut_turns for trajectory in episodes)
        longer = f", or raise rollout.turn_tokens: {cut} turns were cut off" if cut else ""
        raise InvariantError(
            f"no tool was called in the first {len(episodes)} episodes: warm the model up with [sft], or give it an "
            f"instruction that shows how to call one{longer}"
        )
