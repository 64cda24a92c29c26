"""Make the sets of weights of part B, play with them, and measure their gradients.

A set is a warm start of the tiny model, of so many updates that about 5, 20, 50 or 80% of the tasks succeed. It plays
24 training tasks, 64 episodes each; ``gradients.py`` measures the rest. A set costs some ten minutes of a core. Ctrl-C
or a kill leaves the finished rows; the set is then played anew, which gives the same episodes.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import gradients
import torch
from rows import FOLDER, RowFile, commit_of
from transformers import AutoModelForCausalLM
from work import PLACE, Limits, claimed, tidy

from agentrl.batch import Batch, as_batch
from agentrl.config import load_config
from agentrl.eval.command import run as evaluate
from agentrl.eval.request import EvalRequest
from agentrl.runs.progress import Display
from agentrl.train.run import train

EXAMPLES = """examples:
  python experiments/sets.py --list               what is done
  python experiments/sets.py --units 1            the next set
  python experiments/sets.py --only 20-seed3000   this set
  python experiments/sets.py --only pretrained-seed3000 --device cuda
  python experiments/sets.py --hours 2 --pause-file pause
"""
UPDATES = {5: 118, 20: 155, 50: 300, 80: 800}
"""Most updates of the warm start, by the success in percent that they aim at; a row tells what it is.

The longest is the quickstart's own, which ends once an oracle episode is likely enough."""
SEEDS = (3000, 3001, 3002)
SIZES = (1, 2, 4, 8, 16, 32)
DRAWS = 40
ATTEMPTS = 64
"""Episodes of a task."""
LEVELS = tuple(f"level{level}=agentrl/Arithmetic-v0?level={level}&max_turns=4" for level in range(1, 6))
"""The mixture of levels 1 to 5, which the weights of 80% play."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Set:
    """Weights, and what they play."""

    aim: int
    """Success in percent that the warm start aims at."""
    seed: int
    """Of the warm start, the tasks and the sampling."""
    mixed: bool = False
    """Whether tasks of five levels are played."""
    pretrained: bool = False
    """Whether SmolLM2 plays, after the warm start of its preset."""

    @property
    def name(self) -> str:
        """The name in the rows."""
        kind = "mixed" if self.mixed else "pretrained" if self.pretrained else self.aim
        return f"{kind}-seed{self.seed}"

    @property
    def tasks(self) -> int:
        """Tasks of each environment."""
        return 5 if self.mixed else 24


def sets() -> Iterator[Set]:
    """All sets, seed by seed."""
    for seed in SEEDS:
        yield from (Set(aim=aim, seed=seed) for aim in (20, 80, 50, 5))
        if seed == SEEDS[0]:
            yield Set(aim=80, seed=seed, mixed=True)
            yield Set(aim=20, seed=seed, pretrained=True)


def done(wanted: Set, rows: RowFile) -> bool:
    """Return True if a set has all its rows."""
    return all(rows.has(unit) for unit in gradients.units(wanted.name, SIZES, DRAWS))


def play(
    wanted: Set, folder: Path, display: Display, attempts: int = ATTEMPTS, device: str = "cpu"
) -> tuple[Path, Batch]:
    """Train and play a set in a folder; return its weights and its episodes, tasks side by side."""
    base = ["run.threads=1", f"run.dir={str(folder)!r}", 'run.name="warm"', f"run.seed={wanted.seed}", "eval.tasks=1"]
    base += ["optim.steps=0", f"model.device={device!r}"]
    base += ["rollout.concurrency=256"] if wanted.pretrained else [f"sft.steps={UPDATES[wanted.aim]}"]
    run = train(load_config(preset="smollm2-135m" if wanted.pretrained else "quickstart", overrides=base), display)
    weights = run / "checkpoints" / "step-000000"
    request = EvalRequest(
        path=str(weights),
        overrides=("eval.split='train'", f"eval.tasks={wanted.tasks}", f"eval.attempts={attempts}"),
        envs=LEVELS if wanted.mixed else (),
        seed=wanted.seed,
        out=folder / "played",
    )
    evaluate(request, display)
    return weights, as_batch(gradients.groups_of(folder / "played", attempts))


def measure(wanted: Set, rows: RowFile, folder: Path, display: Display, device: str) -> None:
    """Do the units of a set that have no row."""
    tidy(folder / "warm")
    tidy(folder / "played")
    weights, batch = play(wanted, folder, display, device=device)
    model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32).to(device)
    display.say(f"{wanted.name}: {len(batch)} episodes, {len(batch.sampled)} sampled tokens")
    recorded = gradients.record(model.eval(), batch, temperature=1.0, width=4096)
    gradients.run(recorded, wanted.name, SIZES, DRAWS, rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the sets that have no rows yet."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="SET", help="one set, by its name in --list")
    parser.add_argument("--units", type=int, default=0, help="stop after so many sets")
    parser.add_argument("--hours", type=float, default=0, help="begin no set after so many hours")
    parser.add_argument("--pause-file", type=Path, help="wait before a set while this file is there")
    parser.add_argument("--list", action="store_true", help="show what is done, and do nothing")
    parser.add_argument("--device", default="cpu", help="PyTorch's name of it (default: cpu)")
    parser.add_argument("--commit", help="of the code, where it lies without its history")
    parser.add_argument("--out", type=Path, default=FOLDER / "B.jsonl", help="the file of rows")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows = RowFile(arguments.out, arguments.commit or ("" if arguments.list else commit_of()))
    if arguments.list:
        print("\n".join(f"{wanted.name:18} {'done' if done(wanted, rows) else 'to do'}" for wanted in sets()))
        return 0
    limits, display = Limits(arguments.units, arguments.hours, arguments.pause_file), Display()
    for wanted in sets():
        # The pretrained model takes hours without a GPU.
        asked_for = arguments.only == wanted.name or not (arguments.only or wanted.pretrained)
        if not asked_for or limits.reached:
            continue
        limits.wait()
        with claimed(f"B-{wanted.name}", PLACE) as folder:
            rows.refresh()
            if folder is None or done(wanted, rows):
                continue
            measure(wanted, rows, folder, display, arguments.device)
            limits.done += 1
            tidy(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
