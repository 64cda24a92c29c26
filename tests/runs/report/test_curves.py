import dataclasses
import random
from collections.abc import Sequence

import pytest

from agentrl.runs.report.curves import compared, families
from agentrl.runs.report.folder import RunData


def run(name: str, seed: int, advantage: str = "otb", values: Sequence[float] = (0.1, 0.5, 0.9)) -> RunData:
    config = f'[run]\nname = "{name}"\nseed = {seed}\n[algo]\nadvantage = "{advantage}"\n[versions]\nx = "{seed}"\n'
    steps = tuple({"step": step, "reward_mean": value} for step, value in enumerate(values, start=1))
    return RunData(name=name, config=config, steps=steps, evals=(), episodes=(), notes=())


def test_runs_that_differ_in_name_and_seed_alone_are_a_family() -> None:
    groups = families([run("a", 0), run("b", 0, "rloo"), run("c", 1), run("d", 2)])
    assert [[member.name for member in family.runs] for family in groups] == [["a", "c", "d"], ["b"]]
    assert [family.title for family in groups] == ["algo.advantage=otb (a, c, d)", "algo.advantage=rloo (b)"]


@pytest.mark.parametrize("config", ["", "not = [toml", "x = " + "[" * 100_000, "run = 3"])
def test_runs_without_settings_are_alone(config: str) -> None:
    runs = [dataclasses.replace(run(name, 0), config=config) for name in ("a", "b")]
    assert all(name in family.title for family, name in zip(families(runs), "ab", strict=True))


def test_a_band_reaches_from_the_smallest_to_the_largest_of_the_seeds() -> None:
    noise = random.Random(0)
    seeds = [[noise.random() for _ in range(5 + seed)] for seed in range(3)]
    (chart,) = compared([run(str(seed), seed, values=values) for seed, values in enumerate(seeds)])
    (line,) = chart.lines
    together = list(enumerate(zip(*seeds, strict=False), start=1))
    assert len(together) == 5, "only steps that all seeds have"
    assert line.points == [(step, pytest.approx(sum(values) / 3)) for step, values in together]
    assert line.band == [(step, min(values), max(values)) for step, values in together]


def test_a_mix_has_a_chart_of_each_environment() -> None:
    def mix(name: str, seed: int) -> RunData:
        base = run(name, seed)
        rows = [{"step": step, "split": split, "env": env, "success": step / 10}
                for step in (1, 2) for split in ("test", "hard") for env in ("ab", "cd")]  # fmt: skip
        return dataclasses.replace(base, steps=({**base.steps[0], "env/cd/reward_mean": 0.5},), evals=tuple(rows))

    titles = [chart.title for chart in compared([mix("x", 0), mix("y", 1), run("z", 2)])]
    assert titles == ["Success: ab", "Success: cd", "Training reward", "Training reward: cd"]


def test_each_family_has_a_line_and_a_name() -> None:
    (chart,) = compared([run("a", 0), run("b", 0, "rloo")])
    assert [(line.style, line.name, line.band) for line in chart.lines] == [
        ("run0", "algo.advantage=otb (a)", []),
        ("run1", "algo.advantage=rloo (b)", []),
    ]
    assert chart.keys[1] == ("run1", "algo.advantage=rloo (b), 1 run")
