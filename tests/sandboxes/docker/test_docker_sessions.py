"""What containers do beyond the conformance suite: their version, refused forks, large orders, keys of the stream."""

import re

import pytest

from agentrl.sandboxes import ForkRefused, Sandbox, Session


def test_the_version_names_runtime_and_image(sandbox: Sandbox, runtime: str) -> None:
    assert re.fullmatch(rf"{runtime}, image [0-9a-f]{{12}}", sandbox.version)


@pytest.mark.parametrize(
    ("cell", "why"),
    [("import time\ntime.time_ns()", "depend on time or chance"), ("while True: pass", "can't be run to the same")],
)
def test_fork_refuses_what_it_can_not_copy(session: Session, cell: str, why: str) -> None:
    session.run(cell, timeout=0.3)
    with pytest.raises(ForkRefused, match=why):
        session.fork()
    assert session.run("1 + 1").value == "2"


def test_large_orders_and_outputs_travel(sandbox: Sandbox) -> None:
    data = bytes(range(256)) * (20 << 12)
    code = (
        "import sys\nsys.stdout.write('x' * (1 << 21))\nsys.stderr.write('y' * (1 << 21))\nlen(open('b', 'rb').read())"
    )
    result = sandbox.run(code, files={"b": data})
    assert (result.value, result.truncated) == (str(len(data)), True)
    assert result.stdout.startswith("xxx") and result.stderr.endswith("yyy")


def test_a_session_closed_at_once_leaves_its_container_usable(sandbox: Sandbox) -> None:
    for _ in range(5):
        session = sandbox.session()
        with pytest.raises(FileNotFoundError):
            session.read_file("none")
        session.close()
    assert sandbox.run("1 + 1").value == "2"


# Finds the key of the stream in what it has inherited from pid 1, and answers the host in its place.
FORGED = """
import base64, json, sys
outer = sys._getframe()
while not hasattr(outer.f_locals.get("self"), "_host"):
    outer = outer.f_back
def pack(message):
    data = json.dumps(message).encode()
    return len(data).to_bytes(4, "big") + data
forged = {"key": outer.f_locals["self"]._host.key, "t": "channel", "data": base64.b64encode(pack(ANSWER)).decode()}
with open("/proc/1/fd/1", "wb", buffering=0) as stream:
    stream.write(pack(forged))
while True: pass
"""
ANSWER = {
    **{"t": "done", "status": "ok", "value": "'FORGED'", "exc_type": None, "traceback": None, "exit_code": 0},
    **{"signal": None, "wall": 0, "cpu": 0, "rss": 0, "state": "kept"},
}


def test_what_a_program_inherits_does_not_let_it_speak_for_pid_1(sandbox: Sandbox, runtime: str) -> None:
    with sandbox.session() as session:
        session.run("x = 1")
        result = session.run(f"ANSWER = {ANSWER!r}\n{FORGED}", timeout=2.0)
    # A kernel does not let it open the stream; gVisor does, and a wrong key there ends the container.
    expected = ("crash", None) if runtime == "runsc" else ("error", "PermissionError")
    assert (result.status, result.exc_type, result.value) == (*expected, None)
    assert sandbox.run("1 + 1").value == "2"
