"""A run on two environments: no group mixes them, each is measured and evaluated on its own, also when resumed."""

import io
import math
from dataclasses import replace
from itertools import groupby, pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import gymnasium
import pytest

from agentrl.config import load_config
from agentrl.errors import InvariantError, TrajectoryError, UnknownNameError
from agentrl.eval.command import EvalRequest
from agentrl.eval.command import run as evaluate
from agentrl.eval.sweep import SweepRun, result_of
from agentrl.runs.folder import read_jsonl
from agentrl.runs.progress import Display
from agentrl.runs.records import Record, read_episodes
from agentrl.toolenv.base import Episode, ToolEnv
from agentrl.toolenv.tasks import TaskList
from agentrl.train.groups import env_metrics
from agentrl.train.run import resume, train
from agentrl.types import Group, Task, ToolRun

from ..algos import reference as slow
from ..runs.origins import ORIGIN
from ..runs.report.blocks import blocks
from .conftest import SMALL, Make, OnDisk, python, rewards_in_time, rows_of, same_weights, step, trainer_of

MIX = """
[env.mix.loud]
id = "test/Shout-v0"
args = { tooled = false }
weight = 2
[env.mix.short]
id = "test/Short-v0"
args = { max_turns = 1, dialect = "xml" }
"""
TEXT = SMALL.replace('[env]\nid = "test/Shout-v0"\nargs = { tooled = false }\n', MIX)
SETTINGS = ("optim.steps=4", "eval.every=2", "save.every=2", "save.episodes_every=1", "model.path=model")


class Short(ToolEnv):
    """One turn, worth up to 2, in any dialect."""

    instructions = "Be short."
    reward_weights = {"correct": 2.0}  # noqa: RUF012

    def __init__(self, *, tooled: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.tools = (python,) if tooled else ()

    def tasks(self, split: str) -> TaskList:
        return TaskList([Task(id=f"{split}:{word}", prompt=f"Say {word}.") for word in ("ab", "yz", "no")])

    def reward(self, episode: Episode) -> dict[str, float]:
        return {"correct": float(len(episode.final) % 2)}

    def gold(self, task: Task) -> list[str]:
        return ["h"]


@pytest.fixture
def mixed(on_disk: OnDisk) -> OnDisk:
    """Makes configs of a run on both."""
    gymnasium.register("test/Short-v0", entry_point=Short)  # pyright: ignore
    Path("mix.toml").write_text(TEXT)
    return lambda *overrides: load_config(path="mix.toml", overrides=[*SETTINGS, *overrides])


def records(run: Path, number: int) -> list[Record]:
    return list(read_episodes(run / "episodes" / f"step-{number:06d}.jsonl.zst"))


@pytest.mark.slow
def test_two_environments_end_to_end(mixed: OnDisk) -> None:
    run = train(mixed("run.name=whole"), Display())
    rows, evals = read_jsonl(run / "metrics.jsonl"), read_jsonl(run / "evals.jsonl")
    assert sum(row["env/loud/groups"] for row in rows) == 8 and sum(row["env/short/groups"] for row in rows) == 4
    for row in rows:
        played = records(run, row["step"])
        for name in ("loud", "short"):
            mine = [record for record in played if record.trajectory.env == name]
            returns, best = [record.trajectory.ret for record in mine], mine[0].origin.best_return
            assert len(mine) == 4 * row[f"env/{name}/groups"]
            assert row[f"env/{name}/reward_mean"] == pytest.approx(fmean(returns))
            assert row[f"env/{name}/success"] == fmean(value >= best for value in returns)
            turns = [len(record.trajectory.sampled) for record in mine]
            assert row[f"env/{name}/turns_mean"] == pytest.approx(fmean(turns))
            assert all(record.origin.env_args.get("max_turns") == (1 if name == "short" else None) for record in mine)
            assert all(record.origin.dialect.startswith("xml" if name == "short" else "fence") for record in mine)
        side_by_side = groupby((record.trajectory.env, record.trajectory.task_id) for record in played)
        assert all(len(list(group)) % 4 == 0 for _, group in side_by_side), "groups of four do not mix"
    order = [(at, name) for at in (0, 2, 4) for name in ("loud", "short")]
    assert [(row["step"], row["env"]) for row in evals] == order
    # Its evaluation alone is that of the run; the file says of each episode where it is from.
    request = EvalRequest(path=str(run), out=Path("e"))
    overall = {result.name: result.overall for result in evaluate(request, Display())}
    assert [overall[row["env"]].row().items() <= row.items() for row in evals[-2:]] == [True, True]
    assert [record.trajectory.env for record in read_episodes("e")].count("short") == 3, "it has no more"
    assert {result.name: result.overall for result in evaluate(request, Display())} == overall, "all was there"
    page = (run / "report.html").read_text()
    titles = [chart["title"] for chart in blocks(run / "report.html")["charts"]["curve"]]
    assert titles == ["Learning curve: loud", "Learning curve: short"] and "<th>environment</th>" in page
    swept = result_of(SweepRun(settings={}, words=(), config=mixed("run.name=whole")))
    assert swept and swept.tasks == 7 and swept.success == fmean(row["success"] for row in evals[-2:])
    # A run that was stopped after two steps goes on alike.
    other = train(mixed("run.name=stopped", "optim.steps=2"), Display())
    resume(other, Display(), ["optim.steps=4"])
    for file in ("metrics.jsonl", "evals.jsonl"):
        assert rows_of(run, file) == rows_of(other, file)
    assert same_weights(run, other)


@pytest.mark.parametrize(("tasks", "weights", "alone"), [(3, "old", 1), (6, "cumulative", 0)])
def test_a_pool_is_of_one_environment(mixed: OnDisk, tasks: int, weights: str, alone: int) -> None:
    settings = ("algo.advantage=otb_pooled", f"algo.advantage_options.weights={weights}")
    settings = (*settings, f"rollout.tasks={tasks}", "optim.steps=1", "eval.every=0")
    run = train(mixed(*settings), Display())
    assert rows_of(run)[0]["groups_unpooled"] == alone
    check_pools(run)


def test_a_pool_is_of_the_groups_that_are_trained(mixed: OnDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    def reward(_: Short, episode: Episode) -> dict[str, float]:
        return {"correct": float(len(episode.final) % 2 and episode.task.id != "train:no")}

    # Groups of one task are silent, and further ones replace them.
    monkeypatch.setattr(Short, "reward", reward)
    settings = ("algo.advantage=otb_pooled", "rollout.tasks=4", "rollout.plan.refills=3", "run.seed=3")
    run = train(mixed(*settings, "optim.steps=1", "eval.every=0"), Display())
    assert rows_of(run)[0]["groups_left_out"] > 0
    check_pools(run)


def check_pools(run: Path) -> None:
    """Compare the advantages of a run's first step with those of loops over each environment's trained episodes."""
    for name in ("loud", "short"):
        played = [record for record in records(run, 1) if record.trajectory.env == name]
        realized = [record.training["realized_energy"] for record in played]
        energy = [[w - before for before, w in pairwise((0.0, *row))] for row in realized]
        rewards = [rewards_in_time(record.trajectory) for record in played]
        group = [record.trajectory.task_id for record in played]
        wanted = slow.otb(rewards, energy, group, tail="carry", pool=math.inf)
        assert any(any(row) for row in wanted)
        for record, row in zip(played, wanted, strict=True):
            assert record.advantages == pytest.approx(row, abs=1e-3), "five digits of an energy are in the file"
            below = zip(record.advantages or (), record.training["baseline"], strict=True)
            ahead = [sum(rewards_in_time(record.trajectory)[t:]) for t in range(len(row))]
            assert [a + b for a, b in below] == pytest.approx(ahead, abs=1e-3)


def test_one_environment_has_no_names(small: Make) -> None:
    result = step(trainer_of(small())[0])
    assert not [name for name in result.metrics if name.startswith("env/")]
    assert {episode.env for episode in result.trajectories} == {""}


def test_the_warm_start_learns_every_environment(mixed: OnDisk) -> None:
    settings = ("sft.steps=2", "sft.tasks=9", "sft.episodes=4", "optim.steps=0", "eval.tasks=1")
    output = io.StringIO()
    train(mixed(*settings), Display(output))
    # Six words are all that an environment has to teach: its share would be six and three.
    assert "2 updates on 9 oracle episodes" in output.getvalue()


class Caller(Short):
    """Counts each turn as a call of its tool."""

    def step(self, action: str) -> Any:
        done = super().step(action)
        self._episode = replace(self.episode, tool_runs=(ToolRun(name="python", ok=True, wall_s=0.1),))
        return done


def test_a_tool_must_be_called_in_one_of_the_environments_that_have_some(mixed: OnDisk) -> None:
    settings = ("env.mix.short.args.tooled=true", "eval.tasks=1", "optim.steps=1")
    with pytest.raises(InvariantError, match=r"in the first 4 episodes of 'short': .* \(sft.steps is 0\)"):
        train(mixed(*settings), Display())
    gymnasium.register("test/Caller-v0", entry_point=Caller)  # pyright: ignore
    called = ("env.mix.loud.id=test/Caller-v0", "env.mix.loud.args.tooled=true")
    train(mixed(*settings, *called, "run.name=called"), Display())


def test_what_a_mix_refuses(mixed: OnDisk, small: Make) -> None:
    with pytest.raises(UnknownNameError, match="no environment is called 'test/Shuot-v0'; did you mean"):
        train(mixed("env.mix.loud.id=test/Shuot-v0"), Display())
    assert not Path("runs").exists()
    episode, other = step(trainer_of(small())[0]).trajectories[:2]
    with pytest.raises(TrajectoryError, match="a group is of one environment, not of 'a' and 'b'"):
        Group((replace(episode, env="a"), replace(other, env="b")))


def test_an_environment_without_a_group_has_no_means() -> None:
    assert env_metrics([], {"rare": ORIGIN}) == {"env/rare/groups": 0, "env/rare/groups_silent": 0}
