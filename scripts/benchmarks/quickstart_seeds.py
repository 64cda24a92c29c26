"""Tabulate the results of quickstart runs, one row a seed: ``quickstart_seeds.py runs/seed-*``."""

import json
import sys
import tomllib
from pathlib import Path


def row(run: Path) -> str:
    """Format seed, held-out success at each evaluation, and seconds from the run's beginning to the last one."""
    seed = tomllib.loads((run / "config.toml").read_text(encoding="utf-8"))["run"]["seed"]
    evals = [json.loads(line) for line in (run / "evals.jsonl").read_text(encoding="utf-8").splitlines()]
    curve = ", ".join(f"{one['success']:.1%} ({one['step']})" for one in evals)
    return f"| {seed} | {curve} | {evals[-1]['seconds_run']:.0f} |"


def main() -> None:
    """Print the table."""
    print("| `run.seed` | held-out success (after step) | seconds |\n|---|---|---|")
    print("\n".join(row(Path(run)) for run in sys.argv[1:]))


if __name__ == "__main__":
    main()
