"""Which stages of CI run: those that always do, those that a changed file calls for, and each of the others in turn.

It needs nothing but Python 3.11. `.ci/run --help` explains the options.
"""

import argparse
import subprocess
import sys
import tomllib
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
Stages = Mapping[str, Mapping[str, Any]]
STRANGERS = ("bookworm-root", "bookworm-user", "trixie-root")


def stages() -> Stages:
    """Return all stages by name, in their order."""
    return tomllib.loads((HERE / "stages.toml").read_text(encoding="utf-8"))


def git(*words: str) -> list[str] | None:
    """Return the lines that git prints; None where it fails."""
    done = subprocess.run(["git", *words], cwd=HERE.parent, capture_output=True, text=True, check=False)
    return done.stdout.splitlines() if done.returncode == 0 else None


def changed_since(commit: str, head: str = "HEAD") -> list[str] | None:
    """Return the files that differ from a commit before ``head``; None where that can't be known."""
    if not commit or git("merge-base", "--is-ancestor", commit, head) is None:
        return None
    return git("diff", "--name-only", "--no-renames", commit, head)


def chosen(table: Stages, changed: Collection[str] | None, pushes: int) -> dict[str, str]:
    """Return the stages that run, each with the reason.

    Args:
        table: all stages.
        changed: files that changed since the last push that passed; None where nobody knows, and all stages run.
        pushes: how many pushes have passed before.
    """
    reasons = dict[str, str]()
    for turn, (name, stage) in enumerate(table.items()):
        patterns = stage.get("calls", ())
        caller = next((file for file in changed or () if any(fnmatchcase(file, p) for p in patterns)), None)
        if stage.get("always"):
            reasons[name] = "always"
        elif changed is None:
            reasons[name] = "nobody knows what has changed"
        elif caller is not None:
            reasons[name] = f"{caller} has changed"
        elif (pushes + turn) % stage["every"] == 0:
            reasons[name] = f"its turn, one push in {stage['every']}"
    return reasons


def passed() -> tuple[str, int]:
    """Return the last commit that passed, and the number of pushes that did; no commit where the file tells none."""
    try:
        table = tomllib.loads((HERE / "passed.toml").read_text(encoding="utf-8"))
        return str(table["commit"]), int(table["pushes"])
    except (OSError, ValueError, KeyError):
        return "", 0


def note_passed(commit: str) -> None:
    """Write down that a push has passed with this commit."""
    full = git("rev-parse", "--verify", f"{commit}^{{commit}}")
    if not full:
        raise SystemExit(f"there is no commit {commit!r} here")
    path, (_, pushes) = HERE / "passed.toml", passed()
    head = (
        "# The newest commit that CI has passed, and how many pushes it has passed: `.ci/run --passed COMMIT` counts."
    )
    path.write_text(f'{head}\ncommit = "{full[0]}"\npushes = {pushes + 1}\n', encoding="utf-8")


def replay(count: int, size: int) -> None:
    """Print how many of the stages would have run in the last ``count`` commits, pushed ``size`` at a time."""
    table, commits = stages(), git("rev-list", "--first-parent", f"--max-count={count + 1}", "HEAD") or []
    ends = commits[::-1][::size]
    minutes, runs = list[int](), dict.fromkeys(table, 0)
    for pushes, (before, after) in enumerate(pairwise(ends)):
        names = chosen(table, changed_since(before, after), pushes)
        minutes.append(sum(table[name]["minutes"] for name in names))
        for name in names:
            runs[name] += 1
    for name, number in runs.items():
        print(f"{name:12} {number:3} of {len(minutes)} pushes, {table[name]['minutes']} min each")
    ordered = sorted(minutes)
    middle, most = ordered[len(ordered) // 2], ordered[9 * len(ordered) // 10 - 1]
    print(f"minutes of a push: median {middle}, nine in ten at most {most}")
    print(f"all stages: {sum(stage['minutes'] for stage in table.values())} min")


def main(argv: Sequence[str] | None = None) -> None:
    """Print the names of the stages that run; the reasons go to standard error."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--passed", metavar="COMMIT")
    parser.add_argument("--replay", type=int, metavar="COMMITS")
    parser.add_argument("--stranger", action="store_true")
    parser.add_argument("--left-out", action="store_true")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args(argv)
    table, (commit, pushes) = stages(), passed()
    if options.passed:
        note_passed(options.passed)
    elif options.replay:
        replay(options.replay, 20)
    elif options.stranger:
        print(STRANGERS[pushes % len(STRANGERS)])
    elif options.left_out:
        print("\n".join(dict.fromkeys(file for stage in table.values() for file in stage.get("files", ()))))
    else:
        if unknown := set(options.names) - set(table):
            raise SystemExit(f"there is no stage {min(unknown)!r}: choose among {', '.join(table)}")
        named = dict.fromkeys(options.names or table, "named" if options.names else "all")
        reasons = named if options.names or options.all else chosen(table, changed_since(commit), pushes)
        for name, stage in table.items():
            reason = reasons.get(name, "left out")
            print(f"{name:12} {stage['minutes']:3} min  {reason}", file=sys.stderr)
            if name in reasons:
                print(name)


if __name__ == "__main__":
    main()
