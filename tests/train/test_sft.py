"""The warm start: it learns the gold player's tokens and nothing else, and refuses what it must not learn."""

import asyncio
import copy
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from agentrl.config import with_overrides
from agentrl.engines.base import Sampling
from agentrl.errors import ConfigError, InvariantError
from agentrl.eval.table import Evaluation, plan, play, summarise
from agentrl.train.sft import SftStep, oracle_episodes, warm_start
from agentrl.types import Group, Trajectory, flatten

from .conftest import Make, Small
from .test_trainer import logp_of

TAUGHT = ("env.args.tooled=true", "rollout.turn_tokens=40", "sft.steps=12", "sft.episodes=4", "sft.lr=3e-3")


def oracle(run: Small) -> tuple[Group, ...]:
    return asyncio.run(oracle_episodes(run.config, run.parts.renderer, run.players, run.mix))


def test_gold_is_played_in_the_real_environment(small: Make) -> None:
    run = small(*TAUGHT)
    groups = oracle(run)
    assert len(groups) == 6, "each of a finite set's tasks once, however many are asked for"
    for episode in flatten(groups):
        assert (episode.ret, len(episode.tool_runs), len(episode.sampled)) == (1.0, 1, 2)
        word = episode.task_id.removeprefix("train:")
        said = [run.parts.renderer.text(part.token_ids) for part in episode.sampled]
        assert said == [f"```python\n{word}\n```", word.upper()]
        assert {part.token_ids[-1] for part in episode.sampled} == {run.parts.tokenizer.eos_token_id}


def test_likelihood_rises_and_only_gold_tokens_are_learned(small: Make, reference: Any) -> None:
    run = small(*TAUGHT, "sft.episodes=6", "sft.steps=60")
    groups = oracle(run)
    steps: list[SftStep] = []
    assert warm_start(run.config, run.parts.model, groups, steps.append) == 60
    assert [one.step for one in steps] == list(range(1, 61))
    with torch.no_grad():
        gold = torch.cat([logp_of(reference, episode) for episode in flatten(groups)])
    assert steps[0].loss == pytest.approx(-float(gold.mean()), rel=1e-4), "the mean over gold tokens"
    assert steps[-1].loss < 0.1 * steps[0].loss
    assert steps[-1].likelihood > steps[0].likelihood
    assert 0.0 <= steps[-1].likelihood <= 1.0


def warmed(run: Small) -> tuple[list[SftStep], list[float]]:
    """The updates of a warm start and the learning rate of each."""
    steps: list[SftStep] = []
    rates: list[float] = []

    def keep(optimizer: Any, *_: Any) -> None:
        rates.append(optimizer.param_groups[0]["lr"])

    hook = register_optimizer_step_pre_hook(keep)
    assert warm_start(run.config, run.parts.model, oracle(run), steps.append) == len(steps)
    hook.remove()
    assert len(rates) == len(steps)
    return steps, rates


def test_the_rate_rises_is_held_and_falls_to_nothing_over_the_last_updates(small: Make) -> None:
    _, rates = warmed(small(*TAUGHT, "sft.steps=60"))
    assert rates == pytest.approx([3e-3 * min(1, step / 30, (61 - step) / 21) for step in range(1, 61)])
    assert rates[29:40] == [3e-3] * 11


def test_where_it_is_good_enough_it_cools_down_and_ends(small: Make) -> None:
    steps, rates = warmed(small(*TAUGHT, "sft.steps=500", "sft.stop_at=0.05"))
    (reached,) = [
        after.step for before, after in itertools.pairwise(steps) if before.likelihood < 0.05 <= after.likelihood
    ]
    assert len(steps) == reached + 20 < 500
    assert rates[30:reached] == [3e-3] * (reached - 30), "held, however long it takes"
    assert rates[reached:] == pytest.approx([3e-3 * (20 - place) / 21 for place in range(20)])


@pytest.mark.slow
def test_likelihood_is_the_mean_over_episodes_of_what_each_has_before_the_update(small: Make, reference: Any) -> None:
    # Packs of four episodes and of two: a mean over packs would be another.
    run = small(*TAUGHT, "sft.episodes=6", "sft.steps=90", "sft.lr=1e-2", "optim.max_tokens=260", "sft.temperature=0.7")
    groups = oracle(run)
    seen: list[tuple[SftStep, float]] = []

    def keep(step: SftStep) -> None:
        seen.append((step, expected))
        measure()

    def measure() -> None:
        nonlocal expected
        model = copy.deepcopy(reference)
        model.load_state_dict(run.parts.model.state_dict())
        with torch.no_grad():
            expected = sum(float(logp_of(model, episode, 0.7).sum().exp()) for episode in flatten(groups)) / 6

    expected = 0.0
    measure()
    warm_start(run.config, run.parts.model, groups, keep)
    assert seen[-1][0].likelihood > 0.1
    for (before, _), (after, measured) in itertools.pairwise(seen):
        assert after.likelihood == pytest.approx(0.8 * before.likelihood + 0.2 * measured, rel=1e-2, abs=1e-30)


def test_a_gradient_that_is_not_finite_ends_it(small: Make) -> None:
    run = small(*TAUGHT, "sft.lr=1e30")
    groups = oracle(run)
    with pytest.raises(InvariantError, match="gradient of the warm start is not finite: lower sft"):
        warm_start(run.config, run.parts.model, groups)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_gradient_is_that_of_the_mean_over_gold_tokens_in_uneven_packs(
    small: Make, reference: Any, temperature: float
) -> None:
    # Five episodes in two packs: means of packs would weigh those of the smaller one more.
    run = small(*TAUGHT, "sft.episodes=5", "sft.steps=1", f"sft.temperature={temperature}")
    groups = oracle(run)[:5]
    lengths = [len(episode.token_ids) for episode in flatten(groups)]
    run = replace(run, config=with_overrides(run.config, [f"optim.max_tokens={sum(lengths) - min(lengths)}"]))
    gradients: list[dict[str, Any]] = []

    def keep(*_: Any) -> None:
        gradients.append({name: weights.grad for name, weights in run.parts.model.named_parameters()})

    hook = register_optimizer_step_pre_hook(keep)
    warm_start(run.config, run.parts.model, groups)
    hook.remove()
    model = copy.deepcopy(reference)
    torch.cat([-logp_of(model, episode, temperature) for episode in flatten(groups)]).mean().backward()
    for name, weights in model.named_parameters():
        torch.testing.assert_close(gradients[0][name], weights.grad, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("tooled", ["true", "false"])
def test_no_gold_player_is_a_mistake_in_the_settings(small: Make, tooled: str) -> None:
    run = small("env.args.player=none", f"env.args.tooled={tooled}")
    with pytest.raises(ConfigError, match=r"has no gold player: set sft\.steps=0, or give it a gold method"):
        oracle(run)


def test_gold_that_is_wrong_is_not_taught(small: Make) -> None:
    with pytest.raises(InvariantError, match="the gold player scores 0 of 1 on task 'train:"):
        oracle(small(*TAUGHT, "env.args.player=bad"))


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (("rollout.turn_tokens=3", "env.args.max_turns=1"), r"rollout\.turn_tokens=3 cuts off a turn of (\d+) tokens"),
        (("rollout.episode_tokens=40",), r"rollout\.episode_tokens=40 cuts it off: raise it"),
        (("env.args.max_turns=1",), r"it has 2 turns, and the environment's max_turns cuts it off"),
    ],
)
def test_gold_that_a_limit_cuts_off_names_the_limit(small: Make, settings: tuple[str, ...], why: str) -> None:
    with pytest.raises(InvariantError, match=why):
        oracle(small(*TAUGHT, "env.args.tooled=true", *settings))


def judged(run: Small, seed: int) -> tuple[Evaluation, list[Trajectory]]:
    """The table and the episodes, those of each task together."""
    specs = plan(run.source, run.config.eval, seed)
    sampling = Sampling(temperature=run.config.eval.temperature, max_tokens=9)
    found: dict[tuple[str, int], Trajectory] = {}
    played = asyncio.run(
        play(
            run.players,
            run.parts.engine,
            specs,
            sampling,
            on_episode=lambda one: found.__setitem__((one.task_id, one.seed), one),
        )
    )
    table = summarise(played.groups, best_return=run.source.best_return, lost=played.lost)
    order = [(spec.task_id, spec.seed) for group in specs for spec in group]
    return table, [found[key] for key in order if key in found]


def test_evaluation_depends_on_its_seed_alone(small: Make) -> None:
    run = small("eval.tasks=5", "eval.attempts=3", split="test")
    (one, first), (two, second), (_, third) = judged(run, 3), judged(run, 3), judged(run, 4)
    assert one == two and (one.tasks, one.attempts) == (5, 3)
    tokens = [[episode.token_ids for episode in episodes] for episodes in (first, second, third)]
    assert tokens[0] == tokens[1] != tokens[2]
    assert [episode.task_id for episode in first[::3]] == [f"test:{word}" for word in ("kl", "ij", "gh", "ef", "cd")]
    assert len({episode.token_ids for episode in first[:3]}) > 1, "attempts are sampled anew"


def test_greedy_evaluation_needs_no_seed(small: Make) -> None:
    run = small("eval.temperature=0", "eval.tasks=100", split="test")
    before = copy.deepcopy(run.parts.model.state_dict())
    plays = [judged(run, seed) for seed in (1, 2)]
    assert [one.token_ids for one in plays[0][1]] == [one.token_ids for one in plays[1][1]]
    assert plays[0][0].tasks == 6, "no more tasks than there are"
    assert all(torch.equal(weights, before[name]) for name, weights in run.parts.model.state_dict().items())
