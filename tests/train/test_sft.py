"""The warm start: it learns the gold player's tokens and nothing else, and refuses what it must not learn."""

import asyncio
import copy
import itertools
from dataclasses import replace
from statistics import fmean
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from agentrl.config import with_overrides
from agentrl.engines.base import Sampling
from agentrl.errors import ConfigError, InvariantError
from agentrl.eval.table import Evaluation, plan_episodes, play_tasks, summarise
from agentrl.train.sft import SftStep, oracle_episodes, warm_start
from agentrl.train.sharded import make_learner
from agentrl.types import Group, Trajectory, flatten

from .conftest import Make, Small, logp_of

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
        texts = [run.parts.renderer.text(part.token_ids) for part in episode.sampled]
        assert texts == [f"```python\n{word}\n```", word.upper()]
        assert {part.token_ids[-1] for part in episode.sampled} == {run.parts.tokenizer.eos_token_id}


def warmed(run: Small) -> tuple[list[SftStep], list[float]]:
    """The updates of a warm start and the learning rate of each."""
    steps, rates = list[SftStep](), list[float]()
    hook = register_optimizer_step_pre_hook(lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"]))
    assert (
        warm_start(run.config, make_learner(run.config, run.parts.model), oracle(run), steps.append)
        == len(steps)
        == len(rates)
    )
    hook.remove()
    return steps, rates


def test_the_rate_rises_is_held_and_falls_to_nothing_over_the_last_updates(small: Make) -> None:
    steps, rates = warmed(small(*TAUGHT, "sft.episodes=6", "sft.steps=60"))
    assert rates == pytest.approx([3e-3 * min(1, step / 30, (61 - step) / 21) for step in range(1, 61)])
    assert rates[29:40] == [3e-3] * 11
    assert [update.step for update in steps] == list(range(1, 61)) and steps[-1].loss < 0.1 * steps[0].loss
    assert 0.0 <= steps[0].likelihood < steps[-1].likelihood <= 1.0


@pytest.mark.slow
def test_where_it_is_good_enough_it_cools_down_and_ends(small: Make) -> None:
    steps, rates = warmed(small(*TAUGHT, "sft.steps=500", "sft.stop_at=0.05"))
    reached = next(update.step for update in steps if update.likelihood >= 0.05)
    assert len(steps) == reached + 20 < 500
    assert rates[30:reached] == [3e-3] * (reached - 30), "held, however long it takes"
    assert rates[reached:] == pytest.approx([3e-3 * (20 - index) / 21 for index in range(20)])


@pytest.mark.slow
def test_likelihood_is_the_mean_over_episodes_of_what_each_has_before_the_update(small: Make, reference: Any) -> None:
    # Packs of three episodes and of two: a mean over packs would be another.
    settings = ("sft.steps=90", "sft.lr=1e-2", "optim.max_tokens=260", "sft.temperature=0.7")
    run = small(*TAUGHT, "sft.tasks=5", "sft.episodes=5", *settings)
    groups, rates, measured, model = oracle(run), list[float](), list[float](), copy.deepcopy(reference)

    @torch.no_grad()
    def measure(*_: Any) -> None:
        model.load_state_dict(run.parts.model.state_dict())
        measured.append(fmean(float(logp_of(model, episode, 0.7).sum().exp()) for episode in flatten(groups)))

    hook = register_optimizer_step_pre_hook(measure)
    warm_start(
        run.config, make_learner(run.config, run.parts.model), groups, lambda step: rates.append(step.likelihood)
    )
    hook.remove()
    assert rates[-1] > 0.1
    for (before, after), now in zip(itertools.pairwise(rates), measured[1:], strict=True):
        assert after == pytest.approx(0.8 * before + 0.2 * now, rel=1e-2, abs=1e-30)


def test_a_gradient_that_is_not_finite_ends_it(small: Make) -> None:
    with pytest.raises(InvariantError, match="gradient of the warm start is not finite: lower sft"):
        warmed(small(*TAUGHT, "sft.lr=1e30"))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_gradient_is_that_of_the_mean_over_gold_tokens(small: Make, reference: Any, temperature: float) -> None:
    # Five episodes in two packs: means of packs would weigh those of the smaller one more.
    run = small(*TAUGHT, "sft.episodes=5", "sft.steps=1", f"sft.temperature={temperature}")
    groups = oracle(run)[:5]
    lengths = [len(episode.token_ids) for episode in flatten(groups)]
    run = replace(run, config=with_overrides(run.config, [f"optim.max_tokens={sum(lengths) - min(lengths)}"]))
    gradients, steps, ours = list[Any](), list[SftStep](), run.parts.model
    hook = register_optimizer_step_pre_hook(lambda *_: gradients.extend(weight.grad for weight in ours.parameters()))
    warm_start(run.config, make_learner(run.config, ours), groups, steps.append)
    hook.remove()
    model = copy.deepcopy(reference)
    loss = torch.cat([-logp_of(model, episode, temperature) for episode in flatten(groups)]).mean()
    assert steps[0].loss == pytest.approx(loss.item(), rel=1e-4)
    loss.backward()
    for mine, (name, weights) in zip(gradients, model.named_parameters(), strict=True):
        torch.testing.assert_close(mine, weights.grad, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("tooled", ["true", "false"])
def test_no_gold_player_is_a_mistake_in_the_settings(small: Make, tooled: str) -> None:
    with pytest.raises(ConfigError, match=r"has no gold player: set sft\.steps=0, or give it a gold method"):
        oracle(small("env.args.player=none", f"env.args.tooled={tooled}"))


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (("rollout.turn_tokens=3", "env.args.max_turns=1"), r"at most \d+ tokens, [1-9] were cut off, .*raise"),
        (("rollout.episode_tokens=40",), "[1-9] were cut off|ended by token_limit"),
        (("env.args.max_turns=1",), "its 2 turns have .* ended by turn_limit"),
        (("env.args.player=bad",), "the gold player scores 0 of 1 on task 'train:.* ended by terminated"),
    ],
)
def test_gold_that_is_wrong_or_cut_off_is_not_taught(small: Make, settings: tuple[str, ...], why: str) -> None:
    with pytest.raises(InvariantError, match=why):
        oracle(small(*TAUGHT, *settings))


def judged(run: Small, seed: int) -> tuple[Evaluation, list[Trajectory]]:
    """The table and the episodes, those of each task together."""
    specs = plan_episodes(run.source, run.config.eval, seed)
    sampling = Sampling(temperature=run.config.eval.temperature, max_tokens=9)
    ended: list[Trajectory] = []
    played = asyncio.run(play_tasks(run.players, run.parts.engine, specs, sampling, on_episode=ended.append))
    table = summarise(played.groups, best_return=run.source.best_return, lost=played.lost)
    by_seed = {(episode.task_id, episode.seed): episode for episode in ended}
    return table, [by_seed[spec.task_id, spec.seed] for group in specs for spec in group]


def test_evaluation_depends_on_its_seed_alone(small: Make) -> None:
    run = small("eval.tasks=5", "eval.attempts=3", split="test")
    (result, episodes), (again, second), (_, third) = judged(run, 3), judged(run, 3), judged(run, 4)
    assert result == again and (result.tasks, result.attempts) == (5, 3)
    tokens = [[episode.token_ids for episode in played] for played in (episodes, second, third)]
    assert tokens[0] == tokens[1] != tokens[2]
    assert [episode.task_id for episode in episodes[::3]] == [f"test:{word}" for word in ("kl", "ij", "gh", "ef", "cd")]
    assert len({episode.token_ids for episode in episodes[:3]}) > 1, "attempts are sampled anew"


def test_greedy_evaluation_needs_no_seed(small: Make) -> None:
    run = small("eval.temperature=0", "eval.tasks=100", split="test")
    before = copy.deepcopy(run.parts.model.state_dict())
    plays = [judged(run, seed) for seed in (1, 2)]
    assert [episode.token_ids for episode in plays[0][1]] == [episode.token_ids for episode in plays[1][1]]
    assert plays[0][0].tasks == 6, "no more tasks than there are"
    assert all(torch.equal(weights, before[name]) for name, weights in run.parts.model.state_dict().items())
