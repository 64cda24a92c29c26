"""What the containers of tasks need of the engine beside starting: builds, commands, and files as tar streams.

A tar stream is read as it comes and counted: nothing that a container holds is ever unpacked on this machine.
"""

import json
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, cast

from agentrl.sandboxes.docker.engine import ContainerStream, DockerEngine, faults

if TYPE_CHECKING:
    import requests

MODIFIED: Final = 0
"""Kind of a path of :meth:`TaskEngine.changes` whose content or rights differ from the image's."""
ADDED: Final = 1
"""Kind of a path that the image does not have."""
DELETED: Final = 2
"""Kind of a path of the image that was deleted; the same path may be there anew."""
_TIMEOUT_S: Final = 60
_LONG_S: Final = 600
"""Seconds after which a container has too many files for the engine to list them."""
_CHUNK: Final = 1 << 16


class TooLargeError(Exception):
    """A stream is longer than its limit: whoever filled the container caused it."""


class TaskEngine(DockerEngine):
    """A connection to an engine that also builds images of tasks, and runs commands in their containers."""

    def settings(self, image: str) -> Mapping[str, Any]:
        """Return an image's settings, such as ``WorkingDir`` and ``Env``.

        Raises:
            SandboxError: It is not there.
        """
        with faults(f"looking at the image {image}"):
            inspected = cast(dict[str, Any], self._client.inspect_image(image))
        return {"Id": inspected["Id"], **(inspected["Config"] or {})}

    def images(self, label: str) -> list[tuple[int, str]]:
        """List the images with a label, by their time of creation, as time and tag."""
        with faults("listing images"):
            listed = cast(list[dict[str, Any]], self._client.images(filters={"label": label}))
        return sorted((int(image["Created"]), str(tag)) for image in listed for tag in image["RepoTags"] or ())

    def remove_image(self, tag: str) -> None:
        """Remove an image; one that a container still uses stays, and one that is gone already is fine."""
        with faults(f"removing the image {tag}", fine=(404, 409)):
            self._client.remove_image(tag)

    def is_running(self, container: str) -> bool:
        """Return whether a container's first process runs."""
        with faults("looking at a container"):
            return bool(cast(dict[str, Any], self._client.inspect_container(container))["State"]["Running"])

    def kill(self, container: str) -> None:
        """End every process of a container; its files stay. One that has ended already is fine."""
        with faults("ending a container", fine=(409,)):
            self._client.kill(container)
        with faults("waiting for a container's end"):
            self._client.wait(container, timeout=_TIMEOUT_S)

    def run(
        self,
        container: str,
        command: Sequence[str],
        timeout: float,
        *,
        user: str = "",
        env: Mapping[str, str] | None = None,
    ) -> int | None:
        """Run a command in ``/`` without its output; return its exit code, None if it runs longer than ``timeout``.

        Its end is read from the engine, so no program in the container can change the limit.
        """
        until, pause = time.monotonic() + timeout, 0.02
        with faults("running a command in a container"):
            made = self._client.exec_create(
                container, list(command), user=user, environment=dict(env or {}), workdir="/"
            )
            self._client.exec_start(made["Id"], detach=True)
        while (code := self.exit_code(str(made["Id"]))) is None:
            if time.monotonic() > until:
                return None
            time.sleep(pause)
            pause = min(2 * pause, 0.5)
        return code

    def exit_code(self, exec_id: str) -> int | None:
        """Return the exit code of a command, -1 where the engine knows none; None while the command runs."""
        with faults("looking at a command"):
            seen = self._client.exec_inspect(exec_id)
        code = -1 if seen["ExitCode"] is None else int(seen["ExitCode"])
        return None if seen["Running"] else code

    def talk(self, container: str, command: Sequence[str], *, user: str, env: Mapping[str, str]) -> "Conversation":
        """Start a program in ``/`` and return its standard input and output; it must not write before it reads."""
        with faults("starting a program in a container"):
            made = self._client.exec_create(
                container, list(command), user=user, environment=dict(env), stdin=True, workdir="/"
            )
            return Conversation(str(made["Id"]), cast(object, self._client.exec_start(made["Id"], socket=True)))

    def unpack(self, container: str, tar: bytes) -> None:
        """Unpack a tar at the root of a container, with its owners; missing folders are made."""
        with faults("copying files into a container"):
            self._client.put_archive(container, "/", tar)

    @contextmanager
    def archive(self, container: str, path: str, limit: int) -> Generator["CountedStream | None"]:
        """Open a tar stream of a file or folder of a container, links not followed; None where it is not there."""
        with faults(f"copying {path!r} out of a container"), self._get(container, "archive", path=path) as answer:
            if answer.status_code == 404:
                yield None
                return
            answer.raise_for_status()
            yield CountedStream(answer.iter_content(_CHUNK), limit)

    def changes(self, container: str, limit: int) -> dict[str, int]:
        """Map the paths that differ from the image's to their kinds: ``MODIFIED``, ``ADDED`` or ``DELETED``.

        Raises:
            TooLargeError: The list is longer than ``limit`` bytes.
        """
        with faults("listing the changed files"), self._get(container, "changes") as answer:
            answer.raise_for_status()
            text = CountedStream(answer.iter_content(_CHUNK), limit).read(limit + 1)
        entries = cast(list[dict[str, Any]], json.loads(text) or [])
        return {str(entry["Path"]): int(entry["Kind"]) for entry in entries}

    @contextmanager
    def _get(self, container: str, what: str, **params: str) -> "Generator[requests.Response]":
        import requests

        # The SDK's own method for this can't be stopped in the middle of an answer.
        url = f"{self._client.base_url}/v{self._client.api_version}/containers/{container}/{what}"
        wanted = {"Accept-Encoding": "identity"}
        try:
            with self._client.get(url, params=params, headers=wanted, stream=True, timeout=_LONG_S) as answer:
                yield answer
        except requests.Timeout as error:
            raise TooLargeError from error


class CountedStream:
    """A file that can be read once, from front to back, and only so far."""

    def __init__(self, chunks: Iterator[bytes], limit: int) -> None:
        self._chunks, self._rest = chunks, b""
        self.left = limit
        """How many bytes may still come."""

    def read(self, size: int) -> bytes:
        """Read ``size`` bytes, fewer at the end.

        Raises:
            TooLargeError: More than the limit came.
        """
        parts, missing = [self._rest], size - len(self._rest)
        while missing > 0 and (chunk := next(self._chunks, b"")):
            self.left -= len(chunk)
            if self.left < 0:
                raise TooLargeError
            parts.append(chunk)
            missing -= len(chunk)
        data = b"".join(parts)
        self._rest = data[size:]
        return data[:size]


class Conversation(ContainerStream):
    """Standard input and output of a program that runs in a container."""

    def __init__(self, exec_id: str, answer: object) -> None:
        super().__init__(answer)
        self.exec_id = exec_id
        """The engine's name of the running program."""
        self._frames = b""

    def send(self, data: bytes) -> None:
        """Send everything; see :meth:`ContainerStream.send`. A program that does not read can't hold up the caller."""
        self._socket.settimeout(_TIMEOUT_S)
        super().send(data)

    def heard(self, seconds: float) -> bytes:
        """Wait so many seconds at most for output; return it, or nothing."""
        until = time.monotonic() + seconds
        try:
            data = self.receive(until)
        except TimeoutError:
            return b""
        # A program that has closed its output may go on.
        time.sleep(0 if data else max(0.0, until - time.monotonic()))
        return data

    def receive(self, until: float) -> bytes:
        """Wait for output until a time of the monotonic clock; return it, or nothing where the program has ended.

        Raises:
            TimeoutError: Nothing came.
        """
        while True:
            size = int.from_bytes(self._frames[4:8], "big")
            if len(self._frames) >= 8 + size and len(self._frames) >= 8:
                data, self._frames = self._frames[8 : 8 + size], self._frames[8 + size :]
                return data
            if (left := until - time.monotonic()) <= 0:
                raise TimeoutError
            self._socket.settimeout(left)
            try:
                data = self._socket.recv(_CHUNK)
            except ConnectionError:
                data = b""
            if not data:
                return b""
            self._frames += data
