"""The driver ``agent``: starts a program in a sandbox, from which it reaches the endpoint and nothing else."""

import asyncio
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from agentrl.endpoint.server import Endpoint, Ticket
from agentrl.endpoint.session import KindOf, Options
from agentrl.errors import ConfigError, InfrastructureError
from agentrl.named import resolve
from agentrl.rollout.plan import EpisodeSpec
from agentrl.rollout.policy import Past, Policy
from agentrl.sandboxes import SandboxError
from agentrl.sandboxes.agents import AGENT_LIMITS, AgentProcess, AgentRun
from agentrl.toolenv.base import ToolEnv
from agentrl.types import Stop

_PORT = 8000
_STOPS = {"timeout": Stop.TIME_LIMIT, "exit": Stop.TERMINATED}


class AgentDriver:
    """Plays each episode by a program of anybody's, which asks the endpoint for the policy's turns.

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
        strict: refuse requests for what the policy does not do, such as another temperature, in place of ignoring that.
        past: how earlier turns are shown: "sampled", or "template" to drop thoughts where the chat template does.
        kind_of: ``module:function`` that decides what a request is for; see ``agentrl.endpoint.session.KindOf``.

    Raises:
        ConfigError: the command is empty, or a file is missing.
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
        strict: bool = False,
        past: Past = "sampled",
        kind_of: str = "",
    ) -> None:
        if not command or isinstance(command, str):
            raise ConfigError('the driver "agent" needs a command, a list of words: set rollout.driver.options.command')
        self._command, self._env, self._binds = tuple(command), dict(env or {}), dict(binds or {})
        self._files = _read(files)
        self._packages = Path(packages) if packages else None
        self._seconds = seconds
        self._memory_bytes = memory_mb * 2**20
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
        messages, _ = await policy.run(env.reset, seed=spec.seed % 2**32, options={"task": spec.task_id})
        endpoint = await self._started()
        ticket = endpoint.open(policy, env.dialect.name, spec.seed)
        try:
            run = await self._run(endpoint, ticket, env, messages[-1]["content"])
        finally:
            await endpoint.close(ticket)
        session = ticket.session
        if session.fault is not None:
            raise InfrastructureError(f"an agent's request failed: {session.fault}") from session.fault
        stop = Stop.CRASHED if run.status == "exit" and run.code else _STOPS.get(run.status, Stop.CRASHED)
        counts = {name: count for name, count in session.counts.items() if count}
        await policy.run(env.record, session.messages, len(policy.rewards), {"agent": run, "requests": counts})
        policy.pay(await policy.run(env.truncate, stop))

    async def _run(self, endpoint: Endpoint, ticket: Ticket, env: ToolEnv, prompt: str) -> AgentRun:
        url = f"http://127.0.0.1:{_PORT}/s/{ticket.name}"
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
        try:
            assert endpoint.path is not None, "an endpoint for sandboxes has a socket"
            process = AgentProcess(
                [filled(word) for word in self._command],
                hole=endpoint.path,
                port=_PORT,
                files={**self._files, **_given(env)},
                env=variables,
                packages=self._packages,
                binds=self._binds,
                limits=replace(AGENT_LIMITS, memory_bytes=self._memory_bytes),
                seconds=self._seconds,
            )
            waiting = asyncio.ensure_future(asyncio.to_thread(process.wait))
            try:
                return await asyncio.shield(waiting)
            except asyncio.CancelledError:
                process.kill()
                await asyncio.wait([waiting])
                raise
        except SandboxError as error:
            raise InfrastructureError(f"sandbox failed: {error}") from error

    async def _started(self) -> Endpoint:
        """Return the endpoint, which serves the event loop that samples."""
        loop = asyncio.get_running_loop()
        if self._endpoint is None or self._loop is not loop:
            # Assigned before it has started: others wait for it.
            self._loop, self._endpoint = loop, Endpoint(Path(tempfile.mkdtemp(prefix="agentrl-")) / "s", self._options)
        await self._endpoint.start()
        return self._endpoint


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
