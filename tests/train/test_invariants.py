"""The checks that stop a run: each passes what is right and sees each way to be wrong."""

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch

from agentrl.batch import Batch, whole
from agentrl.errors import InvariantError
from agentrl.models.load import ROUNDING
from agentrl.train.invariants import (
    check_agreement,
    check_first_ratio,
    check_tools_are_called,
    check_trained_tokens,
    check_versions,
)
from agentrl.types import Group, Segment, Stop, ToolRun, Trajectory

F32, BF16 = torch.float32, torch.bfloat16


def episode(*runs: ToolRun) -> Trajectory:
    segments = (Segment("prompt", (1, 2)), Segment("policy", (3, 4), (-0.1, -0.2), 0), Segment("tool", (5,)))
    return Trajectory(
        task_id="t", seed=0, segments=segments, rewards=(1.0,), stop=Stop.TERMINATED, tool_runs=tuple(runs)
    )


@pytest.mark.parametrize(("dtype", "off"), [(F32, 0.0), (F32, 9e-4), (BF16, 0.4)])
def test_engine_and_trainer_may_differ_by_rounding(dtype: torch.dtype, off: float) -> None:
    logp = torch.tensor([-1.0, 0.0, -20.0])
    other = logp - torch.tensor([0.0, 0.0, off])
    assert check_agreement(logp, other, ROUNDING[dtype]) == pytest.approx(off, abs=1e-5)
    check_first_ratio(logp, other, ROUNDING[dtype])


@pytest.mark.parametrize(("dtype", "off"), [(F32, 2e-3), (BF16, 0.6), (F32, float("inf"))])
def test_a_larger_difference_stops_the_run(dtype: torch.dtype, off: float) -> None:
    logp = torch.tensor([-1.0, -2.0])
    for sign in (-1, 1):
        other = logp - sign * torch.tensor([0.0, off])
        with pytest.raises(InvariantError, match="disagree by up to"):
            check_agreement(logp, other, ROUNDING[dtype])
        with pytest.raises(InvariantError, match="scoring is not repeatable"):
            check_first_ratio(other, logp, ROUNDING[dtype])


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf"), 0.1])
def test_a_log_prob_that_is_none_stops_the_run(broken: float) -> None:
    logp, fine = torch.tensor([-1.0, broken]), torch.tensor([-1.0, -1.0])
    with pytest.raises(InvariantError, match="above 0 or not finite"):
        check_agreement(logp, fine, ROUNDING[F32])
    with pytest.raises(InvariantError):
        check_first_ratio(logp, fine, ROUNDING[F32])


def test_nothing_sampled_is_nothing_to_disagree_on() -> None:
    none = torch.zeros(0)
    assert check_agreement(none, none, ROUNDING[F32]) == 0.0
    check_first_ratio(none, none, ROUNDING[F32])


@pytest.mark.parametrize(
    "broken",
    [
        lambda batch: (batch.tokens, batch.sampled - 1),
        lambda batch: (batch.tokens, batch.sampled + 1),
        lambda batch: (batch.tokens, batch.sampled[:1]),
        lambda batch: (batch.tokens, batch.sampled[[1, 0, 2, 3]]),
        lambda batch: (torch.where(torch.arange(len(batch.tokens)) == 3, 9, batch.tokens), batch.sampled),
    ],
    ids=["one early", "one late", "one lacks", "another order", "another token"],
)
def test_a_batch_of_other_tokens_stops_the_run(broken: Callable[[Batch], tuple[torch.Tensor, torch.Tensor]]) -> None:
    groups = [Group((episode(), episode()))]
    with pytest.raises(InvariantError, match="not the tokens that were sampled"):
        check_trained_tokens(groups, *broken(whole(groups)))


def test_an_agent_must_call_a_tool_where_there_is_one() -> None:
    check_tools_are_called([Group((episode(), episode(ToolRun(name="x", ok=False, wall_s=0.1))))])
    with pytest.raises(InvariantError, match="no tool was called in the first 2 episodes"):
        check_tools_are_called([Group((episode(), episode()))])


@pytest.mark.parametrize("staleness", [0, 2])
def test_weights_may_be_as_old_as_the_bound_and_no_older(staleness: int) -> None:
    # Those of an episode are of version 0.
    for version, right in ((staleness, True), (staleness + 1, False), (-1, False)):
        with nullcontext() if right else pytest.raises(InvariantError, match=f"the trainer's are of version {version}"):
            assert check_versions([Group((episode(),))], version, staleness).tolist() == [version] * 2
