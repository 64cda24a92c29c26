"""Draw the curves of runs, and tabulate their evaluations: of the real model's page, ``docs/real_model.md``."""

import argparse
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from plot import Axis, Chart

from agentrl.runs.folder import read_jsonl

EXAMPLES = """examples:
  python experiments/real.py runs/seed-* --svg docs/real_model.svg
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
    """Draw the success of each step's episodes as a line, and of held-out tasks as points; return SVG."""
    rows: list[list[dict[str, Any]]] = [read_jsonl(run / "metrics.jsonl") for run in runs]
    last = max(row["step"] for of_run in rows for row in of_run)
    chart = Chart(title, Axis(title="step", low=0, high=last), Axis(title="success", low=0, high=1))
    for number, (run, of_run) in enumerate(zip(runs, rows, strict=True)):
        chart.line([(row["step"], row["reward/correct"]) for row in of_run], number, f"{run.name}, training")
        evals = read_jsonl(run / "evals.jsonl")
        points = [(row["step"], row["success"], f"{run.name}: {row['success']:.1%}") for row in evals]
        chart.dots(points, number, f"{run.name}, held out")
    return chart.svg()


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
