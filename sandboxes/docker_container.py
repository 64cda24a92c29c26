"""One container as the host sees it: how it is hardened, and the stream to the runner in it."""

import dataclasses
import itertools
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from agentrl.sandboxes import docker_boot, launcher, link, wire
from agentrl.sandboxes.base import MIB, Limits, SandboxError
from agentrl.sandboxes.docker_engine import OWNER_LABEL, Engine, owner
from agentrl.sandboxes.profiles import PRELOADED

READY_S: Final = 120.0
"""Patience with a container that starts [seconds]."""
# The interpreter with its imports, the runner's own, and the page tables of a full /tmp.
_RUNNER_BYTES: Final = 384 * MIB
_RUNNER_PROCESSES: Final = 16
# The kernel of gVisor is itself a process with many threads, in the same cgroup.
_GVISOR_PROCESSES: Final = 1024
_USERS: Final = range(20_000, 60_000)
_next_user: Final = itertools.count(secrets.randbelow(len(_USERS)))
# Patience with a container that is to kill what a session left, and to remove its files.
_WIPE_S: Final = 30.0
_CHUNK: Final = 1 << 18
_ERRORS_KEPT: Final = 4_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What every container of one sandbox is made from."""

    image: str
    """Id of the image."""
    python: str
    """The interpreter in it."""
    environment: dict[str, str]
    """Environment variables of the image."""
    runtime: str | None
    """Container runtime; ``None`` takes the engine's own."""
    limits: Limits
    """What each session may use."""
    cpus: int
    """Cores that one container may keep busy."""


def hardening(recipe: Recipe) -> dict[str, Any]:
    """Give the settings that keep a container's programs in: the arguments of the SDK's ``create_host_config``."""
    limits = recipe.limits
    # The overseer stops a session at its limit; its stopped copy, its files and the runner come on top. At this limit
    # here the kernel kills, and the program is the first that it kills.
    memory = 2 * limits.memory_bytes + limits.tmp_bytes + limits.shm_bytes + _RUNNER_BYTES
    processes = limits.processes + _RUNNER_PROCESSES
    folder = f"rw,exec,nosuid,nodev,size={limits.tmp_bytes},nr_inodes={limits.tmp_inodes},mode=1777"
    return {
        "network_mode": "none",
        "read_only": True,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges"],
        "ipc_mode": "private",
        "pids_limit": processes if recipe.runtime is None else max(processes, _GVISOR_PROCESSES),
        "mem_limit": memory,
        "memswap_limit": memory,
        "nano_cpus": recipe.cpus * 1_000_000_000,
        "shm_size": limits.shm_bytes,
        "tmpfs": {"/tmp": folder},
        "runtime": recipe.runtime,
        "ulimits": [{"Name": name, "Soft": 0, "Hard": 0} for name in ("core", "memlock", "msgqueue", "rtprio")],
        "auto_remove": True,
        # What goes over the stream must not be written to the engine's disk as well.
        "log_config": {"Type": "none", "Config": {}},
    }


def _settings(recipe: Recipe) -> dict[str, Any]:
    # A user of its own: the kernel counts processes by user, and nothing that one container left is another's.
    user = _USERS[next(_next_user) % len(_USERS)]
    return {
        "user": f"{user}:{user}",
        "environment": {**recipe.environment, **launcher.fixed_environment(recipe.python)},
        "entrypoint": [],
        "working_dir": "/",
        "hostname": "sandbox",
        "labels": {OWNER_LABEL: owner()},
    }


def _sources() -> bytes:
    """Give our modules as the container's first lines expect them: the length, then JSON."""
    folder = Path(__file__).parent
    names = {f"agentrl.sandboxes.{path.stem}": path for path in folder.glob("*.py") if path.stem != "__init__"}
    package = {"agentrl": "", "agentrl.sandboxes": ""}
    return wire.pack({**package, **{name: path.read_text() for name, path in names.items()}})


class Container:
    """A container with its runner; one session at a time."""

    def __init__(self, engine: Engine, recipe: Recipe, ended: Callable[["Container", bool], None]) -> None:
        """Start it, without waiting until it is ready.

        Args:
            engine: Where it runs.
            recipe: What it is made from.
            ended: Called with this container after each session, and at its end: whether it can serve another one.

        Raises:
            SandboxError: The engine refused.
        """
        self._engine = engine
        self._ended = ended
        self._lock = threading.Lock()
        self._ready = threading.Event()
        self._fault = ""
        self._key = secrets.token_bytes(16)
        self._errors = b""
        self._session: _Ends | None = None
        self.alive = True
        """Whether the stream to it is open."""
        self._began = time.time()
        self.made = time.monotonic()
        """When it was made, by the monotonic clock [seconds]."""
        self.uses = 0
        """Sessions that it has served."""
        boot = Path(docker_boot.__file__).read_text()
        command = [recipe.python, "-s", "-S", "-P", "-c", boot]
        hard = hardening(recipe)
        self._memory: int = hard["mem_limit"]
        self.id = engine.create(recipe.image, command, _settings(recipe), **hard)
        """Its id."""
        try:
            self._stream = engine.attach(self.id)
            engine.start(self.id)
            given: wire.Message = {
                **{"limits": dataclasses.asdict(recipe.limits), "preload": list(PRELOADED["sympy"])},
                **{"key": self._key.hex()},
            }
            self._stream.send(_sources() + link.frame(link.RUNNER, wire.pack(given)))
        except OSError as error:
            engine.remove(self.id)
            raise SandboxError(f"a container did not take its orders: {error}") from error
        except BaseException:
            engine.remove(self.id)
            raise
        threading.Thread(target=self._listen, name=f"agentrl-{self.id[:12]}", daemon=True).start()

    def await_ready(self) -> None:
        """Wait until it has imported everything.

        Raises:
            SandboxError: It did not start.
        """
        if not self._ready.wait(READY_S):
            raise SandboxError(f"a container did not start within {READY_S:.0f} seconds")
        if not self.alive:
            raise SandboxError(f"a container did not start: {self._why()}")

    def _why(self) -> str:
        said = self._errors.decode("utf-8", "replace").strip()
        return self._fault or said[-_ERRORS_KEPT:] or "it ended without a word"

    @property
    def memory_bytes(self) -> int:
        """What all of it may use [bytes]."""
        return self._memory

    def serve(self, theirs: tuple[int, int, int]) -> None:
        """Begin a session that talks over copies of these descriptors: channel, standard output, standard error.

        Raises:
            SandboxError: The container is gone.
        """
        channel, out, err = map(os.dup, theirs)
        ends = _Ends(socket.socket(fileno=channel), {link.OUT: out, link.ERR: err})
        with self._lock:
            if not self.alive:
                ends.close()
                raise SandboxError(f"the container is gone: {self._why()}")
            self.uses += 1
            self._session = ends
        try:
            self._stream.send(link.frame(link.RUNNER, wire.pack({"t": "open"})))
        except OSError as error:
            raise SandboxError(f"the container is gone: {error}") from error
        threading.Thread(target=self._forward, args=(ends,), daemon=True).start()

    def _forward(self, ends: "_Ends") -> None:
        """Carry what the session says into the container; when the session ends, say so and see that it is cleaned."""
        with suppress(OSError):
            while data := ends.channel.recv(_CHUNK):
                self._stream.send(link.frame(link.CHANNEL, data))
        ends.leaving = True
        # Where the container is gone, nobody needs to be told.
        with suppress(OSError):
            self._stream.send(link.frame(link.RUNNER, wire.pack({"t": "close"})))
        if not ends.closed.wait(_WIPE_S):
            with suppress(SandboxError):
                self.close()

    def _listen(self) -> None:
        """Carry what the container says to the session, until the container ends."""
        cutter, words, engine_frames = link.Cutter(self._key), wire.Frames(wire.MAX_ORDER), _EngineFrames()
        try:
            while data := self._stream.receive(_CHUNK):
                for kind, payload in engine_frames.feed(data):
                    if kind == _EngineFrames.ERRORS:
                        self._errors = (self._errors + payload)[-_ERRORS_KEPT:]
                        continue
                    for part, piece in cutter.feed(payload):
                        if part == link.RUNNER:
                            for word in words.feed(piece):
                                if word.get("t") == "key":
                                    cutter.key = bytes.fromhex(str(word["key"]))
                                else:
                                    self._hear(word)
                        elif self._session is not None:
                            self._session.take(part, piece)
        except (OSError, ValueError, KeyError, wire.WireError) as error:
            self._fault = self._fault or str(error)
        finally:
            self._stream.close()
            self._over()

    def _hear(self, word: wire.Message) -> None:
        if word["t"] == "ready":
            self._ready.set()
        elif word["t"] == "fault":
            self._fault = str(word["why"])
        elif word["t"] == "clean":
            with self._lock:
                ends, self._session = self._session, None
            if ends is None or not ends.leaving:
                raise wire.WireError("it says that a session has ended which has not")
            ends.close()
            self._ended(self, bool(word["usable"]))

    def _over(self) -> None:
        with self._lock:
            self.alive = False
            ends, self._session = self._session, None
        self._ready.set()
        if ends is not None:
            ends.close()
        self._ended(self, False)

    def was_out_of_memory(self) -> bool:
        """Whether the kernel ended the whole container at its memory limit."""
        return self._engine.was_out_of_memory(self.id, self._began)

    def close(self) -> None:
        """End every process in it and remove it.

        Raises:
            SandboxError: The engine failed.
        """
        self.alive = False
        self._engine.remove(self.id)


class _Ends:
    """The container's ends of a session's descriptors."""

    def __init__(self, channel: socket.socket, pipes: dict[bytes, int]) -> None:
        self.channel = channel
        self.leaving = False
        """Whether the host's session has let go."""
        self.closed = threading.Event()
        """Set when the container has let go of the session."""
        self._pipes = pipes

    def take(self, kind: bytes, data: bytes) -> None:
        """Hand bytes to the session; one that has been closed takes none."""
        with suppress(BrokenPipeError, ConnectionResetError):
            if kind == link.CHANNEL:
                self.channel.sendall(data)
            else:
                while data:
                    data = data[os.write(self._pipes[kind], data) :]

    def close(self) -> None:
        """Let go, so that a session that still listens hears the end."""
        with suppress(OSError):
            self.channel.shutdown(socket.SHUT_RDWR)
        self.channel.close()
        for descriptor in self._pipes.values():
            os.close(descriptor)
        self.closed.set()


class _EngineFrames:
    """Undoes how the engine interleaves a container's standard output and error: 8 bytes, then the payload."""

    ERRORS: Final = 2

    def __init__(self) -> None:
        self._head = b""
        self._left = 0

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """Add bytes and give what they contain: 1 or 2, and the piece."""
        found: list[tuple[int, bytes]] = []
        while data:
            if not self._left:
                taken = 8 - len(self._head)
                self._head, data = self._head + data[:taken], data[taken:]
                if len(self._head) < 8:
                    break
                self._left = int.from_bytes(self._head[4:], "big")
                self._kind = self._head[0]
                self._head = b""
            piece, data = data[: self._left], data[self._left :]
            self._left -= len(piece)
            if piece:
                found.append((self._kind, piece))
        return found
