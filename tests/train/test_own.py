"""Losses, advantages and engines of the user's own: they can do what ours do, and each fault is a sentence."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl.config import load_config
from agentrl.engines import make_engine
from agentrl.errors import UsageError
from agentrl.train.step import check_training_config

from .conftest import Make, is_time, step, trainer_of


def clip(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    starts: Tensor,
    *,
    weights: Tensor,
    aggregate: str = "seq_mean_token_mean",
    width: float = 0.01,
) -> tuple[Tensor, dict[str, float]]:
    """PPO's loss, as its paper writes it."""
    ratio = (logp - old_logp).exp()
    surrogate = torch.minimum(advantages * ratio, advantages * ratio.clamp(1 - width, 1 + width))
    rows = [row.mean() for row in (weights * surrogate).split(starts.diff().tolist()) if len(row)]
    return -torch.stack(rows).mean(), {"tokens": float(len(logp))}


def others(rewards: Tensor, starts: Tensor, group: Tensor) -> Tensor:
    """Leave-one-out, in loops."""
    lengths = starts.diff().tolist()
    returns = [float(row.sum()) for row in rewards.split(lengths)]
    credit = list[float]()
    for mine, length in enumerate(lengths):
        rest = [paid for other, paid in enumerate(returns) if other != mine and group[other] == group[mine]]
        credit += [returns[mine] - sum(rest) / len(rest)] * length
    return torch.tensor(credit)


def bare(logp: Tensor, advantages: Tensor, *, weights: Tensor, aggregate: str = "token_mean") -> Tensor:
    return -(weights * advantages * logp).mean()


MODULE: dict[str, Any] = {
    "clip": clip,
    "others": others,
    "bare": bare,
    "LIMIT": 3,
    "undecorated": lambda inputs: inputs,
    "unweighted": lambda logp, *, aggregate="token_mean": logp.sum(),
    "detached": lambda logp, *, weights, aggregate="token_mean": logp.detach().sum(),
    "per_token": lambda logp, *, weights, aggregate="token_mean": logp,
    "number": lambda logp, *, weights, aggregate="token_mean": 1.0,
    "endless": lambda logp, *, weights, aggregate="token_mean": (logp.sum() / 0).sum(),
    "metric": lambda logp, *, weights, aggregate="token_mean": (logp.sum(), {"own": torch.tensor(torch.nan)}),
    "fails": lambda rewards: rewards.nothing,
    "counts": lambda starts: starts.diff(),
    "whitened": lambda rewards, starts: (rewards - rewards.mean()) / (0 * rewards),
    "listed": lambda rewards: rewards.tolist(),
}


@pytest.fixture(autouse=True)
def mine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mine", SimpleNamespace(**MODULE))


def test_two_steps_of_ones_own_are_those_of_ours(small: Make) -> None:
    seen: list[tuple[Any, Any]] = []
    ours = ("algo.loss=ppo_clip", "algo.loss_options={clip_low=0.01, clip_high=0.01}", "algo.advantage=rloo")
    for chosen in (ours, ("algo.loss=mine:clip", "algo.advantage=mine:others")):
        run = small(*chosen, "optim.lr=3e-3", "optim.epochs=2", "optim.max_tokens=200")
        trainer, _ = trainer_of(run)
        results = [step(trainer, number) for number in (1, 2)]
        seen.append((results, run.weights()))
    (ours_results, ours_weights), (own_results, own_weights) = seen
    for mine, theirs in zip(own_results, ours_results, strict=True):
        # Each token counts as many times as there are tokens in its pack, which ours do not report.
        assert 1 < mine.metrics.pop("loss/tokens") < mine.metrics["sampled_tokens"]
        wanted = {name: value for name, value in theirs.metrics.items() if not is_time(name) and "flops" not in name}
        assert {name: mine.metrics[name] for name in wanted} == pytest.approx(wanted, rel=1e-3, abs=1e-5)
        assert mine.metrics.keys() == theirs.metrics.keys() and wanted["clip_fraction"] > 0.05
    for name, weights in ours_weights.items():
        assert torch.allclose(weights, own_weights[name], atol=1e-5), name


def test_a_loss_may_be_a_bare_tensor(small: Make) -> None:
    metrics = step(trainer_of(small("algo.loss=mine:bare"))[0]).metrics
    assert metrics["clip_fraction"] == 0 and metrics["log_ratio_abs_max"] > 0
    assert not [name for name in metrics if name.startswith("loss/")]


@pytest.mark.parametrize(
    ("setting", "wanted"),
    [
        ("loss=mine:LIMIT", "loss 'mine:LIMIT' is of type int, which can't be called"),
        ("loss=mine:clop", "loss 'mine:clop' is not in mine; did you mean 'clip'?"),
        ("loss=nowhere:clip", "loss 'nowhere:clip' needs nowhere: install it"),
        (
            "loss=mine:undecorated",
            "takes 'inputs': it must be a function of (logp, old_logp, advantages, starts",
        ),
        ("loss=mine:unweighted", "loss 'mine:unweighted' has no option 'weights': it must be a function of (logp"),
        ("loss=mine:detached", "with a gradient by logp, perhaps with a dict of scalars, and not the gradient None"),
        (
            "loss=mine:per_token",
            "and not torch.float32 [5]",
        ),
        ("loss=mine:number", "and not a float"),
        ("loss=mine:endless", "and not nan or inf"),
        ("loss=mine:metric", "and not own=nan"),
        ("loss=mine:clip algo.loss_options.widht=1", "loss 'mine:clip' has no option 'widht'; did you mean 'width'?"),
        ("loss=mine:clip algo.loss_options.width=wide", "loss 'mine:clip' fails on a batch of five tokens"),
        (
            "advantage=mine:clip",
            "advantage 'mine:clip' takes 'logp': it must be a function of (rewards, energy",
        ),
        (
            "advantage=mine:fails",
            "fails on a batch of five tokens, as with an option of the wrong type: Attri",
        ),
        ("advantage=mine:counts", "torch.float32 [S], one for each sampled token, and not torch.int64 [4]"),
        (
            "advantage=mine:whitened",
            "torch.float32 [S], one for each sampled token, and not nan or inf",
        ),
        ("advantage=mine:listed", "and not a list"),
    ],
)
def test_what_is_none_is_refused_at_the_start(setting: str, wanted: str) -> None:
    config = load_config(overrides=[f"algo.{part.removeprefix('algo.')}" for part in setting.split()])
    with pytest.raises(UsageError) as caught:
        check_training_config(config)
    assert wanted in str(caught.value) and "\n" not in str(caught.value)


def test_an_engine_keeps_its_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    made = SimpleNamespace(exact=True, rounding=0.0, generate=None, load_weights=None)
    monkeypatch.setitem(sys.modules, "mine", SimpleNamespace(engine=lambda model, *, slots: made))
    with pytest.raises(UsageError, match="engine 'mine:engine' made a SimpleNamespace without 'close'"):
        make_engine("mine:engine", None, {"slots": 1})
    with pytest.raises(UsageError, match=r"can't be made with engine\.options: .*'slot'"):
        make_engine("mine:engine", None, {"slot": 1})
    made.close = None
    assert make_engine("mine:engine", None, {"slots": 1}) is made
