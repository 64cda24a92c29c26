"""An episode's container, with a shell in it that lives as long as the episode.

The agent owns everything in here. It can end every process, delete the shell, or fill a pipe: that is an outcome, and
the agent reads what happened. Only a failure of the engine itself is a fault.
"""

import inspect
import re
import secrets
import shlex
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from agentrl.envs.adapters.harbor.folder import Healthcheck
from agentrl.sandboxes import SandboxError
from agentrl.sandboxes.agents import AgentRun, packed
from agentrl.sandboxes.docker.engine import OWNER_LABEL, owner
from agentrl.sandboxes.docker.task_engine import Conversation, TaskEngine
from agentrl.sandboxes.inside import relay

_PROCESSES: Final = 512
_START_S: Final = 30.0
_KILL_S: Final = 10.0
_MOST_OUTPUT: Final = 1 << 16
_FOLDERS: Final = 'mkdir -p "$0" /logs/agent /logs/verifier /logs/artifacts && chmod 777 /logs/*'
# A command that runs in a container has no process group of its own.
_KILL_TREE: Final = 'k() { for c in $(cat /proc/$1/task/*/children); do k "$c"; done; kill -9 "$1"; }; k "$0"'
_IN_FOLDER: Final = 'cd "$0"; exec "$@" 2>&1 </dev/null'
_GLANCE_S: Final = 0.2
REVIVED: Final = "[every process of the container was ended; the container was started again, with its files]"
"""What the agent reads after it has ended its own container."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxSpec:
    """Specifies the containers of a task."""

    image: str
    """Tag of the image."""
    network: str
    """Network of the agent's container, as the engine names it."""
    env: tuple[tuple[str, str], ...]
    """Variables of every program."""
    workdir: str
    """Folder that programs start in."""
    memory_mb: int
    """Memory [MiB]."""
    cpus: float
    """Cores."""
    user: str
    """User of the agent's shell; empty for the image's."""
    mounts: tuple[tuple[str, str], ...] = ()
    """Folders of the engine's machine, and where they are mounted, read-only."""
    agent_mounts: tuple[tuple[str, str], ...] = ()
    """What is mounted besides in the agent's container, and not in that of the tests."""
    healthcheck: Healthcheck | None = None
    """What must succeed before the agent begins."""


def start_container(engine: TaskEngine, spec: BoxSpec, network: str, more: tuple[tuple[str, str], ...] = ()) -> str:
    """Start a container that does nothing, with further mounts, and return its id.

    Raises:
        SandboxError: The engine failed.
    """
    container = engine.create(
        spec.image,
        ["sleep", "infinity"],
        {
            "environment": dict(spec.env),
            "entrypoint": [],
            "user": "",
            # Not the work folder: where the agent puts something else, the container could not start again.
            "working_dir": "/",
            "labels": {OWNER_LABEL: owner()},
        },
        network_mode=network,
        init=True,
        cap_drop=["NET_RAW", "MKNOD"],
        pids_limit=_PROCESSES,
        mem_limit=spec.memory_mb << 20,
        memswap_limit=spec.memory_mb << 20,
        nano_cpus=int(spec.cpus * 1e9),
        binds={source: {"bind": target, "mode": "ro"} for source, target in (*spec.mounts, *more)},
        log_config={"Type": "none", "Config": {}},
    )
    try:
        engine.start(container)
        if engine.run(container, ["sh", "-c", _FOLDERS, spec.workdir], _START_S, user="0"):
            raise SandboxError(f"the image {spec.image} has no sh, mkdir or chmod: it can't hold a task")
    except BaseException:
        with suppress(SandboxError):
            engine.remove(container)
        raise
    return container


class Box:
    """A container with a shell that keeps its folder, its variables and its background processes.

    Args:
        engine: where it runs.
        spec: what it is made from.

    Raises:
        SandboxError: it did not start, is not healthy, or has no bash.
    """

    def __init__(self, engine: TaskEngine, spec: BoxSpec) -> None:
        self.engine, self.spec = engine, spec
        self.id = start_container(engine, spec, spec.network, spec.agent_mounts)
        """Its id."""
        self.usable = True
        """False once the agent has made it such that it can't be started again."""
        self._shell: Conversation | None = None
        self._leader = ""
        try:
            self._await_health()
            if not self._open_shell():
                raise SandboxError(f"the image {spec.image} has no bash: the agent can't work in it")
        except BaseException:
            with suppress(SandboxError):
                self.close()
            raise

    def _await_health(self) -> None:
        if (check := self.spec.healthcheck) is None:
            return
        until, failures = time.monotonic() + check.start_period_sec, 0
        while self.engine.run(self.id, ["bash", "-c", check.command], check.timeout_sec, user="0") != 0:
            # Within the start period a failure does not count.
            failures += time.monotonic() >= until
            if failures >= check.retries:
                raise SandboxError(f"the container of {self.spec.image} is not healthy: {check.command[:200]}")
            time.sleep(check.interval_sec)

    def run(self, command: str, timeout: float) -> str:
        """Run a command in the shell; return its output and, where it is not 0, its exit code.

        Raises:
            SandboxError: The engine failed.
        """
        try:
            # It may have stopped right after the command that ended its first process.
            notice = "" if self.engine.is_running(self.id) else f"{REVIVED}\n"
            if notice and not self.revive():
                return "[the container can't be started again]"
            if self._shell is None and not self._open_shell():
                return f"{notice}[bash can't be started in the container any more]"
            return notice + self._run(command, timeout)
        except SandboxError:
            # Raises where the engine itself is gone; else the agent has ended the container meanwhile.
            self.engine.info()
            self._drop_shell()
            return REVIVED if self.revive() else "[the container can't be started again]"

    def _run(self, command: str, timeout: float) -> str:
        assert self._shell is not None, "run opens a shell"
        mark = f"\n{secrets.token_hex(16)} ".encode()
        # Standard input is where the shell reads its next command from: no program may read it.
        script = f"eval {shlex.quote(command)} </dev/null\nprintf '\\n%s %d\\n' {mark.strip().decode()} \"$?\"\n"
        output, until = b"", time.monotonic() + timeout
        try:
            self._shell.send(script.encode("utf-8", "surrogateescape").replace(b"\0", b""))
            while not (end := re.search(re.escape(mark) + rb"(\d+)\n", output)):
                data = self._shell.receive(until)
                if not data:
                    return _shown(output) + self._ended()
                output = _shortened(output + data)
        except TimeoutError:
            return f"{_shown(output)}[stopped after {timeout:g} s: {self._interrupt()}]"
        except OSError:
            return _shown(output) + self._ended()
        code = int(end[1])
        return _shown(output[: end.start()]) + (f"[exit code {code}]" if code else "") or "[no output]"

    def play(
        self, command: Sequence[str], *, port: int, env: Mapping[str, str], files: Mapping[str, bytes], seconds: float
    ) -> AgentRun:
        """Run an agent in the work folder, until it ends or has taken so many seconds.

        Args:
            command: its words.
            port: of the loopback interface, behind which the socket is that ``agent_mounts`` has mounted.
            env: its variables.
            files: of its own folder, ``/tmp/agent``, by their relative paths.
            seconds: after which every process of the container is ended.

        Raises:
            SandboxError: The engine failed, or the image has no Python for the relay.
        """
        self.engine.unpack(self.id, packed({f"{relay.WORK[1:]}/{name}": data for name, data in files.items()}, 0o666))
        open_up = ["sh", "-c", 'mkdir -p "$0" && chmod -R a+rwX "$0"', relay.WORK]
        relaying = ["python3", "-c", inspect.getsource(relay), str(port)]
        if self.engine.run(self.id, open_up, _START_S, user="0") or self.engine.run(self.id, relaying, _START_S):
            raise SandboxError(f"the image {self.spec.image} has no python3: no agent can be reached in it")
        until, output = time.monotonic() + seconds, b""
        words = ["sh", "-c", _IN_FOLDER, self.spec.workdir, *command]
        agent = self.engine.talk(self.id, words, user=self.spec.user, env=env)
        code: int | None = None
        try:
            # What it leaves running holds its output open, so the engine says whether it has ended.
            while code is None and time.monotonic() < until:
                code = self.engine.exit_code(agent.exec_id)
                glance = time.monotonic() + _GLANCE_S
                while (left := glance - time.monotonic()) > 0:
                    output = _shortened(output + agent.heard(left))
        finally:
            agent.close()
        if code is None:
            self.engine.kill(self.id)
            self.revive()
            return AgentRun(status="timeout", code=0, output=_shown(output), files={})
        return AgentRun(status="exit", code=code, output=_shown(output), files={})

    def _ended(self) -> str:
        self._drop_shell()
        if self.engine.is_running(self.id):
            return "[the shell has ended; the next command gets a new one]"
        return REVIVED if self.revive() else "[the container can't be started again]"

    def _interrupt(self) -> str:
        """End what the shell runs, from outside of the container where its own kill does not help."""
        assert self._shell is not None, "something runs in the shell"
        running = self._shell.exec_id
        self._drop_shell()
        self.engine.run(self.id, ["sh", "-c", _KILL_TREE, self._leader], _KILL_S, user="0")
        until = time.monotonic() + _KILL_S
        while time.monotonic() < until:
            if self.engine.exit_code(running) is not None:
                return "the next command gets a new shell"
            time.sleep(0.1)
        self.engine.kill(self.id)
        return "the container was started again" if self.revive() else "the container can't be started again"

    def _open_shell(self) -> bool:
        """Start the shell; return False where the container has none that answers."""
        mark = secrets.token_hex(16)
        shell = ["bash", "--norc", "--noprofile"]
        self._shell = self.engine.talk(self.id, shell, user=self.spec.user, env={"TERM": "dumb"})
        answer, until = b"", time.monotonic() + _START_S
        try:
            self._shell.send(f"exec 2>&1; cd {shlex.quote(self.spec.workdir)}; printf '%s %d\\n' {mark} $$\n".encode())
            while not (leader := re.search(rf"{mark} (\d+)\n".encode(), answer)):
                data = self._shell.receive(until)
                answer = _shortened(answer + data)
                if not data:
                    break
        except OSError:
            leader = None
        # A forged number could only end the agent's own processes.
        self._leader = leader[1].decode() if leader else "1"
        if leader is None:
            self._drop_shell()
        return leader is not None

    def _drop_shell(self) -> None:
        if self._shell is not None:
            self._shell.close()
        self._shell = None

    def revive(self) -> bool:
        """Start the container where it has stopped; return False where the agent has made that impossible.

        Raises:
            SandboxError: The engine failed.
        """
        if self.engine.is_running(self.id):
            return True
        self._drop_shell()
        try:
            self.engine.start(self.id)
        except SandboxError:
            self.engine.info()
            self.usable = False
        return self.usable

    def close(self) -> None:
        """Remove the container. Closing twice is allowed.

        Raises:
            SandboxError: The engine failed.
        """
        self._drop_shell()
        self.engine.remove(self.id)


def _shortened(output: bytes) -> bytes:
    """Keep head and tail of an output that nobody will read as a whole."""
    half = _MOST_OUTPUT
    return output if len(output) <= 2 * half else output[:half] + b"\n[...]\n" + output[-half:]


def _shown(output: bytes) -> str:
    text = output.decode("utf-8", "replace").strip("\n")
    return f"{text}\n" if text else ""
