"""A step as it really is, T ≠ 1, an engine of its own mind, tool turns, packs, minibatches and epochs, row by row."""

import asyncio
import copy
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import gymnasium
import pytest
import torch
from torch import Tensor

import agentrl.train.learner
from agentrl.batch import Batch
from agentrl.engines.base import Completion, Sampling
from agentrl.models.load import ROUNDING
from agentrl.toolenv.base import Episode
from agentrl.train.step import StepResult, Trainer

from ..algos import reference as slow
from ..engines.around import Around
from .conftest import Make, Shout, Small, energy_of, logp_of, rewards_in_time

TEMPERATURE, CAP, NORM, LR, BETAS, DECAY = 0.7, 1.5, 0.1, 1e-4, (0.8, 0.9), 3.0
CONSTANT = 7
WIDTHS = {"low": 0.2, "high": 0.3, "dual": 0.4}
SETTINGS = (
    *("env.id=test/Loud-v0", "env.args.tooled=true", f"rollout.temperature={TEMPERATURE}"),
    *("algo.advantage=otb", "algo.advantage_options.tail=carry", f"algo.correction.cap={CAP}"),
    "rollout.episode_tokens=200",
    *(f"algo.loss_options.clip_{side}={width}" for side, width in WIDTHS.items()),
    *("optim.minibatches=3", "optim.epochs=2", f"optim.lr={LR}", f"optim.max_grad_norm={NORM}"),
    *(f"optim.betas={list(BETAS)}", f"optim.weight_decay={DECAY}"),
)


class Loud(Shout):
    """``Shout`` with the tool and yet something for every text, and a little for each call."""

    def reward(self, episode: Episode) -> dict[str, float]:
        return {"correct": sum(map(ord, episode.final)) % 5 / 4}

    def turn_reward(self, episode: Episode) -> float:
        return 0.3 * len(episode.tool_runs)


@pytest.fixture(autouse=True)
def loud(clean_registry: None) -> None:
    gymnasium.register("test/Loud-v0", entry_point=Loud)


class Skewed(Around):
    """Calls the tool in every other turn, ends turns early, and reports log-probs with noise of its own.

    Only first turns call it, unless it is to go on ``calling``.
    """

    def __init__(self, run: Small, noise: float, calling: bool) -> None:
        super().__init__(run.parts.engine)
        self._run, self._noise, self._opening, self._calling = run, noise, 0, calling
        self._eager = copy.deepcopy(run.parts.model)
        self._eager.set_attn_implementation("eager")

    async def generate(self, prompt_ids: tuple[int, ...], sampling: Sampling, *, seed: int) -> Completion:
        self._opening = self._opening or len(prompt_ids)
        shorter = replace(sampling, max_tokens=min(sampling.max_tokens, 2 + seed % 9))
        done = await super().generate(prompt_ids, shorter, seed=seed)
        tokens = done.token_ids
        if seed % 2 and (self._calling or len(prompt_ids) == self._opening):
            tokens = self._run.parts.renderer.turn("```python\nab\n```", answered_by="tool")
        self._eager.load_state_dict(self._run.parts.model.state_dict())
        row = torch.tensor([*prompt_ids, *tokens])
        logits = self._eager(row[None]).logits[0, -len(tokens) - 1 : -1].detach() / sampling.temperature
        logp = torch.log_softmax(logits, dim=-1).gather(1, row[-len(tokens) :, None])[:, 0]
        drawn = torch.randn(len(tokens), generator=torch.Generator().manual_seed(seed))
        noisy = (logp + self._noise * drawn).clamp(max=0.0)
        return replace(done, token_ids=tuple(tokens), logprobs=tuple(noisy.tolist()))


@dataclass
class Update:
    """What the trainer did in one gradient step."""

    packs: list[list[int]]
    weights: dict[str, Tensor]
    gradient: dict[str, Tensor]


@dataclass
class Watched:
    """A trainer, and what its updates did."""

    trainer: Trainer
    packs: list[list[int]] = field(default_factory=list[list[int]])
    updates: list[Update] = field(default_factory=list[Update])

    def step(self, number: int) -> StepResult:
        self.updates.clear()
        result = asyncio.run(self.trainer.step(number))
        firsts = itertools.accumulate((episode.n_sampled for episode in result.trajectories), initial=0)
        row_at = {begin: row for row, begin in enumerate(firsts)}
        for update in self.updates:
            update.packs = [[row_at[begin] for begin in pack] for pack in update.packs]
        return result


@pytest.fixture(name="watch")
def make_watched(small: Make, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make a trainer whose engine is a ``Skewed`` one, and note the rows, weights and gradient of every update."""

    def make(*overrides: str, noise: float = 0.3, calling: bool = False) -> Watched:
        run = small(*SETTINGS, *overrides)
        watched = Watched(run.on(Skewed(run, noise, calling)).trainer())
        real = agentrl.train.learner.score

        def score(model: Any, batch: Batch, *, temperature: float, dtype: torch.dtype) -> Any:
            if torch.is_grad_enabled():
                watched.packs.append(batch.index[batch.starts[:-1]].tolist())
            return real(model, batch, temperature=temperature, dtype=dtype)

        def keep(*_: Any) -> None:
            update = Update(packs=watched.packs.copy(), weights=run.weights(), gradient=run.gradients())
            watched.updates.append(update)
            watched.packs.clear()

        monkeypatch.setattr(agentrl.train.learner, "score", score)
        watched.trainer.learner.optimizer.register_step_pre_hook(keep)
        return watched

    # The noise is far more than rounding explains, and without it old and sampler would be one.
    monkeypatch.setitem(ROUNDING, torch.float32, 50.0)
    return make


class Slow:
    """The same step in loops: one row at a time through transformers' own attention, and plain Python numbers."""

    def __init__(self, model: Any, result: StepResult) -> None:
        self.model = copy.deepcopy(model)
        self.episodes = result.trajectories
        self.sampler = [[lp for part in episode.sampled for lp in part.logprobs or ()] for episode in self.episodes]
        self.rewards = [rewards_in_time(episode) for episode in self.episodes]

    def take(self, weights: dict[str, Tensor]) -> None:
        self.model.load_state_dict(weights, strict=False)

    def logp(self, row: int) -> Tensor:
        return logp_of(self.model, self.episodes[row], TEMPERATURE)

    def all_logp(self) -> list[list[float]]:
        with torch.no_grad():
            return [self.logp(row).tolist() for row in range(len(self.episodes))]

    def credit(self, by_ratio: bool, kappa: float = 0.0) -> list[list[float]]:
        """OTB for the policy as it is now, its energies weighed by the capped ratios to the sampler or not."""
        ratios = self.weights(self.all_logp(), "prefix") if by_ratio else None
        return self.otb(ratios, kappa)

    def otb(self, weights: list[list[float]] | None, kappa: float = 0.0) -> list[list[float]]:
        group = [episode.task_id for episode in self.episodes]
        energy = [energy_of(self.model, episode, TEMPERATURE).tolist() for episode in self.episodes]
        return slow.otb(self.rewards, energy, group, tail="carry", weights=weights, pool=kappa)

    def weights(self, old: Sequence[Sequence[float]], kind: str) -> list[list[float]]:
        """min(old/sampler, cap) of the row, of the prefix or of the token."""
        rows: list[list[float]] = []
        for row, pair in enumerate(zip(old, self.sampler, strict=True)):
            steps = [a - b for a, b in zip(*pair, strict=True)]
            logs = {"sequence": [math.fsum(steps)] * len(steps), "prefix": sums(*pair), "token": steps}
            rows.append([min(math.exp(log_ratio), CAP) for log_ratio in logs.get(kind, [0.0] * len(old[row]))])
        return rows


def sums(newer: Sequence[float], older: Sequence[float]) -> list[float]:
    return list(itertools.accumulate(a - b for a, b in zip(newer, older, strict=True)))


@dataclass
class Pool:
    """What is told of all tokens of all updates: one entry a token."""

    shift: list[float] = field(default_factory=list[float])
    step: list[float] = field(default_factory=list[float])
    cut: list[bool] = field(default_factory=list[bool])
    ordinals: list[int] = field(default_factory=list[int])
    credited_ordinals: list[int] = field(default_factory=list[int])

    def check(self, metrics: dict[str, float]) -> None:
        shift = torch.tensor(self.shift, dtype=torch.float64)
        wanted = {
            "S_mean": float(shift.mean()),
            "S_std": float(shift.std(correction=0)),
            "ratio_mean": float(shift.exp().mean()),
            "log_ratio_abs_max": max(map(abs, self.step)),
            "kl_old": sum(math.exp(log_ratio) - 1 - log_ratio for log_ratio in self.step) / len(self.step),
            "clip_fraction": sum(self.cut) / len(self.cut),
        }
        for edge in (1, 2, 4, 8):
            inside = torch.tensor([edge <= t < 2 * edge for t in self.ordinals])
            wanted[f"S_std_t{edge}"] = float(shift[inside].std(correction=0))
            cut = [flag for flag, t in zip(self.cut, self.credited_ordinals, strict=True) if edge <= t < 2 * edge]
            wanted[f"clip_fraction_t{edge}"] = sum(cut) / len(cut)
        for name, value in wanted.items():
            assert metrics[name] == pytest.approx(value, rel=2e-3, abs=1e-5), name
        assert 0.01 < wanted["clip_fraction"] < 0.9 and wanted["S_std"] > 0.05, "or nothing is shown"


def nothing(_: int) -> Tensor:
    return torch.zeros(())


def check_update(
    ours: Slow, update: Update, old: Any, credit: Any, weights: Any, pool: Pool, aggregate: str, beside: Any = nothing,
    widths: Any = WIDTHS, most: float = NORM,
) -> tuple[float, float]:  # fmt: skip
    """Compare the gradient of an update; its loss and the norm before it is limited to ``most``.

    ``beside`` gives the mean of what a row's tokens add to the policy loss.
    """
    ours.take(update.weights)
    ours.model.zero_grad(set_to_none=True)
    rows = slow.flat(update.packs)
    value = 0.0
    for row in rows:
        logp = ours.logp(row)
        steps = [a - b for a, b in zip(logp.tolist(), old[row], strict=True)]
        (losses,), (slopes,) = slow.ctpo([steps], [credit[row]], **widths)
        share = {
            "seq_mean_token_mean": 1 / (len(rows) * len(steps)),
            "seq_mean_token_sum": 1 / len(rows),
            "token_sum_const": 1 / (len(rows) * CONSTANT),
            "token_mean": 1 / sum(len(old[row]) for row in rows),
        }[aggregate]
        factors = [weight * share for weight in weights[row]]
        value += math.fsum(f * loss for f, loss in zip(factors, losses, strict=True))
        (logp * torch.tensor([f * slope for f, slope in zip(factors, slopes, strict=True)])).sum().backward()
        further = beside(row) / len(rows)
        value += further.item()
        if further.requires_grad:
            further.backward()
        pool.shift += sums(logp.tolist(), old[row])
        pool.step += steps
        pool.ordinals += range(1, len(steps) + 1)
        seen_tokens = [(t, slope == 0) for t, (slope, a) in enumerate(zip(slopes, credit[row], strict=True), 1) if a]
        pool.credited_ordinals += [t for t, _ in seen_tokens]
        pool.cut += [cut for _, cut in seen_tokens]
    wanted = {name: weight.grad for name, weight in ours.model.named_parameters() if weight.grad is not None}
    norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in wanted.values()))
    assert update.gradient.keys() == wanted.keys() and norm > 0.01, "a gradient of nothing proves nothing"
    limited = min(1.0, most / norm)
    for name, gradient in wanted.items():
        rounding = {"rtol": 1e-3, "atol": 1e-5 * max(1.0, limited * norm)}
        torch.testing.assert_close(update.gradient[name], limited * gradient, **rounding, msg=name)
    return value, norm


BY_RATIO = {False: [], True: ["algo.advantage_options.weights=cumulative"]}
CASES = {
    "sequence, a row a pack": ("sequence", 80, False, "seq_mean_token_mean", 0.0),
    "sequence, some rows a pack": ("sequence", 120, False, "token_mean", 0.0),
    "sequence, all in one": ("sequence", 5000, False, "token_mean", 0.0),
    "prefix, a pool and the group": ("prefix", 120, False, "seq_mean_token_sum", 1.5),
    "token": ("token", 120, False, "token_sum_const", 0.0),
    "none, energies by the ratio": ("none", 120, True, "seq_mean_token_mean", 0.0),
    "none, the pool's energies by the ratio": ("none", 120, True, "seq_mean_token_mean", math.inf),
}


@pytest.mark.parametrize("case", CASES)
def test_step_is_that_of_loops_over_rows_and_tokens(watch: Any, reference: Any, case: str) -> None:
    kind, max_tokens, by_ratio, aggregate, kappa = CASES[case]
    constant = f"algo.loss_options.max_tokens={CONSTANT}"
    watched = watch(
        f"algo.correction={kind}", f"optim.max_tokens={max_tokens}", *BY_RATIO[by_ratio],
        f"algo.loss_options.aggregate={aggregate}", f"algo.advantage_options.pool={kappa}",
        *([constant] if aggregate == "token_sum_const" else []),
    )  # fmt: skip
    result = watched.step(1)
    ours, pool = Slow(reference, result), Pool()
    assert len({len(row) for row in ours.sampler}) > 3
    assert any(len(episode.sampled) > 1 for episode in result.trajectories)
    old, credit = ours.all_logp(), ours.credit(by_ratio, kappa)
    weights = ours.weights(old, kind)
    capped = [value == CAP for value in slow.flat(weights)]
    assert kind == "none" or (any(capped) and not all(capped))
    for mine, theirs in zip(result.advantages, credit, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-4)
    moments: list[tuple[float, float]] = []
    for number, update in enumerate(watched.updates):
        assert max_tokens == 5000 or len(update.packs) > 1
        if by_ratio and number == 3:
            ours.take(update.weights)
            credit = ours.credit(by_ratio, kappa)
        moments.append(check_update(ours, update, old, credit, weights, pool, aggregate))
    assert len(moments) == 6
    uneven = any(len(set(map(len, update.packs))) > 1 for update in watched.updates)
    assert uneven or max_tokens != 120
    losses, norms = zip(*moments, strict=True)
    assert max(norms) > 3 * NORM, "the limit must be met"
    assert result.metrics["loss"] == pytest.approx(sum(losses) / 6, abs=1e-4)
    assert result.metrics["grad_norm"] == pytest.approx(sum(norms) / 6, rel=2e-3)
    pool.check(result.metrics)
    steps = [a - b for a, b in zip(slow.flat(old), slow.flat(ours.sampler), strict=True)]
    kl = sum(math.exp(ratio) - 1 - ratio for ratio in steps) / len(steps)
    assert result.metrics["kl_sampler"] == pytest.approx(kl, rel=1e-3) and kl > 0.02


def test_weights_move_as_the_settings_of_adamw_say(watch: Any, reference: Any) -> None:
    watched = watch()
    watched.step(1)
    model = copy.deepcopy(reference)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, weight_decay=DECAY)
    for update in watched.updates:
        for name, weights in model.named_parameters():
            torch.testing.assert_close(update.weights[name], weights.detach(), rtol=1e-5, atol=1e-7, msg=name)
            weights.grad = update.gradient.get(name)
        optimizer.step()


def test_every_pass_and_step_shuffles_rows_anew(watch: Any) -> None:
    watched = watch()
    orders: list[list[int]] = []
    for number in (1, 2):
        watched.step(number)
        rows = [slow.flat(update.packs) for update in watched.updates]
        orders += [slow.flat(rows[:3]), slow.flat(rows[3:])]
    assert all(sorted(order) == list(range(12)) for order in orders), "each row once a pass"
    assert len(set(map(tuple, orders))) == 4
