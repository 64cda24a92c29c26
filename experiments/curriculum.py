"""Compare plans of tasks on Countdown in five levels: tokens to a held-out success, for each arm and five seeds.

A run costs some four minutes of a core. The worker can be stopped at any moment; the same command goes on.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any

from arms import PRESET, Arm, Setting, Unit, overrides
from learn import learn
from rows import FOLDER, RowFile, commit_of, read_rows
from work import PLACE, Limits, claimed, tidy

from agentrl.config import load_config
from agentrl.eval.pages import table as format_table
from agentrl.runs.progress import Display
from agentrl.train.run import train

EXAMPLES = """examples:
  nice -n 19 python experiments/curriculum.py              all that is left
  python experiments/curriculum.py --units 1               a single run
  python experiments/curriculum.py --table                 what came out so far
"""
SEEDS = range(5)
TARGETS = (0.18, 0.22, 0.26)
WINDOW = 3
"""Evaluations whose mean counts, since one of 500 tasks has a standard error of 2 points."""
_TASKS: Mapping[str, Any] = {
    "run.threads": 1,
    "env.id": "countdown:agentrl/SmallCountdown-v0",
    "env.args.level": [1, 2, 3, 4, 5],
    "env.args.max_turns": 1,
    "env.args.tool": False,
    "rollout.turn_tokens": 48,
    "rollout.episode_tokens": 128,
    "eval.tasks": 500,
}
WARM: Mapping[str, Any] = {**_TASKS, "sft.steps": 600, "sft.tasks": 8192, "optim.steps": 0}
"""The warm start, over the preset."""
RUN: Mapping[str, Any] = {
    **_TASKS,
    "algo.advantage": "otb",
    "algo.loss": "ctpo",
    "optim.minibatches": 4,
    "optim.epochs": 2,
    "optim.max_sampled_tokens": 150_000,
    "eval.every": 10,
}
"""Each run, over those of ``arms.BASE``: it ends by tokens, so that arms can be compared."""
PLANS: Mapping[str, Mapping[str, Setting]] = {
    "uniform": {},
    "success": {"rollout.plan.name": "success"},
    "refills": {"rollout.plan.refills": 2},
}


def units(seed: int) -> Iterator[Unit]:
    """List the runs of a seed."""
    for name, plan in PLANS.items():
        arm = Arm(name=name, settings={**RUN, **plan})
        yield arm.unit("curriculum", "results", lr=3e-4, seed=seed, steps=1000)


def work(seed: int, folder: Path, rows: RowFile, commit: str, limits: Limits, display: Display) -> None:
    """Do the runs of a seed that have no row, all from the same warm start."""
    weights = folder / "warm" / "checkpoints" / "step-000000"
    for unit in units(seed):
        if rows.has(unit) or limits.reached:
            continue
        if not (folder / "warm" / "evals.jsonl").exists():  # written after the checkpoint
            tidy(folder / "warm")
            own = {"run.dir": str(folder), "run.name": "warm", "run.seed": seed}
            train(load_config(preset=PRESET, overrides=overrides({**WARM, **own})), display)
        of_run = folder / unit["arm"]
        of_run.mkdir(exist_ok=True)
        rows.add(unit, **learn(unit, of_run, weights, commit, display))
        limits.done += 1
    if all(map(rows.has, units(seed))):
        tidy(folder)


def tokens_to(row: Mapping[str, Any], target: float) -> float | None:
    """Interpolate the tokens until the mean of the last ``WINDOW`` evaluations is ``target``; None if it never is."""
    spent = [0, *accumulate(row["tokens"])]
    held_out = [(spent[step], success) for step, _, success in row["held_out"]]
    windows = [held_out[max(0, end - WINDOW) : end] for end in range(1, len(held_out) + 1)]
    means = [(fmean(tokens for tokens, _ in part), fmean(success for _, success in part)) for part in windows]
    for (before, low), (after, high) in pairwise(means):
        if low < target <= high:
            return before + (after - before) * (target - low) / (high - low)
    return None


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format a line for each arm: tokens to each target, their ratio to those of uniform, and where the runs end."""
    runs = {name: {row["unit"]["seed"]: row for row in rows if row["unit"]["arm"] == name} for name in PLANS}
    lines = list[list[str]]()
    for name, by_seed in runs.items():
        cells = list[str]()
        for target in TARGETS:
            needed = {seed: tokens for seed, row in by_seed.items() if (tokens := tokens_to(row, target))}
            others = {seed: tokens for seed, row in runs["uniform"].items() if (tokens := tokens_to(row, target))}
            ratios = sorted(needed[seed] / others[seed] for seed in needed.keys() & others.keys())
            cell = f"{fmean(needed.values()) / 1000:.0f}k" if needed else ""
            cell += f" ({len(needed)} of {len(by_seed)})" if len(needed) < len(by_seed) else ""
            if ratios and name != "uniform":
                cell += f"; {geometric_mean(ratios):.2f} times ({ratios[0]:.2f} to {ratios[-1]:.2f})"
            cells.append(cell)
        ends = [fmean(success for *_, success in row["held_out"][-WINDOW:]) for row in by_seed.values()]
        cells.append(f"{fmean(ends):.1%} ({min(ends):.1%} to {max(ends):.1%})" if ends else "")
        lines.append([f"`{name}`", str(len(by_seed)), *cells])
    return format_table(["plan", "seeds", *(f"to {target:.0%}" for target in TARGETS), "at the end"], lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Do the runs that have no row yet, or show what came out."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--units", type=int, default=0, help="stop after so many runs")
    parser.add_argument("--hours", type=float, default=0, help="begin no run after so many hours")
    parser.add_argument("--table", action="store_true", help="show the results, and do nothing")
    arguments = parser.parse_args(argv)
    path = FOLDER / "curriculum.jsonl"
    if arguments.table:
        print(table(read_rows(path)))
        return 0
    commit = commit_of()
    rows, limits, display = RowFile(path, commit), Limits(arguments.units, arguments.hours, None), Display()
    for seed in SEEDS:
        with claimed(f"curriculum-{seed}", PLACE) as folder:
            if folder is not None:
                rows.refresh()
                work(seed, folder, rows, commit, limits, display)
    return 0


if __name__ == "__main__":
    sys.exit(main())
