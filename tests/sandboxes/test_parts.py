"""The parts that need no namespaces: messages, output capture, the system call filter."""

import socket
import struct
import tarfile
import tomllib
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.sandboxes.host.capture import Capture
from agentrl.sandboxes.inside import agent, seccomp, wire

JSON = st.dictionaries(st.text(), st.none() | st.integers(-(10**18), 10**18) | st.text(), max_size=4)


@given(st.lists(JSON, max_size=4), st.integers(1, 50))
def test_messages_survive_any_cutting(messages: list[dict[str, object]], step: int) -> None:
    stream = b"".join(map(wire.pack, messages))
    frames, decoded = wire.Decoder(1 << 20), list[wire.Message]()
    for start in range(0, len(stream), step):
        decoded += frames.feed(stream[start : start + step])
    assert decoded == messages


def test_fields_are_taken_strictly() -> None:
    """Beside what programs of the conformance suite try."""
    assert wire.text({"s": "x\ud800"}, "s", 10) == "x\\ud800"
    wrong: list[Any] = [(wire.text, {}, "s", 10), (wire.number, {}, "n"), (wire.real, {}, "r")]
    wrong += [(wire.real, {"r": "1"}, "r")]
    for read, *arguments in wrong:
        with pytest.raises(wire.WireError):
            read(*arguments)


def test_receive_sees_the_end_and_refuses_two_at_once() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(wire.pack({"a": 1}))
        assert wire.receive(ours, wire.Decoder(100)) == {"a": 1}
        theirs.sendall(wire.pack({"a": 1}) * 2)
        with pytest.raises(wire.WireError, match="more than one"):
            wire.receive(ours, wire.Decoder(100))
        theirs.close()
        assert wire.receive(ours, wire.Decoder(100)) is None


@given(st.lists(st.binary(max_size=40), max_size=12), st.integers(2, 60))
def test_capture_keeps_head_and_tail(pieces: list[bytes], limit: int) -> None:
    capture, whole = Capture(limit), b"".join(pieces)
    for piece in pieces:
        capture.add(piece)
    assert capture.size == len(whole)
    assert capture.truncated == (len(whole) > limit)
    if not capture.truncated:
        assert capture.text() == whole.decode("utf-8", "replace")
    else:
        head, tail = whole[: limit // 2], whole[len(whole) - (limit - limit // 2) :]
        assert capture.text().startswith(head.decode("utf-8", "replace"))
        assert capture.text().endswith(tail.decode("utf-8", "replace"))
        assert f"[{len(whole) - limit} bytes cut]" in capture.text()


def test_cut_keeps_short_texts_whole() -> None:
    assert wire.cut("abc", 3) == "abc"
    assert wire.cut("abcdefgh", 4) == "ab\n… [4 characters cut] …\ngh"


def run_filter(program: bytes, arch: int, number: int, *arguments: int) -> int:
    """A slow reference of the kernel's BPF machine, for the instructions that the filter uses."""
    data = struct.pack("<IIQ6Q", number, arch, 0, *arguments, *[0] * (6 - len(arguments)))
    code = list(struct.iter_unpack("=HBBI", program))
    accumulator = at = 0
    while True:
        operation, if_true, if_false, operand = code[at]
        at += 1
        if operation == 0x20:
            accumulator = int(struct.unpack_from("<I", data, operand)[0])
        elif operation == 0x54:
            accumulator &= operand
        elif operation == 0x06:
            return int(operand)
        else:
            tests = {0x15: accumulator == operand, 0x35: accumulator >= operand, 0x25: accumulator > operand}
            at += if_true if {**tests, 0x45: bool(accumulator & operand)}[operation] else if_false


KILL = 0x80000000
VERDICTS = {"ALLOW": 0x7FFF0000, "EPERM": 0x50001, "ENOSYS": 0x50000 | 38}
FILTERED: dict[str, dict[str, list[list[int]]]] = tomllib.loads(Path(__file__).with_name("filtered.toml").read_text())
"""Calls by processor and verdict, each with its number and arguments."""


@pytest.mark.parametrize(
    ("where", "name"), [(where, name) for where, named in FILTERED.items() for name in named], ids=str
)
def test_filter(where: str, name: str) -> None:
    machine, verdict = where.split()
    arch = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}[machine]
    program = seccomp.assemble(machine, 128)
    assert len(program) // 8 < 4096
    for call in FILTERED[where][name]:
        assert run_filter(program, arch, *call) == VERDICTS[verdict]
        assert run_filter(program, 0x40000003, *call) == KILL  # the 32-bit calls of i386


@pytest.mark.parametrize(
    ("name", "kind"),
    [("../out", tarfile.REGTYPE), ("a/../../out", tarfile.REGTYPE), ("/out", tarfile.REGTYPE)]
    + [("it", kind) for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE)],
)
def test_an_agent_gets_regular_files_within_its_folder_alone(tmp_path: Path, name: str, kind: bytes) -> None:
    stream = BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        archive.addfile(member := tarfile.TarInfo("sub/file"))
        member.name, member.type, member.linkname = name, kind, "/etc/passwd"
        archive.addfile(member)
    stream.seek(0)
    (folder := tmp_path / "in").mkdir()
    with pytest.raises(ValueError, match="is no file within the agent's folder"):
        agent._unpack(stream, str(folder))
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "in", "sub"]
