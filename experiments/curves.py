"""Draw the curves of runs, and tabulate their evaluations: of the real model's page, ``docs/real_model.md``."""

import argparse
import tomllib
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

from plot import Axis, Chart

from agentrl.runs.folder import read_jsonl

EXAMPLES = """examples:
  python experiments/curves.py runs/seed-* --svg docs/real_model.svg
"""


def table(runs: Sequence[Path]) -> str:
    """Format a row for each run: seed, held-out success by step, minutes."""
    rows = ["| `run.seed` | held-out success (after step) | minutes |", "|---|---|---|"]
    for run in runs:
        seed = tomllib.loads((run / "config.toml").read_text(encoding="utf-8"))["run"]["seed"]
        evals = read_jsonl(run / "evals.jsonl")
        curve = ", ".join(f"{row['success']:.1%} ({row['step']})" for row in evals)
        rows.append(f"| {seed} | {curve} | {evals[-1]['seconds_run'] / 60:.1f} |")
    return "\n".join(rows)


def figure(runs: Sequence[Path], title: str) -> str:
    """Draw the success of each step's episodes as a line, and of held-out tasks as points; return SVG.

    More than three runs are one line, their mean, in a band from the lowest to the highest.
    """
    rows: list[list[dict[str, Any]]] = [read_jsonl(run / "metrics.jsonl") for run in runs]
    evals = [read_jsonl(run / "evals.jsonl") for run in runs]
    last = max(row["step"] for of_run in rows for row in of_run)
    chart = Chart(title, Axis(title="step", low=0, high=last), Axis(title="success", low=0, high=1))
    if len(runs) > 3:
        training = _by_step(rows, "reward/correct")
        chart.band([(step, min(values), max(values)) for step, values in training.items()], 0)
        chart.line([(step, fmean(values)) for step, values in training.items()], 0, f"training, {len(runs)} runs")
        held_out = _by_step(evals, "success").items()
        chart.dots([(step, value, f"{value:.1%}") for step, values in held_out for value in values], 1, "held out")
        return chart.svg()
    for number, (run, of_run, of_it) in enumerate(zip(runs, rows, evals, strict=True)):
        chart.line([(row["step"], row["reward/correct"]) for row in of_run], number, f"{run.name}, training")
        points = [(row["step"], row["success"], f"{run.name}: {row['success']:.1%}") for row in of_it]
        chart.dots(points, number, f"{run.name}, held out")
    return chart.svg()


def _by_step(runs: Sequence[Sequence[dict[str, Any]]], name: str) -> dict[int, list[float]]:
    values: dict[int, list[float]] = {}
    for row in chain.from_iterable(runs):
        values.setdefault(row["step"], []).append(row[name])
    return values


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table, and write the figure."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+", help="run folders")
    parser.add_argument("--svg", type=Path, help="the figure to write")
    parser.add_argument("--title", default="Success, in training and held out", help="of the figure")
    arguments = parser.parse_args(argv)
    if arguments.svg:
        arguments.svg.write_text(figure(arguments.runs, arguments.title), encoding="utf-8")
    print(table(arguments.runs))


if __name__ == "__main__":
    main()
