"""Sampled-and-trained tokens per second of the whole training loop, against TRL's GRPOTrainer.

Both sides are loaded once, each in a process of its own, and then take turns: one rollout batch by agentrl, one by TRL,
and so on, so that whatever else the machine does meets both alike. Same model, prompts, number of episodes, lengths,
learning rate and updates per batch; the first batches are left out. Only sampled tokens count: no prompts, no pads.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean, median, quantiles
from typing import IO

from end_to_end_common import Step, Workload

HERE = Path(__file__).resolve().parent
CONSTRAINTS = HERE.parents[1] / "constraints.txt"
DEFAULT_VENV = Path.home() / ".cache" / "agentrl-benchmarks" / "trl"
SIDES = {"ours": HERE / "end_to_end_ours.py", "TRL": HERE / "end_to_end_trl.py"}
EXAMPLES = """examples:
  end_to_end.py                            both workloads against TRL (the first time TRL is installed: minutes)
  end_to_end.py --workload ragged          one of them
  end_to_end.py --quick --without-trl      does it still run? seconds
  end_to_end.py --threads 1                steadier where others use the machine as well
  end_to_end.py --steps 20 --json out.json more batches, and where to write the numbers
"""
Played = dict[str, list[Step]]


class Side:
    """One process that trains a rollout batch each time it is told to."""

    def __init__(self, name: str, python: Path, load: Workload, log: IO[str]) -> None:
        self.name = name
        self._log = log
        env = {**os.environ, "OMP_NUM_THREADS": str(load.threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "0"}
        self.process = subprocess.Popen(
            [python, SIDES[name], load.to_json()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=env,
        )
        self._answer()

    def step(self) -> Step:
        """Have it train one rollout batch."""
        assert self.process.stdin is not None
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        return Step(**json.loads(self._answer()))

    def close(self) -> None:
        """Have it stop."""
        self.process.communicate()

    def _answer(self) -> str:
        assert self.process.stdout is not None
        if line := self.process.stdout.readline():
            return line
        self.process.wait()
        self._log.seek(0)
        sys.exit(f"{self.name} failed:\n{self._log.read()[-4000:]}")


@contextmanager
def running(load: Workload, pythons: dict[str, Path]) -> Iterator[list[Side]]:
    """Both sides, loaded."""
    sides: list[Side] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for name, python in pythons.items():
                sides.append(Side(name, python, load, (Path(folder) / name).open("w+")))
            yield sides
        finally:
            for side in sides:
                side.close()


def play(load: Workload, pythons: dict[str, Path], *, warmup: int, steps: int) -> Played:
    """Rollout batches by turns; those of the warm-up are left out."""
    played: Played = {name: [] for name in pythons}
    with running(load, pythons) as sides:
        for number in range(warmup + steps):
            for side in sides:
                step = side.step()
                say(f"{load.name} {number + 1}/{warmup + steps} {side.name}: {step.rate:.0f} tokens/s")
                if number >= warmup:
                    played[side.name].append(step)
    return played


def workloads(args: argparse.Namespace, folder: Path) -> list[Workload]:
    """What is asked for on the command line; the model is made and saved in ``folder``."""
    stop_ids = save_model(folder)
    ragged = Workload(
        name="ragged",
        model=str(folder),
        tasks=2 if args.quick else 8,
        group_size=args.group_size,
        shortest=4 if args.quick else 16,
        longest=24 if args.quick else 256,
        stop_ids=stop_ids,
        updates=args.updates,
        lr=1e-6,
        threads=args.threads,
    )
    fixed = replace(ragged, name="fixed", longest=16 if args.quick else 128, stop_ids=())
    return [load for load in (ragged, fixed) if args.workload in (load.name, "both")]


def save_model(folder: Path) -> tuple[int, ...]:
    """Make the tiny model of 0.85M parameters; the tokens that end an episode in the ragged workload.

    The weights are random, so each of the 512 tokens is about equally likely: with six that stop, the number of tokens
    until then is about geometric, with a mean of 85.
    """
    from agentrl.tiny import make_model, make_tokenizer

    texts = (f"system\nuser\nassistant\ntool Write what comes to mind: {number * 7919}" for number in range(500))
    tokenizer = make_tokenizer([*texts, (HERE / "end_to_end_common.py").read_text(), Path(__file__).read_text()])
    model = make_model(tokenizer, hidden=128, layers=4, heads=4, seed=0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    say(f"model: {model.num_parameters() / 1e6:.2f}M parameters, vocabulary {len(tokenizer)}")
    return (int(tokenizer.eos_token_id), *range(len(tokenizer) - 5, len(tokenizer)))


def trl_python(folder: Path) -> Path:
    """The Python of the virtual environment that holds TRL; it is made when it is missing."""
    python = folder / "bin" / "python"
    if python.exists() and subprocess.run([python, "-c", "import trl"], capture_output=True).returncode == 0:
        return python
    say(f"installing TRL into {folder}")
    venv.create(folder, with_pip=True)
    packages = ["torch", "transformers", "trl", "datasets", "accelerate"]
    subprocess.run([python, "-m", "pip", "install", "--quiet", "-c", CONSTRAINTS, *packages], check=True)
    return python


def versions(python: Path) -> dict[str, str]:
    """The versions that matter, as ``python`` has them."""
    code = (
        "import importlib.metadata as m, json\n"
        "names = {d.metadata['Name'].lower() for d in m.distributions()}\n"
        "print(json.dumps({n: m.version(n) for n in ('torch', 'transformers', 'trl', 'accelerate') if n in names}))"
    )
    return json.loads(subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout)


def rate_table(results: dict[str, Played]) -> str:
    """Tokens per second of both sides, of wall time and of processor time."""
    lines = [
        "| workload | side | batches | tokens/s (median) | lowest | highest | tokens/s of processor time |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, played in results.items():
        for side, steps in played.items():
            rates = [step.rate for step in steps]
            cpu = median(step.cpu_rate for step in steps)
            lines.append(
                f"| {name} | {side} | {len(steps)} | {median(rates):.0f} | {min(rates):.0f} | {max(rates):.0f} "
                f"| {cpu:.0f} |"
            )
    return "\n".join(lines)


def ratio_table(results: dict[str, Played]) -> str:
    """Our rate over TRL's, as :func:`ratios` has it."""
    lines = [
        "| workload | ours / TRL | paired | lowest pair | highest pair | processor time |",
        "|---|---|---|---|---|---|",
    ]
    for name, played in results.items():
        if len(played) == 2:
            lines.append(f"| {name} | " + " | ".join(f"{value:.2f}" for value in ratios(played).values()) + " |")
    return "\n".join(lines)


def ratios(played: Played) -> dict[str, float]:
    """Our rate over TRL's: of medians, and of each batch of ours to the one that TRL did next."""
    ours, theirs = played["ours"], played["TRL"]
    pairs = [mine.rate / other.rate for mine, other in zip(ours, theirs, strict=True)]
    return {
        "median": median(step.rate for step in ours) / median(step.rate for step in theirs),
        "paired": median(pairs),
        "lowest": min(pairs),
        "highest": max(pairs),
        "cpu": median(step.cpu_rate for step in ours) / median(step.cpu_rate for step in theirs),
    }


def length_table(results: dict[str, Played]) -> str:
    """How long the episodes were: the comparison is fair only where both sides drew from one distribution."""
    lines = [
        "| workload | side | prompt tokens | episodes | mean | shortest | 10% | 50% | 90% | longest |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, played in results.items():
        for side, steps in played.items():
            lengths = [length for step in steps for length in step.lengths]
            deciles = quantiles(lengths, n=10)
            lines.append(
                f"| {name} | {side} | {steps[0].prompt_tokens} | {len(lengths)} | {mean(lengths):.1f} | {min(lengths)} "
                f"| {deciles[0]:.0f} | {median(lengths):.0f} | {deciles[8]:.0f} | {max(lengths)} |"
            )
    return "\n".join(lines)


def phase_table(results: dict[str, Played]) -> str:
    """Where each side's time goes, in µs per sampled token."""
    lines = ["| workload | side | phase | µs/token (median) | share of the step |", "|---|---|---|---|---|"]
    for name, played in results.items():
        for side, steps in played.items():
            for phase in steps[0].phases:
                cost = median(step.phases[phase] / sum(step.lengths) for step in steps) * 1e6
                share = median(step.phases[phase] / step.seconds for step in steps)
                lines.append(f"| {name} | {side} | {phase} | {cost:.1f} | {share:.0%} |")
    return "\n".join(lines)


def say(text: str) -> None:
    """Progress goes to stderr: stdout holds the tables alone."""
    print(text, file=sys.stderr, flush=True)


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", choices=["ragged", "fixed", "both"], default="both")
    parser.add_argument("--steps", type=int, help="measured rollout batches per side (default 8; quick 2)")
    parser.add_argument("--warmup", type=int, default=1, help="batches before those, left out (default 1)")
    parser.add_argument("--group-size", type=int, default=8, help="episodes per prompt (default 8)")
    parser.add_argument("--updates", type=int, default=2, help="optimizer updates per rollout batch (default 2)")
    parser.add_argument(
        "--threads", type=int, default=len(os.sched_getaffinity(0)), help="of PyTorch, on both sides (default: all)"
    )
    parser.add_argument("--quick", action="store_true", help="few and short episodes: a test that all runs, no timing")
    parser.add_argument("--without-trl", action="store_true", help="our side alone; nothing is installed")
    parser.add_argument("--venv", type=Path, default=DEFAULT_VENV, help=f"where TRL lives (default {DEFAULT_VENV})")
    parser.add_argument("--json", type=Path, default=Path("runs/end_to_end.json"), help="where the numbers go")
    args = parser.parse_args(arguments)
    args.steps = args.steps or (2 if args.quick else 8)
    return args


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    args = parsed(arguments)
    pythons = {"ours": Path(sys.executable)}
    if not args.without_trl:
        pythons["TRL"] = trl_python(args.venv)
    with tempfile.TemporaryDirectory() as folder:
        loads = workloads(args, Path(folder))
        results = {load.name: play(load, pythons, warmup=args.warmup, steps=args.steps) for load in loads}
    print("\n\n".join(table(results) for table in (rate_table, ratio_table, length_table, phase_table)))
    args.json.parent.mkdir(parents=True, exist_ok=True)
    report = {
        "machine": {"cpu": platform.processor(), "cores": os.cpu_count(), "threads": args.threads},
        "versions": {name: versions(python) for name, python in pythons.items()},
        "workloads": [asdict(load) for load in loads],
        "ratios": {name: ratios(played) for name, played in results.items() if len(played) == 2},
        "steps": {n: {side: [asdict(s) for s in steps] for side, steps in p.items()} for n, p in results.items()},
    }
    args.json.write_text(json.dumps(report), encoding="utf-8")
    say(f"written: {args.json}")


if __name__ == "__main__":
    main()
