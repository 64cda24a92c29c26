"""What all Harbor environments of a process share: the engine, images of tasks, and containers started ahead."""

import hashlib
import io
import queue
import shutil
import threading
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from agentrl.envs.adapters.harbor.box import Box, BoxSpec
from agentrl.envs.adapters.harbor.folder import HarborTask, TaskFault, base_images, dockerfile, packed, sent
from agentrl.envs.adapters.harbor.layer import build_layer
from agentrl.processes.per_process import PerProcess
from agentrl.sandboxes import SandboxError
from agentrl.sandboxes.docker.engine import connect
from agentrl.sandboxes.docker.task_engine import TaskEngine

LABEL: Final = "agentrl.task"
"""Label of the images that are built here."""


class Host:
    """A connection to the engine with what it holds for this process; safe from any thread.

    Raises:
        SandboxUnavailable: There is no engine or no SDK; the message names the way out.
    """

    def __init__(self) -> None:
        self.engine = connect(TaskEngine)
        """The engine."""
        self.engine.remove_leftovers()
        self._building = threading.Lock()
        self._used: dict[str, int] = {}
        self._layer: Path | None = None
        self._lock = threading.Lock()
        self._ready: list[Box] = []
        self._starting = Counter[BoxSpec]()
        self._jobs: queue.SimpleQueue[tuple[BoxSpec, int] | None] = queue.SimpleQueue()
        self._closed = False
        threading.Thread(target=self._start_ahead, name="agentrl-harbor", daemon=True).start()

    def image(self, task: HarborTask, *, image_map: Mapping[str, str], network: str, held: int) -> str:
        """Return the tag of a task's image, and build it where its content has none yet.

        Args:
            task: whose image it is.
            image_map: local images by the names of published ones.
            network: what a build may reach, as the engine names it.
            held: how many built images stay on the engine's disk; the one used longest ago goes before others.

        Raises:
            SandboxError: The engine has no such image, or can't build it.
        """
        wanted = task.settings.environment.docker_image
        ready = image_map.get(wanted, wanted)
        buildable = (task.folder / "environment" / "Dockerfile").is_file()
        if ready and (not buildable or self._id(ready)):
            return ready
        # One at a time: several episodes of a task begin together and wait for one build.
        with self._building:
            return self._built(task, image_map, network, held)

    def _built(self, task: HarborTask, image_map: Mapping[str, str], network: str, held: int) -> str:
        try:
            text = dockerfile(task, image_map)
            folder = task.folder / "environment"
            context = packed(folder, replaced={"Dockerfile": text.encode()}, only=sent(folder))
        except TaskFault as error:
            raise SandboxError(f"{task.folder.name}: {error}") from error
        # Another base of the same name is another image.
        bases = [self._id(name) for name in base_images(text)]
        tag = f"agentrl-task:{hashlib.sha256(b''.join([context, *map(str.encode, bases)])).hexdigest()[:24]}"
        if not self._id(tag):
            self.engine.build(
                tag,
                timeout=task.settings.environment.build_timeout_sec,
                fileobj=io.BytesIO(context),
                custom_context=True,
                forcerm=True,
                network_mode=network,
                labels={LABEL: ""},
            )
        self._used[tag] = max(self._used.values(), default=0) + 1
        images = sorted((self._used.get(name, 0), created, name) for created, name in self.engine.images(LABEL))
        for *_, name in images[: max(0, len(images) - held)]:
            self.engine.remove_image(name)
        return tag

    def _id(self, image: str) -> str:
        """Return an image's digest; empty where the engine does not have it."""
        try:
            return str(self.engine.settings(image)["Id"])
        except SandboxError:
            self.engine.info()  # raises where the engine itself is gone
            return ""

    def layer(self) -> Path:
        """Return the folder of the offline verifier."""
        with self._lock:
            self._layer = self._layer or build_layer()
            return self._layer

    def take(self, spec: BoxSpec, ahead: int) -> Box:
        """Return a started container, and start the next one meanwhile where fewer than ``ahead`` are ready.

        Raises:
            SandboxError: It can't be started.
        """
        with self._lock:
            box = next((box for box in self._ready if box.spec == spec), None)
            if box is not None:
                self._ready.remove(box)
            if sum(other.spec == spec for other in self._ready) + self._starting[spec] < ahead:
                self._starting[spec] += 1
                self._jobs.put((spec, ahead))
        if box is not None and self.engine.is_running(box.id):
            return box
        if box is not None:
            box.close()
        return Box(self.engine, spec)

    def _start_ahead(self) -> None:
        while (job := self._jobs.get()) is not None:
            spec, ahead = job
            box = None
            # Whoever needs this container tries again, and sees the fault.
            with suppress(SandboxError):
                box = None if self._closed else Box(self.engine, spec)
            with self._lock:
                self._starting[spec] -= 1
                if box is not None:
                    self._ready.append(box)
                many = 0 if self._closed else ahead
                late, self._ready = self._ready[: len(self._ready) - many], self._ready[len(self._ready) - many :]
            _close(late)

    def close(self) -> None:
        """Remove what was started ahead; containers of episodes belong to them."""
        with self._lock:
            self._closed = True
            late, self._ready = self._ready, []
        self._jobs.put(None)
        _close(late)
        if self._layer is not None:
            shutil.rmtree(self._layer, ignore_errors=True)
        self.engine.close()


def _close(boxes: list[Box]) -> None:
    for box in boxes:
        with suppress(SandboxError):
            box.close()


_host: PerProcess[Host] = PerProcess(Host, close=Host.close)


def shared_host() -> Host:
    """Return the process's host.

    Raises:
        SandboxUnavailable: There is no engine or no SDK; the message names the way out.
    """
    return _host.get()


close_host = _host.close
"""Close the process's host; the next use opens another."""
