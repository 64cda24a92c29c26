"""The checks that stop a run: each passes what is right and sees each way to be wrong."""

from typing import Any

import pytest
import torch

from agentrl.batch import whole
from agentrl.config import RolloutSettings
from agentrl.env import ToolEnv
from agentrl.errors import ConfigError, InvariantError
from agentrl.invariants import (
    check_agreement,
    check_first_ratio,
    check_tools_are_called,
    check_trained_tokens,
    refuse_biased_sampling,
)
from agentrl.tools import tool
from agentrl.types import Group, Segment, Stop, ToolRun, Trajectory

F32, BF16 = torch.float32, torch.bfloat16


def episode(*runs: ToolRun) -> Trajectory:
    segments = (Segment("prompt", (1, 2)), Segment("policy", (3, 4), (-0.1, -0.2), 0), Segment("tool", (5,)))
    return Trajectory(
        task_id="t", seed=0, segments=segments, rewards=(1.0,), stop=Stop.TERMINATED, tool_runs=tuple(runs)
    )


def test_plain_sampling_is_fine() -> None:
    refuse_biased_sampling(RolloutSettings(temperature=0.7))


@pytest.mark.parametrize(("name", "value"), [("top_p", 0.9), ("top_k", 50), ("repetition_penalty", 1.1)])
def test_sampling_from_a_changed_distribution_is_refused(name: str, value: float) -> None:
    settings: dict[str, Any] = {name: value}
    with pytest.raises(ConfigError, match=rf"rollout\.{name} must be"):
        refuse_biased_sampling(RolloutSettings(**settings))


@pytest.mark.parametrize(("dtype", "off"), [(F32, 0.0), (F32, 9e-4), (BF16, 0.4)])
def test_engine_and_trainer_may_differ_by_rounding(dtype: torch.dtype, off: float) -> None:
    logp = torch.tensor([-1.0, 0.0, -20.0])
    other = logp - torch.tensor([0.0, 0.0, off])
    assert check_agreement(logp, other, dtype) == pytest.approx(off, abs=1e-5)
    check_first_ratio(logp, other, dtype)


@pytest.mark.parametrize(("dtype", "off"), [(F32, 2e-3), (BF16, 0.6), (F32, float("inf"))])
def test_a_larger_difference_stops_the_run(dtype: torch.dtype, off: float) -> None:
    logp = torch.tensor([-1.0, -2.0])
    for sign in (-1, 1):
        other = logp - sign * torch.tensor([0.0, off])
        with pytest.raises(InvariantError, match="disagree by up to"):
            check_agreement(logp, other, dtype)
        with pytest.raises(InvariantError, match="scoring is not repeatable"):
            check_first_ratio(other, logp, dtype)


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf"), 0.1])
def test_a_log_prob_that_is_none_stops_the_run(broken: float) -> None:
    logp, fine = torch.tensor([-1.0, broken]), torch.tensor([-1.0, -1.0])
    with pytest.raises(InvariantError, match="above 0 or not finite"):
        check_agreement(logp, fine, F32)
    with pytest.raises(InvariantError):
        check_first_ratio(logp, fine, F32)


def test_nothing_sampled_is_nothing_to_disagree_on() -> None:
    none = torch.zeros(0)
    assert check_agreement(none, none, F32) == 0.0
    check_first_ratio(none, none, F32)


def test_the_tokens_of_a_batch_are_those_that_were_sampled() -> None:
    groups = [Group((episode(), episode())), Group((episode(),))]
    batch = whole(groups)
    check_trained_tokens(groups, batch.tokens, batch.sampled)


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_batch_that_is_off_by_one_stops_the_run(shift: int) -> None:
    groups = [Group((episode(),))]
    batch = whole(groups)
    with pytest.raises(InvariantError, match="not the tokens that were sampled"):
        check_trained_tokens(groups, batch.tokens, batch.sampled + shift)


def test_a_batch_that_lacks_or_changes_a_token_stops_the_run() -> None:
    groups = [Group((episode(),))]
    batch = whole(groups)
    changed = batch.tokens.clone()
    changed[3] = 9
    for tokens, sampled in ((changed, batch.sampled), (batch.tokens, batch.sampled[:1])):
        with pytest.raises(InvariantError, match="not the tokens that were sampled"):
            check_trained_tokens(groups, tokens, sampled)


def test_a_batch_whose_tokens_stand_in_another_order_stops_the_run() -> None:
    groups = [Group((episode(), episode()))]
    batch = whole(groups)
    order = torch.tensor([1, 0, 2, 3])
    with pytest.raises(InvariantError, match="not the tokens that were sampled"):
        check_trained_tokens(groups, batch.tokens, batch.sampled[order])


@tool
def python(code: str) -> str:
    """Run nothing."""
    return code


def test_an_agent_must_call_a_tool_where_there_is_one() -> None:
    env = ToolEnv()
    silent, calling = (
        [Group((episode(), episode()))],
        [Group((episode(), episode(ToolRun(name="x", ok=False, wall_s=0.1))))],
    )
    check_tools_are_called(silent, env)
    env.tools = (python,)
    check_tools_are_called(calling, env)
    with pytest.raises(InvariantError, match="no tool was called in the first 2 episodes"):
        check_tools_are_called(silent, env)
