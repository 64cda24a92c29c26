"""Tables and figures: those that are committed are those of the rows, and every part has some."""

import json
import random
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from .conftest import load

figures, schedule, gradients, plot, curves = map(load, ("figures", "schedule", "gradients", "plot", "curves"))
weight_sets, show_learning, long = load("weight_sets"), load("show_learning"), load("long")

ROOT = Path(__file__).parents[2]


def test_what_is_committed_is_what_the_rows_say(capsys: pytest.CaptureFixture[str]) -> None:
    assert figures.main(["--check"]) == 0, capsys.readouterr().out


def test_parts_without_rows_are_said_to_be_so() -> None:
    page = (ROOT / "docs" / "results.md").read_text()
    files = figures.made({part: [] for part in figures.PARTS}, page)
    assert list(files) == ["results.md"], "no figure"
    report = files["results.md"]
    for name in [*figures.TABLES, *figures.FIGURES]:
        inside = report[report.index(f"<!-- {name} -->") : report.index(f"<!-- end of {name} -->")]
        assert "not run yet" in inside, name
    with pytest.raises(ValueError, match="table 1"):
        figures.made({part: [] for part in figures.PARTS}, page.replace("<!-- table 1 -->", ""))


def curve(unit: dict[str, Any], speed: float) -> dict[str, Any]:
    generator = random.Random(f"{unit['arm']}{unit['rewards']}{unit['seed']}")
    shares = [min(1.0, 0.1 + speed * step + generator.random() / 20) for step in range(unit["steps"])]
    return {
        "unit": unit,
        "tokens": [3700] * unit["steps"],
        "episodes": [128] * unit["steps"],
        "successes": [round(128 * share) for share in shares],
        "grad_norm": [1.0 + share for share in shares],
        "held_out": [[0, 200, 0.1], [unit["steps"], 200, shares[-1]]],
        "warm": "w",
    }


def long_run(unit: dict[str, Any]) -> dict[str, Any]:
    """The row of a long run whose S_t spreads as √t; with power 0 ever more of its tokens are clipped."""
    edges = [2**k for k in range(10)]
    late = 1.0 if unit["arm"] == "ctpo power 0" else 0.1
    return {
        **curve(unit, 0.04),
        "S_std": {str(t): 0.01 * t**0.5 for t in edges},
        "clip_fraction": {str(t): 0.1 * t**late for t in edges},
    }


def whole_book() -> dict[str, list[dict[str, Any]]]:
    """Rows of parts B to G, as if all had been run."""
    book: dict[str, list[dict[str, Any]]] = {part: [] for part in "ABWCDEFG"}
    book["W"] = [{"unit": {"seed": s}, "success": 0.2} for start in (1000, 2000) for s in range(start, start + 20)]
    for part in "CDEF":
        done: set[str] = set()
        while new := [unit for unit in schedule.ready_units(part, book)[0] if schedule.key_of(unit) not in done]:
            done |= {schedule.key_of(unit) for unit in new}
            book[part] += [curve(unit, 0.05 if "pooled" in unit["arm"] else 0.04) for unit in new]
    for purpose in ("rates", "results"):
        book["G"] += [long_run(unit) for unit in long.units(book["G"]) if unit["purpose"] == purpose]
    arms = {
        arm: {"noise": [float(number + 2)] * 5, "along": [4.0] * 5, "signal": [4.0] * 5}
        for number, arm in enumerate(gradients.ARMS)
    }
    norms = [[low / 10, 10.0, 1.2 - low / 10, 1.1 - low / 10] for low in range(10)]
    shares = {"p": 0.2, "beta_W": 0.05, "beta_S": 0.04, "e": 1.0, "by_probability": norms}
    for name in [*(f"{aim}-seed{seed}" for aim in (5, 20, 50, 80) for seed in (1, 2, 3)), "mixed-seed1"]:
        *of_arms, of_pool = gradients.units(name, (1, 4, 32, 2, 8, 16), 40)
        book["B"] += [{"unit": unit, **shares, "arms": arms} for unit in of_arms]
        noise = {"4": {"0": 1.5, "inf": 1.25}, "8": {"0": 1.25, "inf": 1.125}}
        book["B"].append({"unit": of_pool, "within": 0.5, "between": -0.1 if "80" in name else 0.25, "noise": noise})
    return book


def test_every_part_with_rows_has_its_tables_and_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    for part in "DEF":
        monkeypatch.setitem(schedule.SEEDS, part, 5)
    book = whole_book()
    book["A"] = figures.read_all()["A"]
    files = figures.made(book, (ROOT / "docs" / "results.md").read_text())
    drawn = [f"results/figure-{number}.svg" for number in range(1, 10)]
    assert sorted(files) == ["results.md", *drawn, "results/gradients.md"]
    # The first arm has the noise 2, the signal 4 and the product 4 with the truth, whose square is 4: 4/√(4·6).
    assert "| otb | 0.816, 100%, 0.5 |" in files["results/gradients.md"]
    for name, text in files.items():
        if name.endswith("svg"):
            root = ElementTree.fromstring(text)
            assert root.tag == "{http://www.w3.org/2000/svg}svg" and "nan" not in text
    page = files["results.md"]
    assert page.count("not run yet") == 3 + page.count("| B5 |"), "the pretrained model, plans of tasks, G5 and B5"
    assert "| G1 | the spread of S_t grows as √t: slope .4 to .6 | holds | ctpo 0.50" in page
    assert "| G2 | power ½ clips late tokens as often as early ones | holds | 1.52 times |" in page
    assert "| G2 | power 0 clips late tokens at least 3 times as often | holds | 64.00 times |" in page
    assert "| about 20% | 3 | 2 | 4 | 1.5 | 1.25 |\n| about 20% | 3 | 2 | 8 | 1.25 | 1.12 |" in page
    assert "| about 80% | 3 | ∞ | 4 | 1.5 | 1.25 |" in page, "an estimate of no difference between tasks"
    assert "| D1 | pooled needs fewer tokens to 50% than `otb` | holds |" in page
    assert "(5 pairs); fewer in 5 of 5" in page
    assert "(5 pairs); fewer in 0 of 5; success over all steps -" in page
    assert figures.made(book, page) == files, "made again it stays as it is"
    assert "So far" not in page
    whole = len(book["C"])
    del book["C"][7]
    assert f"*So far {whole - 1} of about {whole} runs: nothing" in figures.made(book, page)["results.md"]


def test_worth_by_hand() -> None:
    arm = {"noise": [8.0, 4.0, 6.0], "along": [4.0, 1.0, 2.0]}
    truth = {"noise": [1.0] * 3, "along": [2.0, 0.5, 1.0]}
    rows = {("0/1", size): {"arms": {"otb": arm, "otb_pooled": truth}} for size in (4, 32)}
    weights = weight_sets.WeightSet("20-seed1", rows)
    # Two tasks of four episodes; 4² / (2 · 8 · 8), and 1² / (.5 · 4 · 4) without the first task.
    assert weights.worth("otb", 4) == pytest.approx(16 / (2 * 8 * 8))
    assert weights.worth("otb", 4, without=1) == pytest.approx(1 / (0.5 * 4 * 4))
    assert weights.error("otb", 4) > 0
    assert weight_sets.factors(0.5, 0.5) == {"none": 2.0, "none ±1": 1.0, "group_mean": 1.0, "otb": 1.0}


def test_the_largest_stable_rate_is_that_without_a_collapse() -> None:
    unit = {"arm": "otb", "rewards": "0/1", "seed": 1, "steps": 6}
    steady = {**curve(unit, 0.1), "successes": [20, 40, 60, 80, 90, 90]}
    falling = {**curve(unit, 0.1), "successes": [20, 90, 90, 90, 10, 0]}
    assert show_learning.stable({1e-3: [steady, steady], 1e-2: [steady, falling]}) == 1e-3
    assert show_learning.stable({1e-2: [falling]}) == 0.0
    assert show_learning.stable({1e-2: [{**steady, "failed": "no gradient was finite"}]}) == 0.0


def test_axes_have_round_ticks() -> None:
    assert plot.Axis(title="x", low=1e-4, high=1e-2, log=True).ticks() == pytest.approx([1e-4, 3e-4, 1e-3, 3e-3, 1e-2])
    assert plot.Axis(title="x", low=1e-4, high=10, log=True).ticks() == pytest.approx([1e-4, 1e-3, 1e-2, 0.1, 1, 10])
    chart = plot.Chart("A < B", plot.Axis(title="x", low=0, high=1), plot.Axis(title="y", low=0, high=1))
    chart.line([(0, 0), (1, 2)], 0, "up")
    assert "A &lt; B" in chart.svg() and chart.svg().count("<path") == 2


def test_curves_of_runs_are_a_table_and_a_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "first"
    run.mkdir()
    evals = [{"step": 0, "success": 0.3, "seconds_run": 21.0}, {"step": 8, "success": 0.955, "seconds_run": 99.0}]
    rows = [{"step": step, "reward/correct": step / 8} for step in range(1, 9)]
    for name, of_it in (("evals.jsonl", evals), ("metrics.jsonl", rows)):
        (run / name).write_text("".join(json.dumps(row) + "\n" for row in of_it))
    (run / "config.toml").write_text("[run]\nseed = 7\n")
    curves.main([str(run), "--svg", str(tmp_path / "made.svg")])
    assert capsys.readouterr().out.splitlines()[2:] == ["| 7 | 30.0% (0), 95.5% (8) | 1.6 |"]
    drawn = ElementTree.fromstring((tmp_path / "made.svg").read_text())
    assert len(drawn.findall("{*}circle")) == 2 and "first, held out" in "".join(drawn.itertext())
