"""Learning runs: their units and settings, workers that share them, and a run from end to end."""

import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl.config import load_config
from agentrl.toolenv.base import Episode, ToolEnv
from agentrl.train.live import check_run
from agentrl.types import Message

from ..train.conftest import TOY
from .conftest import load

arms, learn, schedule, work = map(load, ("arms", "learn", "schedule", "work"))


SMALL_WARM = {"env.id": "test/Toy-v0", "sft.steps": 2, "sft.tasks": 4, "sft.episodes": 4, "eval.tasks": 1}
SMALL_WARM |= {"model.tiny.hidden": 16, "model.tiny.layers": 1, "model.tiny.heads": 2}
SMALL_BASE = {"env.id": "test/Toy-v0", "rollout.tasks": 2, "rollout.group_size": 2, "rollout.turn_tokens": 4}
SMALL_BASE |= {"rollout.truncated.turn": "answer", "eval.tasks": 1}


@pytest.fixture
def books(tmp_path: Path) -> Any:
    return learn.Books(tmp_path / "rows", "abc")


def warm(seed: int, success: float) -> dict[str, Any]:
    return {"unit": {"part": "W", "purpose": "warm start", "seed": seed, "steps": 130}, "success": success}


def row(unit: dict[str, Any], share: float) -> dict[str, Any]:
    steps = unit["steps"]
    return {"unit": unit, "episodes": [100] * steps, "successes": [round(100 * share)] * steps}


def finished(level: Callable[[dict[str, Any]], float]) -> dict[str, list[dict[str, Any]]]:
    """All rows of tuning, with a success for each unit."""
    book: dict[str, list[dict[str, Any]]] = {part: [] for part in "WCDEF"}
    book["W"] = [warm(seed, 0.2) for start in (1000, 2000) for seed in range(start, start + 20)]
    for part in "CE":
        while new := [unit for unit in schedule._tuning(part, book) if unit not in [old["unit"] for old in book[part]]]:
            book[part] += [row(unit, level(unit)) for unit in new]
    return book


@pytest.fixture
def signed(clean_registry: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of an environment, which is registered until the test ends."""
    monkeypatch.delitem(sys.modules, "signed", raising=False)
    return load("signed")


def test_every_arm_is_a_run_that_can_begin(signed: Any) -> None:
    assert (len(arms.LEARNING), len(arms.UPDATING), len(arms.STALE), len(arms.SAME_SIGNED)) == (9, 14, 12, 4)
    for arm in (
        *arms.LEARNING,
        *arms.UPDATING,
        *arms.SAME_SIGNED,
        *arms.VARIANTS,
        *(stale for stale, _, _ in arms.STALE.values()),
    ):
        unit = arm.unit("C", "rates", lr=1e-3, seed=1000, steps=15)
        config = load_config(preset=arms.PRESET, overrides=arms.overrides(arms.settings_of(unit)))
        check_run(config)
        assert config.rollout.tasks * config.rollout.group_size == 128 and config.optim.lr == 1e-3
        assert config.algo.loss_options["aggregate"] == "seq_mean_token_sum"
        assert (config.optim.schedule, config.optim.warmup, config.optim.max_grad_norm) == ("constant", 0, 1000.0)
        assert (config.rollout.overlap.staleness == 8) == ("staleness 8" in arm.name)
    check_run(load_config(preset=arms.PRESET, overrides=arms.overrides(arms.WARM)))


def test_seeds_are_the_first_that_count_and_all_arms_of_one_come_first() -> None:
    book: dict[str, list[Any]] = {part: [] for part in "WCDEF"}
    assert [unit["seed"] for unit in schedule.units("C", book)] == [1000, 1001], "so many are needed at least"
    book["W"] = [warm(1000, 0.02), warm(1001, 0.3)]
    units = list(schedule.units("C", book))
    assert [unit["seed"] for unit in units] == [1001] * 45 + [1002] and units[45]["part"] == "W"
    names = [(unit["arm"], unit["rewards"]) for unit in units[:45]]
    assert len({*names}) == 9 and names[:5] == [("otb", "0/1")] * 5
    assert [unit["lr"] for unit in units[:5]] == [1e-4, 3e-4, 1e-3, 3e-3, 1e-2]
    book["W"].append(warm(1002, 0.05))
    assert [unit["seed"] for unit in schedule.units("C", book)] == [1001] * 45 + [1002] * 45


def test_the_rate_is_the_best_and_of_near_ones_the_lowest() -> None:
    unit = {"steps": 15}
    half = {"unit": unit, "episodes": [10] * 15, "successes": [0] * 7 + [10] * 8}
    assert schedule.success(half) == 1.0, "steps 8 to 15"
    assert schedule.success({"unit": unit, "episodes": [10] * 9, "successes": [0] * 7 + [10] * 2}) == 0.25
    assert schedule.best_rate({1e-4: [row(unit, 0.5)], 1e-3: [row(unit, 0.71)], 3e-3: [row(unit, 0.72)]}) == 1e-3


def test_rates_at_the_edge_are_followed_and_then_the_parts_have_theirs() -> None:

    def level(unit: dict[str, Any]) -> float:
        best = {"otb": 3e-2, "grpo": 3e-5}.get(unit["arm"], 1e-3)
        return 0.9 - 0.1 * abs(schedule.LADDER.index(unit["lr"]) - schedule.LADDER.index(best))

    book = finished(level)
    further = [unit["unit"] for unit in book["C"] if unit["unit"]["lr"] not in schedule.RATES["C"]]
    tried = {(unit["arm"], unit["lr"]) for unit in further}
    assert tried == {("otb", 0.03), ("otb", 0.1), ("grpo", 3e-5), ("grpo", 1e-5)}
    assert len(further) == 12, "otb with both rewards, two seeds each"
    equal = finished(lambda unit: 0.5)
    assert len(equal["C"]) == 90 + 30 and len(equal["E"]) == 56 + 14, "but not without end"
    runs = list(schedule.units("D", book))
    assert len(runs) == 20 * 9 + 10 * 6 and [unit["seed"] for unit in runs[:15]] == [2000] * 15
    assert {unit["lr"] for unit in runs if unit["arm"] == "otb"} == {0.03}
    assert {unit["lr"] for unit in runs if unit["arm"] == "grpo"} == {3e-5}
    assert {unit["lr"] for unit in runs if unit["arm"] in ("otb pool 1", "ogb pooled")} == {1e-3}, "that of otb_pooled"
    assert len([unit for unit in schedule.units("E", book) if unit["purpose"] == "results"]) == 140
    stale = list(schedule.units("F", book))
    assert len(stale) == 60 and {unit["lr"] for unit in stale} == {3e-5, 1e-3}, "the lower of two"


def test_a_part_waits_for_the_rates_of_another(books: Any) -> None:
    with pytest.raises(schedule.NotYet, match="part D has its rates from part C"):
        list(schedule.units("D", books))
    lines = list(learn.listed(books))
    assert lines[0] == "C: 0 of 90 runs done, 1.8 core-hours left, 2 warm starts to try"
    assert lines[1].startswith("D: 0 of 230 runs done, 8") and "part C" in lines[1]


def test_workers_share_units(books: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[dict[str, Any]] = []

    def fake(unit: dict[str, Any], folder: Path, books: Any, root: Path, display: object) -> None:
        (folder / "run").mkdir()
        done.append(unit)
        books.add(unit, success=0.2)

    monkeypatch.setattr(learn, "do", fake)
    taken = {"part": "W", "purpose": "warm start", "seed": 1000, "steps": 130}
    with learn.claimed(learn.name_of(taken), tmp_path):
        assert learn.work("C", books, learn.Limits(2, 0, None), tmp_path) == "as many units or hours as were asked for"
    assert [(unit["part"], unit["seed"]) for unit in done] == [("W", 1001), ("C", 1001)], "the first is another's"
    assert "part C" in learn.work("D", books, learn.Limits(0, 0, None), tmp_path)
    other = learn.Books(tmp_path / "rows", "abc")
    learn.work("C", other, learn.Limits(3, 0, None), tmp_path)
    assert len({json.dumps(unit) for unit in done}) == len(done) == 5, "no unit twice"
    reason = learn.work("C", other, learn.Limits(0, 0, None), tmp_path, learn.seeds_of("1001-1002"))
    assert reason == "part C is done for these seeds"
    assert {unit["seed"] for unit in done[5:]} == {1001}, "the other seeds are left to other machines"
    assert not list(tmp_path.glob("C-*")) and not list(tmp_path.glob("W-1001*")), "their folders are gone"


def test_a_stopped_run_goes_on(
    books: Any, clean_registry: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy: dict[str, Any] = {"__name__": __name__}
    exec(TOY, toy)  # which registers it
    toy["Toy"].__init__ = lambda self, *, level=1, **options: ToolEnv.__init__(self, **options)
    for settings, small in ((arms.WARM, SMALL_WARM), (arms.BASE, SMALL_BASE)):
        for key, value in small.items():
            monkeypatch.setitem(settings, key, value)
    unit = arms.OTB.unit("C", "rates", lr=1e-3, seed=7, steps=2)
    monkeypatch.setattr(learn, "ready_units", lambda part, book: ([unit], ""))
    asked = itertools.count()

    class Stopped(work.Limits):
        def wait(self, check: Callable[[], object] = lambda: None) -> None:
            if next(asked) == 1:  # the first is before the run, this one after its first step
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        learn.work("C", books, Stopped(0, 0, None), tmp_path)
    run = next(tmp_path.glob("C-7-*")) / "run"
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 1 and books["C"] == []
    assert learn.work("C", books, work.Limits(0, 0, None), tmp_path) == "part C is done"
    (made,) = learn.Books(tmp_path / "rows", "abc")["C"]
    assert made["unit"] == unit and made["commit"] == "abc" and len(made["warm"]) == 12
    assert made["episodes"] == [4, 4] and len(made["tokens"]) == len(made["grad_norm"]) == 2
    assert [step for step, _, _ in made["held_out"]] == [0, 2] and not run.exists()
    assert (tmp_path / "warm" / "seed-7" / "model.safetensors").is_file(), "the seed's other arms begin with it"


def test_signed_rewards_are_twice_the_others_less_one(signed: Any) -> None:
    env = signed.SignedArithmetic()
    task = env.task_set[0]
    for answer, wanted in ((task.answer, 1.0), ("nothing", -1.0)):
        turn = Message(role="assistant", content=f"\\boxed{{{answer}}}")
        parts = env.reward(Episode(task=task, messages=(turn,), turns=1))
        assert sum(env.reward_weights[name] * value for name, value in parts.items()) == wanted
    assert env.best_return == 1.0
