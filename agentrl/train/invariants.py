"""Checks that stop a run before it learns from wrong numbers.

Each checks a relation between engine, record and trainer. Where it does not hold, training would be silently wrong.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from agentrl.algos.head import TokenStats
from agentrl.batch import Batch, as_batch
from agentrl.engines.base import Completion, Engine, Sampling
from agentrl.errors import InvariantError
from agentrl.rollout.collector import Fleet
from agentrl.types import Group, Segment, Stop, Trajectory, flatten

_PROMPT = (1,)
"""A prompt that every vocabulary and every limit allows."""


def check_logp(logp: Tensor) -> None:
    """Check that the trainer's log-probs [S] are log-probs.

    Raises:
        InvariantError: one is above 0 or not finite.
    """
    if not bool(torch.isfinite(logp).all()) or bool((logp > 0).any()):
        raise InvariantError("the trainer computed a log-prob that is above 0 or not finite: the weights are broken")


def check_agreement(logp: Tensor, sampler_logp: Tensor, rounding: float) -> float:
    """Check that engine and trainer compute the same log-probs for the same tokens.

    Args:
        logp: the trainer's log-probs [S].
        sampler_logp: the engine's [S].
        rounding: largest |Δ log-prob| that the arithmetic of the two explains, in nats.

    Returns:
        The largest |Δ log-prob|, in nats.

    Raises:
        InvariantError: a log-prob is above 0 or not finite, or the two disagree by more than rounding.
    """
    check_logp(logp)
    largest = float((logp - sampler_logp).abs().max()) if len(logp) else 0.0
    # Written so that NaN in the engine's log-probs fails too.
    if not largest <= rounding:
        raise InvariantError(
            f"engine and trainer disagree by up to {largest:.3g} nats on a token's log-prob (rounding explains "
            f"{rounding:g}): they do not run the same weights, tokens or temperature"
        )
    return largest


def check_versions(groups: Sequence[Group], version: int, staleness: int) -> Tensor:
    """Check that no tokens were sampled from weights that are too old, or newer than those that score them.

    Args:
        groups: the episodes.
        version: of the trainer's weights.
        staleness: number of versions by which a token's weights may be older.

    Returns:
        Number of versions by which each sampled token's weights are older [S].

    Raises:
        InvariantError: some are older than that, or newer than the trainer's.
    """
    segments = [segment for trajectory in flatten(groups) for segment in trajectory.sampled]
    versions = [sampled_by for segment in segments for sampled_by in segment.token_versions]
    if wrong := [sampled_by for sampled_by in versions if not version - staleness <= sampled_by <= version]:
        older = f" and theirs may be {staleness} older" if staleness else ""
        raise InvariantError(
            f"tokens were sampled from weights of version {min(wrong)}, but the trainer's are of version "
            f"{version}{older}"
        )
    return version - torch.tensor(versions, dtype=torch.long)


async def check_weights_in_use(
    engine: Engine, sampling: Sampling, score: Callable[[Batch], TokenStats], rounding: float
) -> None:
    """Check that an engine samples from the trainer's weights, on one completion of the engine or of each actor.

    Args:
        engine: has loaded the weights.
        sampling: of the completions.
        score: the trainer's scoring.
        rounding: largest |Δ log-prob| that the trainer's arithmetic explains, in nats.

    Raises:
        InvariantError: the trainer computes other log-probs for a completion.
        InfrastructureError: the engine failed.
    """
    # Later checks skip tokens of older weights, so an actor that keeps old weights would go unnoticed.
    ask = engine.probe(_PROMPT, sampling, seed=0) if isinstance(engine, Fleet) else _sampled(engine, sampling)
    batch = as_batch([Group((_row(done),)) for done in await ask])
    try:
        check_agreement(score(batch).logp, batch.sampler_logp, max(rounding, engine.rounding))
    except InvariantError as error:
        raise InvariantError(
            f"the engine was given new weights, but {error}: check that it loads every tensor by its name (a head tied "
            "to the embedding comes as the embedding only) and forgets what the old weights had cached"
        ) from error


async def _sampled(engine: Engine, sampling: Sampling) -> Sequence[Completion]:
    return [await engine.generate(_PROMPT, sampling, seed=0)]


def _row(done: Completion) -> Trajectory:
    segments = (Segment("prompt", _PROMPT), Segment("policy", done.token_ids, done.logprobs, done.version))
    return Trajectory(task_id="probe", seed=0, segments=segments, rewards=(0.0,), stop=Stop.TURN_LIMIT)


def check_first_ratio(logp: Tensor, old_logp: Tensor, rounding: float) -> None:
    """Check that every ratio is 1 within rounding, as it must be before the first update on a fresh batch.

    Raises:
        InvariantError: one is not.
    """
    largest = float((logp - old_logp).abs().max()) if len(logp) else 0.0
    if not largest <= rounding:  # NaN fails too
        raise InvariantError(
            f"before any update a token's log ratio is {largest:.3g}, not 0: scoring is not repeatable"
        )


def check_trained_tokens(groups: Sequence[Group], tokens: Tensor, sampled: Tensor) -> None:
    """Check that the tokens that the loss will see are exactly the tokens that were sampled.

    Args:
        groups: the episodes of the step.
        tokens: packed tokens of all of them, in order [T].
        sampled: index into ``tokens`` of each sampled token, in time [S].

    Raises:
        InvariantError: they are not.
    """
    # Two independent ways to the same tokens: the batch's indices, and the episodes' records.
    trained = tokens[sampled].tolist()
    recorded = [token for trajectory in flatten(groups) for seg in trajectory.sampled for token in seg.token_ids]
    if trained != recorded:
        raise InvariantError("the tokens to be trained on are not the tokens that were sampled")


def check_tools_are_called(groups: Sequence[Group], warmed: int = 0) -> None:
    """Check that the policy calls tools at all, in one of the environments that have some; all groups are of these.

    A policy that never samples a call never sees a reward for one, and so can't learn to call.

    Args:
        groups: of the first batch.
        warmed: ``sft.steps`` of the run.

    Raises:
        InvariantError: no episode called one.
    """
    episodes = flatten(groups)
    if not any(trajectory.tool_runs for trajectory in episodes):
        cut = sum(trajectory.cut_turns for trajectory in episodes)
        names = ", ".join(sorted({repr(group.env) for group in groups if group.env}))
        longer = f", or with a larger rollout.turn_tokens: {cut} turns were cut off" if cut else ""
        raise InvariantError(
            f"no tool was called in the first {len(episodes)} episodes{names and f' of {names}'}: begin another run "
            f"with a longer warm start (sft.steps is {warmed}), or with an instruction that shows how to call "
            f"one{longer}"
        )
