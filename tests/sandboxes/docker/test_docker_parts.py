"""The parts that need no engine: framing, the first lines in a container, wiping, and who owns what."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from agentrl.sandboxes import Limits, SandboxError, SandboxUnavailable, open_sandbox
from agentrl.sandboxes.docker import engine as docker_engine
from agentrl.sandboxes.docker import image as docker_image
from agentrl.sandboxes.docker.container import Container, ContainerSpec, _sources
from agentrl.sandboxes.inside import boot, mux, runner, wire

ROOT = Path(__file__).parents[3]


class Impostor:
    """An engine, and the stream to its only container, which does not say what pid 1 would say."""

    def __init__(self, sent: bytes) -> None:
        self.sent, self.removed = sent, False

    def create(self, *_: object, **__: object) -> str:
        return "container"

    def attach(self, container: str) -> "Impostor":
        return self

    def frames(self) -> Iterator[tuple[int, bytes]]:
        yield 1, self.sent

    def remove(self, container: str) -> None:
        self.removed = True

    def start(self, *_: object) -> None:
        return

    send = close = start


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (wire.pack({"t": "ready"}), "pid 1 did not send"),
        (wire.pack({"t": "ready", "key": "guessed"}), "pid 1 did not send"),
        (b"\xff" * 8, "longer than"),
    ],
)
def test_a_message_that_pid_1_did_not_send_ends_the_container(sent: bytes, why: str) -> None:
    image = docker_engine.Image(id="", python="")
    spec = ContainerSpec(image=image, runtime=None, limits=Limits(), cpus=1)
    engine: Any = Impostor(sent)
    with pytest.raises(SandboxError, match=why):
        Container(engine, spec, Mock())
    assert engine.removed


def between() -> tuple[mux.Mux, int, int]:
    """A mux, and the ends by which its host writes and reads."""
    (source, host), (reader, sink) = os.pipe(), os.pipe()
    return mux.Mux(source, sink), host, reader


def messages(reader: int) -> list[wire.Message]:
    """What a mux has sent."""
    return wire.Decoder(1 << 20).feed(os.read(reader, 1 << 20))


def test_a_mux_that_parts_from_a_copy_of_itself_changes_its_key() -> None:
    ours, _, reader = between()
    ours.key = "k"
    ours.rotate_key()
    ours.send_control({"t": "ready"})
    assert len(ours.key) == 32
    assert messages(reader) == [{"key": "k", "t": "key", "next": ours.key}, {"key": ours.key, "t": "ready"}]


def test_the_mux_sends_output_before_the_answer_that_came_after_it() -> None:
    ours, _, reader = between()
    out, err = ours.open_pipes()
    os.write(out, b"out")
    os.write(err, b"\xff")
    ours.sendall(b"answer")
    sent = [(message["t"], mux.carried(message)) for message in messages(reader)]
    assert sent == [("out", b"out"), ("err", b"\xff"), ("channel", b"answer")]


def test_the_mux_does_not_block_on_a_host_that_reads_nothing() -> None:
    ours, _, _ = between()
    out, _ = ours.open_pipes()
    os.set_blocking(out, False)
    for _ in range(200):
        ours.sendall(b"x" * 10_000)
        os.write(out, b"y")


def test_the_mux_tells_the_end_of_a_session() -> None:
    ours, host, _ = between()
    order = wire.pack(mux.carry("channel", b"order"))
    os.write(host, order[:9])
    os.write(host, order[9:])
    assert ours.recv(1000) == b"order"
    os.write(host, wire.pack({"t": "close"}))
    with pytest.raises(mux.SessionEnded):
        ours.recv(1000)
    os.write(host, order + wire.pack({"t": "open"}) + wire.pack({"t": "close"}))
    assert [message["t"] for message in ours.receive_control()] == ["open", "close"]


def test_the_first_lines_run_what_they_are_sent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(boot, "__file__", str(tmp_path / "boot.py"))
    (tmp_path / "__init__.py").touch()
    (tmp_path / "other.py").write_text("x = 'sent'")
    (tmp_path / "runner.py").write_text(
        "import sys\nimport agentrl.sandboxes.inside.other as o\n"
        "def main():\n    print(o.x, *(path for path in sys.path if '/fd/' in path), flush=True)"
    )
    sent = _sources() + b"rest"
    monkeypatch.undo()
    command = [sys.executable, "-I", "-S", "-c", Path(boot.__file__).read_text()]
    done = subprocess.run(command, input=sent, capture_output=True, cwd="/")
    assert (done.stdout, done.stderr, done.returncode) == (b"sent\n", b"", 0)


def test_emptying_a_folder_does_not_trust_its_depth(tmp_path: Path) -> None:
    top = tmp_path / "tmp"
    top.mkdir()
    here = os.open(top, os.O_RDONLY)
    for number in range(2000):
        os.mkdir("d", dir_fd=here)
        os.close(os.open(f"f{number}", os.O_CREAT | os.O_WRONLY, dir_fd=here))
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    (top / "d" / "link").symlink_to(tmp_path)
    (top / "d").chmod(0)
    assert runner._empty(str(top)) and list(top.iterdir()) == [] and tmp_path.exists()


def test_only_pid_1_wipes() -> None:
    with pytest.raises(RuntimeError, match="for pid 1"):
        runner.wipe()


def test_owners_are_told_apart() -> None:
    child = subprocess.Popen(["sleep", "60"])
    name = docker_engine.owner(child.pid)
    assert name != docker_engine.owner() and not docker_engine.is_gone(name)
    child.kill()
    child.wait()
    assert docker_engine.is_gone(name)
    here = name.split(":")[0]
    for foreign in ("another-boot/1:1:1", "", "somebody", f"{here}:x:1", f"{here}::::"):
        assert not docker_engine.is_gone(foreign)


def test_a_missing_engine_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("docker")
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere.sock")
    with pytest.raises(SandboxUnavailable, match=r"no Docker engine answers at unix:///nowhere\.sock") as caught:
        open_sandbox("docker")
    assert caught.value.remedy == "sudo systemctl start docker"


def test_a_missing_sdk_is_named() -> None:
    script = (
        "import sys\nsys.modules['docker'] = None\nfrom agentrl.sandboxes import *\n"
        "try: open_sandbox('docker')\nexcept SandboxUnavailable as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "the docker back end needs the docker package: `pip install 'agentrl[docker]'`\n"


def test_the_dockerfile_pins_what_the_constraints_pin() -> None:
    text = (docker_image.FOLDER / "Dockerfile").read_text()
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    pinned = dict(word.split("==") for word in text.split() if "==" in word)
    assert len(pinned) == 4 and all(pins[name] == version for name, version in pinned.items())
