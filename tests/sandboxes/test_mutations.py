"""A few defences are removed for real and missed; the script around them, its table, and its ways to fail."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from agentrl.sandboxes import Sandbox

from ..conftest import load_script
from .conformance import cases

SCRIPTS = Path(__file__).parents[2] / "scripts"
script = load_script("sandbox_mutations")


FAST = {
    **{"filter-io-uring": "surface_io_uring", "rlimit-fsize": "file_size_is_bounded"},
    **{"proc-subset": "proc_shows_processes_only", "network": "host_port_is_out_of_reach"},
    **{"token": "claim_with_guessed_token", "exit-agrees": "true_claim_then_exit_7"},
    **{"claim-text": "claim_of_wrong_type", "head-and-tail": "one_big_print", "snapshot": "a_hard_exit_is_rolled_back"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAST)
def test_a_removed_defence_is_missed(sandbox: Sandbox, name: str) -> None:
    (mutation,) = [mutation for mutation in script.load() if mutation.name == name]
    assert FAST[name] in script.play(mutation.watch, mutation).noticed


def test_without_a_mutation_nothing_is_missed(sandbox: Sandbox) -> None:
    seen = script.play(sorted(FAST.values()))
    assert seen.noticed == {} and sorted(seen.held) == sorted(FAST.values())


def mutate(file: str, old: str, new: str, **more: object) -> object:
    patch = script.Patch(file=file, old=old, new=new)
    return script.Mutation(**{"name": "m", "defence": "d", "watch": ("works_hello",), "patches": (patch,), **more})


@pytest.mark.parametrize(
    ("file", "old", "new", "kind", "why"),
    [
        # A set-up that fails is a fault, and never an exit of the program.
        (
            "program",
            "    os.chdir(program_files.HOME)\n",
            "    os.chdir('/nowhere')\n",
            "(does not start)",
            "SandboxError",
        ),
        ("limits", "MIB = 1 << 20", "MIB = = 1", "(died)", "SyntaxError"),
        ("limits", "MIB = 1 << 20", "while True: __import__('time').sleep(9)", "(hung)", "no end after"),
    ],
)
def test_a_copy_that_does_not_work_is_noticed(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, file: str, old: str, new: str, kind: str, why: str
) -> None:
    if kind == "(hung)":
        monkeypatch.setattr(script, "PATIENCE_S", 0.5)
    seen = script.play(["works_hello"], mutate(f"inside/{file}.py", old, new))
    assert why in seen.noticed[kind] and seen.held == ()


def test_every_mutation_fits_the_code_and_is_watched_by_cases_that_exist_and_end() -> None:
    names = Counter(mutation.name for mutation in script.load())
    assert len(names) >= 80 and set(names.values()) == {1}
    for mutation in script.load():
        for patch in mutation.patches:
            text = (script.PACKAGE / patch.file).read_text(encoding="utf-8")
            assert text.count(patch.old) == 1, f"{mutation.name}: {patch.file} does not hold {patch.old!r} once"
            assert patch.old != patch.new
        watching = cases(mutation.watch)
        assert watching and mutation.defence, mutation.name
        assert not [case.name for case in watching if case.unbounded], mutation.name


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, SCRIPTS / "sandbox_mutations.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.slow
def test_one_defence_from_the_command_line(sandbox: Sandbox) -> None:
    shown = run("--only", "oom-score")
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert "1 cases hold, 0 fail" in shown.stdout and "-> oom_killer_takes_the_program_first" in shown.stdout
    assert "1 of 1 defences are missed by a program" in shown.stdout
