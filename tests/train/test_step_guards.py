"""The checks that stop a run: each passes what is right and sees each way to be wrong; a step calls all of them.

And no two of its episodes, nor of two steps, are played alike.
"""

import copy
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import ModuleType
from typing import Any

import gymnasium
import pytest
import torch

import agentrl.train.learner
import agentrl.train.step
from agentrl.batch import Batch, as_batch
from agentrl.engines.base import Completion, Sampling
from agentrl.engines.transformers import TransformersEngine
from agentrl.errors import InvariantError
from agentrl.models.load import ROUNDING
from agentrl.toolenv.tasks import TaskList
from agentrl.train import invariants
from agentrl.train.step import StepResult
from agentrl.types import Group, Segment, Stop

from ..engines.around import Around
from .conftest import WORDS, Make, Shout, step, steps_of, trainer_of, trajectory, turn

F32, BF16 = torch.float32, torch.bfloat16


EPISODE = trajectory(Segment("prompt", (1, 2)), turn((3, 4)), Segment("tool", (5,)))


@pytest.mark.parametrize(("dtype", "off"), [(F32, 0.0), (F32, 9e-4), (BF16, 0.4), (F32, None)])
def test_engine_and_trainer_may_differ_by_rounding(dtype: torch.dtype, off: float | None) -> None:
    logp = torch.tensor([] if off is None else [-1.0, 0.0, -20.0])
    other = logp if off is None else logp - torch.tensor([0.0, 0.0, off])
    assert invariants.check_agreement(logp, other, ROUNDING[dtype]) == pytest.approx(off or 0.0, abs=1e-5)
    invariants.check_first_ratio(logp, other, ROUNDING[dtype])


NOT_ONE = [(F32, -2.0 + value, "above 0 or not finite") for value in (float("nan"), float("inf"), -float("inf"), 2.1)]
TOO_FAR = [(F32, 2e-3), (F32, -2e-3), (BF16, 0.6), (BF16, -0.6)]


@pytest.mark.parametrize(
    ("dtype", "logp", "words"), [*((dtype, -2.0 - off, "disagree by up to") for dtype, off in TOO_FAR), *NOT_ONE]
)
def test_a_larger_difference_stops_the_run(dtype: torch.dtype, logp: float, words: str) -> None:
    numbers, fine = torch.tensor([-1.0, logp]), torch.tensor([-1.0, -2.0])
    with pytest.raises(InvariantError, match=words):
        invariants.check_agreement(numbers, fine, ROUNDING[dtype])
    with pytest.raises(InvariantError, match="disagree by up to"):
        invariants.check_agreement(fine, numbers, ROUNDING[dtype])
    for pair in ((numbers, fine), (fine, numbers)):
        with pytest.raises(InvariantError, match="scoring is not repeatable"):
            invariants.check_first_ratio(*pair, ROUNDING[dtype])


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
    groups = [Group((EPISODE, EPISODE))]
    with pytest.raises(InvariantError, match="not the tokens that were sampled"):
        invariants.check_trained_tokens(groups, *broken(as_batch(groups)))


@pytest.mark.parametrize("staleness", [0, 2])
def test_weights_may_be_as_old_as_the_bound_and_no_older(staleness: int) -> None:
    # Those of an episode are of version 0.
    for version, right in ((staleness, True), (staleness + 1, False), (-1, False)):
        with nullcontext() if right else pytest.raises(InvariantError, match=f"the trainer's are of version {version}"):
            assert invariants.check_versions([Group((EPISODE,))], version, staleness).tolist() == [version] * 2


class Off(Around):
    """Reports log-probs that are not those it samples from, in episodes and not to a probe, which has no stop ids."""

    async def generate(self, prompt_ids: tuple[int, ...], sampling: Sampling, *, seed: int) -> Completion:
        done = await super().generate(prompt_ids, sampling, seed=seed)
        return replace(done, logprobs=tuple(lp - 0.01 * bool(sampling.stop_ids) for lp in done.logprobs))


def batch_in_another_order(as_batch: Callable[..., Batch]) -> Callable[..., Batch]:
    return lambda groups: replace(as_batch(groups), sampled=as_batch(groups).sampled.flip(0))


def score_that_wavers(score: Callable[..., Any]) -> Callable[..., Any]:
    def wavering(*args: Any, **options: Any) -> Any:
        stats = score(*args, **options)
        return stats._replace(logp=stats.logp - 0.01 * (next(calls) > 0))

    calls = itertools.count()
    return wavering


class OldVersion(Around):
    """Says that its tokens are of the weights before the last."""

    async def generate(self, prompt_ids: tuple[int, ...], sampling: Sampling, *, seed: int) -> Completion:
        done = await super().generate(prompt_ids, sampling, seed=seed)
        return replace(done, swaps=((len(done.token_ids) // 2, 1),))


class Forgetful(Around):
    """Loads all tensors but one."""

    lost: str

    async def load_weights(self, named_tensors: Any, version: int) -> None:
        await super().load_weights([pair for pair in named_tensors if pair[0] != self.lost], version)


def test_a_head_that_stays_as_it_was_stops_the_step_that_changed_it(small: Make) -> None:
    run = small("optim.lr=1e-2")
    # It has one of its own, and of tied weights only the embedding is given.
    model = copy.deepcopy(run.parts.model)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    with pytest.raises(InvariantError, match=r"was given new weights, but .*a head tied to the embedding"):
        step(run.on(TransformersEngine(model, slots=12, max_length=256)).trainer())


def test_new_weights_are_probed_at_the_temperature_of_the_rollouts(small: Make) -> None:
    assert step(small("rollout.temperature=0.7").trainer()).metrics["logp_diff_max"] < 1e-4


@pytest.mark.parametrize("lost", ["model.embed_tokens.weight", "model.layers.1.self_attn.k_proj.weight"])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_any_one_tensor_that_an_engine_does_not_load_stops_the_step(small: Make, lost: str, temperature: float) -> None:
    run = small("optim.lr=1e-2", f"rollout.temperature={temperature}")
    engine = Forgetful(run.parts.engine)
    engine.lost = lost
    with pytest.raises(InvariantError, match="the engine was given new weights, but engine and trainer disagree"):
        step(run.on(engine).trainer())


@pytest.mark.parametrize(
    ("engine", "deterministic", "wanted"),
    [
        (OldVersion, "false", "weights of version 1, but the trainer's are of version 0"),
        (Off, "false", r"engine and trainer disagree by up to 0\.01"),
        (Off, "true", r"engine and trainer disagree by up to 0\.01"),
    ],
)
def test_what_disagrees_stops_the_step(small: Make, engine: type[Around], deterministic: str, wanted: str) -> None:
    run = small(f"run.deterministic={deterministic}")
    with pytest.raises(InvariantError, match=wanted):
        steps_of(run.on(engine(run.parts.engine)), 1)


@pytest.mark.parametrize(
    ("module", "name", "broken", "wanted"),
    [
        (agentrl.train.step, "as_batch", batch_in_another_order, "not the tokens that were sampled"),
        (agentrl.train.learner, "score", score_that_wavers, "before any update a token's log ratio is 0.01"),
    ],
)
def test_a_batch_or_a_score_that_is_wrong_stops_the_step(
    small: Make, monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str, broken: Any, wanted: str
) -> None:
    monkeypatch.setattr(module, name, broken(getattr(module, name)))
    with pytest.raises(InvariantError, match=wanted):
        step(trainer_of(small("optim.max_tokens=100000"))[0])


def test_weights_that_break_within_a_step_stop_it(small: Make) -> None:
    with pytest.raises(InvariantError, match="the weights are broken"):
        step(trainer_of(small("optim.lr=1e30"))[0])


def test_an_agent_that_calls_no_tool_stops_the_step(small: Make) -> None:
    with pytest.raises(InvariantError, match="no tool was called in the first 12 episodes"):
        step(trainer_of(small("env.args.tooled=true"))[0])


class Long(Shout):
    """``Shout`` with a first task that does not even fit into a pack."""

    def tasks(self, split: str) -> TaskList:
        task, *rest = super().tasks(split)
        return TaskList([replace(task, prompt=task.prompt * 100), *rest])


def test_a_prompt_that_leaves_no_room_ends_its_episodes_and_no_run(small: Make) -> None:
    gymnasium.register("test/Long-v0", entry_point=Long)
    run = small("env.id=test/Long-v0", "rollout.tasks=6")
    result = step(trainer_of(run)[0])
    none = [episode for episode in result.trajectories if episode.n_sampled == 0]
    assert {episode.stop for episode in none} == {Stop.TOKEN_LIMIT} and len(none) == 4
    assert len(none[0].token_ids) > run.config.optim.max_tokens and result.metrics["grad_norm"] > 0


def tasks_of(result: StepResult) -> list[str]:
    """The word of each group."""
    return [episode.task_id.removeprefix("train:") for episode in result.trajectories[::4]]


@pytest.mark.slow
def test_steps_play_all_tasks_in_passes_with_seeds_of_their_own(small: Make) -> None:
    trainer, later = (trainer_of(small())[0] for _ in range(2))
    results = [step(trainer, number) for number in range(1, 5)]
    later.rollouts.restore(trainer.rollouts.state(), ())
    results += [step(trainer, number) for number in range(5, 9)]
    passes = [tasks_of(episode) + tasks_of(other) for episode, other in zip(results[::2], results[1::2], strict=True)]
    assert all(sorted(episode) == sorted(WORDS) for episode in passes)
    assert len(set(map(tuple, passes))) > 2 and list(WORDS) not in passes
    seeds = [episode.seed for result in results for episode in result.trajectories]
    assert len(set(seeds)) == len(seeds) == 8 * 12
    again = step(later, 5)
    assert tasks_of(again) == tasks_of(results[4]), "who goes on at a step meets that step's tasks"
    assert [episode.seed for episode in again.trajectories] == [episode.seed for episode in results[4].trajectories]
