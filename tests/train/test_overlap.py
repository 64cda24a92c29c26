"""Groups that are played while the trainer learns: how early, in which order, under which weights, and to which end.

Those without signal make room for others: how often, which, and the same ones in a run that goes on.
"""

import asyncio
import copy
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import gymnasium
import pytest
import torch

import agentrl.train.step
from agentrl.config import load_config
from agentrl.engines.base import Completion, Engine, Sampling
from agentrl.errors import ConfigError, FaultRateError, InfrastructureError
from agentrl.rollout.collected import Collected
from agentrl.rollout.plan import EpisodeSpec
from agentrl.toolenv.base import Episode
from agentrl.toolenv.tasks import TaskList
from agentrl.train.credit import Scored
from agentrl.train.groups import Collecting, StepGroups, is_silent
from agentrl.train.live import check_run
from agentrl.train.overlap import Overlapped
from agentrl.train.step import StepResult
from agentrl.types import Group, Task, Trajectory, flatten

from ..engines.around import Around
from .conftest import Make, Shout, Small, logp_of, step, steps_of


async def settled(source: Overlapped) -> None:
    """Wait until all groups that have begun have ended."""
    await asyncio.gather(*(ahead.task for ahead in source._ahead.values() if ahead.task))  # pyright: ignore


def tokens_of(played: StepGroups) -> list[tuple[str, int, tuple[int, ...]]]:
    return [(episode.task_id, episode.seed, episode.token_ids) for episode in flatten(played.collected.groups)]


@pytest.mark.parametrize(("mode", "bound"), [("lag", 1), ("lag", 3), ("inflight", 1), ("inflight", 3)])
def test_groups_begin_in_order_and_as_early_as_the_bound_allows(small: Make, mode: str, bound: int) -> None:
    overlap = f'rollout.overlap={{mode="{mode}",staleness={bound}}}'
    run = small(overlap, "optim.steps=6", "rollout.turn_tokens=3")
    mix, begun = run.mix, list[int]()
    pick = mix.pick

    def picked(count: int, *, start: int = 0, seed: int) -> Any:
        begun.append(start // run.config.rollout.tasks + 1)
        before = source._ahead.get(begun[-1] - 1)  # pyright: ignore
        # Runs of the sandbox are counted for the whole process, and are to be of one step's groups.
        assert mode == "inflight" or not before or not before.task or before.task.done()
        return pick(count, start=start, seed=seed)

    mix.pick = picked  # pyright: ignore
    source = Overlapped(run.config, mix, run.players, run.parts.engine)
    plain = Collecting(run.config, run.mix, run.players, run.parts.engine)
    learner = run.trainer().learner

    async def go() -> None:
        for number in range(1, 7):
            played = await source.batch(number)
            await settled(source)
            # Slowly: group by group, by the rule that each is held to.
            version, tasks = number - 1, run.config.rollout.tasks
            free = [k for k in range(6 * tasks) if k < (version + 1 + bound) * tasks]
            assert begun == sorted({k // tasks + 1 for k in free}), "neither too early nor later than it may"
            assert tokens_of(played) == tokens_of(await plain.batch(number)), "the weights are the same throughout"
            flying = played.metrics["groups_in_flight"]
            begun_now = min(number + bound, 6) - (number if number == 1 else min(number + bound - 1, 6))
            assert 0 <= flying <= 3 * bound and (mode == "inflight" or flying == 3 * begun_now)
            await source.published(learner, number)

    learner.weights = lambda: iter(())  # pyright: ignore
    asyncio.run(go())


class Midway(Around):
    """Swaps weights in the middle of the next step's turns, and keeps all of them."""

    def __init__(self, run: Small, reference: Any) -> None:
        super().__init__(run.parts.engine)
        self.run, self.reference, self.models, self.asked = run, reference, list[Any](), 0
        self.may_begin = [asyncio.Event() for _ in range(run.config.optim.steps + 1)]

    async def generate(self, prompt_ids: tuple[int, ...], sampling: Sampling, *, seed: int) -> Completion:
        # Episodes have one turn and come in order, so their number says of which step they are.
        if len(prompt_ids) > 1:
            step, self.asked = self.asked // 12 + 1, self.asked + 1
            await self.may_begin[step - 1].wait()  # all of a step begin in one turn of the loop, before the first token
        return await super().generate(prompt_ids, sampling, seed=seed)

    async def load_weights(self, named_tensors: Any, version: int) -> None:
        self.models.append(copy.deepcopy(self.reference))
        self.models[-1].load_state_dict(self.run.parts.model.state_dict())
        steps = self.run.config.optim.steps
        while self.asked < 12 * min(version + 1, steps) and version:
            await asyncio.sleep(0.001)
        self.may_begin[version].set()
        slots = self.run.parts.engine._slots  # pyright: ignore
        while 0 < version < steps and not any(slot.request and len(slot.request.sampled) > 2 for slot in slots):
            await asyncio.sleep(0)
        await super().load_weights(named_tensors, version)


@pytest.mark.slow
def test_each_token_is_of_its_version_and_corrected(small: Make, reference: Any, monkeypatch: Any) -> None:
    run = small("rollout.overlap=inflight", "optim.steps=4", "optim.lr=1e-2", "algo.kl_coef=0", "algo.advantage=otb")
    engine, seen = Midway(run, reference), list[torch.Tensor]()
    correct = agentrl.train.step.correction_weights

    def watched(algo: Any, scored: Scored) -> torch.Tensor:
        seen.append(correct(algo, scored))
        return seen[-1]

    monkeypatch.setattr(agentrl.train.step, "correction_weights", watched)
    results = steps_of(run.on(engine), 4)
    for number, (result, weights) in enumerate(zip(results, seen, strict=True), start=1):
        ages, wanted = list[int](), list[float]()
        for episode in result.trajectories:
            (segment,) = episode.sampled
            assert [len(segment.swaps), segment.version] == ([0, 0] if number == 1 else [1, number - 2])
            under = [logp_of(model, episode).tolist() for model in engine.models]
            sampled = [under[version][position] for position, version in enumerate(segment.token_versions)]
            assert segment.logprobs == pytest.approx(sampled, abs=1e-4)
            ages += [number - 1 - version for version in segment.token_versions]
            old = under[number - 1]
            ratio = torch.tensor(old).double().sum() - torch.tensor(segment.logprobs).double().sum()
            wanted += [min(run.config.algo.correction.cap, float(ratio.exp()))] * len(old)
        assert weights.tolist() == pytest.approx(wanted, rel=1e-3)
        assert number == 1 or max(abs(weight - 1) for weight in wanted) > 0.01, "the weights must have moved"
        metrics = result.metrics
        assert metrics["staleness_max"] == max(ages) == min(number - 1, 1)
        assert metrics["staleness_mean"] == pytest.approx(sum(ages) / len(ages))
        assert metrics["logp_diff_max"] < 1e-4, "of the tokens of the trainer's version alone"


class Wavering(Around):
    """Its log-probs depend on the clock, within rounding."""

    async def generate(self, prompt_ids: tuple[int, ...], sampling: Sampling, *, seed: int) -> Completion:
        done = await super().generate(prompt_ids, sampling, seed=seed)
        return replace(done, logprobs=tuple(lp - 1e-6 * (time.perf_counter_ns() % 10) for lp in done.logprobs))


@pytest.mark.slow
@pytest.mark.parametrize("age", [0, 1])
def test_a_deterministic_run_does_not_depend_on_the_engines_rounding(small: Make, age: int) -> None:
    mode = ("rollout.overlap=lag", f"rollout.overlap.staleness={age}") if age else ()

    def ended(deterministic: str) -> tuple[list[StepResult], list[torch.Tensor]]:
        run = small(*mode, f"run.deterministic={deterministic}", "optim.steps=3", "optim.lr=1e-2")
        return steps_of(run.on(Wavering(run.parts.engine)), 3), list(run.parts.model.parameters())

    (results, left), (repeated, right) = ended("true"), ended("true")
    assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))
    assert [result.trajectories for result in results] == [result.trajectories for result in repeated]
    turns = [[turn for episode in result.trajectories for turn in episode.sampled] for result in results]
    versions = [{version for turn in step_turns for version in turn.versions} for step_turns in turns]
    assert versions == [{max(0, step - age)} for step in range(3)]
    again = [ended("false")[1] for _ in range(2)]
    assert not all(torch.equal(a, b) for a, b in zip(*again, strict=True)), "it would show"


def test_what_a_checkpoint_keeps_of_a_step_is_what_is_trained_on(small: Make) -> None:
    run = small("rollout.overlap=lag", "run.deterministic=true", "optim.steps=3")
    source = Overlapped(run.config, run.mix, run.players, Wavering(run.parts.engine))

    async def go() -> tuple[Sequence[Trajectory], Sequence[Trajectory]]:
        await source.published(run.trainer().learner, 0)
        await source.batch(1)
        await settled(source)
        return source.unused(), flatten((await source.batch(2)).collected.groups)

    unused, trained = asyncio.run(go())
    assert list(unused) == list(trained), "with the trainer's log-probs, which the engine's are not"


def test_a_step_trains_on_its_first_groups_and_says_how_many_it_cancelled(small: Make) -> None:
    # One group at a time: the last of them is the last to end.
    run = small("rollout.overlap=inflight", "rollout.overlap.spare=2", "rollout.concurrency=4", "optim.steps=2")
    for number, result in enumerate(steps_of(run, 2)):
        wanted = [task.id for task in run.source.pick(3, start=5 * number, seed=0)]
        assert list(dict.fromkeys(episode.task_id for episode in result.trajectories)) == wanted
        assert result.metrics["groups_cancelled"] == 2 and result.metrics["groups_lost"] == 0


class Failing(Around):
    """Fails from a request on."""

    left = 12

    async def generate(self, prompt_ids: tuple[int, ...], sampling: Sampling, *, seed: int) -> Completion:
        # Not on the prompt of one token, by which new weights are checked: that may come before the groups have failed.
        self.left -= len(prompt_ids) > 1
        if self.left < 0 and len(prompt_ids) > 1:
            raise InfrastructureError("it is gone")
        return await super().generate(prompt_ids, sampling, seed=seed)


@pytest.mark.parametrize("mode", ["lag", "inflight"])
def test_an_error_of_later_groups_stops_the_run_at_once(small: Make, mode: str) -> None:
    run = small(f"rollout.overlap={mode}", "rollout.overlap.staleness=2", "optim.steps=6")
    trainer = run.on(Failing(run.parts.engine)).trainer()
    rows = list[StepResult]()

    async def go() -> None:
        async with asyncio.timeout(60):
            for number in range(1, 4):
                rows.append(await trainer.step(number))

    with pytest.raises(FaultRateError, match="it is gone"):
        asyncio.run(go())
    assert len(rows) <= 1


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("rollout.overlap=inflight", "run.deterministic=true"), "needs rollout.overlap='off' or 'lag'"),
        (("rollout.overlap.spare=1",), "needs rollout.overlap='inflight': set it so"),
        (("rollout.overlap.spare=1", "rollout.overlap=lag"), "needs rollout.overlap='inflight': set it so"),
        (("engine.options.sleep=true", "rollout.overlap=lag"), "set rollout.overlap='off' and fleet.name='local'"),
        (("engine.options.sleep=true", "fleet.name=ray"), "set rollout.overlap='off' and fleet.name='local'"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(overrides: Sequence[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_run(load_config(overrides=overrides))


class Sleepy(Around):
    """Notes what it samples, when it sleeps, and when it gets weights."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.events = list[str]()

    async def generate(self, prompt_ids: tuple[int, ...], sampling: Sampling, *, seed: int) -> Completion:
        self.events += ["samples"] * (self.events[-1:] != ["samples"])
        return await super().generate(prompt_ids, sampling, seed=seed)

    async def load_weights(self, named_tensors: Any, version: int) -> None:
        self.events.append("loads")
        await super().load_weights(named_tensors, version)

    async def sleep(self) -> None:
        self.events.append("sleeps")


def test_an_engine_sleeps_while_the_trainer_learns(small: Make) -> None:
    run = small("rollout.overlap=off")
    engine = Sleepy(run.parts.engine)
    trainer = run.on(engine).trainer()

    async def learn() -> None:
        await trainer.sync(0)
        for number in (1, 2):
            await trainer.step(number)

    asyncio.run(learn())
    assert engine.events == ["loads", *["samples", "sleeps", "loads"] * 2, "samples"], "the last is the probe"


def test_an_engine_that_others_disturb_is_refused_in_a_deterministic_run(small: Make) -> None:
    run = small("run.deterministic=true")
    inexact = Around(run.parts.engine)
    inexact.exact = False
    with pytest.raises(ConfigError, match="which transformers is not"):
        run.on(inexact).trainer()


COUNT = 24


class Mute(Shout):
    """``Shout`` where only tasks whose number is a multiple of ``every`` tell their episodes apart."""

    def __init__(self, *, split: str = "train", tooled: bool = True, every: int = 2) -> None:
        super().__init__(split=split, tooled=tooled)
        self.every = every

    def tasks(self, split: str) -> TaskList:
        return TaskList([Task(id=str(n), prompt=f"Say {n}.", answer=str(n)) for n in range(COUNT)])

    def reward(self, episode: Episode) -> dict[str, float]:
        heard = int(episode.task.id) % self.every == 0
        return {"correct": float(self.np_random.random()) if heard else 0.5}


@pytest.fixture
def muted(small: Make) -> Make:
    """Make the parts of a run on it."""
    gymnasium.register("test/Mute-v0", entry_point=Mute)
    return lambda *overrides: small("env.id=test/Mute-v0", "rollout.turn_tokens=4", *overrides)


def play(run: Small, number: int) -> StepGroups:
    return asyncio.run(Collecting(run.config, run.mix, run.players, run.parts.engine).batch(number))


def numbers(groups: Iterable[Group]) -> list[int]:
    return [int(group.task_id) for group in groups]


def test_without_refills_every_group_is_trained_on(muted: Make) -> None:
    played = play(muted("env.args.every=2"), 2)
    assert played.trained == list(played.collected.groups) and len(played.trained) == 3
    assert played.silent == sum(number % 2 for number in numbers(played.trained))
    assert [is_silent(group) for group in played.trained] == [number % 2 == 1 for number in numbers(played.trained)]


def test_silent_groups_are_left_out_for_the_next_tasks(muted: Make) -> None:
    run, at = muted("rollout.plan.refills=3"), 0
    source = Collecting(run.config, run.mix, run.players, run.parts.engine)
    for number in (1, 2):
        played, begin = asyncio.run(source.batch(number)), at
        own = [int(task.id) for task in run.source.pick(24, seed=0)]
        asked, heard = numbers(played.collected.groups), [index for index in own[begin:] if index % 2 == 0]
        # In loops: each round asks for as many further tasks as are missing.
        even = 0
        for _ in range(4):
            more = own[at : at + 3 - even]
            at, even = at + len(more), even + sum(index % 2 == 0 for index in more)
        assert asked == own[begin:at] and numbers(played.trained) == heard[:3], "in their order, and none is left out"
        seeds = [episode.seed for group in played.collected.groups for episode in group]
        assert len(set(seeds)) == len(seeds) and played.silent == len(asked) - even > 0


def test_refills_end_and_what_is_missing_stays_silent(muted: Make) -> None:
    played = play(muted("rollout.plan.refills=2", "env.args.every=23"), 1)
    asked, trained = played.collected.groups, played.trained
    assert 6 < len(asked) <= 9 and len(trained) == 3 and played.silent > len(asked) - 3
    silent = [group for group in asked if is_silent(group)]
    assert [group for group in trained if is_silent(group)] == silent[: 3 - (len(asked) - len(silent))]


def test_spare_groups_begin_with_the_others_and_those_that_end_last_are_left_out(muted: Make) -> None:
    # One group at a time, so that the clock decides nothing.
    overlap = 'rollout.overlap={mode="inflight",spare=2}'
    settings = (overlap, "rollout.plan.refills=1", "rollout.concurrency=4")
    run, seeds, at = muted(*settings), list[int](), 0
    source = Collecting(run.config, run.mix, run.players, run.parts.engine)
    for number in (1, 2):
        played, own = asyncio.run(source.batch(number)), [int(task.id) for task in run.source.pick(24, seed=0)][at:]
        missing = sum(index % 2 for index in own[:3])
        assert missing and numbers(played.collected.groups) == own[: 3 + missing], "what was cancelled comes next"
        assert played.collected.cancelled == 4 and len(played.trained) == 3
        seeds += [episode.seed for episode in flatten(played.collected.groups)]
        at += 3 + missing
    assert len(set(seeds)) == len(seeds)


def test_groups_that_end_in_the_same_moment_as_the_last_one_that_was_missing_ask_for_no_more(muted: Make) -> None:
    settings = ("rollout.overlap.spare=3", "rollout.plan.refills=2", "rollout.overlap=inflight")
    run, asked = muted("env.args.every=1", *settings), list[int]()
    collect = run.players.collect

    async def collect_all(specs: Sequence[Sequence[EpisodeSpec]], *how: Any, enough: int) -> Collected:
        asked.append(len(specs))
        # As if all had ended when the first ones were counted.
        return await collect(specs, *how)

    run.players.collect = collect_all  # pyright: ignore
    assert len(play(run, 1).collected.groups) == 6 and asked == [6]


def test_a_step_counts_what_it_left_out_and_goes_on_alike(muted: Make) -> None:
    trainer, later = (muted("rollout.plan.refills=3").trainer() for _ in range(2))
    results = [step(trainer)]
    later.rollouts.restore(json.loads(json.dumps(trainer.rollouts.state())), ())
    results.append(step(trainer, 2))
    again = step(later, 2)
    assert [result.seed for result in again.trajectories] == [result.seed for result in results[1].trajectories]
    for result in results:
        metrics, taught = result.metrics, sum(result.n_sampled for result in result.trajectories)
        assert metrics["groups_left_out"] > 0 and metrics["episodes"] == 4 * (3 + metrics["groups_left_out"])
        assert metrics["groups_silent"] == metrics["groups_left_out"] and metrics["sampled_tokens"] > taught
    assert trainer.sampled_tokens == sum(result.metrics["sampled_tokens"] for result in results)
