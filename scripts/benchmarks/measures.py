"""What the benchmarks share: their command lines, measures beside their targets, and where samples go."""

import argparse
import json
import sys
import timeit
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from agentrl.eval.pages import table

Samples = dict[str, list[float]]
"""Seconds of every turn, by row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """One line of the table of measures."""

    name: str
    """The quantity measured."""
    value: str
    """The result, with its unit."""
    target: str = ""
    """The project's target; empty where there is none."""
    met: bool | None = None
    """True if the target is met; ``None`` where there is none, or nothing was measured."""


def command_line(doc: str | None, examples: str) -> argparse.ArgumentParser:
    """Make a benchmark's command line, whose help shows its docstring and examples."""
    return argparse.ArgumentParser(
        description=doc, epilog=examples, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def measure_table(measures: Sequence[Measure]) -> str:
    """Tabulate every measure beside its target."""
    words = {True: "yes", False: "NO", None: ""}
    rows = [(measure.name, measure.value, measure.target, words[measure.met]) for measure in measures]
    return table(("what", "measured", "target", "met"), rows)


def write(path: Path, machine: str, samples: Mapping[str, Sequence[float]], measures: Sequence[Measure]) -> None:
    """Write every sample [seconds] and every measure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"machine": machine, "seconds": samples, "measures": [asdict(measure) for measure in measures]}
    path.write_text(json.dumps(document, indent=1) + "\n")


def timed(call: Callable[[], object]) -> float:
    """Time one call in seconds."""
    return timeit.timeit(call, number=1)


def say(text: str) -> None:
    """Print progress to stderr: stdout holds the tables alone."""
    print(text, file=sys.stderr, flush=True)
