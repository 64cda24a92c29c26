"""Shows what each defence of the local sandbox is good for: removes one at a time and runs the programs that test it.

Each mutation of sandbox_mutations.toml is applied to a temporary copy of agentrl/sandboxes, and the conformance cases
that watch it run against the copy, in a process of its own. A defence that no case misses needs a case; where another
defence covers it, the file says which.

Exit status: 0 every defence is missed by a case or covered; 1 one is missed by none; 2 the runs mean nothing, because
a case fails without any mutation or because a mutation no longer fits the code.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mutating import Mutation, Patch, apply, command_line, run

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "agentrl" / "sandboxes"
TESTS = ROOT / "tests" / "sandboxes"
TABLE = Path(__file__).with_suffix(".toml")
PATIENCE_S = 180.0
EXAMPLES = """\
examples:
  python scripts/sandbox_mutations.py                      every defence, some minutes
  python scripts/sandbox_mutations.py --only 'rlimit-*'    some of them, by name
  python scripts/sandbox_mutations.py --all --only token   against every bounded case, not only those that watch it
  python scripts/sandbox_mutations.py --list               what there is
"""
# A variable that must not reach a program; the cases compare the host's environment with the program's.
CANARY = {"AGENTRL_CANARY": "a variable of the host"}
# A stub in place of agentrl: the copy holds only the sandboxes, and the real package must not supply them.
WORKER = """
import json, sys, types
package = types.ModuleType("agentrl")
package.__path__ = [sys.argv[1]]
sys.modules["agentrl"] = package
sys.path.append(sys.argv[2])
from agentrl.sandboxes import SandboxError, open_sandbox
from conformance import cases
def tell(**what): print(json.dumps(what), flush=True)
try:
    sandbox = open_sandbox("local")
    if sandbox.run("1").value != "1":
        raise SandboxError("it does not even run 1")
except SandboxError as error:
    tell(broken=f"{type(error).__name__}: {error}")
    sys.exit()
with sandbox:
    watched = json.loads(sys.argv[3])
    for case in cases(watched):
        if watched is None and case.unbounded:
            continue
        tell(name=case.name, seen=case.run(sandbox).seen)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The cases' outcomes on a copy."""

    noticed: dict[str, str]
    """Name of each case that failed, and what it saw."""
    held: tuple[str, ...]
    """Cases that passed."""


def load() -> tuple[Mutation, ...]:
    """Read the mutations."""
    mutations: list[Mutation] = []
    for row in tomllib.loads(TABLE.read_text(encoding="utf-8"))["mutation"]:
        patches = tuple(Patch(**patch) for patch in row.pop("patch"))
        mutations.append(Mutation(watch=tuple(row.pop("watch")), patches=patches, **row))
    return tuple(mutations)


def play(watch: Sequence[str] | None, mutation: Mutation | None = None) -> Seen:
    """Run cases against a copy of the package, mutated or as it is.

    Args:
        watch: Patterns of cases; ``None`` for every case whose program is bounded.
        mutation: The mutation to apply first.

    Raises:
        Misfit: The mutation does not fit the code.
    """
    with tempfile.TemporaryDirectory(prefix="agentrl-mutation-") as folder:
        package = Path(folder) / "agentrl" / "sandboxes"
        shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
        if mutation is not None:
            apply(mutation, package)
        command = [sys.executable, "-B", "-c", WORKER, package.parent, TESTS, json.dumps(watch)]
        return _listen(command, watch is None)


def _listen(command: Sequence[str | Path], everything: bool) -> Seen:
    noticed: dict[str, str] = {}
    held: list[str] = []
    patience = PATIENCE_S * (10 if everything else 1)
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(command, stdout=output, stderr=errors, env={**os.environ, **CANARY}, cwd="/") as process:
            try:
                process.wait(patience)
            except subprocess.TimeoutExpired:
                process.kill()
                noticed["(hung)"] = f"no end after {patience:.0f} s"
        output.seek(0)
        errors.seek(0)
        for line in output:
            row = json.loads(line)
            if "broken" in row:
                noticed["(does not start)"] = row["broken"]
            elif row["seen"]:
                noticed[row["name"]] = row["seen"]
            else:
                held.append(row["name"])
        if process.returncode and not noticed:
            noticed["(died)"] = errors.read().strip()[-300:]
    return Seen(noticed=noticed, held=tuple(held))


def judge(mutation: Mutation, seen: Seen) -> tuple[bool, str]:
    """Return True if a defence is accounted for, and by what."""
    if seen.noticed:
        return True, ", ".join(sorted(seen.noticed))
    if mutation.covered_by:
        return True, f"none; covered by {mutation.covered_by}"
    return False, "NONE: write a program that misses it"


def main(argv: Sequence[str] | None = None) -> int:
    """Remove the defences one by one and print who noticed.

    Returns:
        The exit status that the module's docstring names.
    """
    parser = command_line(str(__doc__), EXAMPLES)
    parser.add_argument("--all", action="store_true", help="run every bounded case against each mutation: an hour")
    arguments = parser.parse_args(argv)
    possible = [mutation for mutation in load() if os.geteuid() == 0 or not mutation.root]
    if left := len(load()) - len(possible):
        print(f"left out: {left} that are defences only where real root opens the sandbox", file=sys.stderr)

    def baseline(mutations: Sequence[Mutation]) -> dict[str, str]:
        print("without any mutation ...", end=" ", flush=True)
        watched = {pattern for mutation in mutations for pattern in mutation.watch}
        seen = play(None if arguments.all else sorted(watched))
        print(f"{len(seen.held)} cases hold, {len(seen.noticed)} fail", flush=True)
        return seen.noticed

    def attempt(mutation: Mutation) -> tuple[bool, str]:
        return judge(mutation, play(None if arguments.all else mutation.watch, mutation))

    return run(arguments, possible, baseline, attempt, "defences are missed by a program or covered by another")


if __name__ == "__main__":
    sys.exit(main())
