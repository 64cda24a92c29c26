"""Drivers whose episodes are played by programs of anybody's, which ask the endpoint for the policy's turns.

``agent`` starts a program in a sandbox, from which it reaches the endpoint and nothing else. ``serve`` waits for agents
that run elsewhere.
"""

import asyncio
import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentrl.endpoint.desk import Desk
from agentrl.endpoint.server import Endpoint, Ticket
from agentrl.endpoint.session import KindOf, Options
from agentrl.errors import ConfigError, InfrastructureError
from agentrl.named import resolve
from agentrl.rollout.plan import EpisodeSpec
from agentrl.rollout.policy import Past, Policy
from agentrl.sandboxes import SandboxError
from agentrl.sandboxes.agents import AGENT_LIMITS, AgentProcess, AgentRun
from agentrl.sandboxes.inside import relay
from agentrl.toolenv.base import ToolEnv
from agentrl.types import Stop

_PORT = 8000
_CONTAINER_PORT = 41700
"""Where tasks of containers use none: they may well serve something at 8000."""
_PACKAGES = "/opt/agent-packages"
_STOPS = {"timeout": Stop.TIME_LIMIT, "exit": Stop.TERMINATED}


class EndpointDriver(ABC):
    """Base of the drivers: opens a session for each episode, and has it graded when the agent has ended.

    Args:
        strict: refuse requests for what the policy does not do, such as another temperature, in place of ignoring that.
        past: how earlier turns are shown: "sampled", or "template" to drop thoughts where the chat template does.
        kind_of: ``module:function`` that decides what a request is for; see ``agentrl.endpoint.session.KindOf``.
    """

    def __init__(self, *, strict: bool = False, past: Past = "sampled", kind_of: str = "") -> None:
        decide: KindOf | None = resolve("kind_of", {}, kind_of) if kind_of else None
        self._options = Options(strict=strict, past=past, kind_of=decide)
        self._endpoint: Endpoint | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def __getstate__(self) -> dict[str, object]:
        # Another process has an endpoint of its own.
        return {**self.__dict__, "_endpoint": None, "_loop": None}

    async def play(self, env: ToolEnv, policy: Policy, spec: EpisodeSpec) -> None:
        """Play the episode.

        Raises:
            InfrastructureError: the engine, the endpoint or the sandbox failed.
        """
        loop = asyncio.get_running_loop()
        if self._endpoint is None or self._loop is not loop:
            # Assigned before it has started: others wait for it.
            self._loop, self._endpoint = loop, self.make_endpoint()
        await self._endpoint.start()
        self.prepare(self._endpoint, env)
        await policy.run(env.reset, seed=spec.seed % 2**32, options={"task": spec.task_id})
        ticket = self._endpoint.open(policy, env.dialect.name, spec.seed)
        try:
            run = await self.attend(self._endpoint, ticket, env, policy)
        except SandboxError as error:
            raise InfrastructureError(f"sandbox failed: {error}") from error
        finally:
            await self._endpoint.close(ticket)
        session = ticket.session
        if isinstance(session.fault, InfrastructureError):
            raise session.fault
        if session.fault is not None:
            raise InfrastructureError(f"an agent's request failed: {session.fault!r}") from session.fault
        stop = Stop.CRASHED if run.status == "exit" and run.code else _STOPS.get(run.status, Stop.CRASHED)
        counts = {name: count for name, count in session.counts.items() if count}
        await policy.run(env.record, session.messages, len(policy.rewards), {"agent": run, "requests": counts})
        policy.pay(await policy.run(env.truncate, stop))

    @abstractmethod
    def make_endpoint(self) -> Endpoint:
        """Make the endpoint of this event loop."""

    def prepare(self, endpoint: Endpoint, env: ToolEnv) -> None:  # noqa: B027  most need nothing
        """Prepare the environment for the agent, before an episode begins; nothing by default."""

    @abstractmethod
    async def attend(self, endpoint: Endpoint, ticket: Ticket, env: ToolEnv, policy: Policy) -> AgentRun:
        """Let an agent play the session, and return how it ended.

        Raises:
            SandboxError: the sandbox failed.
        """


class AgentDriver(EndpointDriver):
    """Plays each episode by a program in a sandbox.

    The program finds URLs and keys in the environment variables ``OPENAI_BASE_URL``, ``OPENAI_API_KEY``,
    ``ANTHROPIC_BASE_URL`` and ``ANTHROPIC_API_KEY``, and the task's prompt in ``AGENTRL_PROMPT``. It ends the episode
    by ending itself; ``reward`` then reads its run, an ``AgentRun``, as ``episode.state["agent"]``. The environment may
    put files for its working folder into ``context.state["files"]`` when it opens the episode.

    Args:
        command: the program's words. ``{prompt}``, ``{url}`` and ``{key}`` are replaced in them, and ``{python}`` is
            the interpreter in the sandbox.
        files: files or folders of this machine to be put into the working folder.
        env: further environment variables; the same texts are replaced in their values.
        packages: a folder of installed Python packages that the program may import.
        binds: folders of this machine that it may read, and where it finds them.
        seconds: wall seconds of an episode.
        memory_mb: memory of the program and all that it starts [MiB].
        in_container: run the program in the environment's own container, as ``agentrl/Harbor-v0`` has one, with that
            container's limits: in the task's folder, with the files in ``/tmp/agent``.
        options: those of :class:`EndpointDriver`.

    Raises:
        ConfigError: the command is empty, a file is missing, or the environment has no container.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        files: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        packages: str = "",
        binds: Mapping[str, str] | None = None,
        seconds: float = 600.0,
        memory_mb: int = 2048,
        in_container: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if not command or isinstance(command, str):
            raise ConfigError('the driver "agent" needs a command, a list of words: set rollout.driver.options.command')
        self._command, self._env, self._binds = tuple(command), dict(env or {}), dict(binds or {})
        self._files = _read(files)
        self._packages = Path(packages) if packages else None
        self._seconds = seconds
        self._memory_bytes = memory_mb * 2**20
        self._in_container = in_container

    def make_endpoint(self) -> Endpoint:
        """Make one that listens on a socket, the hole in the sandbox."""
        return Endpoint(Path(tempfile.mkdtemp(prefix="agentrl-")) / "s", options=self._options)

    def prepare(self, endpoint: Endpoint, env: ToolEnv) -> None:
        """Have the socket and the program's folders mounted, where it runs in a container."""
        if self._in_container:
            binds = [*self._binds.items(), *([(self._packages, _PACKAGES)] if self._packages else [])]
            mounts = [(str(Path(source).resolve()), target) for source, target in binds]
            _with_container(env).agent_mounts = ((str(endpoint.path), relay.HOLE), *mounts)

    async def attend(self, endpoint: Endpoint, ticket: Ticket, env: ToolEnv, policy: Policy) -> AgentRun:
        """Run the program."""
        prompt = env.episode.messages[-1]["content"]
        port = _CONTAINER_PORT if self._in_container else _PORT
        url = f"http://127.0.0.1:{port}/s/{ticket.name}"
        words = {"{prompt}": prompt, "{url}": url, "{key}": ticket.key}

        def filled(text: str) -> str:
            for word, value in words.items():
                text = text.replace(word, value)
            return text

        variables = {
            "OPENAI_BASE_URL": f"{url}/v1",
            "OPENAI_API_KEY": ticket.key,
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_API_KEY": ticket.key,
            "AGENTRL_PROMPT": prompt,
            **{name: filled(value) for name, value in self._env.items()},
        }
        assert endpoint.path is not None, "an endpoint for sandboxes has a socket"
        command, files = [filled(word) for word in self._command], {**self._files, **_given(env)}
        if self._in_container:
            if self._packages:
                variables = {"PYTHONPATH": _PACKAGES, **variables}
            command = ["python3" if word == "{python}" else word for word in command]
            run_agent = _with_container(env).run_agent
            return await policy.run(run_agent, command, port=port, env=variables, files=files, seconds=self._seconds)
        process = AgentProcess(
            command,
            hole=endpoint.path,
            port=port,
            files=files,
            env=variables,
            packages=self._packages,
            binds=self._binds,
            limits=replace(AGENT_LIMITS, memory_bytes=self._memory_bytes),
            seconds=self._seconds,
        )
        # A thread of its own: asyncio has few, and this one waits as long as the agent lives.
        threads = ThreadPoolExecutor(1, thread_name_prefix="agentrl-agent")
        waiting = asyncio.get_running_loop().run_in_executor(threads, process.wait)
        threads.shutdown(wait=False)
        try:
            return await asyncio.shield(waiting)
        except asyncio.CancelledError:
            process.kill()
            with suppress(SandboxError):
                await waiting
            raise


class ServeDriver(EndpointDriver):
    """Waits for agents that run elsewhere: each asks for a session, and says when it is done.

    ``POST /sessions`` with the run's key returns a session's ``url``, ``key``, ``task_id`` and ``prompt``, and 204
    while there is none. The agent ends it by ``POST /sessions/NAME`` with the session's key, and a body that may hold a
    ``code``, an ``output`` and ``files``, texts by name; ``reward`` finds them as ``episode.state["agent"]``.

    Args:
        port: of the loopback interface.
        key: the run's key; by default the environment variable ``AGENTRL_SERVE_KEY``.
        seconds: wall seconds of an episode, from when an agent has taken it.
        options: those of :class:`EndpointDriver`.

    Raises:
        ConfigError: there is no key of at least 16 characters.
    """

    def __init__(self, *, port: int = 8700, key: str = "", seconds: float = 3600.0, **options: Any) -> None:
        super().__init__(**options)
        self._port, self._key = port, key or os.environ.get("AGENTRL_SERVE_KEY", "")
        self._seconds = seconds
        if len(self._key) < 16:
            raise ConfigError(
                'the driver "serve" needs a key of at least 16 characters: set AGENTRL_SERVE_KEY, as by '
                "`export AGENTRL_SERVE_KEY=$(openssl rand -hex 16)`"
            )

    def make_endpoint(self) -> Endpoint:
        """Make one that listens on the port."""
        return Endpoint(port=self._port, options=self._options, desk=Desk(self._key))

    async def attend(self, endpoint: Endpoint, ticket: Ticket, env: ToolEnv, policy: Policy) -> AgentRun:
        """Offer the session, and wait until its agent is done."""
        assert endpoint.desk is not None, "an endpoint for agents elsewhere has a desk"
        task = {
            "session": ticket.name,
            "url": f"{endpoint.url}/s/{ticket.name}",
            "key": ticket.key,
            "task_id": env.episode.task.id,
            "prompt": env.episode.messages[-1]["content"],
            "seconds": self._seconds,
        }
        return await endpoint.desk.offer(ticket.name, task, self._seconds)


def _with_container(env: ToolEnv) -> Any:
    """Return an environment whose episodes have a container, in which its ``run_agent`` runs a command.

    What its ``agent_mounts`` name is mounted there, read-only: paths of this machine, each with its path there.

    Raises:
        ConfigError: it has none.
    """
    if not hasattr(env, "run_agent"):
        raise ConfigError(
            f"rollout.driver.options.in_container runs the agent in the environment's container, and "
            f"{type(env).__name__} has none: take it out"
        )
    return env


def _given(env: ToolEnv) -> Mapping[str, bytes]:
    files = env.episode.state.get("files", {})
    return {name: data.encode() if isinstance(data, str) else data for name, data in files.items()}


def _read(names: Sequence[str]) -> dict[str, bytes]:
    """Read files, and folders with all that is in them.

    Raises:
        ConfigError: there is no such file.
    """
    files = dict[str, bytes]()
    for name in names:
        path = Path(name)
        if not path.exists():
            raise ConfigError(f"rollout.driver.options.files names {name!r}, which is not there: correct the path")
        for file in [path] if path.is_file() else sorted(path.rglob("*")):
            if file.is_file():
                files[os.path.relpath(file, path.parent)] = file.read_bytes()
    return files
