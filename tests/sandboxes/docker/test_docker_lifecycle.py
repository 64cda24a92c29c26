"""Containers come and go: with their sandbox, with its process, after violations, and when the engine goes."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from agentrl.sandboxes import Limits, Sandbox, SandboxError, SandboxUnavailable, open_sandbox
from agentrl.sandboxes.docker.engine import OWNER_LABEL, DockerEngine, is_gone, owner
from agentrl.sandboxes.docker.image import IMAGE
from agentrl.sandboxes.docker.sandbox import DockerSandbox

from ..conftest import HOST

ROOT = Path(__file__).parents[3]
LOSER = """
from agentrl.sandboxes import SandboxError, open_sandbox
sandbox = open_sandbox("docker", ready=1)
session, idle = sandbox.session(), sandbox.session()
idle.run("x = 1")
session.run("x = 1")
print("running", flush=True)
for call in (lambda: session.run("import time\\ntime.sleep(30)", 20), lambda: idle.run("1"), lambda: sandbox.run("1")):
    try: print(call().status)
    except SandboxError: print("fault")
counted = sandbox.counters()
print(sandbox.health().ok, counted.faults >= 3, list(counted.runs))
sandbox.close()
"""


def of(engine: DockerEngine, name: str) -> set[str]:
    return {container for container, named in engine.owned().items() if named == name}


def eventually(true: Callable[[], bool]) -> bool:
    while not true():
        time.sleep(0.05)
    return True


def test_close_leaves_no_container_and_no_descriptor(engine: DockerEngine) -> None:
    before, descriptors = of(engine, owner()), len(os.listdir("/proc/self/fd"))
    with open_sandbox("docker", ready=2) as opened:
        session = opened.session()
        session.run("import os, time\nfor _ in range(3):\n    if os.fork() == 0: time.sleep(600)")
        opened.run("1")
        assert of(engine, owner()) - before
    # Containers of earlier tests may be on their way out.
    assert not of(engine, owner()) - before
    assert (opened.health().ok, opened.health().detail) == (False, "closed")
    session.close()
    with pytest.raises(SandboxError, match="closed"):
        opened.run("1")
    assert eventually(lambda: len(os.listdir("/proc/self/fd")) <= descriptors)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_containers_end_with_the_host(engine: DockerEngine, number: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOST, "docker"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT
    ) as host:
        assert host.stdout is not None and host.stdout.readline() == b"up\n"
        name = owner(host.pid)
        assert of(engine, name)
        host.send_signal(number)
    assert is_gone(name) and not is_gone(owner())
    assert eventually(lambda: not of(engine, name))


def test_leftovers_of_the_dead_are_removed_at_the_next_start(engine: DockerEngine, own: Callable[..., Sandbox]) -> None:
    here, _, _ = owner().split(":")
    dead, elsewhere = f"{here}:{os.getpid()}:1", "another-boot/1:1:1"
    made = [
        engine.create(IMAGE, ["sleep", "600"], {"labels": {OWNER_LABEL: name}}, network_mode="none")
        for name in (dead, elsewhere)
    ]
    try:
        own()
        assert (of(engine, dead), of(engine, elsewhere)) == (set(), {made[1]})
    finally:
        for container in made:
            engine.remove(container)


def ids(sandbox: Sandbox, count: int = 4) -> set[str | None]:
    """Users of the containers that programs get: each container has its own."""
    return {sandbox.run("import os\nos.getuid()").value for _ in range(count)}


PROGRAMS: dict[str, list[Any]] = tomllib.loads(Path(__file__).with_name("programs.toml").read_text())


@pytest.mark.parametrize(("code", "replaced"), PROGRAMS["violations"])
def test_a_container_is_replaced_after_a_violation(own: Callable[..., Sandbox], code: str, replaced: bool) -> None:
    sandbox = own()
    (before,) = ids(sandbox)
    sandbox.run(code, timeout=0.3)
    assert (before not in ids(sandbox)) is replaced


def test_a_container_is_replaced_after_many_uses(own: Callable[..., Sandbox], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.sandboxes.docker.container.MAX_USES", 6)
    assert len(ids(own(), 12)) == 2


def test_files_of_one_session_are_gone_for_the_next(own: Callable[..., Sandbox]) -> None:
    sandbox = own()
    deep = "import os\nos.makedirs('/dev/shm/a/b')\nfor _ in range(3000):\n    os.mkdir('d')\n    os.chdir('d')"
    hidden = "\nopen('x', 'w').close()\nos.chmod('/tmp/d', 0)\nos.mkfifo('/tmp/p')\nos.symlink('/etc', '/tmp/l')"
    (before,) = ids(sandbox)
    assert sandbox.run(deep + hidden).status == "ok"
    assert (
        sandbox.run("import os\nos.getuid(), os.listdir('/tmp'), os.listdir('/dev/shm')").value == f"({before}, [], [])"
    )


def test_the_kernels_memory_limit_is_the_programs_memory(engine: DockerEngine, own: Callable[..., Sandbox]) -> None:
    """The supervisor's watch is slower than the kernel's here: the cgroup is made smaller than the session's limit."""
    others = of(engine, owner())
    sandbox = own()
    with sandbox.session() as session:
        session.run("x = 1")
        for container in of(engine, owner()) - others:
            subprocess.run(
                ["docker", "update", "--memory", "200m", "--memory-swap", "200m", container], check=True, stdout=-3
            )
        result = session.run("x = 2\ny = b'x' * (400 << 20)\ny = 1")
        assert (result.status, result.state) == ("memory", "rolled_back")
        assert session.run("x").value == "1"


@pytest.fixture
def flaky(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """A way to the engine that a test can cut: a socket of its own that everything goes through."""
    path, ends, open_ = str(tmp_path / "engine.sock"), list[socket.socket](), [True]
    server = socket.socket(socket.AF_UNIX)
    server.bind(path)
    server.listen()

    def carry(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def serve() -> None:
        with suppress(OSError):
            while open_[0]:
                near, _ = server.accept()
                far = socket.socket(socket.AF_UNIX)
                far.connect("/var/run/docker.sock")
                ends.extend((near, far))
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=carry, args=pair, daemon=True).start()

    def cut() -> None:
        open_[0] = False
        for end in (server, *ends):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    threading.Thread(target=serve, daemon=True).start()
    monkeypatch.setenv("DOCKER_HOST", f"unix://{path}")
    yield cut
    cut()


def test_a_dead_engine_is_a_fault_and_never_a_verdict(
    engine: DockerEngine, flaky: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    # In a process of its own, as the SDK does not close a socket that it could not connect.
    with subprocess.Popen([sys.executable, "-c", LOSER], stdout=subprocess.PIPE, text=True, cwd=ROOT) as host:
        assert host.stdout is not None and host.stdout.readline() == "running\n"
        name = owner(host.pid)
        assert of(engine, name)
        flaky()
        assert host.stdout.read() == "fault\nfault\nfault\nFalse True ['ok']\n"
    # Those that ran end with their streams; one that was being made is left to the next start.
    monkeypatch.delenv("DOCKER_HOST")
    open_sandbox("docker", ready=0).close()
    assert eventually(lambda: not of(engine, name))


def test_a_container_that_ends_while_a_program_runs_is_tried_once_more(
    engine: DockerEngine, own: Callable[..., Sandbox]
) -> None:
    others = of(engine, owner())
    sandbox = own()
    mine = of(engine, owner()) - others
    threading.Timer(0.4, lambda: [engine.remove(container) for container in mine]).start()
    result = sandbox.run("import time\ntime.sleep(0.8)\n6 * 7")
    assert (result.status, result.value, result.attempts) == ("ok", "42", 2)
    assert sandbox.counters().reruns == 1


def test_what_is_missing_is_named(engine: DockerEngine) -> None:
    with pytest.raises(SandboxUnavailable, match=r"no runtime called 'kata', only .*runc"):
        open_sandbox("docker", runtime="kata")
    with pytest.raises(
        SandboxUnavailable, match="no image called nobody/none: build it with `agentrl sandbox build-image`"
    ):
        DockerSandbox(Limits(), image="nobody/none")


def test_packages_that_the_image_lacks_are_said(engine: DockerEngine) -> None:
    with pytest.raises(SandboxUnavailable, match="No module named 'sortedcontainers'") as caught:
        open_sandbox("docker", ready=1, packages=["sortedcontainers"])
    assert caught.value.remedy == "agentrl sandbox build-image --packages sortedcontainers"
