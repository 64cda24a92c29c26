import dataclasses
import random
import re
from collections.abc import Sequence

import pytest

from agentrl.runs.report.curves import compared, families
from agentrl.runs.report.folder import RunData


def run(name: str, seed: int, advantage: str = "otb", values: Sequence[float] = (0.1, 0.5, 0.9)) -> RunData:
    config = f'[run]\nname = "{name}"\nseed = {seed}\n[algo]\nadvantage = "{advantage}"\n[versions]\nx = "{seed}"\n'
    steps = tuple({"step": step, "reward_mean": value} for step, value in enumerate(values, start=1))
    return RunData(name=name, config=config, steps=steps, evals=(), episodes=(), notes=())


def test_runs_that_differ_in_name_and_seed_alone_are_a_family() -> None:
    found = families([run("a", 0), run("b", 0, "rloo"), run("c", 1), run("d", 2)])
    assert [[one.name for one in family.runs] for family in found] == [["a", "c", "d"], ["b"]]
    assert [family.title for family in found] == ["algo.advantage=otb (a, c, d)", "algo.advantage=rloo (b)"]


@pytest.mark.parametrize("config", ["", "not = [toml", "x = " + "[" * 100_000, "run = 3"])
def test_runs_without_settings_are_alone(config: str) -> None:
    runs = [dataclasses.replace(run(name, 0), config=config) for name in ("a", "b")]
    assert all(name in family.title for family, name in zip(families(runs), "ab", strict=True))


def test_a_band_reaches_from_the_smallest_to_the_largest_of_the_seeds() -> None:
    noise = random.Random(0)
    seeds = [[noise.random() for _ in range(5 + seed)] for seed in range(3)]
    (chart,) = compared([run(str(seed), seed, values=values) for seed, values in enumerate(seeds)])
    (band,), (line,) = (re.findall(rf'class="{kind} run0" d="([^"]+)"', chart) for kind in ("range", "line"))
    both, mean = ([float(y) for y in re.findall(r"[\d.]+ ([\d.]+)", path)] for path in (band, line))
    assert len(mean) == 5, "only steps that all seeds have"

    ticks = re.findall(r'class="tick" x="[\d.]+" y="([\d.]+)" dy="[^"]*">([\d.]+)<', chart)
    (low, at_low), *_, (high, at_high) = sorted((float(text), float(y)) for y, text in ticks)

    def y(value: float) -> float:
        return at_low + (value - low) / (high - low) * (at_high - at_low)

    for step in range(5):
        values = [seed[step] for seed in seeds]
        assert mean[step] == pytest.approx(y(sum(values) / 3), abs=0.2)
        assert both[step] == pytest.approx(y(max(values)), abs=0.2)
        assert both[-1 - step] == pytest.approx(y(min(values)), abs=0.2)


def test_a_mix_has_a_chart_of_each_environment() -> None:
    def mix(name: str, seed: int) -> RunData:
        one = run(name, seed)
        rows = [{"step": step, "split": split, "env": env, "success": step / 10}
                for step in (1, 2) for split in ("test", "hard") for env in ("ab", "cd")]  # fmt: skip
        return dataclasses.replace(one, steps=({**one.steps[0], "env/cd/reward_mean": 0.5},), evals=tuple(rows))

    titles = [re.findall("<b>([^<]+)</b>", chart) for chart in compared([mix("x", 0), mix("y", 1), run("z", 2)])]
    assert titles == [["Success: ab"], ["Success: cd"], ["Training reward"], ["Training reward: cd"]]


def test_each_family_has_a_line_a_name_and_a_part_in_the_tooltip() -> None:
    hostile = "<script>\u202e"
    (chart,) = compared([run("a", 0), run(hostile, 0, "rloo")])
    assert 'class="line run0"' in chart and 'class="line run1"' in chart and 'class="range' not in chart
    assert "&lt;script&gt;U+202E), 1 run</span>" in chart and "<script>" not in chart
    assert "<title>step 1: algo.advantage=otb (a) 0.1 · algo.advantage=rloo (&lt;script&gt;U+202E) 0.1</title>" in chart
