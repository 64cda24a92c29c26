"""Programs that try to escape, starve or deceive a sandbox, each with the verdict it must get."""

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from agentrl.sandboxes import Limits, Result, Sandbox, open_sandbox

PROGRAMS: list[dict[str, Any]] = json.loads(Path(__file__).with_name("hostile_programs.json").read_text())
Future_ = Future[tuple[Result, list[Result], list[Result]]]


@pytest.fixture(scope="module")
def brisk(sandbox: Sandbox) -> Iterator[Sandbox]:
    """A sandbox that waits less for sleepers; asks for the shared one only to be skipped with it."""
    with open_sandbox("local", limits=Limits(wall_factor=2.0)) as opened:
        yield opened


@pytest.fixture(scope="module")
def verdicts(brisk: Sandbox, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Future_]:
    """Start every program at once; the sandbox runs as many as there are cores."""
    canary = tmp_path_factory.mktemp("canary") / "secret"
    canary.write_text("S3CRET-CANARY")
    pool = ThreadPoolExecutor(8)

    def run(program: dict[str, Any]) -> Result:
        code = program["code"].replace("{CANARY}", str(canary)).replace("{CANARY_DIR}", str(canary.parent))
        return brisk.run(code, timeout=program.get("timeout_s", 2.0))

    def play(program: dict[str, Any]) -> tuple[Result, list[Result], list[Result]]:
        beside: list[Result] = []
        watcher = threading.Thread(target=lambda: beside.extend(run(other) for other in program.get("during", [])))
        if "during" in program:
            threading.Timer(0.3, watcher.start).start()
        result = run(program)
        while "during" in program and len(beside) < len(program["during"]):
            time.sleep(0.01)
        return result, beside, [run(other) for other in program.get("then", [])]

    return {program["name"]: pool.submit(play, program) for program in PROGRAMS}


def check(expected: dict[str, Any], result: Result) -> None:
    assert result.status in expected["verdict"], result
    if result.status == "error" and "etype" in expected:
        assert result.exc_type in expected["etype"], result
    assert expected.get("stdout_has", "") in result.stdout, result
    assert "stdout_lacks" not in expected or expected["stdout_lacks"] not in result.stdout, result
    assert expected.get("stdout", result.stdout) == result.stdout
    assert expected.get("value", result.value) == result.value
    assert len(result.stdout) <= expected.get("stdout_max", 1 << 20)
    assert len(result.traceback or "") <= expected.get("tb_max", 1 << 20)


@pytest.mark.parametrize("program", PROGRAMS, ids=[program["name"] for program in PROGRAMS])
def test_hostile_program(verdicts: dict[str, Future_], program: dict[str, Any]) -> None:
    result, beside, after = verdicts[program["name"]].result()
    check(program["expect"], result)
    for other, outcome in zip(program.get("during", []), beside, strict=True):
        check(other["expect"], outcome)
    for other, outcome in zip(program.get("then", []), after, strict=True):
        check(other["expect"], outcome)
