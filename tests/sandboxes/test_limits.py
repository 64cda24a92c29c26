"""Each limit, made small, stops exactly what it names."""

from collections.abc import Iterator

import pytest

from agentrl.sandboxes import Limits, Sandbox, open_sandbox

from .conformance import cases

SMALL = Limits(
    cpu_s=0.3, wall_factor=2.0, memory_bytes=96 << 20, processes=6, open_files=16, file_bytes=1 << 20,
    tmp_bytes=2 << 20, tmp_inodes=20, shm_bytes=1 << 20, output_kept_bytes=1000, output_kill_bytes=100_000,
    value_chars=100, traceback_chars=200, code_bytes=10_000,
)  # fmt: skip


@pytest.fixture(scope="module")
def small(sandbox: Sandbox) -> Iterator[Sandbox]:
    """A sandbox with little of everything; asks for the shared one only to be skipped with it."""
    with open_sandbox("local", limits=SMALL) as opened:
        yield opened


def test_cpu_of_which_a_timeout_may_allow_more(small: Sandbox) -> None:
    result = small.run("while True: pass")
    assert result.status == "timeout" and result.cpu_s < 1
    busy = "import time\nuntil = time.process_time() + 0.5\nwhile time.process_time() < until: pass"
    assert small.run(busy, timeout=3).status == "ok"


def test_wall(small: Sandbox) -> None:
    result = small.run("import time; time.sleep(60)")
    assert result.status == "timeout" and 0.6 <= result.wall_s < 6


def test_memory(small: Sandbox) -> None:
    assert small.run("x = bytearray(40 << 20)").status == "ok"
    assert small.run("x = bytearray(120 << 20)").status == "memory"


BOUNDED = ["process_limit_bites", "thread_limit_bites", "descriptors_are_bounded", "file_size_is_bounded"]


@pytest.mark.parametrize("name", [*BOUNDED, "inodes_are_bounded"])
def test_the_limits_own_program(small: Sandbox, name: str) -> None:
    (case,) = cases([name])
    outcome = case.run(small)
    assert outcome.passed, outcome


FILL = """
import os
try:
    for n in range(9):
        with open(f"{folder}/{{n}}", "wb") as file:
            file.write(bytes(1 << 19))
except OSError as error:
    print(error.strerror)
sum(os.path.getsize("{folder}/" + name) for name in os.listdir("{folder}"))
"""


@pytest.mark.parametrize(("folder", "most"), [("/tmp", 2 << 20), ("/dev/shm", 1 << 20)])
def test_folders_fill_up(small: Sandbox, folder: str, most: int) -> None:
    result = small.run(FILL.format(folder=folder))
    assert result.stdout == "No space left on device\n"
    assert most // 2 < int(result.value or 0) <= most


def test_output(small: Sandbox) -> None:
    result = small.run("print('a' * 5000)")
    assert result.status == "ok" and result.truncated and len(result.stdout) < 1100
    assert small.run("import sys\nwhile True: sys.stderr.write('a' * 5000)", timeout=30).status == "output_limit"


def test_value_and_traceback(small: Sandbox) -> None:
    value = small.run("'a' * 5000")
    assert value.value is not None and len(value.value) < 150 and value.truncated
    trace = small.run("raise ValueError('a' * 5000)")
    assert trace.traceback is not None and len(trace.traceback) < 250 and trace.truncated


def test_code(small: Sandbox) -> None:
    assert small.run("#" * 10_000).status == "ok"
    for code in ("#" * 10_001, "é" * 5_001):
        with pytest.raises(ValueError, match="longer than 10000 bytes"):
            small.run(code)


@pytest.mark.parametrize("name", Limits.__slots__)
def test_every_limit_must_be_positive(name: str) -> None:
    for wrong in (0, -1, float("nan")):
        with pytest.raises(ValueError, match=f"Limits.{name} must be positive"):
            Limits(**{name: wrong})
