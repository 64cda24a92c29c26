"""Plans of tasks: the weights against a slow reference, what is drawn, and which settings are refused."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import pytest

from agentrl.config import Config, load_config
from agentrl.errors import ConfigError, UnknownNameError
from agentrl.rollout.mix import TaskMix
from agentrl.rollout.plan import TaskSource
from agentrl.rollout.success import SuccessPlan
from agentrl.rollout.taskplan import Choose, TaskPlan, make_plan
from agentrl.toolenv.base import ToolEnv
from agentrl.toolenv.tasks import TaskList
from agentrl.types import Group, Segment, Stop, Task, Trajectory

COUNT = 12
Outcome = tuple[str, str, Sequence[int]]
"""Environment, task, and the return of each episode."""
Plan = Callable[..., SuccessPlan]


class Levels(ToolEnv):
    """Tasks of three levels in turn."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)

    def tasks(self, split: str) -> TaskList:
        return TaskList([Task(id=str(n), prompt="?", tags=(f"level:{n % 3}",)) for n in range(COUNT)])

    def reward(self, episode: Any) -> dict[str, float]:
        return {"correct": 1.0}


@pytest.fixture
def levels(clean_registry: None) -> str:
    gymnasium.register("test/Levels-v0", entry_point=Levels)
    return "test/Levels-v0"


@pytest.fixture
def plan(levels: str) -> Plan:
    """Make a plan for a finite and an endless environment, by default for both."""

    def make(*names: str, **options: float) -> SuccessPlan:
        endless = TaskSource("agentrl/Arithmetic-v0", {"level": [1, 2, 3]}, "train", "endless")
        sources = {"finite": TaskSource(levels, {}, "train", "finite"), "endless": endless}
        chosen = {name: sources[name] for name in names or sources}
        return SuccessPlan(TaskMix(chosen, {"finite": 1.0, "endless": 3.0}, block=8), 7, **options)

    return make


def groups_of(plan: SuccessPlan, outcomes: Sequence[Outcome]) -> list[Group]:
    segments = (Segment("prompt", (1,)), Segment("policy", (2,), (-1.0,), 0))

    def group(env: str, task_id: str, returns: Sequence[int]) -> Group:
        tags = plan._mix.sources[env].tasks.find(task_id).tags  # pyright: ignore
        plain: dict[str, Any] = {"seed": 0, "segments": segments, "stop": Stop.TERMINATED}
        episodes = [Trajectory(**plain, task_id=task_id, env=env, tags=tags, rewards=(float(ret),)) for ret in returns]
        return Group(tuple(episodes))

    return [group(*outcome) for outcome in outcomes]


STEPS: Sequence[Sequence[Outcome]] = (
    [("finite", "0", [1, 1, 1, 0]), ("finite", "3", [0, 0, 0, 0]), ("endless", "train-1-2-3:0", [1, 1, 1, 1])],
    [("finite", "1", [1, 1, 1, 1]), ("endless", "train-1-2-3:4", [0, 0]), ("endless", "train-1-2-3:3", [1, 1])],
    [("finite", "0", [1, 1]), ("finite", "1", [1, 1, 1, 1])],
)


def weight_of(env: str, level: str, task_id: str | None, prior: float, floor: float, forget: float) -> float:
    """The weight after ``STEPS``, episode by episode; of a stratum where there is no task."""
    wins, episodes, own_wins, own = 0.0, 0.0, 0.0, 0.0
    for age, outcomes in enumerate(reversed(STEPS)):
        for name, task, returns in outcomes:
            number = int(task.rpartition(":")[2])
            of_level = str(number % 3 + (name == "endless")) == level
            for ret in returns:
                part = (1 - forget) ** age
                if (name, of_level) == (env, True):
                    wins, episodes = wins + part * ret, episodes + part
                if (name, task) == (env, task_id):
                    own_wins, own = own_wins + part * ret, own + part
    p = (wins + prior * 0.5) / (episodes + prior)
    if task_id is not None:
        p = (own_wins + prior * p) / (own + prior)
    return max(floor, p * (1 - p) / 0.25)


@pytest.mark.parametrize("options", [(4.0, 0.1, 0.05), (0.5, 0.3, 0.0), (9.0, 1.0, 0.9)])
def test_weights_are_those_of_a_walk_through_the_history(plan: Plan, options: tuple[float, float, float]) -> None:
    made = plan(prior=options[0], floor=options[1], forget=options[2])
    for outcomes in STEPS:
        made.learned(groups_of(made, outcomes))
    walked = [weight_of("finite", str(n % 3), str(n), *options) for n in range(COUNT)]
    assert made._task_weights("finite").tolist() == pytest.approx(walked)  # pyright: ignore
    of_strata = made._stratum_weights("endless")  # pyright: ignore
    assert of_strata == pytest.approx({f"level:{n}": weight_of("endless", str(n), None, *options) for n in (1, 2)})


def drawn(plan: TaskPlan, count: int, *, start: int = 0, batch: int = 8) -> list[tuple[str, Task]]:
    choose = plan.pick(1)
    return [pair for begin in range(start, start + count, batch) for pair in choose(range(begin, begin + batch))]


@pytest.mark.slow
def test_tasks_come_by_weight_and_environments_by_theirs(plan: Plan) -> None:
    made, batches = plan(), 2000
    for outcomes in STEPS:
        made.learned(groups_of(made, outcomes))
    pairs = drawn(made, 8 * batches)
    counts = Counter((name, task.id if name == "finite" else task.tags[0]) for name, task in pairs)
    assert [sum(counts[env, key] for env, key in counts if env == name) for name in ("finite", "endless")] == [
        2 * batches,
        6 * batches,
    ]
    weights = made._task_weights("finite")  # pyright: ignore
    # Systematic draws vary less than independent ones, whose variance this is; four deviations are allowed.
    for number, share in enumerate((weights / weights.sum()).tolist()):
        expected = 2 * batches * share
        assert abs(counts["finite", str(number)] - expected) < 4 * (expected * (1 - share)) ** 0.5
    accepted = made._stratum_weights("endless")  # pyright: ignore
    shares = {level: accepted.get(level, 1.0) for level in ("level:1", "level:2", "level:3")}
    for level, weight in shares.items():
        share = weight / sum(shares.values())
        expected = 6 * batches * share
        assert abs(counts["endless", level] - expected) < 4 * (expected * (1 - share)) ** 0.5


def test_no_task_comes_twice_where_that_can_be_avoided(plan: Plan) -> None:
    made = plan("endless")
    assert len({task.id for _, task in drawn(made, 400)}) == 400, "an endless split has no task twice"
    made = plan("finite")
    assert all(len({task.id for _, task in drawn(made, 8, start=8 * step)}) == 8 for step in range(20))
    assert drawn(made, 40) == drawn(plan("finite"), 40) != drawn(made, 40, start=40)


def test_weights_of_a_step_are_those_of_its_begin_and_survive_a_checkpoint(plan: Plan) -> None:
    made, other = plan(), plan()
    before, untouched = made.pick(1), other.pick(1)
    for outcomes in STEPS:
        made.learned(groups_of(made, outcomes))
    assert before(range(64)) == untouched(range(64)), "later outcomes change no step that has begun"
    other.restore(json.loads(json.dumps(made.state())))
    assert made.pick(2)(range(64, 128)) == other.pick(2)(range(64, 128))


def test_a_stratum_that_is_never_accepted_ends_the_draws(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    made = plan("endless", floor=1e-9, prior=1e-9, forget=0.0)
    made.learned(groups_of(made, [("endless", f"train-1-2-3:{n}", [1]) for n in range(3)]))
    monkeypatch.setattr("agentrl.rollout.success._MOST_DRAWS", 5)
    assert [task.id for _, task in made.pick(1)(range(2))] == ["train-1-2-3:10", "train-1-2-3:11"]


class Own(TaskPlan):
    """Takes one task again and again."""

    def __init__(self, mix: TaskMix, seed: int, *, number: int = 0) -> None:
        self.mix, self.number = mix, number

    def pick(self, step: int) -> Choose:
        ((name, source),) = self.mix.sources.items()
        return lambda indices: [(name, source.tasks[self.number]) for _ in indices]


def test_a_plan_of_ones_own_is_named_by_its_module(levels: str) -> None:
    def made(name: str, **options: object) -> TaskPlan:
        config: Config = load_config(overrides=[f"env.id={levels}", f"rollout.plan.name={name}"])
        config = config.updated(rollout={"plan": config.rollout.plan.model_copy(update={"options": options})})
        return make_plan(config, TaskMix({"": TaskSource(levels, {}, "train")}, {"": 1.0}, block=8))

    own = f"{__name__}:Own"
    assert {task.id for _, task in drawn(made(own, number=5), 8)} == {"5"}
    assert made(own).learned([]) == {} and made(own).state() == {}
    for name, options, error, words in (
        ("succes", {}, UnknownNameError, "did you mean 'success'"),
        ("uniform", {"prior": 1.0}, ConfigError, "can't be made with rollout.plan.options: .*'prior'"),
        ("success", {"prior": 0.0}, ConfigError, "rollout.plan.options.prior is 0: set it to a number above 0"),
        ("success", {"floor": 1.5}, ConfigError, "floor is 1.5: set it to a number above 0 and at most 1"),
        ("success", {"forget": 1.0}, ConfigError, "forget is 1: set it to a number at least 0 and below 1"),
        ("success", {"prior": "4"}, ConfigError, "can't be made with rollout.plan.options"),
        ("builtins:slice", {}, ConfigError, "makes no plan: make it a subclass of agentrl.rollout.taskplan.TaskPlan"),
    ):
        with pytest.raises(error, match=words):
            made(name, **options)
