"""Do part G of PLAN.md: three losses and two more advantages on episodes of some 600 sampled tokens in ten turns.

A run takes some ten minutes of a core. Several workers may run side by side; one can be stopped at any moment, and the
same command goes on.
"""

import argparse
import itertools
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from arms import BASE, CARRY, LOSSES, POOLED, WHOLE, Arm, Unit, overrides
from contrast import reached
from learn import fingerprint, results_of
from plot import Axis, Chart
from rows import FOLDER, ROOT, RowFile, commit_of, digits
from schedule import area, best_rate, success
from verdict import NOT_RUN, Rows, Verdict
from work import Limits, claimed, tidy

from agentrl.config import load_config
from agentrl.errors import InvariantError
from agentrl.eval.pages import table
from agentrl.eval.paired import bootstrap
from agentrl.runs.folder import read_jsonl
from agentrl.runs.progress import Display
from agentrl.train.run import train

EXAMPLES = """examples:
  python experiments/long.py --list                 what is done and what is left
  nice -n 19 python experiments/long.py             all that is left
  python experiments/long.py --hours 2 --pause-file pause
"""
CONFIG = ROOT / "experiments" / "relay.toml"
ARMS = tuple(
    Arm(name=loss, settings={**POOLED.settings, **LOSSES[loss], "optim.minibatches": 4})
    for loss in ("ctpo", "ctpo power 0", "ppo_clip")
)
OTHERS = tuple(
    Arm(name=f"{arm.name}, ctpo", settings={**arm.settings, **LOSSES["ctpo"], "optim.minibatches": 4})
    for arm in (WHOLE, CARRY)
)
"""Arms of G4, with the rate of the first."""
COMPARED = (ARMS[0], OTHERS[0])
"""The two that G4 is about: one baseline for each position, and one for a whole episode."""
DEFAULTS = {"algo.loss_options.aggregate": "seq_mean_token_mean", "optim.max_grad_norm": 1.0}
AS_SHIPPED = tuple(
    Arm(name=f"{arm.name}, defaults", settings={**ARMS[0].settings, **arm.settings, **DEFAULTS})
    for arm in (POOLED, WHOLE)
)
"""Arms of G5: the library's aggregation and its limit of the norm."""
RATES = (1e-4, 3e-4, 1e-3)
TUNING, TUNING_STEPS = 1000, 8
SEEDS, STEPS = (2000, 2001, 2002), 25
FURTHER_SEEDS = (2003, 2004, 2005)
"""With which G4 compares two advantages only; they count for nothing else."""
SHIPPED_SEEDS = (2006, 2007, 2008, 2009, 2010, 2011)
"""Those of G5, which decides the default advantage."""
FIRST = 8
"""The smallest position that G1 and G2 speak of."""
TARGETS = (0.5, 0.7, 0.9)
_SHARED = (
    "run.threads", "algo.loss_options.aggregate", "optim.epochs", "optim.warmup", "optim.schedule", "optim.betas",
    "optim.weight_decay", "optim.max_grad_norm",
)  # fmt: skip
_BY_POSITION = ("S_std", "clip_fraction")
Row = Mapping[str, Any]


def _is(row: Row, arm: str, purpose: str) -> bool:
    return (row["unit"]["arm"], row["unit"]["purpose"]) == (arm, purpose)


def units(rows: Sequence[Row]) -> Iterator[Unit]:
    """List the runs that are known, in order; those for results once an arm's rates were tried."""
    for lr in RATES:
        for arm in ARMS:
            yield arm.unit("G", "rates", lr=lr, seed=TUNING, steps=TUNING_STEPS)
    rates = {arm.name: _rate(rows, arm) for arm in ARMS}
    rates |= {arm.name: rates[ARMS[0].name] for arm in (*OTHERS, *AS_SHIPPED)}
    for purpose, arms, seeds in (
        ("results", ARMS, SEEDS),
        ("results", OTHERS, SEEDS),
        ("further", COMPARED, FURTHER_SEEDS),
        ("defaults", AS_SHIPPED, SHIPPED_SEEDS),
    ):
        for seed, arm in itertools.product(seeds, arms):
            if (lr := rates[arm.name]) is not None:
                yield arm.unit("G", purpose, lr=lr, seed=seed, steps=STEPS)


def _rate(rows: Sequence[Row], arm: Arm) -> float | None:
    """Choose the rate of an arm; None before all were tried."""
    tried = {row["unit"]["lr"]: [row] for row in rows if _is(row, arm.name, "rates")}
    return best_rate(tried, success) if len(tried) == len(RATES) else None


def run(unit: Unit, rows: RowFile) -> None:
    """Do a run from its seed's warm start, which the first one makes, and write its row."""
    with claimed(f"G-{unit['seed']}") as folder:
        rows.refresh()
        if folder is None or rows.has(unit):
            return
        weights = folder / "warm" / "checkpoints" / "step-000000"
        if not (folder / "warm" / "evals.jsonl").exists():  # written after the checkpoint
            tidy(folder / "warm")
            _train({"optim.steps": 0}, unit["seed"], folder, "warm")
        tidy(folder / "run")
        own = {**{name: BASE[name] for name in _SHARED}, **unit["settings"], "model.path": str(weights)}
        own |= {"sft.steps": 0, "optim.lr": unit["lr"], "optim.steps": unit["steps"], "eval.every": 0, "save.every": 0}
        failed: dict[str, str] = {}
        try:
            _train(own, unit["seed"], folder, "run")
        except InvariantError as error:
            # Weights that a high rate has ruined are a result; anything else is a defect, which ends the worker.
            if "was finite" not in str(error):
                raise
            failed = {"failed": str(error)}
        of_run = {**results_of(folder / "run"), **by_position(read_jsonl(folder / "run" / "metrics.jsonl"))}
        rows.add(unit, **of_run, **failed, warm=fingerprint(weights))
        tidy(folder / "run")


def by_position(steps: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Average the spread of S_t and the clipped share over all steps, by the smallest t of each bin."""
    return {
        name: {
            key.removeprefix(f"{name}_t"): digits(fmean(step[key] for step in steps if key in step), 4)
            for key in steps[0]
            if key.startswith(f"{name}_t")
        }
        for name in _BY_POSITION
        if steps
    }


def _train(settings: Mapping[str, Any], seed: int, folder: Path, name: str) -> None:
    own = {"run.dir": str(folder), "run.name": name, "run.seed": seed}
    train(load_config(path=CONFIG, overrides=overrides({**settings, **own})), Display())


def _runs(rows: Rows, arms: Sequence[Arm] = ARMS) -> dict[str, list[Row]]:
    """Sort the runs for results by arm; arms without one are left out."""
    of = {arm.name: list[Row](row for row in rows.get("G", ()) if _is(row, arm.name, "results")) for arm in arms}
    return {arm: runs for arm, runs in of.items() if runs}


def _positions(runs: Sequence[Row], name: str) -> list[tuple[int, float]]:
    """Average a figure by position over runs."""
    edges = sorted({int(edge) for row in runs for edge in row[name]})
    return [(edge, fmean(row[name][str(edge)] for row in runs if str(edge) in row[name])) for edge in edges]


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Compute the least-squares slope of log y against log x."""
    xs, ys = ([math.log(value) for value in axis] for axis in zip(*points, strict=True))
    middle = fmean(xs)
    return math.fsum((x - middle) * y for x, y in zip(xs, ys, strict=True)) / math.fsum((x - middle) ** 2 for x in xs)


def spread(rows: Rows) -> str:
    """Figure 7: the spread of S_t by position, and a line that grows as √t."""
    return _drawn(rows, "S_std", "spread of S_t (nats)", root=True)


def clipped(rows: Rows) -> str:
    """Figure 8: the clipped share by position."""
    return _drawn(rows, "clip_fraction", "share of tokens clipped", root=False)


def _drawn(rows: Rows, name: str, title: str, *, root: bool) -> str:
    lines = {arm: _positions(runs, name) for arm, runs in _runs(rows).items()}
    values = [value for points in lines.values() for _, value in points if value > 0]
    if not values:
        return ""
    x = Axis(
        title="position t among sampled tokens", low=1, high=max(t for of in lines.values() for t, _ in of), log=True
    )
    y = Axis(title=title, low=min(values) / 1.2, high=max(values) * 1.2, log=True)
    chart = Chart("Long episodes, mean of all steps", x, y)
    for number, (arm, points) in enumerate(lines.items()):
        chart.line(points, number, arm)
        chart.dots([(t, value, f"{arm} from t = {t}: {value:.3g}") for t, value in points], number)
    if root:
        at, level = next((t, value) for t, value in next(iter(lines.values())) if t == FIRST)
        chart.line([(t, level * (t / at) ** 0.5) for t in (1, x.high)], len(lines), "grows as √t")
    return chart.svg()


def results(rows: Rows) -> str:
    """Table 8: tokens to a success by arm, success over all steps and held out at the end, each seed in brackets."""
    lines: list[list[str]] = []
    for arm, runs in _runs(rows, (*ARMS, *OTHERS)).items():
        cells = list[str]()
        for target in TARGETS:
            needed = [reached(dict(row), target) for row in runs]
            never = sum(run.censored for run in needed)
            middle = f"{'> ' * bool(never)}{fmean(run.tokens for run in needed) / 1000:.0f}k"
            cells.append(middle + (f" ({never} never)" if never else ""))
        held = [row["held_out"][-1][2] for row in runs if row["held_out"]]
        for shares in ([area(row) for row in runs], held):
            cells.append(f"{fmean(shares):.0%} ({', '.join(f'{share:.0%}' for share in shares)})" if shares else "")
        lines.append([arm, f"{runs[0]['unit']['lr']:g}", str(len(runs)), *cells])
    head = [
        "arm",
        "rate",
        "seeds",
        *(f"tokens to {target:.0%}" for target in TARGETS),
        "all steps",
        "held out at the end",
    ]
    return table(head, lines) if lines else NOT_RUN


def verdicts(rows: Rows) -> list[Verdict]:
    """Judge G1, G2 and G5, and describe G4."""
    growth, even = "the spread of S_t grows as √t: slope .4 to .6", "power ½ clips late tokens as often as early ones"
    uneven = "power 0 clips late tokens at least 3 times as often"
    runs = _runs(rows)
    if len(runs) < len(ARMS):
        return [Verdict("G1", growth), Verdict("G2", even), Verdict("G2", uneven), *_whole_episodes(rows)]
    slopes = {arm: slope([point for point in _positions(of, "S_std") if point[0] >= FIRST]) for arm, of in runs.items()}
    grown = ", ".join(f"{arm} {value:.2f}" for arm, value in slopes.items())
    ratios = {arm: _late(runs[arm]) for arm in ("ctpo", "ctpo power 0")}
    return [
        Verdict("G1", growth, all(0.4 <= value <= 0.6 for value in slopes.values()), grown),
        Verdict("G2", even, 0.5 <= ratios["ctpo"] <= 2, f"{ratios['ctpo']:.2f} times"),
        Verdict("G2", uneven, ratios["ctpo power 0"] >= 3, f"{ratios['ctpo power 0']:.2f} times"),
        *_whole_episodes(rows),
    ]


def _whole_episodes(rows: Rows) -> list[Verdict]:
    """Describe G4 and judge G5: success with one baseline for a whole episode, less that with one for each position."""
    more = "more success over all steps than with `otb_pooled`"
    described = f"with one baseline for a whole episode `ctpo` has {more}"
    judged = f"with the library's other defaults, one baseline for a whole episode has {more}"
    return [
        Verdict("G4", described, figures=_apart(rows, *COMPARED)[1], described=True),
        Verdict("G5", judged, *_apart(rows, *AS_SHIPPED)),
    ]


def _apart(rows: Rows, by_position: Arm, by_episode: Arm) -> tuple[bool | None, str]:
    """Compare the success over all steps of two arms, seed by seed.

    Returns:
        Whether the interval of the difference lies above 0, None without all pairs of G5; and the figures in words.
    """
    shares: dict[str, dict[int, float]] = {by_position.name: {}, by_episode.name: {}}
    for row in rows.get("G", ()):
        unit = row["unit"]
        if unit["arm"] in shares and unit["purpose"] != "rates":
            shares[unit["arm"]][unit["seed"]] = area(row)
    positions, episodes = shares.values()
    apart = [100 * (episodes[seed] - positions[seed]) for seed in sorted(positions.keys() & episodes.keys())]
    if not apart:
        return None, ""
    low, high = bootstrap(apart)
    each = ", ".join(f"{value:+.0f}" for value in apart)
    words = f"{fmean(apart):+.1f} points ({low:+.1f} to {high:+.1f}); by seed {each}"
    return low > 0 if len(apart) == len(SHIPPED_SEEDS) else None, words


def _late(runs: Sequence[Row]) -> float:
    """Compute the clipped share of the longest positions over that of positions 8 to 15."""
    shares = dict(_positions(runs, "clip_fraction"))
    return shares[max(shares)] / max(shares[FIRST], 1e-9)


def listed(rows: RowFile) -> str:
    """List the runs that are known."""
    planned = list(units(rows.rows))
    words = [f"{unit['purpose']} of {unit['arm']}, rate {unit['lr']:g}, seed {unit['seed']}" for unit in planned]
    return "\n".join(
        f"{'done ' if rows.has(unit) else 'to do'}  {text}" for unit, text in zip(planned, words, strict=True)
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Do the runs that have no row yet and that no other worker does."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--units", type=int, default=0, help="stop after so many runs")
    parser.add_argument("--hours", type=float, default=0, help="begin no run after so many hours")
    parser.add_argument("--pause-file", type=Path, help="wait before a run while this file is there")
    parser.add_argument("--list", action="store_true", help="show what is done and what is left, and do nothing")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows = RowFile(FOLDER / "G.jsonl", "" if arguments.list else commit_of())
    if arguments.list:
        print(listed(rows))
        return 0
    limits = Limits(arguments.units, arguments.hours, arguments.pause_file)
    for _ in ("rates", "results"):  # the second pass knows the rates
        for unit in list(units(rows.rows)):
            if not limits.reached and not rows.has(unit):
                limits.wait()
                run(unit, rows)
                limits.done += 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
