"""Run a task's tests where the agent can't decide the verdict: in a fresh container of the same image.

The agent's container stays up and lends its network, so a service that it started still answers. Its processes, its
system files, ``/tests`` and ``/logs`` are not the verifier's. Not covered: what ``test.sh`` itself runs of the agent's
code has the rights of ``test.sh``, and a test that such code can fool is the task's own.
"""

import tarfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from agentrl.envs.adapters.harbor.box import Box, start_container
from agentrl.envs.adapters.harbor.carry import MOST_BYTES, MOST_PATHS, Parcel, scope_of, select
from agentrl.envs.adapters.harbor.folder import HarborTask, packed
from agentrl.envs.adapters.harbor.layer import MOUNT
from agentrl.envs.adapters.harbor.verdict import FILES, MOST_REWARD, UnreadableError, Verdict, parts_of, regular
from agentrl.sandboxes import SandboxError
from agentrl.sandboxes.docker.task_engine import TaskEngine, TooLargeError

_MOST_LIST: Final = 16 << 20
_STEP_S: Final = 60.0
_BATCH: Final = 200
_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_IN_WORKDIR: Final = 'cd "$0" 2>/dev/null; exec /tests/test.sh'


@dataclass(frozen=True, slots=True, kw_only=True)
class Grader:
    """Grades episodes of one environment."""

    engine: TaskEngine
    """Where the containers are."""
    parts: Mapping[str, float]
    """The parts that a verdict must have."""
    offline: bool
    """The layer of the offline verifier is mounted."""

    def fresh(self, box: Box, task: HarborTask) -> Verdict:
        """Grade in a fresh container what the agent has left in its own, which stays up.

        Raises:
            SandboxError: The engine failed.
        """
        verifier = self._start(box)
        try:
            try:
                self._carry(box, verifier, task)
            except (UnreadableError, TooLargeError, tarfile.TarError, SandboxError) as error:
                return self._outcome(error)
            return self._test(verifier, box, task)
        finally:
            with suppress(SandboxError):
                self.engine.remove(verifier)

    def shared(self, box: Box, task: HarborTask) -> Verdict:
        """Grade in the agent's own container, where it may have replaced whatever the tests use.

        Raises:
            SandboxError: The engine failed.
        """
        try:
            if not box.revive():
                return self._none("the agent's container can't be started again")
            self.engine.run(box.id, ["sh", "-c", "rm -rf /tests /logs/verifier/reward.*"], _STEP_S, user="0")
            return self._test(box.id, box, task)
        except SandboxError as error:
            return self._outcome(error)

    def _start(self, box: Box) -> str:
        if box.revive():
            try:
                return start_container(self.engine, box.spec, f"container:{box.id}")
            except SandboxError:
                # A process that the agent has left may end its container again; then no service can be asked.
                self.engine.info()
        return start_container(self.engine, box.spec, "none")

    def _carry(self, box: Box, verifier: str, task: HarborTask) -> None:
        """Carry the changed files over as a counted stream."""
        variables = self.engine.settings(box.spec.image).get("Env") or []
        env = [f"{name}={value}" for name, value in box.spec.env]
        scope = scope_of(task.artifacts or (box.spec.workdir,), [*variables, *env])
        changes = select(self.engine.changes(box.id, _MOST_LIST), scope)
        if len(changes.copied) + len(changes.modified) + len(changes.deleted) > MOST_PATHS:
            raise UnreadableError(f"the agent has left more than {MOST_PATHS} separate changes")
        parcel, left = Parcel(scope), MOST_BYTES
        for path in (*changes.copied, *changes.modified):
            with self.engine.archive(box.id, path, left) as stream:
                if stream is not None:
                    parcel.add(path, stream, alone=path not in changes.copied)
                    left = stream.left
        for start in range(0, len(changes.deleted), _BATCH):
            batch = changes.deleted[start : start + _BATCH]
            self.engine.run(verifier, ["rm", "-rf", "--", *batch], _STEP_S, user="0")
        self.engine.unpack(verifier, parcel.finish())

    def _test(self, container: str, box: Box, task: HarborTask) -> Verdict:
        verifier = task.settings.verifier
        self.engine.unpack(container, packed(task.folder / "tests", "tests/"))
        env = dict(task.verifier_env)
        if self.offline:
            # Published tests read this file of the installer that they download.
            self.engine.run(container, ["sh", "-c", "mkdir -p ~/.local/bin; : >~/.local/bin/env"], _STEP_S, user="0")
            image = dict(text.partition("=")[::2] for text in self.engine.settings(box.spec.image).get("Env") or [])
            env["PATH"] = f"{MOUNT}/bin:{image.get('PATH', _PATH)}"
        command = ["bash", "-c", _IN_WORKDIR, box.spec.workdir]
        code = self.engine.run(container, command, verifier.timeout_sec, user=str(verifier.user), env=env)
        # Whatever the tests or the agent's code in them left running writes no more.
        self.engine.kill(container)
        if code is None:
            return self._none(f"the tests took more than {verifier.timeout_sec:g} s", timeout=True)
        try:
            return Verdict(parts=parts_of(self._rewards(container), self.parts))
        except (UnreadableError, TooLargeError) as error:
            return self._none(_why(error))

    def _rewards(self, container: str) -> dict[str, bytes]:
        files: dict[str, bytes] = {}
        for path in FILES:
            with self.engine.archive(container, path, 2 * MOST_REWARD) as stream:
                if stream is not None:
                    files[path] = regular(stream)
        return files

    def _outcome(self, error: Exception) -> Verdict:
        """Return the verdict for an error that what the agent has left causes; raise one that the machine causes."""
        # Late: it comes with the extra docker.
        import requests

        self.engine.info()  # raises where the engine itself is gone
        if isinstance(error.__cause__, requests.ConnectionError | requests.Timeout) and isinstance(error, SandboxError):
            raise error
        return self._none(_why(error))

    def _none(self, reason: str, *, timeout: bool = False) -> Verdict:
        return Verdict(parts=dict.fromkeys(self.parts, 0.0), reason=reason, timeout=timeout)


def _why(error: Exception) -> str:
    if isinstance(error, TooLargeError):
        return f"what the agent has left is more than {MOST_BYTES >> 20} MiB, or too many files"
    return str(error) if isinstance(error, UnreadableError) else f"what the agent has left can't be read: {error}"
