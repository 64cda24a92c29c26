"""Updates on episodes of several rows, against loops over each row alone and over an episode's tokens in time."""

import asyncio
import copy
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from agentrl.algos import LOSSES
from agentrl.batch import as_batch, collate
from agentrl.models.load import ROUNDING
from agentrl.rollout.collected import Clock, Collected
from agentrl.runs.checkpoint import load_state, load_unused, save_checkpoint
from agentrl.segments import Row, Segment, complete_rows
from agentrl.train.groups import RolloutSource, StepGroups
from agentrl.train.learner import Learner
from agentrl.train.overlap import Overlapped
from agentrl.train.step import StepResult, Trainer
from agentrl.types import Group, Trajectory, flatten

from ..forests import forest, sampled, shuffled, tokens
from ..runs.origins import ORIGIN
from .conftest import Make, energy_of, is_time, logp_of, rewards_in_time, step, trainer_of, trajectory
from .test_whole_step import CAP, TEMPERATURE, Pool, Slow, Update, check_update

WIDTHS = {"low": 0.05, "high": 0.1, "dual": 0.1}
SETTINGS = (
    *("algo.advantage=otb", "algo.advantage_options.tail=carry", f"algo.correction.cap={CAP}"),
    *("optim.minibatches=2", "optim.epochs=2", "optim.lr=2e-5", f"rollout.temperature={TEMPERATURE}"),
    *("rollout.episode_tokens=36", "rollout.turn_tokens=36"),
)
WINDOW = [f"algo.loss_options.clip_{side}={width}" for side, width in WIDTHS.items()]
LARGE = "optim.max_tokens=5000"


class Given(RolloutSource):
    """A source of the same groups in each step."""

    rounding, steps = math.inf, 1

    def __init__(self, groups: Sequence[Group]) -> None:
        self.groups, self.origins = tuple(groups), {"": ORIGIN}

    async def batch(self, number: int) -> StepGroups:
        collected = Collected(groups=self.groups, faults=0, lost=0, seconds=1.0, clock=Clock(), sandbox={})
        return StepGroups(collected=collected, trained=self.groups)

    def check(self, groups: Sequence[Group]) -> Tensor:
        return torch.zeros(sum(episode.n_sampled for group in groups for episode in group), dtype=torch.long)

    async def published(self, learner: Learner, version: int) -> None:
        pass

    def state(self) -> Mapping[str, object]:
        return {}


def groups_of(model: Any, seed: int, rows: Sequence[Sequence[int]] = ((3, 1, 2), (4, 2, 3))) -> list[Group]:
    """Groups of episodes of so many rows each, with log-probs of the sampler that are the model's and some noise."""
    rng = random.Random(seed)
    groups: list[Group] = []
    for number, counts in enumerate(rows):
        opening = Segment("prompt", tokens(rng))
        episodes = [replace(forest(rng, opening, count), task_id=str(number)) for count in counts]
        groups.append(Group(tuple(as_sampled(model, episode, rng) for episode in episodes)))
    return groups


def as_sampled(model: Any, episode: Trajectory, rng: random.Random) -> Trajectory:
    numbers = logp_of(model, episode, TEMPERATURE).tolist()
    by_turn: dict[int | None, tuple[float, ...]] = {}
    for part in episode.sampled:
        by_turn[part.turn] = tuple(min(0.0, numbers.pop(0) + rng.gauss(0, 0.2)) for _ in part.token_ids)
    rows = [
        replace(row, segments=tuple(replace(s, logprobs=by_turn[s.turn]) if s.trained else s for s in row.segments))
        for row in episode.rows
    ]
    return replace(episode, segments=(), rows=tuple(rows))


class Norm(nn.Module):
    """RMSNorm in the type of its input: the model's own rounds to float32."""

    weight: Tensor
    variance_epsilon: float

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)


def updates_of(
    small: Make, groups: Sequence[Group], *overrides: str, double: bool = False
) -> tuple[Trainer, StepResult, list[Any], Any]:
    """A step on ``groups``: its result, and the weights before each update with the gradient that it took."""
    run = small(*SETTINGS, *overrides)
    if double:
        model = run.config.model.model_copy(update={"dtype": "float64"})
        run = replace(run, config=run.config.model_copy(update={"model": model}))
        for module in run.parts.model.double().modules():
            if type(module).__name__.endswith("RMSNorm"):
                module.__class__ = Norm
    before = copy.deepcopy(run.parts.model)
    before.set_attn_implementation("eager")
    trainer, seen = trainer_of(run)
    trainer.rollouts = Given(groups)
    return trainer, step(trainer), seen, before


@pytest.fixture(autouse=True)
def any_disagreement(monkeypatch: pytest.MonkeyPatch) -> None:
    # The log-probs of the sampler are made up.
    for dtype in (torch.float32, torch.float64):
        monkeypatch.setitem(ROUNDING, dtype, 50.0)


@pytest.mark.slow
@pytest.mark.parametrize(("max_tokens", "seed"), [(5000, 0), (5000, 1), (100, 2), (36, 0), (36, 3)])
def test_an_update_is_that_of_loops_over_rows_and_over_tokens_in_time(
    small: Make, reference: Any, max_tokens: int, seed: int
) -> None:
    groups = groups_of(reference, seed)
    episodes = [episode for group in groups for episode in group]
    longest = max(len(row) for episode in episodes for row in complete_rows(episode.rows))
    totals = [sum(map(len, complete_rows(episode.rows))) for episode in episodes]
    assert longest <= max_tokens and (max_tokens > 36 or max(totals) > max_tokens), "an episode has to be cut"
    trainer, result, seen, model = updates_of(small, groups, *WINDOW, f"optim.max_tokens={max_tokens}")
    ours, pool = Slow(model, result), Pool()
    old, credit = ours.all_logp(), ours.credit(by_ratio=False)
    for mine, theirs in zip(result.advantages, credit, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-4)
    # The energy of a turn that several rows hold counts once, where it was sampled.
    for numbers, episode in zip(result.record.by_episode(), episodes, strict=True):
        own = energy_of(model, episode, TEMPERATURE).cumsum(0)
        assert numbers["realized_energy"] == pytest.approx(own.tolist(), rel=1e-4)
    halves = halves_of(trainer, len(episodes))
    assert len(seen) == len(halves) == 4
    norms = list[float]()
    for (weights, gradient), rows in zip(seen, halves, strict=True):
        update = Update(packs=[rows], weights=weights, gradient=gradient)
        how = ours.weights(old, "sequence"), pool, "seq_mean_token_mean"
        norms.append(check_update(ours, update, old, credit, *how, widths=WIDTHS, most=math.inf)[1])
    pool.check(result.metrics)
    assert min(norms) > 0.1 and max(map(abs, pool.shift)) > WIDTHS["low"], "a window that nothing leaves shows nothing"


def halves_of(trainer: Trainer, count: int) -> list[list[int]]:
    passes = trainer._minibatches(torch.arange(count), 1)  # pyright: ignore[reportPrivateUsage]
    return [part for parts in passes for part in parts]


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
def test_rows_in_another_order_and_in_packs_give_the_same_numbers(small: Make, reference: Any, loss: str) -> None:
    groups, rng = groups_of(reference, 0), random.Random(7)
    others = [Group(tuple(shuffled(episode, rng) for episode in group)) for group in groups]
    assert others != groups
    how = [f"algo.loss={loss}", "algo.kl_coef=0.3", "algo.entropy_coef=0.05"]
    _, expected, seen, _ = updates_of(small, groups, *how, "optim.max_tokens=5000", double=True)
    for again, limit in [(others, 5000), (groups, 36), (others, 36)][0 if loss == "ctpo" else 2 :]:
        _, result, also_seen, _ = updates_of(small, again, *how, f"optim.max_tokens={limit}", double=True)
        assert same_means(result) == pytest.approx(same_means(expected), rel=1e-6, abs=1e-9)
        for mine, theirs in zip(result.record.by_episode(), expected.record.by_episode(), strict=True):
            assert mine.keys() == theirs.keys()
            assert all(mine[name] == pytest.approx(theirs[name], rel=1e-6, abs=1e-9) for name in mine)
        assert apart(also_seen, seen) < 1e-9


def same_means(result: StepResult) -> dict[str, float]:
    """The metrics that don't depend on how an episode is cut into rows, nor on the clock."""
    cut = {"rows_mean", "tokens", "trained_tokens", "update_flops"}
    return {name: value for name, value in result.metrics.items() if not (is_time(name) or name in cut)}


def apart(seen: Any, wanted: Any) -> float:
    """Largest distance of weights and gradients, relative to the largest number of the tensor."""
    pairs = zip(tree_leaves(seen), tree_leaves(wanted), strict=True)
    return max(float((a - b).abs().max() / b.abs().max().clamp_min(1e-30)) for a, b in pairs)


def test_a_batch_sorts_tokens_in_time_and_back(reference: Any) -> None:
    groups = groups_of(reference, 5)
    batch = as_batch(groups)
    episodes = [episode for group in groups for episode in group]
    in_time = batch.in_time(batch.tokens[batch.sampled]).tolist()
    assert in_time == [token for episode in episodes for part in episode.sampled for token in part.token_ids]
    assert batch.in_time(batch.rewards).tolist() == [r for episode in episodes for r in rewards_in_time(episode)]
    values = torch.randn(len(batch.sampled))
    assert torch.equal(batch.in_rows(batch.in_time(values)), values)
    assert batch.episode.tolist() == [n for n, episode in enumerate(episodes) for _ in episode.rows]
    assert batch.episode_starts.diff().tolist() == [episode.n_sampled for episode in episodes]
    assert batch.episode_group.tolist() == [n for n, group in enumerate(groups) for _ in group]
    rows = [row for episode in episodes for row in complete_rows(episode.rows)]
    assert [part.tolist() for part in batch.tokens.split(batch.row_starts.diff().tolist())] == list(map(list, rows))
    packs = collate(groups, max_tokens=36)
    assert torch.cat([pack.tokens for pack in packs]).equal(batch.tokens) and len(packs) > 1
    owner = torch.arange(len(episodes)).repeat_interleave(batch.episode_starts.diff())
    held = [set(owner[pack.index].tolist()) for pack in packs]
    fitting = [n for n, episode in enumerate(episodes) if sum(map(len, complete_rows(episode.rows))) <= 36]
    assert fitting and all(sum(n in pack for pack in held) == 1 for n in fitting), "a pack ends between two episodes"


@pytest.mark.parametrize("cuts", [(2,), (1, 3), (1, 2, 3)])
def test_a_cut_episode_has_the_updates_of_the_whole_one_to_the_bit(
    small: Make, reference: Any, cuts: tuple[int, ...]
) -> None:
    rng = random.Random(0)
    (beside, *others), elsewhere = groups_of(reference, 4, rows=((1, 2), (3, 1)))
    opening = beside.rows[0].segments[0]
    segments = [opening]
    for turn in range(4):
        segments += [sampled(rng, turn=turn), Segment("tool", tokens(rng))]
    whole = trajectory(*segments[:-1], rewards=(0.0, 0.5, 0.0, 1.0), task_id="0")
    cut = cut_before(as_sampled(reference, whole, rng), cuts)
    whole = replace(whole, segments=tuple(segment for row in cut.rows for segment in row.segments))
    assert len(cut.rows) == len(cuts) + 1 and cut.sampled == whole.sampled and cut.token_ids == whole.token_ids
    groups = [[Group((beside, episode, *others)), elsewhere] for episode in (whole, cut)]
    (_, left, seen, _), (_, right, also_seen, _) = (updates_of(small, own, LARGE, double=True) for own in groups)
    assert left.advantages == right.advantages and left.record.by_episode() == right.record.by_episode()
    # An episode of several rows counts once in every mean, and has one update a pass like any other.
    assert same_means(left) == same_means(right) and len(seen) == len(also_seen) == 4
    assert apart(also_seen, seen) == 0
    _, packed, in_packs, _ = updates_of(small, groups[1], "optim.max_tokens=40", double=True)
    assert same_means(packed) == pytest.approx(same_means(left), rel=1e-6, abs=1e-9)
    assert apart(in_packs, seen) < 1e-9


def cut_before(whole: Trajectory, turns: Sequence[int]) -> Trajectory:
    """The same episode with a new row before each of these turns, which continues all tokens so far."""
    rows, own, length = list[Row](), list[Segment](), 0
    fork = turn = 0
    for segment in whole.segments:
        if segment.trained and turn in turns:
            rows.append(Row(tuple(own), *((len(rows) - 1, fork) if rows else ())))
            own, fork = [], length
        turn += segment.trained
        own.append(segment)
        length += len(segment.token_ids)
    return replace(whole, segments=(), rows=(*rows, Row(tuple(own), len(rows) - 1, fork)))


class Forests(Overlapped):
    """Has groups of episodes of several rows, other ones in each step, in place of those that its collector plays."""

    model: Any

    async def _play(self, number: int, *_: Any, **__: Any) -> Collected:
        groups = tuple(groups_of(self.model, number))
        return Collected(groups=groups, faults=0, lost=0, seconds=1.0, clock=Clock(), sandbox={})


def test_a_lag_scores_and_a_checkpoint_keeps_episodes_of_several_rows(
    small: Make, reference: Any, tokenizer: Any, tmp_path: Path
) -> None:
    run = small("rollout.overlap=lag", "run.deterministic=true", "rollout.tasks=2", "rollout.group_size=3", *SETTINGS)
    source, resumed = (Forests(run.config, run.mix, run.players, run.parts.engine) for _ in range(2))
    source.model = reference

    async def go() -> list[list[Trajectory]]:
        await source.published(run.trainer().learner, 0)
        await source.batch(1)
        await asyncio.gather(*(ahead.task for ahead in source._ahead.values() if ahead.task))  # pyright: ignore
        state: Any = {"state": {"step": 1, "updates": 4, **source.state()}, "unused": source.unused()}
        path = tmp_path / "step-000001"
        save_checkpoint(path, run.parts.model, tokenizer, origins=source.origins, **state)
        resumed.restore(load_state(path), load_unused(path))
        return [flatten((await rollouts.batch(2)).trained) for rollouts in (source, resumed)]

    played, again = asyncio.run(go())
    assert played == again and max(len(episode.rows) for episode in again) > 2
    for was, episode in zip(flatten(groups_of(reference, 2)), played, strict=True):
        scored = [lp for part in episode.sampled for lp in part.logprobs or ()]
        wanted = logp_of(reference, was, TEMPERATURE).tolist()
        assert scored == pytest.approx(wanted, abs=1e-4), "the trainer's, turn by turn"
        assert scored != [lp for part in was.sampled for lp in part.logprobs or ()]
