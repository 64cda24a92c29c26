"""Do part H of PLAN.md: three arms train SmolLM2-135M-Instruct, each from the same warm start of a seed.

Several workers may run side by side, on one GPU or on several cores. A worker can be stopped at any moment; the same
command goes on. scripts/get_smollm2.sh makes the model.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from statistics import mean
from typing import Any

from arms import BASE, GRPO, OTB, POOLED, Arm, Unit, overrides
from learn import fingerprint, results_of, tidy
from rows import FOLDER, RowFile, commit_of
from schedule import area, best_rate
from verdict import NOT_RUN, Rows
from work import PLACE, claimed

from agentrl.config import load_config
from agentrl.eval.pages import table
from agentrl.runs.progress import Display
from agentrl.train.run import train

EXAMPLES = """examples:
  python experiments/pretrained.py                                            all that is left, on a CPU
  for worker in $(seq 9); do python experiments/pretrained.py --device cuda & done; wait      nine runs at a time
"""
PRESET = "smollm2-135m"
ARMS = (POOLED, OTB, GRPO)
RATES = (2e-5, 5e-5, 1e-4)
TUNING, TUNING_STEPS = 1000, 6
SEEDS, STEPS = (2000, 2001, 2002), 16
_SHARED = (
    "algo.loss", "algo.loss_options.aggregate", "optim.epochs", "optim.warmup", "optim.schedule", "optim.betas",
    "optim.weight_decay", "optim.max_grad_norm",
)  # fmt: skip
_OWN: Mapping[str, Any] = {**{name: BASE[name] for name in _SHARED}, "rollout.concurrency": 150, "save.every": 0}
"""What all runs share, over the preset: the tiny model's settings, without those of its size."""


def rate_of(arm: Arm, rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Choose the rate of the highest mean success, of rates within two points the lowest; None before all are tried."""
    tried = {row["unit"]["lr"]: [row] for row in rows if _is(row, arm, "rates")}
    return best_rate(tried, area) if len(tried) == len(RATES) else None


def _is(row: Mapping[str, Any], arm: Arm, purpose: str) -> bool:
    return (row["unit"]["arm"], row["unit"]["purpose"]) == (arm.name, purpose)


def units(rows: Sequence[Mapping[str, Any]]) -> Iterator[Unit]:
    """List the runs that are known, in order."""
    for lr in RATES:
        for arm in ARMS:
            yield arm.unit("H", "rates", lr=lr, seed=TUNING, steps=TUNING_STEPS)
    for seed in SEEDS:
        for arm in ARMS:
            if (lr := rate_of(arm, rows)) is not None:
                yield arm.unit("H", "results", lr=lr, seed=seed, steps=STEPS)


def run(unit: Unit, rows: RowFile, device: str) -> None:
    """Do a run, from the warm start that its seed has or gets, and write its row."""
    common = {**_OWN, "model.device": device, "run.seed": unit["seed"]}
    weights = PLACE / "H-warm" / str(unit["seed"]) / "warm" / "checkpoints" / "step-000000"
    while not (weights.parents[1] / "evals.jsonl").exists():  # written after the checkpoint
        with claimed(f"H-warm/{unit['seed']}") as mine:
            if mine is not None and not (weights.parents[1] / "evals.jsonl").exists():
                tidy(mine / "warm")
                _train({**common, "optim.steps": 0}, mine, "warm")
        time.sleep(1)
    with claimed(f"H-{unit['purpose']}-{unit['arm']}-{unit['lr']}-{unit['seed']}") as folder:
        rows.refresh()
        if folder is None or rows.has(unit):
            return
        tidy(folder / "run")
        more = {**common, **unit["settings"], "optim.lr": unit["lr"], "optim.steps": unit["steps"], "sft.steps": 0}
        _train({**more, "model.path": str(weights), "eval.every": 0}, folder, "run")
        rows.add(unit, **results_of(folder / "run"), warm=fingerprint(weights), device=device)
        tidy(folder / "run")


def _train(settings: Mapping[str, Any], folder: Any, name: str) -> None:
    own = {"run.dir": str(folder), "run.name": name}
    train(load_config(preset=PRESET, overrides=overrides({**settings, **own})), Display())


def results(rows: Rows) -> str:
    """Table 7: the chosen rate, mean training success of each seed, and held-out success after the last step."""
    lines: list[list[str]] = []
    for arm in ARMS:
        done = sorted(
            (row for row in rows.get("H", ()) if _is(row, arm, "results")), key=lambda row: row["unit"]["seed"]
        )
        if done:
            held_out = [row["held_out"][-1][2] for row in done]
            columns = [[area(row) for row in done], held_out]
            cells = [f"{mean(column):.1%} ({', '.join(f'{value:.1%}' for value in column)})" for column in columns]
            lines.append([arm.name, f"{done[0]['unit']['lr']:g}", *cells])
    return table(["arm", "rate", "training success", "held out"], lines) if lines else NOT_RUN


def main(argv: Sequence[str] | None = None) -> int:
    """Do the runs that have no row yet and that no other worker does."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", help="PyTorch's name of it (default: cpu)")
    parser.add_argument("--commit", help="of the code, where it lies without its history")
    arguments = parser.parse_args(argv)
    rows = RowFile(FOLDER / "H.jsonl", arguments.commit or commit_of())
    while True:
        rows.refresh()
        left = [unit for unit in units(rows.rows) if not rows.has(unit)]
        for unit in left:
            run(unit, rows, arguments.device)
        if not left and len(rows.rows) == len(ARMS) * (len(RATES) + len(SEEDS)):
            return 0
        time.sleep(2)


if __name__ == "__main__":
    sys.exit(main())
