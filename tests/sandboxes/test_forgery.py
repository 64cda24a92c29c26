"""What a program can and can't reach by speaking to pid 1 itself: descriptor 3 is its end of the result channel."""

import json
import struct

import pytest

from agentrl.sandboxes import Sandbox, Session


def frame(message: object) -> bytes:
    body = json.dumps(message).encode()
    return struct.pack(">I", len(body)) + body


DONE = {
    **{"t": "done", "token": "0" * 16, "status": "ok", "value": "'FORGED'"},
    **{"exc_type": None, "traceback": None, "exit_code": None},
}
FORGERIES = {
    **{"up again": frame({"t": "up"}), "snapshot out of turn": frame({"t": "snapshot", "pid": 2})},
    "snapshot of pid 1": frame({"t": "snapshot", "pid": 1}),
    **{"read out of turn": frame({"t": "read", "data": "", "errno": None}), "done with a guessed token": frame(DONE)},
    "done without a token": frame({key: value for key, value in DONE.items() if key != "token"}),
    **{"unknown kind": frame({"t": "fault", "why": "the machinery failed"}), "no kind": frame({})},
    **{"a list": frame([1, 2]), "a number": frame(1), "not JSON": struct.pack(">I", 4) + b"{{{{"},
    **{"not UTF-8": struct.pack(">I", 4) + b"\xff\xfe\xff\xfe", "too long": struct.pack(">I", (1 << 20) + 1)},
    **{"endless": struct.pack(">I", 0xFFFFFFFF), "deep": struct.pack(">I", 100_000) + b"[" * 100_000},
    "half a frame, then a whole one": struct.pack(">I", 50) + frame(DONE),
}
# Finds the true token in the harness's own frames and lies with it.
LIE = """
import json, os, struct, sys
outer = sys._getframe()
while "order" not in outer.f_locals:
    outer = outer.f_back
claim = {claim!r} | {{"token": outer.f_locals["order"]["token"]}}
body = json.dumps(claim).encode()
os.write(128, struct.pack(">I", len(body)) + body)
"""


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_frame_only_makes_the_cell_run_out(session: Session, name: str) -> None:
    session.run("x = 1")
    code = f"import os\nos.write(128, {FORGERIES[name]!r})\nwhile True: pass"
    result = session.run(code, timeout=0.1)
    assert (result.status, result.value, result.state) == ("timeout", None, "rolled_back")
    assert session.run("x").value == "1"


def test_a_lie_about_the_value_is_possible_and_documented(sandbox: Sandbox) -> None:
    result = sandbox.run(LIE.format(claim=DONE) + "os._exit(0)")
    assert (result.status, result.value) == ("ok", "'FORGED'")


@pytest.mark.parametrize(
    "part",
    [
        *({"status": ["ok"]}, {"value": {"a": 1}}, {"exc_type": "E" * 201}),
        *({"exit_code": True}, {"exit_code": 1 << 70}, {"traceback": []}),
    ],
    ids=str,
)
def test_a_claim_of_the_wrong_form_is_not_believed(sandbox: Sandbox, part: dict[str, object]) -> None:
    result = sandbox.run(LIE.format(claim={**DONE, **part}) + "os._exit(0)", timeout=0.5)
    assert (result.status, result.value, result.exit_code) == ("exit", None, 0)


def test_claims_between_cells_are_noticed(session: Session) -> None:
    session.run("x = 1", transaction=False)
    late = "import threading, os\nthreading.Timer(0.0, lambda: [os.write(128, b'\\xff' * 8) for _ in range(5)]).start()"
    session.run(late, timeout=0.2, transaction=False)
    session.run("import time; time.sleep(0.05)", timeout=0.2, transaction=False)
    assert session.run("1 + 1", timeout=0.5).status in ("ok", "timeout", "exit")
    assert session.run("1 + 1").value == "2"


@pytest.mark.parametrize(
    "claim", [{"t": "snapshot", "pid": 1 << 40}, {"t": "snapshot", "pid": -1}, {"t": "what"}], ids=str
)
def test_a_claim_that_comes_with_the_end_of_a_cell_harms_its_program_only(
    session: Session, claim: dict[str, object]
) -> None:
    session.run("x = 1")
    # In one piece with the true answer, so that it is heard while pid 1 waits for a copy.
    lie = LIE.replace("len(body)) + body)", "len(body)) + body + {more!r})").format(claim=DONE, more=frame(claim))
    assert session.run(lie + "while True: pass", timeout=0.5).status == "ok"
    # The program goes on spinning, which may cost it the next cell.
    assert session.run("1 + 1", timeout=0.5).status in ("ok", "timeout")
    assert session.run("2 + 2").value == "4"
