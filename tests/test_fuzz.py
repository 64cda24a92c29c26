"""The fuzzer: a short run of every target finds nothing, and what is broken is found, made small and saved."""

import importlib.util
import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "fuzz.py"


@pytest.fixture(scope="module")
def fuzz() -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("fuzz_under_test", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_short_run_of_every_target_finds_nothing(fuzz: ModuleType) -> None:
    chance = random.Random()
    for name, make in fuzz.targets().items():
        target, corpus = make(), list[bytes]()
        for _ in range(40 if name == "render" else 200):
            corpus.append(fuzz.mutated(chance, corpus))
            assert fuzz.problem(target, corpus[-1]) == "", (name, fuzz.text_of(corpus[-1]))


def test_bytes_stand_for_text(fuzz: ModuleType) -> None:
    assert fuzz.text_of(b"") == fuzz.text_of(b"x") == ""
    assert fuzz.text_of(b"ab\x00") == "ab" and fuzz.text_of(b"ab\xff") == "ab" * 2000
    assert fuzz.text_of(bytes([128 + 3, 0])) in fuzz.MARKS
    assert {fuzz.text_of(bytes([byte, 0])) for byte in range(128, 256)} == {*fuzz.MARKS}
    assert len(fuzz.text_of(b"a" * 200 + b"\xff")) == fuzz.LONGEST


def test_what_breaks_is_made_small(fuzz: ModuleType) -> None:
    def target(text: str) -> None:
        if "[" in text and "]" in text:
            raise KeyError(text)

    data = b"some words [ and more of them ] and an end"
    assert fuzz.problem(target, data).startswith("KeyError: ")
    assert fuzz.text_of(fuzz.shrink(target, data)) == "[]"


def test_what_is_not_linear_is_found(fuzz: ModuleType) -> None:
    def target(text: str) -> None:
        sum(1 for one in text for _ in text[:20_000] if one)

    assert fuzz.problem(target, b"abc\x00") == ""
    assert fuzz.problem(target, b"abc\xff").startswith("slower than 0.36 s of CPU time for 6000 characters")


BAD = f"""
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
sys.path.insert(0, {str(SCRIPT.parent)!r})
import fuzz

def target(text):
    assert "}}" not in text

fuzz.targets = lambda: {{"bad": lambda: target}}
fuzz.work(Namespace(engine=sys.argv[1], inputs=100_000, seconds=60.0, seed=0, out=Path(sys.argv[2])), "bad")
"""


@pytest.mark.parametrize("engine", ["random", "atheris"])
def test_what_is_found_is_saved(engine: str, tmp_path: Path, require: Callable[[bool, str], None]) -> None:
    require(engine == "random" or importlib.util.find_spec("atheris") is not None, "needs the package atheris")
    done = subprocess.run([sys.executable, "-c", BAD, engine, str(tmp_path / "out")], capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    saved = json.loads((tmp_path / "out" / "bad.json").read_text())
    assert saved["target"] == "bad" and "}" in saved["text"] and len(saved["text"]) <= 20
    assert "AssertionError" in done.stderr and "saved in" in done.stderr


def test_a_run_that_finds_nothing_ends_well(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--inputs", "200", "--target", "parse-hermes", "--target", "write-xml"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "parse-hermes: 100 inputs in" in done.stderr and "write-xml: 100 inputs in" in done.stderr
    assert not list(tmp_path.iterdir())
    wrong = subprocess.run([*command, "--target", "parse-html"], capture_output=True, text=True)
    assert wrong.returncode == 1 and "there is no target 'parse-html'" in wrong.stderr
