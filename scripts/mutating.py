"""Shared by the mutation scripts: apply one change to the code at a time, and report who notices it."""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """One replacement in one file."""

    file: str
    """Path within the tree that is changed."""
    old: str
    """The text to replace, which must occur exactly once."""
    new: str
    """Its replacement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """A change that breaks one property of the code."""

    name: str
    """Short name."""
    defence: str
    """The property that it breaks, in words."""
    watch: tuple[str, ...]
    """Cases or tests that should notice."""
    patches: tuple[Patch, ...]
    """The replacements that make it."""
    covered_by: str = ""
    """The other defence that makes it unnoticeable, if there is one."""
    root: bool = False
    """True if it makes a difference only under real root."""


class Misfit(Exception):
    """A mutation does not fit the code any more, or what watches it does not run."""


def apply(mutation: Mutation, tree: Path) -> None:
    """Change a copy of the tree.

    Raises:
        Misfit: A patch does not find exactly one place.
    """
    for patch in mutation.patches:
        path = tree / patch.file
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        if (count := text.count(patch.old)) != 1:
            raise Misfit(f"{mutation.name}: {patch.file} holds {count} times, not once: {patch.old.strip()!r}")
        path.write_text(text.replace(patch.old, patch.new), encoding="utf-8")


def command_line(doc: str, examples: str) -> argparse.ArgumentParser:
    """Make a parser with the options that both scripts have."""
    parser = argparse.ArgumentParser(
        description=doc, epilog=examples, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="a mutation's name, with * and ?")
    parser.add_argument("--list", action="store_true", help="name the mutations and end")
    return parser


def run(
    arguments: argparse.Namespace,
    mutations: Sequence[Mutation],
    baseline: Callable[[Sequence[Mutation]], Mapping[str, str]],
    attempt: Callable[[Mutation], tuple[bool, str]],
    verdict: str,
) -> int:
    """Make the chosen mutations one by one and print who noticed.

    Args:
        arguments: the parsed command line.
        mutations: those to choose from.
        baseline: runs the watchers of mutations without any mutation; returns those that fail, and how.
        attempt: makes one; returns True if it is accounted for, and by what.
        verdict: the last line's words for those that are.

    Returns:
        0 all are accounted for; 1 one is not; 2 the runs mean nothing.
    """
    chosen = [
        mutation
        for mutation in mutations
        if not arguments.only or any(fnmatchcase(mutation.name, p) for p in arguments.only)
    ]
    width = max((len(mutation.name) for mutation in chosen), default=0)
    if arguments.list or not chosen:
        print(
            "\n".join(f"{mutation.name:{width}}  {mutation.defence}" for mutation in chosen)
            or "no mutation has such a name"
        )
        return 0 if chosen else 2
    missing = 0
    try:
        if broken := baseline(chosen):
            print("\n".join(f"fails without a mutation: {name}: {seen}" for name, seen in broken.items()))
            return 2
        for number, mutation in enumerate(chosen, start=1):
            began = time.monotonic()
            print(f"[{number}/{len(chosen)}] {mutation.name:{width}} {mutation.defence} -> ", end="", flush=True)
            good, who = attempt(mutation)
            missing += not good
            print(f"{who} ({time.monotonic() - began:.0f} s)", flush=True)
    except Misfit as misfit:
        print(f"\n{misfit}")
        return 2
    print(f"{len(chosen) - missing} of {len(chosen)} {verdict}")
    return 1 if missing else 0
