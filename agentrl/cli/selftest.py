"""The doctor's self-test: a few programs that try what no sandbox may allow.

It is a glance at this machine; ``tests/sandboxes/conformance`` attacks a back end in earnest.
"""

import socket
import tempfile
from collections.abc import Callable
from typing import Final

from agentrl.sandboxes import Result, Sandbox, SandboxError

_SECRET: Final = "S3CRET-CANARY"
_CONNECT: Final = """
import socket
try: print("CONNECTED", socket.create_connection({}, timeout=1))
except OSError as error: print("no", error.errno)
"""
_ROUTES: Final = """
rows = []
for name, head in (("route", 1), ("ipv6_route", 0)):
    try: rows += [row for row in open("/proc/self/net/" + name).read().splitlines()[head:] if row.split()[-1] != "lo"]
    except OSError: pass
print("ROUTES", rows)
"""
_CHILDREN: Final = """
import os, time
for _ in range(4):
    if os.fork() == 0: x = bytearray({} * 2 // 5); time.sleep(30); os._exit(0)
for _ in range(4): os.wait()
"""
_HIDDEN: Final = ("FileNotFoundError", "PermissionError")


def self_test(sandbox: Sandbox) -> dict[str, str]:
    """Run every check, and map it to what it saw that must not be; to an empty text where it passed."""
    with socket.create_server(("127.0.0.1", 0)) as server, tempfile.NamedTemporaryFile("w") as canary:
        canary.write(_SECRET)
        canary.flush()
        connect, read = _CONNECT.format(server.getsockname()), f"print(open({canary.name!r}).read())"
        children = _CHILDREN.format(sandbox.limits.memory_bytes)
        # What each program shows: its code, its CPU seconds, and whether a result is the right one.
        programs: dict[str, tuple[str, float, Callable[[Result], bool]]] = {
            "runs a program": ("int(input()) + int(input())", 10.0, lambda seen: seen.value == "42"),
            "host's ports are out of reach": (connect, 2.0, lambda seen: seen.stdout.startswith("no ")),
            "no way into a network": (_ROUTES, 2.0, lambda seen: seen.stdout == "ROUTES []\n"),
            "host files are hidden": (read, 2.0, lambda seen: seen.exc_type in _HIDDEN),
            "endless loop is a timeout": ("while True: pass", 0.5, lambda seen: seen.status == "timeout"),
            "memory is limited": (children, 3.0, lambda seen: seen.status in ("memory", "killed")),
        }
        return {name: _seen(sandbox, *program) for name, program in programs.items()}


def _seen(sandbox: Sandbox, code: str, timeout: float, is_right: Callable[[Result], bool]) -> str:
    try:
        result = sandbox.run(code, timeout=timeout, stdin="2\n40\n")
    except SandboxError as error:
        return f"a program must not make the infrastructure fail: {type(error).__name__}: {error}"
    return "" if is_right(result) and _SECRET not in result.stdout else _shown(result)


def _shown(result: Result) -> str:
    fields = ("status", "state", "exc_type", "value", "stdout", "stderr")
    return ", ".join(f"{field} {str(getattr(result, field))[:100].strip()}" for field in fields)
