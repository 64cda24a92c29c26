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
from long import CONFIG
from recorded_gradients import Recorded
from rows import FOLDER, RowFile, commit_of
from torch import Tensor
from transformers import AutoModelForCausalLM
from work import PLACE, Limits, claimed, tidy

from agentrl.algos.rows import Rows
from agentrl.batch import as_batch
from agentrl.config import load_config
from agentrl.eval.command import run as evaluate
from agentrl.eval.request import EvalRequest
from agentrl.runs.progress import Display
from agentrl.train.run import train
from agentrl.types import Group

EXAMPLES = """examples:
  python experiments/sets.py --list               what is done
  python experiments/sets.py --units 1            the next set
  python experiments/sets.py --only 20-seed3000   this set
  python experiments/sets.py --only pretrained-seed3000 --device cuda
  python experiments/sets.py --hours 2 --pause-file pause
"""
UPDATES = {"5": 118, "20": 155, "50": 300, "80": 800}
"""Most updates of the warm start, by the success in percent that they aim at; a row tells what it is.

The longest is the quickstart's own, which ends once an oracle episode is likely enough."""
SEEDS = (3000, 3001, 3002)
SIZES, FEWER = (1, 2, 4, 8, 16, 32), (1, 2, 4, 8)
DRAWS = 40
ATTEMPTS = 64
"""Episodes of a task."""
LEVELS = tuple(f"level{level}=agentrl/Arithmetic-v0?level={level}&max_turns=4" for level in range(1, 6))
"""The mixture of levels 1 to 5, which the weights of 80% play."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Set:
    """Weights, and what they play."""

    kind: str
    """One of ``UPDATES``; or ``mixed``, tasks of five levels; ``quiet``, easy tasks with quiet failures beside hard
    tasks with loud ones; ``long``, the episodes of part G; ``pretrained``, SmolLM2."""
    seed: int
    """Of the warm start, the tasks and the sampling."""
    tasks: int = 24
    """Tasks of each environment."""
    attempts: int = ATTEMPTS
    """Episodes of a task."""
    sizes: Sequence[int] = SIZES
    """Sizes of groups."""

    @property
    def name(self) -> str:
        """The name in the rows."""
        return f"{self.kind}-seed{self.seed}"

    @property
    def base(self) -> tuple[str, ...]:
        """The kinds whose weights play."""
        return {"mixed": ("80",), "quiet": ("80", "20")}.get(self.kind, (self.kind,))


def sets() -> Iterator[Set]:
    """All sets, seed by seed."""
    for seed in SEEDS:
        yield from (Set(kind=kind, seed=seed) for kind in ("20", "80", "50", "5"))
        if seed == SEEDS[0]:
            yield Set(kind="mixed", seed=seed, tasks=5)
            yield Set(kind="quiet", seed=seed, sizes=FEWER)
            yield Set(kind="long", seed=seed, tasks=4, attempts=16, sizes=FEWER)
            yield Set(kind="pretrained", seed=seed, tasks=8, attempts=16, sizes=FEWER)


def done(wanted: Set, rows: RowFile) -> bool:
    """Return True if a set has all its rows."""
    return all(rows.has(unit) for unit in gradients.units(wanted.name, wanted.sizes, DRAWS))


def play(wanted: Set, kind: str, folder: Path, display: Display, device: str) -> tuple[Path, list[Group]]:
    """Train and play in a folder with the weights of a kind; return these and the episodes by task."""
    base = [f"run.dir={str(folder)!r}", f"run.name={kind!r}", f"run.seed={wanted.seed}", "eval.tasks=1"]
    base += ["optim.steps=0", "run.threads=1", f"model.device={device!r}"]
    if kind == "long":
        config = load_config(path=CONFIG, overrides=base)
    elif kind == "pretrained":
        config = load_config(preset="smollm2-135m", overrides=[*base, "rollout.concurrency=256"])
    else:
        config = load_config(preset="quickstart", overrides=[*base, f"sft.steps={UPDATES[kind]}"])
    weights = train(config, display) / "checkpoints" / "step-000000"
    request = EvalRequest(
        path=str(weights),
        overrides=("eval.split='train'", f"eval.tasks={wanted.tasks}", f"eval.attempts={wanted.attempts}"),
        envs=LEVELS if wanted.kind == "mixed" else (),
        seed=wanted.seed,
        out=folder / f"{kind}-played",
    )
    evaluate(request, display)
    return weights, gradients.groups_of(folder / f"{kind}-played", wanted.attempts)


def record(
    wanted: Set, kind: str, folder: Path, display: Display, device: str, width: int
) -> tuple[Recorded, list[Group]]:
    """Play with the weights of a kind; return the episodes with the gradients of their tokens, and by task.

    A ``width`` of 0 leaves the gradients out.
    """
    for name in (kind, f"{kind}-played"):
        tidy(folder / name)
    weights, groups = play(wanted, kind, folder, display, device)
    batch = as_batch(groups)
    model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32).to(device)
    display.say(f"{wanted.name}, {kind}: {len(batch)} episodes, {len(batch.sampled)} sampled tokens")
    return gradients.record(model.eval(), batch, 1.0, width, display), groups


def measure(wanted: Set, rows: RowFile, folder: Path, display: Display, device: str) -> None:
    """Do the units of a set that have no row."""
    *of_arms, _ = gradients.units(wanted.name, wanted.sizes, DRAWS)
    width = 0 if all(map(rows.has, of_arms)) else 4096
    parts = [record(wanted, kind, folder, display, device, width) for kind in wanted.base]
    recorded = parts[0][0]
    if wanted.kind == "quiet":
        (easy, easy_groups), (hard, hard_groups) = parts
        every = torch.ones(len(hard.batch), dtype=torch.bool)
        recorded = joined([(easy, easy_groups, quiet(easy)), (hard, hard_groups, every)], 2 * max(wanted.sizes))
    gradients.run(recorded, wanted.name, wanted.sizes, DRAWS, rows)


def quiet(recorded: Recorded) -> Tensor:
    """Choose the rows that succeeded, and of the others those with at most the median energy of a success, bool [R]."""
    layout = Rows.of(recorded.batch.starts, recorded.batch.rewards)
    won, energy = layout.sum(recorded.batch.rewards) > 0, layout.sum(recorded.energy)
    return won | (energy <= energy[won].median())


def joined(parts: Sequence[tuple[Recorded, Sequence[Group], Tensor]], least: int) -> Recorded:
    """Join some rows of several recordings, without tasks that have fewer than ``least`` of them left.

    Args:
        parts: each with its episodes by task, and True for the rows that stay.
        least: number of rows.
    """
    groups = list[Group]()
    tensors: dict[str, list[Tensor]] = {name: [] for name in ("energy", "weights", "gradients", "probability")}
    for recorded, of_part, chosen in parts:
        stays = torch.zeros_like(chosen)
        for task, group in enumerate(of_part):
            rows = torch.nonzero((recorded.batch.group == task) & chosen)[:, 0]
            if len(rows) >= least:
                offset = int(torch.nonzero(recorded.batch.group == task)[0])
                groups.append(Group(tuple(group.trajectories[row - offset] for row in rows.tolist())))
                stays[rows] = True
        tokens = torch.repeat_interleave(stays, recorded.batch.starts.diff())
        for name, values in tensors.items():
            values.append(getattr(recorded, name)[tokens])
    return Recorded(batch=as_batch(groups), **{name: torch.cat(values) for name, values in tensors.items()})


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
        # The pretrained model takes an hour of a core.
        asked_for = arguments.only == wanted.name or not (arguments.only or wanted.kind == "pretrained")
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
