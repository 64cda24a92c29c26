"""Calls the Docker engine through the ``docker`` SDK and turns its errors into ours.

Every failure of the engine is a :class:`SandboxError`; one that a user can remedy beforehand is a
:class:`SandboxUnavailable` that names the command.
"""

import math
import os
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, Final, TypeVar, cast

from agentrl.sandboxes.base import Closing, SandboxError, SandboxUnavailable

if TYPE_CHECKING:
    import docker

PYTHON_LABEL: Final = "agentrl.python"
"""Label of our images that says where the interpreter is."""
OWNER_LABEL: Final = "agentrl.owner"
"""Label of every container: the process that it belongs to."""
STDERR: Final = 2
"""Marks what a container writes to standard error."""
_DEFAULT_HOST: Final = "unix:///var/run/docker.sock"
_TIMEOUT_S: Final = 60
_NO_SDK: Final = "the docker back end needs the docker package"


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """An image that the engine has."""

    id: str
    """Its digest."""
    python: str
    """Where its interpreter is; empty in an image that ``build_image`` has not made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """The runtimes and the size of an engine."""

    runtimes: frozenset[str]
    """Names of its container runtimes."""
    cores: int
    """Processors of its machine."""


def owner(pid: int | None = None) -> str:
    """Return a name of a process of this machine, by default this one, that no later process gets.

    Raises:
        FileNotFoundError: There is no such process.
    """
    pid = os.getpid() if pid is None else pid
    # The start time, since a process id is used again; the boot, since the clock of start times begins with it.
    with open(f"/proc/{pid}/stat") as file:
        started = file.read().rpartition(")")[2].split()[19]
    with open("/proc/sys/kernel/random/boot_id") as file:
        # Process ids mean something within one pid namespace only.
        here = f"{file.read().strip()}/{os.stat('/proc/self/ns/pid').st_ino}"
    return f"{here}:{pid}:{started}"


def is_gone(name: str) -> bool:
    """Return whether the process that :func:`owner` named was of this machine and has ended."""
    boot, _, process = name.partition(":")
    pid = process.partition(":")[0]
    # Of another machine or container that uses the same engine, of this one before a restart, or not ours.
    if boot != owner().partition(":")[0] or not pid.isdecimal():
        return False
    try:
        return owner(int(pid)) != name
    except (FileNotFoundError, ProcessLookupError):
        return True


class DockerEngine(Closing):
    """A connection to a Docker engine; every method may be called from any thread."""

    def __init__(self, client: "docker.APIClient") -> None:
        self._client = client

    def info(self) -> EngineInfo:
        """Return its runtimes and its size."""
        with faults("asking the Docker engine what it can do"):
            info = self._client.info()
        return EngineInfo(runtimes=frozenset(info["Runtimes"]), cores=info["NCPU"])

    def image(self, tag: str) -> Image:
        """Look an image up.

        Raises:
            SandboxUnavailable: It is not there.
        """
        import docker.errors

        with faults(f"looking for the image {tag}"):
            try:
                inspected = cast(dict[str, Any], self._client.inspect_image(tag))
            except docker.errors.ImageNotFound as error:
                command = "agentrl sandbox build-image"
                raise SandboxUnavailable(
                    f"the Docker engine has no image called {tag}: build it with `{command}`", remedy=command
                ) from error
        labels = (inspected["Config"] or {}).get("Labels") or {}
        return Image(id=inspected["Id"], python=labels.get(PYTHON_LABEL, ""))

    def build(self, tag: str, *, timeout: float | None = None, **options: Any) -> None:
        """Build an image with options of the SDK; its base must be on the engine's machine, or in a registry.

        Raises:
            SandboxError: The build failed or took more than ``timeout`` seconds.
        """
        until, last = time.monotonic() + (timeout or math.inf), ""
        with faults(f"building {tag}"):
            seconds = None if timeout is None else int(timeout)
            lines = self._client.build(tag=tag, rm=True, decode=True, timeout=seconds, **options)
            for line in cast(Iterator[dict[str, Any]], lines):
                if "error" in line:
                    raise SandboxError(f"building {tag} failed: {line['error']}; it last said: {last}")
                if time.monotonic() > until:
                    raise SandboxError(f"building {tag} took more than {timeout:g} s")
                last = (str(line.get("stream", "")).strip() or last)[-500:]

    def load(self, tar: IO[bytes], tag: str, settings: list[str]) -> None:
        """Make an image from a tar file of its whole file system, with settings as in a Dockerfile."""
        name, _, version = tag.partition(":")
        with faults(f"importing {tag}"):
            answer = self._client.import_image_from_data(
                cast(bytes, tar), repository=name, tag=version or "latest", changes=settings
            )
        if '"error"' in str(answer):
            raise SandboxError(f"the Docker engine refused the image {tag}: {answer}")

    def create(self, image: str, command: list[str], settings: dict[str, Any], **host: Any) -> str:
        """Create a container that reads standard input, and return its id."""
        with faults("making a container"):
            config = self._client.create_host_config(**host)
            made = self._client.create_container(image, command, stdin_open=True, host_config=config, **settings)
        return str(cast(dict[str, Any], made)["Id"])

    def attach(self, container: str) -> "ContainerStream":
        """Open the stream to a container that has not started: its standard input, output and error."""
        with faults("attaching to a container"):
            wanted = {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1}
            return ContainerStream(cast(object, self._client.attach_socket(container, wanted)))

    def start(self, container: str) -> None:
        """Start a container."""
        with faults("starting a container"):
            self._client.start(container)

    def was_out_of_memory(self, container: str, since: float) -> bool:
        """Return whether the container has hit its memory limit since ``since`` (``time.time()``); it may be gone."""
        with faults("looking at a container"):
            filters = {"container": container, "event": "oom"}
            # The engine keeps its latest events. Asked for those until now, it does not wait for more.
            events = self._client.events(since=int(since), until=int(time.time()), filters=filters, decode=True)
            return any(True for _ in events)

    def remove(self, container: str) -> None:
        """End and remove a container; one that is gone already is fine."""
        # 409: another call, or the engine itself, is removing it already.
        with faults("removing a container", fine=(404, 409)):
            self._client.remove_container(container, force=True, v=True)

    def owned(self) -> dict[str, str]:
        """Map the containers of this back end, of every process, to their owners as :func:`owner` names them."""
        with faults("listing containers"):
            containers = self._client.containers(all=True, filters={"label": OWNER_LABEL})
        return {entry["Id"]: entry["Labels"][OWNER_LABEL] for entry in cast(list[Any], containers)}

    def remove_leftovers(self) -> None:
        """Remove containers of processes of this machine that have ended without removing them."""
        for container, name in self.owned().items():
            if is_gone(name):
                self.remove(container)

    def close(self) -> None:
        """Close the connection."""
        self._client.close()


_Engine = TypeVar("_Engine", bound=DockerEngine)


class ContainerStream:
    """A container's standard input, output and error."""

    def __init__(self, answer: object) -> None:
        # The SDK returns a socket for TLS, else a read-only file around one; kept, since its end closes the socket.
        self._answer = answer
        self._socket = answer if isinstance(answer, socket.socket) else cast(socket.socket, cast(Any, answer)._sock)
        self._socket.settimeout(None)
        self._lock = threading.Lock()

    def send(self, data: bytes) -> None:
        """Send everything; threads wait for each other.

        Raises:
            OSError: The container is gone.
        """
        with self._lock:
            self._socket.sendall(data)

    def frames(self) -> Iterator[tuple[int, bytes]]:
        """Yield what the container writes, as it comes and until it is gone: 1 or ``STDERR``, and the bytes.

        Raises:
            OSError: The engine is gone.
        """
        from docker.utils import socket as docker_socket

        return cast(Iterator[tuple[int, bytes]], docker_socket.frames_iter(self._socket, tty=False))

    def close(self) -> None:
        """Close the stream; a thread that waits for bytes gets none."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        if self._answer is not self._socket:
            cast(Any, self._answer).close()


def connect(make: "Callable[[docker.APIClient], _Engine]" = DockerEngine) -> _Engine:
    """Reach the engine that ``DOCKER_HOST`` names, or the one of this machine.

    Args:
        make: Makes the connection of a client; a subclass of :class:`DockerEngine` can do more.

    Raises:
        SandboxUnavailable: The SDK is not installed, or no engine answers; the message names the way out.
    """
    try:
        import docker
        import docker.errors
        import docker.utils
    except ImportError as error:
        remedy = "pip install 'agentrl[docker]'"
        raise SandboxUnavailable(f"{_NO_SDK}: `{remedy}`", remedy=remedy) from error
    where = os.environ.get("DOCKER_HOST", _DEFAULT_HOST)
    try:
        _reach(where)
        return make(docker.APIClient(version="auto", timeout=_TIMEOUT_S, **docker.utils.kwargs_from_env()))
    except (docker.errors.DockerException, OSError) as error:
        raise _explain(where, str(error)) from error


def _reach(where: str) -> None:
    # Tried first, since the SDK leaks a socket where nobody listens.
    if where.startswith("unix://"):
        with socket.socket(socket.AF_UNIX) as probe:
            probe.connect(where.removeprefix("unix://"))


def _explain(where: str, why: str) -> SandboxUnavailable:
    if "PermissionError" in why or "Permission denied" in why:
        remedy = "sudo usermod -aG docker $USER"
        message = f"this user may not use the Docker engine at {where}: run `{remedy}` and log in again"
    else:
        remedy = "sudo systemctl start docker"
        message = f"no Docker engine answers at {where}: start it with `{remedy}`, or set DOCKER_HOST ({why})"
    return SandboxUnavailable(message, remedy=remedy)


@contextmanager
def faults(what: str, fine: tuple[int, ...] = ()) -> Generator[None]:
    """Turn errors of the SDK, of HTTP and of the socket into ours; a ``fine`` status of HTTP is no error."""
    # Imported late: the SDK is an extra, and takes a second to load.
    import docker.errors
    import requests

    try:
        yield
    except (docker.errors.DockerException, requests.RequestException, OSError) as error:
        if not (isinstance(error, docker.errors.APIError) and error.status_code in fine):
            raise SandboxError(f"{what} failed: {error}") from error
