"""What the kernel counts by user: a program that uses all of it takes nothing from the sessions beside it."""

from collections.abc import Callable

import pytest

from agentrl.sandboxes import Result, Sandbox, open_sandbox

# Thousands of pipes; and more descriptors under way than the kernel allows, since it checks before a sender waits.
CROWD = """
import array, os, socket, time
there = [socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(20)]
for number, end in enumerate(there): end.bind(f"\\0crowd{number}")
ready, told = os.pipe()
def pipes():
    kept = []
    try:
        while True: kept.append(os.pipe())
    except OSError: time.sleep(60)
def descriptors(number):
    here = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    here.connect(f"\\0crowd{number}")
    here.setblocking(False)
    try:
        while True: here.send(b"full")
    except OSError: os.write(told, b"x")
    here.setblocking(True)
    here.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0] * 253))])
    time.sleep(60)
for number in range(20):
    if os.fork() == 0: pipes()
    if os.fork() == 0: descriptors(number)
for _ in there: os.read(ready, 1)
time.sleep(0.2)
for end in there: end.recv(4), end.recv(4)
time.sleep(0.2)
"""
INNOCENT = (
    "import fcntl, os\nr, w = os.pipe()\nfcntl.fcntl(w, 1032), os.write(w, b'x' * 20000), len(os.read(r, 20000))",
    "import socket\na, b = socket.socketpair()\nsocket.send_fds(a, [b'x'], [0])\nlen(socket.recv_fds(b, 1, 1)[1])",
    "import subprocess\nsubprocess.run(['seq', '20000'], capture_output=True).stdout.count(b'1')",
    "import multiprocessing\nwith multiprocessing.Pool(2) as pool: print(pool.map(abs, range(-9, 9)))",
    "import signal, time\nsignal.signal(14, lambda *_: print('rings'))\nsignal.setitimer(0, 0.02)\ntime.sleep(0.1)",
)


def outcome(result: Result) -> tuple[object, ...]:
    return result.status, result.state, result.value, result.stdout, result.traceback, result.attempts


@pytest.mark.slow
def test_nobody_is_disturbed_by_what_another_user_uses_up(
    sandbox: Sandbox, require: Callable[[bool, str], None]
) -> None:
    require("a user id for each session" in sandbox.health().detail, "needs root, or newuidmap with subordinate ids")
    with open_sandbox("local", ready=0) as own, own.session() as victim, own.session() as crowd:
        alone = [outcome(own.run(code)) for code in INNOCENT]
        victim.run("x = 1")
        assert crowd.run(CROWD, transaction=False).status == "ok"
        assert [outcome(own.run(code)) for code in INNOCENT] == alone
        assert {status for status, *_ in alone} == {"ok"}
        # A copy of it needs a descriptor that is sent.
        assert [outcome(victim.run(code))[:2] for code in ("x = 2", "import os\nos._exit(1)", "x")] == [
            *(("ok", "kept"), ("exit", "rolled_back"), ("ok", "kept"))
        ]
        assert crowd.run("1").status == "ok" and own.counters().reruns == own.counters().faults == 0
