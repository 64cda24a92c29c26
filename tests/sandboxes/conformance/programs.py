"""The cases that are programs: read from the data files beside this one.

An entry is one program (``code``) or one session (``cells``), each with the verdict it must get. ``during`` holds
programs that run beside it, ``then`` programs that run after it, ``repeat`` how often it runs, ``same`` that every
time prints the same, ``pause_s`` the seconds to wait after a cell. ``{memory_bytes}`` and the other names of
``Limits`` stand for the sandbox's limits; ``{CANARY}`` and ``{CANARY_DIR}`` for a file of the host with a secret in
it, and its folder.
"""

import json
import tempfile
import threading
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from agentrl.sandboxes.base import Limits, Result, Sandbox

from .expectations import broken, describe
from .model import Case, Violation, must, shown

Entry = Mapping[str, Any]
"""One entry of a data file."""

FILES: Final = ("works.json", "hostile.json", "further.json", "sessions.json")
SECRET: Final = "S3CRET-CANARY"
_BESIDE_AFTER_S: Final = 0.3
_TIMEOUT_S: Final = 2.0

WHY: Final = {
    "time": "A program that never ends must not hold up the others, and has to be told from a slow machine.",
    "memory": "One program must not take the memory of the training.",
    "process": "One program must not fill the process table, nor leave anything behind.",
    "exit": "A way to end that is read as success poisons the reward.",
    "output": "Output goes into a prompt and through the host's memory.",
    "forge": "A program that writes its own verdict earns rewards for nothing.",
    "fs": "Files of the host hold secrets and answers, and its disk is everyone's.",
    "net": "A program with a network can fetch answers and attack others.",
    "priv": "Rights and little used parts of the kernel are the way out.",
    "input": "What a program is given or lacks must not hang it.",
    "leak": "What one program leaves must not reach the next: rewards would depend on their order.",
    "works": "An honest program that fails here is scored as wrong.",
    "surface": "Each call of the kernel that a program does not need is one more hole to find.",
}
# Calls a program must not reach; what the kernel itself refuses so without a filter does no harm.
_CALLS: Final = """
import ctypes, platform
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
reached = []
for number, *rest in {calls}:
    ctypes.set_errno(0)
    answer = libc.syscall(*[ctypes.c_long(part) for part in (number, *rest)])
    if answer == 0 and number == 56:
        libc._exit(0)
    if not (answer == -1 and ctypes.get_errno() in (1, 38)):
        reached.append((number, answer, ctypes.get_errno()))
print("REACHED", reached if platform.machine() == "x86_64" else [])
"""


def load() -> tuple[Case, ...]:
    """Read every data file."""
    folder = Path(__file__).parent
    cases = [_case(entry) for name in FILES for entry in json.loads((folder / name).read_text(encoding="utf-8"))]
    calls: dict[str, list[list[int]]] = json.loads((folder / "surface.json").read_text(encoding="utf-8"))
    return (*cases, *(_case(_surface(name, numbers)) for name, numbers in calls.items()))


def _surface(name: str, numbers: list[list[int]]) -> Entry:
    code = _CALLS.replace("{calls}", repr(numbers))
    expect = {"verdict": ["ok"], "stdout": "REACHED []\n"}
    return {"name": f"surface_{name}", "category": "surface", "code": code, "timeout_s": 5.0, "expect": expect}


def _case(entry: Entry) -> Case:
    steps = [entry] if "code" in entry else entry["cells"]
    return Case(
        name=entry["name"],
        group=entry["category"],
        expected="; then ".join(describe(step["expect"]) for step in (*steps, *entry.get("then", []))),
        why=entry.get("why") or WHY[entry["category"]],
        play=partial(_play_program if "code" in entry else _play_session, entry),
        backends=frozenset(entry.get("backends", ())),
        unbounded=entry.get("unbounded", False),
    )


def source(entry: Entry, limits: Limits, canary: Path) -> str:
    """Return the code of an entry with the sandbox's limits and the secret file's path in place."""
    code = entry["code"] if isinstance(entry["code"], str) else "\n".join(entry["code"])
    for name in Limits.__slots__:
        code = code.replace(f"{{{name}}}", str(object.__getattribute__(limits, name)))
    return code.replace("{CANARY}", str(canary)).replace("{CANARY_DIR}", str(canary.parent))


def _run(sandbox: Sandbox, canary: Path, entry: Entry) -> Result:
    result = sandbox.run(
        source(entry, sandbox.limits, canary),
        timeout=entry.get("timeout_s", _TIMEOUT_S),
        stdin=entry.get("stdin", ""),
        files=entry.get("files"),
    )
    _compare(entry, result, "")
    return result


def _compare(entry: Entry, result: Result, where: str) -> None:
    unmet = "; ".join(broken(entry["expect"], result))
    must(not unmet, f"{where}{shown(result)} — instead of {unmet}")


def _play_program(entry: Entry, sandbox: Sandbox) -> None:
    with tempfile.TemporaryDirectory(prefix="canary-") as folder:
        canary = Path(folder) / "secret"
        canary.write_text(SECRET)
        seen = {_beside(sandbox, canary, entry).stdout for _ in range(entry.get("repeat", 1))}
        must(len(seen) == 1 or not entry.get("same"), f"differing output: {sorted(seen)}")
        for later in entry.get("then", []):
            _run(sandbox, canary, later)


def _beside(sandbox: Sandbox, canary: Path, entry: Entry) -> Result:
    """Run one program and, from a moment later on, those that belong beside it."""
    if "during" not in entry:
        return _run(sandbox, canary, entry)
    errors: list[Exception] = []

    def others() -> None:
        time.sleep(_BESIDE_AFTER_S)
        for other in entry["during"]:
            try:
                _run(sandbox, canary, other)
            except Exception as error:  # it belongs to the case, which another thread runs
                errors.append(error)

    thread = threading.Thread(target=others)
    thread.start()
    try:
        return _run(sandbox, canary, entry)
    finally:
        thread.join()
        if errors:
            raise Violation(f"beside it: {errors[0]}") from errors[0]


def _play_session(entry: Entry, sandbox: Sandbox) -> None:
    with sandbox.session() as session:
        for number, cell in enumerate(entry["cells"], start=1):
            result = session.run(
                source(cell, sandbox.limits, Path("/nowhere/secret")),
                timeout=cell.get("timeout_s", _TIMEOUT_S),
                transaction=cell.get("transaction", True),
            )
            _compare(cell, result, f"cell {number}: ")
            time.sleep(cell.get("pause_s", 0.0))
