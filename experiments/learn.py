"""Do the learning runs of parts C to F of PLAN.md, one after the other, and write a row for each.

A worker uses one core. Several may run side by side: each run belongs to one. A worker can be stopped with Ctrl-C or
killed at any moment; the same command goes on, with the runs that were at work too.
"""

import argparse
import hashlib
import shutil
import signal
import sys
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from arms import PRESET, WARM, Unit, overrides, settings_of
from rows import FOLDER, RowFile, commit_of, digits
from schedule import left_of, ready_units, seconds
from work import PLACE, Limits, claimed, tidy

from agentrl.config import load_config
from agentrl.errors import InvariantError
from agentrl.runs.folder import read_jsonl
from agentrl.runs.progress import Bar, Display
from agentrl.train.interrupts import stop_if_cancelled
from agentrl.train.run import resume, train

EXAMPLES = """examples:
  python experiments/learn.py --list                         what is done, what is left, and how long it takes
  python experiments/learn.py --part C                       all that is left of part C
  python experiments/learn.py --part C --units 1             a single run
  python experiments/learn.py --part D --hours 3             begin no run after three hours
  python experiments/learn.py --part D --pause-file pause    wait while there is a file of this name
  python experiments/learn.py --part D --seeds 2013-2015     these alone, where another machine does the others

Two workers in two terminals use two cores: all share one list. "nice -n 19" in front leaves the machine to others.
"""
PARTS = ("C", "D", "E", "F")
_KEPT = ("grad_norm", "clip_fraction", "entropy")
"""Metrics of each step that a row keeps beside tokens and successes."""
_POLL_S = 5.0
ANY_SEED = range(1_000_000)
_TYPICAL_S = {"C": 70.0, "D": 135.0, "E": 130.0, "F": 140.0}
"""Of a run of each part."""


class Books(dict[str, list[dict[str, Any]]]):
    """The rows of all parts.

    Args:
        folder: of the files.
        commit: of the code.
    """

    def __init__(self, folder: Path, commit: str) -> None:
        self._files = {part: RowFile(folder / f"{part}.jsonl", commit) for part in ("W", *PARTS)}
        self.commit = commit
        self.refresh()

    def refresh(self) -> None:
        """Read what other workers have added."""
        for part, file in self._files.items():
            file.refresh()
            self[part] = file.rows

    def has(self, unit: Unit) -> bool:
        """Return True if a unit has a row."""
        return self._files[unit["part"]].has(unit)

    def add(self, unit: Unit, **results: Any) -> None:
        """Add the row of a unit."""
        self._files[unit["part"]].add(unit, **results)


class _PausingBar:
    """A bar of training that waits, between two steps, while the worker is to wait."""

    def __init__(self, bar: Bar, limits: Limits) -> None:
        self._bar, self._limits = bar, limits

    def advance(self, note: str = "") -> None:
        self._bar.advance(note)
        # The step is finished, so a run that is stopped while it waits saves it.
        self._limits.wait(stop_if_cancelled)


class _PausingDisplay(Display):
    """Shows progress, and has training wait while the worker is to wait."""

    def __init__(self, limits: Limits) -> None:
        super().__init__()
        self._limits = limits

    @contextmanager
    def phase(self, name: str, total: int) -> Generator[Any]:
        """Show a bar while the block runs."""
        with super().phase(name, total) as bar:
            yield _PausingBar(bar, self._limits) if name == "training" else bar


def name_of(unit: Unit) -> str:
    """Name the folder of a unit at work."""
    digest = hashlib.sha256(repr(sorted(unit.items())).encode()).hexdigest()[:10]
    return "-".join(str(word) for word in (unit["part"], unit["seed"], digest))


def start_warm(seed: int, folder: Path, root: Path, display: Display) -> float:
    """Make the warm start of a seed in ``folder``; return its success on training tasks."""
    tidy(folder / "run")
    own = {"run.dir": str(folder), "run.name": "run", "run.seed": seed}
    run = train(load_config(preset=PRESET, overrides=overrides({**WARM, **own, "optim.steps": 0})), display)
    weights = weights_of(seed, root)
    tidy(weights)
    weights.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(run / "checkpoints" / "step-000000", weights)
    return float(read_jsonl(run / "evals.jsonl")[-1]["success"])


def weights_of(seed: int, root: Path) -> Path:
    """Name the folder that keeps a seed's warm start."""
    return root / "warm" / f"seed-{seed}"


def fingerprint(weights: Path) -> str:
    """Compute a hash of weights: all arms of a seed are to begin with the same."""
    return hashlib.sha256((weights / "model.safetensors").read_bytes()).hexdigest()[:12]


def learn(unit: Unit, folder: Path, weights: Path, commit: str, display: Display) -> dict[str, Any]:
    """Do a learning run, or the rest of it, and return what its row holds."""
    run, begun = folder / "run", folder / "commit"
    failed: dict[str, str] = {}
    try:
        # What another commit has begun is not this one's.
        if (run / "config.toml").is_file() and begun.is_file() and begun.read_text() == commit:
            resume(run, display)
        else:
            tidy(run)
            begun.write_text(commit)
            own = {"run.dir": str(folder), "run.name": "run", "model.path": str(weights)}
            train(load_config(preset=PRESET, overrides=overrides({**settings_of(unit), **own})), display)
    except InvariantError as error:
        # Weights that a high rate has ruined are a result; anything else is a defect, which ends the worker.
        if "was finite" not in str(error):
            raise
        failed = {"failed": str(error)}
    return {**results_of(run), **failed, "warm": fingerprint(weights)}


def results_of(run: Path) -> dict[str, Any]:
    """Gather from a run's folder what its row holds."""
    steps, evals = read_jsonl(run / "metrics.jsonl"), read_jsonl(run / "evals.jsonl")
    return {
        "tokens": [row["sampled_tokens"] for row in steps],
        "episodes": [row["episodes"] for row in steps],
        "successes": [round(row["reward/correct"] * row["episodes"]) for row in steps],
        **{key: [digits(row[key], 4) for row in steps] for key in _KEPT if all(key in row for row in steps)},
        "held_out": [[row["step"], row["tasks"], row["success"]] for row in evals],
        "seconds": round(steps[-1]["seconds_run"]) if steps else 0,
    }


def do(unit: Unit, folder: Path, books: Books, root: Path, display: Display) -> None:
    """Do a unit and write its row."""
    seed, weights = unit["seed"], weights_of(unit["seed"], root)
    if unit["part"] == "W":
        success = start_warm(seed, folder, root, display)
        books.add(unit, success=success, tasks=WARM["eval.tasks"], warm=fingerprint(weights))
        return
    # Another machine, or whoever emptied the folder, makes it anew.
    while not weights.is_dir():
        with claimed(f"W-{seed}-again", root) as mine:
            if mine is not None and not weights.is_dir():
                start_warm(seed, mine, root, display)
                tidy(mine)
        time.sleep(0 if weights.is_dir() else _POLL_S)
    books.add(unit, **learn(unit, folder, weights, books.commit, display))


def work(part: str, books: Books, limits: Limits, root: Path = PLACE, seeds: Sequence[int] = ANY_SEED) -> str:
    """Do the units of a part, of these seeds, that nobody else does; return why no further one is begun."""
    display = _PausingDisplay(limits)
    while not limits.reached:
        limits.wait()
        books.refresh()
        begun, elsewhere = False, 0
        units, reason = ready_units(part, books)
        for unit in units:
            if books.has(unit) or unit["seed"] not in seeds:
                continue
            with claimed(name_of(unit), root) as folder:
                books.refresh()
                if folder is None:
                    elsewhere += 1
                    continue
                # A unit that another worker has just finished may decide what comes next, so the list is made anew too.
                begun = True
                if not books.has(unit):
                    display.say(f"{name_of(unit)}: {words(unit)}")
                    do(unit, folder, books, root, display)
                    limits.done += 1
                tidy(folder)
            if begun:
                break
        if not begun and not elsewhere:
            return reason or f"part {part} is done" + (" for these seeds" if seeds != ANY_SEED else "")
        if not begun:  # what others are at decides what comes next
            time.sleep(_POLL_S)
    return "as many units or hours as were asked for"


def words(unit: Unit) -> str:
    """Describe a unit in words."""
    if unit["part"] == "W":
        return f"warm start of seed {unit['seed']}"
    about = f"rewards {unit['rewards']}, rate {unit['lr']:g}, {unit['steps']} steps"
    return f"{unit['purpose']} of {unit['arm']}, {about}, seed {unit['seed']}"


def listed(books: Mapping[str, list[dict[str, Any]]]) -> Iterator[str]:
    """List what each part has done and what is left of it."""
    for part in PARTS:
        left = left_of(part, books)
        # Of runs whose rate or seed is not known yet, the plan knows the number.
        unknown = left.total - left.done - len(left.units)
        hours = (sum(map(seconds, left.units)) + unknown * _TYPICAL_S[part]) / 3600
        more = f", {left.warm} warm starts to try" + (f"; {left.reason}" if left.reason else "")
        yield f"{part}: {left.done} of {left.total} runs done, {hours:.1f} core-hours left{more}"


def seeds_of(text: str) -> range:
    """Read a span of seeds, its ends included."""
    low, high = text.split("-")
    return range(int(low), int(high) + 1)


def main(argv: Sequence[str] | None = None) -> int:
    """Work, or show what there is to do."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=PARTS, help="what to do; warm starts that it needs are done first")
    parser.add_argument("--units", type=int, default=0, help="stop after so many runs and warm starts")
    parser.add_argument("--hours", type=float, default=0, help="begin no run after so many hours")
    parser.add_argument("--pause-file", type=Path, help="wait, between runs or steps, while this file is there")
    parser.add_argument("--seeds", default=ANY_SEED, type=seeds_of, metavar="FIRST-LAST", help="do only runs of these")
    parser.add_argument("--commit", help="of the code, where it lies without its history")
    parser.add_argument("--list", action="store_true", help="show what is done and what is left, and do nothing")
    arguments = parser.parse_args(argv)
    if arguments.list:
        print("\n".join(listed(Books(FOLDER, ""))))
        return 0
    if arguments.part is None:
        parser.error("say which --part, or --list")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        books = Books(FOLDER, arguments.commit or commit_of())
        limits = Limits(arguments.units, arguments.hours, arguments.pause_file)
        reason = work(arguments.part, books, limits, seeds=arguments.seeds)
        print(f"stopped after {limits.done} units: {reason}")
    except KeyboardInterrupt:
        print("stopped; the same command goes on where it was")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
