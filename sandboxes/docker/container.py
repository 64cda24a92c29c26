"""Hardens, starts and ends one container, and carries its session's bytes over the stream to the runner in it."""

import dataclasses
import io
import itertools
import os
import secrets
import socket
import threading
import time
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from agentrl.sandboxes.base import Limits, SandboxError
from agentrl.sandboxes.docker.engine import OWNER_LABEL, STDERR, DockerEngine, Image, owner
from agentrl.sandboxes.host.profiles import PRELOADED
from agentrl.sandboxes.inside import boot, launcher, mux, wire
from agentrl.sandboxes.inside.limits import MIB, QUEUED_SIGNALS

MAX_USES: Final = 200
"""Sessions after which a container is replaced, however clean it reports to be."""
READY_S: Final = 120.0
"""Timeout for the start of a container [seconds]."""
# The interpreter with its imports, the runner's own, and the page tables of a full /tmp.
_RUNNER_BYTES: Final = 384 * MIB
_RUNNER_PROCESSES: Final = 16
# The kernel of gVisor is itself a process with many threads, in the same cgroup.
_GVISOR_PROCESSES: Final = 1024
_ULIMITS: Final = {**dict.fromkeys(("core", "memlock", "msgqueue", "rtprio"), 0), "sigpending": QUEUED_SIGNALS}
_USERS: Final = range(20_000, 60_000)
_next_user: Final = itertools.count(secrets.randbelow(len(_USERS)))
# Timeout for a container to kill what a session left, and to remove its files.
_WIPE_S: Final = 30.0
_CHUNK: Final = 1 << 18
_ERRORS_KEPT: Final = 4_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerSpec:
    """Specifies every container of one sandbox."""

    image: Image
    """The image."""
    runtime: str | None
    """Container runtime; ``None`` takes the engine's own."""
    limits: Limits
    """Limits of each session."""
    cpus: int
    """Cores that one container may keep busy."""


def hardening(spec: ContainerSpec) -> dict[str, Any]:
    """Return the settings that isolate a container's programs: the arguments of the SDK's ``create_host_config``."""
    limits = spec.limits
    # The supervisor stops a session at its own limit; its snapshot, its files and the runner come on top. At this limit
    # the kernel kills, and the program first.
    memory = 2 * limits.memory_bytes + limits.tmp_bytes + limits.shm_bytes + _RUNNER_BYTES
    processes = limits.processes + _RUNNER_PROCESSES
    folder = f"rw,exec,nosuid,nodev,size={limits.tmp_bytes},nr_inodes={limits.tmp_inodes},mode=1777"
    return {
        "network_mode": "none",
        "read_only": True,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges"],
        "ipc_mode": "private",
        "pids_limit": processes if spec.runtime is None else max(processes, _GVISOR_PROCESSES),
        "mem_limit": memory,
        "memswap_limit": memory,
        "nano_cpus": spec.cpus * 1_000_000_000,
        "shm_size": limits.shm_bytes,
        "tmpfs": {"/tmp": folder},
        "runtime": spec.runtime,
        "ulimits": [{"Name": name, "Soft": most, "Hard": most} for name, most in _ULIMITS.items()],
        "auto_remove": True,
        # The engine would write to its disk what goes over the stream.
        "log_config": {"Type": "none", "Config": {}},
    }


def _settings(spec: ContainerSpec) -> dict[str, Any]:
    # A user id of its own: the kernel counts processes by user, and no container owns what another one left.
    user = _USERS[next(_next_user) % len(_USERS)]
    return {
        "user": f"{user}:{user}",
        # The engine adds the image's own.
        "environment": launcher.fixed_environment(spec.image.python),
        "entrypoint": [],
        "working_dir": "/",
        "hostname": "sandbox",
        "labels": {OWNER_LABEL: owner()},
    }


def _sources() -> bytes:
    """Return our modules as ``boot.py`` reads them: the length, then an archive."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        for package in ("agentrl", "agentrl/sandboxes"):
            file.writestr(f"{package}/__init__.py", "")
        for path in Path(boot.__file__).parent.glob("*.py"):
            file.writestr(f"agentrl/sandboxes/inside/{path.name}", path.read_bytes())
    return len(archive.getvalue()).to_bytes(4, "big") + archive.getvalue()


class Container:
    """A container with its runner; one session at a time."""

    def __init__(self, engine: DockerEngine, spec: ContainerSpec, ended: Callable[["Container", bool], None]) -> None:
        """Start it, and wait until it has imported everything.

        Args:
            engine: Where it runs.
            spec: What it is made from.
            ended: Called with this container, and whether it can serve another session, after each one and at its end.

        Raises:
            SandboxError: The engine refused, or it did not start.
        """
        self._engine = engine
        self._ended = ended
        self._lock = threading.Lock()
        self._ready = threading.Event()
        self._fault = ""
        self._key = secrets.token_hex(16)
        self._errors = b""
        self._session: _Endpoint | None = None
        self.alive = True
        """The stream to it is open."""
        self._began = time.time()
        self.made = time.monotonic()
        """When it was made, by the monotonic clock [seconds]."""
        self._uses = 0
        # The boot code travels as an argument, so that the image need not hold it.
        command = [spec.image.python, "-s", "-S", "-P", "-c", Path(boot.__file__).read_text()]
        hard = hardening(spec)
        self.memory_bytes: int = hard["mem_limit"]
        """Limit of the whole container [bytes]."""
        self.id = engine.create(spec.image.id, command, _settings(spec), **hard)
        """Its id."""
        order: wire.Message = {
            **{"t": "settings", "key": self._key},
            **{"limits": dataclasses.asdict(spec.limits), "preload": list(PRELOADED["sympy"])},
        }
        try:
            # Attached before the container starts, so that no byte is missed.
            self._stream = engine.attach(self.id)
            engine.start(self.id)
            threading.Thread(target=self._listen, name=f"agentrl-{self.id[:12]}", daemon=True).start()
            # Where the container has ended already, the listener knows why.
            with suppress(OSError):
                self._stream.send(_sources() + wire.pack(order))
            if not self._ready.wait(READY_S):
                raise SandboxError(f"a container did not start within {READY_S:.0f} seconds")
            if not self.alive:
                raise SandboxError(f"a container did not start: {self._why()}")
        except BaseException:
            with suppress(SandboxError):
                self.dispose()
            raise

    def _why(self) -> str:
        errors = self._errors.decode("utf-8", "replace").strip()
        return self._fault or errors[-_ERRORS_KEPT:] or "it ended without a message"

    def serve(self, theirs: tuple[int, int, int]) -> None:
        """Begin a session on copies of these descriptors: channel, standard output, standard error.

        Raises:
            SandboxError: The container is gone.
        """
        channel, out, err = map(os.dup, theirs)
        endpoint = _Endpoint(socket.socket(fileno=channel), {"out": out, "err": err})
        with self._lock:
            if not self.alive:
                endpoint.close()
                raise SandboxError(f"the container is gone: {self._why()}")
            self._uses += 1
            self._session = endpoint
        try:
            self._stream.send(wire.pack({"t": "open"}))
        except OSError as error:
            raise SandboxError(f"the container is gone: {error}") from error
        threading.Thread(target=self._forward, args=(endpoint,), daemon=True).start()

    def _forward(self, endpoint: "_Endpoint") -> None:
        """Carry the session's bytes into the container until the session ends; then have the container cleaned."""
        with suppress(OSError):
            while data := endpoint.channel.recv(_CHUNK):
                self._stream.send(wire.pack(mux.carry("channel", data)))
        endpoint.host_closed = True
        # Where the container is gone, there is nobody to tell.
        with suppress(OSError):
            self._stream.send(wire.pack({"t": "close"}))
        # A container that does not answer may be busy with what the program left: it serves nobody any more.
        if not endpoint.closed.wait(_WIPE_S):
            with suppress(SandboxError):
                self.dispose()

    def _listen(self) -> None:
        """Carry the container's bytes to the session, until the container ends."""
        decoder = wire.Decoder(wire.MAX_CLAIM)
        try:
            for stream, data in self._stream.frames():
                if stream == STDERR:
                    self._errors = (self._errors + data)[-_ERRORS_KEPT:]
                    continue
                for message in decoder.feed(data):
                    if message.get("key") != self._key:
                        raise wire.WireError("a message that pid 1 did not send")
                    self._handle(message)
        except (OSError, ValueError, KeyError, wire.WireError) as error:
            # A container may send anything, where a program has broken out of our code: that ends this container only.
            self._fault = self._fault or str(error)
        finally:
            self._stream.close()
            self._stream_ended()

    def _handle(self, message: wire.Message) -> None:
        if message["t"] in ("channel", "out", "err"):
            if self._session is not None:
                self._session.deliver(str(message["t"]), mux.carried(message))
        elif message["t"] == "ready":
            self._ready.set()
        elif message["t"] == "key":
            self._key = str(message["next"])
        elif message["t"] == "fault":
            self._fault = str(message["why"])
        elif message["t"] == "clean":
            with self._lock:
                endpoint, self._session = self._session, None
            if endpoint is None or not endpoint.host_closed:
                # Valid only after the host's close: else a program could pass the container on while it still runs.
                raise wire.WireError("it says that a session has ended which has not")
            endpoint.close()
            self._ended(self, bool(message["usable"]) and self._uses < MAX_USES)

    def _stream_ended(self) -> None:
        with self._lock:
            self.alive = False
            endpoint, self._session = self._session, None
        self._ready.set()
        if endpoint is not None:
            endpoint.close()
        self._ended(self, False)

    def was_out_of_memory(self) -> bool:
        """Return whether the kernel ended the whole container at its memory limit."""
        return self._engine.was_out_of_memory(self.id, self._began)

    def dispose(self) -> None:
        """End every process in it and remove it.

        Raises:
            SandboxError: The engine failed.
        """
        self.alive = False
        self._engine.remove(self.id)


class _Endpoint:
    """The container's ends of a session's descriptors."""

    def __init__(self, channel: socket.socket, pipes: dict[str, int]) -> None:
        self.channel = channel
        self.host_closed = False
        """The host's session has closed."""
        self.closed = threading.Event()
        """Set when the container has let go of the session."""
        self._pipes = pipes

    def deliver(self, kind: str, data: bytes) -> None:
        """Write bytes to the session; drop them where it has closed."""
        with suppress(BrokenPipeError, ConnectionResetError):
            if kind == "channel":
                self.channel.sendall(data)
            else:
                while data:
                    data = data[os.write(self._pipes[kind], data) :]

    def close(self) -> None:
        """Close the descriptors."""
        # Shut down first: _forward may be in a call of the socket, which must return.
        with suppress(OSError):
            self.channel.shutdown(socket.SHUT_RDWR)
        self.channel.close()
        for descriptor in self._pipes.values():
            os.close(descriptor)
        self.closed.set()
