"""A step calls every guard, and no two of its episodes, nor of two steps, are played alike."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import agentrl.trainer
from agentrl.batch import Batch
from agentrl.engines.base import Completion, Sampling
from agentrl.errors import InvariantError
from agentrl.trainer import StepResult

from .conftest import WORDS, Make, Small
from .test_trainer import step, trainer_of


class Off:
    """Reports log-probs that are not those it samples from."""

    def __init__(self, run: Small) -> None:
        self._engine = run.parts.engine

    async def generate(self, prompt_ids: tuple[int, ...], sampling: Sampling, *, seed: int) -> Completion:
        done = await self._engine.generate(prompt_ids, sampling, seed=seed)
        return replace(done, logprobs=tuple(lp - 0.01 for lp in done.logprobs))


def batch_in_another_order(whole: Callable[..., Batch]) -> Callable[..., Batch]:
    return lambda groups: replace(whole(groups), sampled=whole(groups).sampled.flip(0))


def score_that_wavers(score: Callable[..., Any]) -> Callable[..., Any]:
    calls: list[int] = []

    def wavering(*args: Any, **options: Any) -> Any:
        calls.append(len(calls))
        stats = score(*args, **options)
        return stats._replace(logp=stats.logp - 0.01 * (len(calls) > 1))

    return wavering


def test_an_engine_that_disagrees_stops_the_step(small: Make) -> None:
    run = small()
    run = replace(run, parts=replace(run.parts, engine=Off(run)))  # pyright: ignore
    with pytest.raises(InvariantError, match=r"engine and trainer disagree by up to 0\.01"):
        step(trainer_of(run)[0])


@pytest.mark.parametrize(
    ("name", "broken", "wanted"),
    [
        ("whole", batch_in_another_order, "not the tokens that were sampled"),
        ("score", score_that_wavers, "before any update a token's log ratio is 0.01"),
    ],
)
def test_a_batch_or_a_score_that_is_wrong_stops_the_step(
    small: Make, monkeypatch: pytest.MonkeyPatch, name: str, broken: Any, wanted: str
) -> None:
    monkeypatch.setattr(agentrl.trainer, name, broken(getattr(agentrl.trainer, name)))
    with pytest.raises(InvariantError, match=wanted):
        step(trainer_of(small("optim.max_tokens=100000"))[0])


def test_an_agent_that_calls_no_tool_stops_the_step(small: Make) -> None:
    with pytest.raises(InvariantError, match="no tool was called in the first 12 episodes"):
        step(trainer_of(small("env.args.tooled=true"))[0])


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_engine_and_trainer_agree_at_any_temperature(small: Make, temperature: float) -> None:
    plain, other = (step(trainer_of(small(f"rollout.temperature={one}"))[0]) for one in (1.0, temperature))
    assert other.metrics["logp_diff_max"] < 1e-4
    assert [one.token_ids for one in other.trajectories] != [one.token_ids for one in plain.trajectories]


def tasks_of(result: StepResult) -> list[str]:
    """The word of each group."""
    return [one.task_id.removeprefix("train:") for one in result.trajectories[::4]]


def test_steps_play_all_tasks_in_passes_with_seeds_of_their_own(small: Make) -> None:
    trainer, _ = trainer_of(small())
    results = [step(trainer, number) for number in range(1, 9)]
    passes = [tasks_of(one) + tasks_of(other) for one, other in zip(results[::2], results[1::2], strict=True)]
    assert all(sorted(one) == sorted(WORDS) for one in passes)
    assert len(set(map(tuple, passes))) > 2 and list(WORDS) not in passes
    seeds = [episode.seed for result in results for episode in result.trajectories]
    assert len(set(seeds)) == len(seeds) == 8 * 12
    later, _ = trainer_of(small())
    again = step(later, 5)
    assert tasks_of(again) == tasks_of(results[4]), "who goes on at a step meets that step's tasks"
    assert [one.seed for one in again.trajectories] == [one.seed for one in results[4].trajectories]
