"""Plans of tasks in a run: the uniform one is what it always was, and no choice depends on the clock."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest

from agentrl.config import load_config
from agentrl.engines.base import Completion, Sampling
from agentrl.engines.scripted import ScriptedEngine
from agentrl.rollout.collected import Clock, Collected
from agentrl.rollout.plan import EpisodeSpec
from agentrl.runs.assemble import task_mix
from agentrl.train.groups import Collecting
from agentrl.types import Group, Segment, Trajectory

from ..engines.around import Around
from .conftest import Make, step, steps_of, trajectory, turn

SETTINGS = (
    *("env.mix.a.id=test/Shout-v0", "env.mix.a.weight=2.0", "env.mix.b.id=agentrl/Arithmetic-v0"),
    *("env.mix.b.args={level=[1,2]}", "rollout.tasks=4", "rollout.group_size=2", "rollout.plan.refills=2"),
    *("rollout.overlap.spare=1", "rollout.overlap.mode=inflight", "run.seed=5"),
)
UNIFORM = [
    "ab:77996 cd:322033 0:619602 1:739670 ef:661555",
    "1:739670 gh:471543 2:904296 ij:700648 kl:715558",
    "2:904296 3:82485 ab:594426 ij:806667 ef:127904",
    "2:904296 cd:497192",
    "2:904296 4:253049 5:505435 gh:713495 kl:928209",
]
"""Task and the first seed's last digits of the groups that each collection began, as they were before there were
plans."""
SUCCESS = ("rollout.plan.name=success", "rollout.plan.options={prior=1,forget=0.5}")


class Recorder:
    """Plays nothing: some groups have no signal, and some are cancelled."""

    def __init__(self) -> None:
        self.begun = list[str]()

    async def collect(self, specs: Sequence[Sequence[EpisodeSpec]], *_: Any, enough: int) -> Collected:
        self.begun.append(" ".join(f"{spec.task_id[-2:].lstrip(':')}:{spec.seed % 10**6}" for spec, *_ in specs))
        ended = sorted(specs, key=lambda spec: (spec[0].seed >> (len(self.begun) - 1)) % 101)[:enough]

        def episode(spec: EpisodeSpec, ret: float) -> Trajectory:
            fields: dict[str, Any] = {"task_id": spec.task_id, "seed": spec.seed, "env": spec.env, "rewards": (ret,)}
            return trajectory(Segment("prompt", (1,)), turn([1]), **fields)

        groups = [
            Group((episode(leader, 0.0), episode(other, float(leader.seed % 3 > 0))))
            for leader, other in (spec for spec in specs if spec in ended)
        ]
        counts: dict[str, Any] = {"faults": 0, "lost": 0, "cancelled": len(specs) - enough, "seconds": 0.0}
        return Collected(groups=tuple(groups), clock=Clock(), sandbox={}, **counts)


@pytest.mark.usefixtures("shout")
@pytest.mark.parametrize("resumed", [False, True])
def test_a_uniform_plan_is_what_it_was_before_there_were_plans(resumed: bool) -> None:
    config, players = load_config(overrides=SETTINGS), Recorder()

    def source() -> Collecting:
        return Collecting(config, task_mix(config, "train"), players, ScriptedEngine(()))  # pyright: ignore

    played = source()
    for number in range(1, 5):
        asyncio.run(played.batch(number))
        if resumed:
            state, played = played.state(), source()
            played.restore(json.loads(json.dumps(state)), ())
        played._order.forget(number)  # pyright: ignore
    assert players.begun == UNIFORM


def test_a_run_by_success_goes_on_alike(small: Make) -> None:
    trainer, later = (small(*SUCCESS, "rollout.plan.refills=1").trainer() for _ in range(2))
    result = step(trainer)
    assert result.metrics["plan/untagged/share"] == 1
    wins = sum(episode.ret == 1 for episode in result.trajectories)
    assert result.metrics["plan/untagged/success"] == pytest.approx((wins + 0.5) / (len(result.trajectories) + 1))
    later.rollouts.restore(json.loads(json.dumps(trainer.rollouts.state())), ())
    tasks = [[(episode.task_id, episode.seed) for episode in step(each, 2).trajectories] for each in (trainer, later)]
    assert tasks[0] == tasks[1]


class Delayed(Around):
    """Answers late."""

    async def generate(self, prompt_ids: tuple[int, ...], sampling: Sampling, *, seed: int) -> Completion:
        await asyncio.sleep(0.4)
        return await super().generate(prompt_ids, sampling, seed=seed)


@pytest.mark.slow
def test_with_a_lag_no_choice_depends_on_the_clock(small: Make) -> None:
    settings = (
        "rollout.overlap.mode=lag",
        "rollout.overlap.staleness=2",
        "optim.steps=4",
        "run.deterministic=true",
        *SUCCESS,
    )
    runs = [small(*settings), small(*settings)]
    runs[1] = runs[1].on(Delayed(runs[1].parts.engine))
    played = [[result.trajectories for result in steps_of(run, 4)] for run in runs]
    assert played[0] == played[1]
