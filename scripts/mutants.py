"""Shows what the tests of training are good for: breaks one line at a time and runs the tests that should see it.

Each mutant of mutants.toml is made in a temporary copy of the repository, never in place, and the tests named with it
run there. A mutant that survives needs a test.

Exit status: 0 every mutant is killed; 1 one survives; 2 the runs mean nothing, because a test fails without any mutant,
or because a mutant no longer fits the code or its tests don't run.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

from mutating import Misfit, Mutation, Patch, apply, command_line, run

ROOT = Path(__file__).resolve().parents[1]
TABLE = Path(__file__).with_suffix(".toml")
COPIED = {"agentrl", "envs", "experiments", "sandboxes", "tests", "scripts", "pyproject.toml"}
PATIENCE_S = 1800.0
EXAMPLES = """\
examples:
  python scripts/mutants.py                        every mutant, about an hour
  python scripts/mutants.py --only 'T*' --only S01  some of them, by name
  python scripts/mutants.py --list                  what there is
"""


def load() -> tuple[Mutation, ...]:
    """Read the mutants: per file, the tests that watch it, and rows of what it is, old text, new text, own tests."""
    mutants: list[Mutation] = []
    for file, rows in tomllib.loads(TABLE.read_text(encoding="utf-8")).items():
        tests = rows.pop("tests")
        for name, (what, old, new, *own) in rows.items():
            patch = Patch(file=file, old=old, new=new)
            mutants.append(Mutation(name=name, defence=what, watch=tuple(own or tests), patches=(patch,)))
    return tuple(mutants)


def play(tests: Sequence[str], mutant: Mutation | None = None) -> str:
    """Run tests in a copy of the repository, broken or as it is.

    Args:
        tests: pytest's arguments; it stops at the first failure.
        mutant: the mutation to apply first.

    Returns:
        The first test that failed; empty where all passed.

    Raises:
        Misfit: the mutant does not fit the code, or pytest can't run the tests.
    """
    with tempfile.TemporaryDirectory(prefix="agentrl-mutant-") as folder:
        shutil.copytree(ROOT, folder, symlinks=True, dirs_exist_ok=True, ignore=_not_copied)
        if mutant is not None:
            apply(mutant, Path(folder))
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
        try:
            # The path comes before what an editable install adds: processes that a test starts import the copy too.
            env = {**os.environ, "PYTHONPATH": folder, "AGENTRL_EVERYTHING": "1"}
            done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            return f"(no end after {PATIENCE_S:.0f} s)"
    if done.returncode not in (0, 1):
        raise Misfit(f"pytest can't run {' '.join(tests)}: {(done.stdout + done.stderr).strip()[-2000:]}")
    failures = [line for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return failures[0].split(" - ")[0].split(" ", 1)[1] if failures else "(no test is named)" * done.returncode


def _not_copied(folder: str, names: list[str]) -> set[str]:
    return set(names) - COPIED if Path(folder) == ROOT else set()


def main(argv: Sequence[str] | None = None) -> int:
    """Make the mutants one by one and print who killed them.

    Returns:
        The exit status that the module's docstring names.
    """

    def baseline(mutants: Sequence[Mutation]) -> dict[str, str]:
        tests = sorted({test for mutant in mutants for test in mutant.watch})
        print("without any mutant ...", end=" ", flush=True)
        failed = play(tests)
        print("a test fails" if failed else "all tests pass", flush=True)
        return {failed: "look at it first"} if failed else {}

    def attempt(mutant: Mutation) -> tuple[bool, str]:
        killer = play(mutant.watch, mutant)
        return bool(killer), f"killed by {killer}" if killer else "SURVIVED: write a test that fails"

    return run(command_line(str(__doc__), EXAMPLES).parse_args(argv), load(), baseline, attempt, "mutants are killed")


if __name__ == "__main__":
    sys.exit(main())
