"""``agentrl/Harbor-v0``: work in a container; the task's own tests decide, in a fresh one."""

import functools
import shlex
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, cast

from agentrl.envs.adapters.harbor.box import Box, BoxSpec
from agentrl.envs.adapters.harbor.carry import is_private
from agentrl.envs.adapters.harbor.folder import HarborTask, TaskFault, read_task, read_text
from agentrl.envs.adapters.harbor.grading import Grader
from agentrl.envs.adapters.harbor.host import shared_host
from agentrl.envs.adapters.harbor.layer import MOUNT
from agentrl.envs.datafiles import by_split, refuse_or_warn, table, tags_of, tasks_of, text_or_table
from agentrl.errors import ConfigError, UsageError
from agentrl.sandboxes.agents import AgentRun
from agentrl.toolenv.base import Episode, ToolEnv
from agentrl.toolenv.tasks import TaskList, split_of
from agentrl.toolenv.tools.context import ToolContext
from agentrl.toolenv.tools.function import tool
from agentrl.types import Task

SAMPLE = Path(__file__).with_name("sample")
"""Twelve tasks of our own."""
_MEASURES = ("ungraded", "timeout", "shared")
_ONE_IN = 5


class Harbor(ToolEnv):
    """Folders with ``task.toml``, ``instruction.md``, ``environment/``, ``tests/test.sh`` and ``solution/solve.sh``.

    The parts of the reward are those of ``parts``, read from the verifier's ``reward.json`` or ``reward.txt``. Of
    weight 0 are ``ungraded``, 1 where there was no readable reward and every part is 0; ``timeout``, 1 where the tests
    took too long; and ``shared``, 1 where the agent's own container was graded. ``episode.state["note"]`` has the
    reason in words.

    Args:
        split: ``"train"`` or ``"test"``.
        dialect: how tool calls are written.
        max_turns: how often the assistant may speak.
        data: a folder of task folders, one task in five of which is ``test``; or one folder for each split. None plays
            twelve small tasks.
        parts: weights of the parts that the tests report.
        graded: ``"fresh"`` grades in a fresh container, ``"shared"`` in the agent's own, as a task needs whose result
            is an installed package; there the agent can write its own verdict.
        image_map: local images by the names of those that tasks begin from.
        network: the engine's network for builds, and for tasks that ask for one.
        offline_verifier: mount pytest and stand-ins for curl, apt-get and uvx for tests that download them.
        variables: values of ``${NAME}`` in the tables of variables of tasks.
        command_timeout: seconds per command of the agent.
        images: how many built images stay on the engine's disk.
        ahead: how many containers are started ahead.
        skip_bad_tasks: skip tasks that can't be played with a warning; without it they are refused.

    Raises:
        UnknownNameError: there is no such split or dialect.
        ConfigError: an argument is invalid.
        UsageError: the extra ``docker`` is missing.
    """

    agent_mounts: tuple[tuple[str, str], ...] = ()
    """Folders and sockets of this machine that the agent's container has read-only, and where, for a driver."""
    instructions = "Work in the container with the tools. When the task is done, say so in one sentence."
    max_turns = 30

    def __init__(
        self,
        *,
        split: str = "train",
        dialect: str = "hermes",
        max_turns: int | None = None,
        data: str | Mapping[str, str] | None = None,
        parts: Mapping[str, float] | None = None,
        graded: Literal["fresh", "shared"] = "fresh",
        image_map: Mapping[str, str] | None = None,
        network: str = "none",
        offline_verifier: bool = False,
        variables: Mapping[str, str] | None = None,
        command_timeout: float = 60.0,
        images: int = 32,
        ahead: int = 1,
        skip_bad_tasks: bool = False,
    ) -> None:
        super().__init__(split=split, dialect=dialect, max_turns=max_turns)
        if find_spec("docker") is None:
            raise UsageError("agentrl/Harbor-v0 plays in containers: pip install 'agentrl[docker]'")
        self.folders = by_split(text_or_table("data", data) or str(SAMPLE))
        self.parts = dict(parts or {"reward": 1.0})
        if graded not in ("fresh", "shared"):
            raise ConfigError(f"graded is {graded!r}: choose 'fresh' or 'shared'")
        if not (command_timeout > 0 and images >= 1 and ahead >= 0) or set(_MEASURES) & set(self.parts):
            raise ConfigError(
                f"Harbor-v0 needs command_timeout above 0, images of at least 1, and no part among {_MEASURES}"
            )
        self.reward_weights: Mapping[str, float] = {**self.parts, **dict.fromkeys(_MEASURES, 0.0)}  # pyright: ignore
        self.graded, self.network, self.offline_verifier = graded, network, offline_verifier
        self.image_map = dict(table("image_map", image_map or {}))
        self.variables = dict(table("variables", variables or {}))
        self.command_timeout, self.images, self.ahead = command_timeout, images, ahead
        self.skip_bad_tasks = skip_bad_tasks
        self.tools = (self.shell, self.read_file, self.write_file)

    @tool(timeout=None, max_chars=8000)
    def shell(self, command: str, context: ToolContext) -> str:  # noqa: D417
        """Run bash in the container. Folder, variables and background processes stay from one command to the next.

        Args:
            command: one or more lines of bash; nothing can be typed into it while it runs.
        """
        return self._run(command, context)

    @tool(timeout=None, max_chars=8000)
    def read_file(self, path: str, context: ToolContext) -> str:  # noqa: D417
        """Read a text file of the container.

        Args:
            path: relative to the shell's folder, or absolute.
        """
        return self._run(f"cat -- {shlex.quote(path)}", context)

    @tool(timeout=None)
    def write_file(self, path: str, content: str, context: ToolContext) -> str:  # noqa: D417
        """Write a text file of the container; missing folders are made.

        Args:
            path: relative to the shell's folder, or absolute.
            content: the complete new content.
        """
        target = shlex.quote(path)
        folder = f'mkdir -p -- "$(dirname -- {target})"'
        return self._run(f"{folder} && printf %s {shlex.quote(content)} >{target}", context)

    def _run(self, command: str, context: ToolContext) -> str:
        """Run a command within what is left of the task's own limit of time, which counts the agent's commands."""
        limit = _task_of(context.task).settings.agent.timeout_sec
        left = self.command_timeout if limit is None else limit - context.state["seconds"]
        began = time.monotonic()
        output = cast(Box, context.state["box"]).run(command, min(self.command_timeout, max(left, 0.1)))
        context.state["seconds"] += time.monotonic() - began
        if limit is not None and context.state["seconds"] >= limit:
            context.end()
        return output

    @functools.cached_property
    def _splits(self) -> Mapping[str, tuple[Task, ...]]:
        splits: dict[str, list[Task]] = {"train": [], "test": []}
        faults: list[str] = []
        for name, source in self.folders:
            folder = Path(source).expanduser()
            paths = sorted(path.parent for path in folder.glob("*/task.toml"))
            if not paths:
                raise ConfigError(f"data names {str(folder)!r}: no folder in it has a task.toml")
            for path in paths:
                try:
                    task = self._read(path)
                except TaskFault as error:
                    faults.append(f"{path.name}: {error}")
                else:
                    splits[name or split_of(task.id, _ONE_IN)].append(task)
        refuse_or_warn("bad tasks", faults, skip=self.skip_bad_tasks, option="skip_bad_tasks")
        return {name: tuple(tasks) for name, tasks in splits.items()}

    def _read(self, folder: Path) -> Task:
        task = read_task(folder, self.variables)
        # No fresh container gets them, since a verifier's own programs are there.
        private = [path for path in task.artifacts if is_private(path)]
        if private and self.graded == "fresh":
            raise TaskFault(f"its artifact {private[0]!r} is the system's own: graded='shared' plays it")
        tags = tags_of(task.settings.metadata)
        return Task(id=folder.name, prompt=task.instruction, data={"harbor": task}, tags=tags)

    def tasks(self, split: str) -> TaskList:
        """Return the tasks of ``split``, by name.

        Raises:
            ConfigError: a folder can't be used, or no task of it is in this split.
        """
        return TaskList(tasks_of(self._splits, split, self.folders))

    def open_episode(self, context: ToolContext) -> None:
        """Start the task's container, or take one that was started ahead."""
        host, task = shared_host(), _task_of(context.task)
        image = host.image(task, image_map=self.image_map, network=self.network, held=self.images)
        settings = host.engine.settings(image)
        environment = task.settings.environment
        workdir = environment.workdir or str(settings.get("WorkingDir") or "/")
        layer = ((str(host.layer()), MOUNT),) if self.offline_verifier else ()
        spec = BoxSpec(
            image=image,
            network=self.network if task.public else "none",
            env=tuple(sorted(task.env.items())),
            workdir="/app" if workdir == "/" else workdir,
            memory_mb=task.memory_mb,
            cpus=environment.cpus,
            user=str(task.settings.agent.user),
            mounts=layer,
            agent_mounts=self.agent_mounts,
            healthcheck=environment.healthcheck,
        )
        context.state.update(box=host.take(spec, self.ahead), seconds=0.0)

    def run_agent(self, command: Sequence[str], **options: Any) -> AgentRun:
        """Run an agent in the episode's container; the options are those of ``Box.play``.

        Raises:
            SandboxError: the engine failed.
        """
        limit = _task_of(self.episode.task).settings.agent.timeout_sec
        seconds = options.pop("seconds")
        seconds = seconds if limit is None else min(seconds, limit)
        return cast(Box, self.episode.state["box"]).play(command, seconds=seconds, **options)

    def close_episode(self, context: ToolContext) -> None:
        """Remove the container."""
        cast(Box, context.state["box"]).close()

    def reward(self, episode: Episode) -> Mapping[str, float]:
        """Run the tests; all parts are 0 where they leave no readable reward.

        Raises:
            InfrastructureError: the engine failed.
        """
        box = cast(Box, episode.state["box"])
        grader = Grader(engine=box.engine, parts=self.parts, offline=self.offline_verifier)
        grade = grader.fresh if self.graded == "fresh" else grader.shared
        verdict = grade(box, _task_of(episode.task))
        note = "graded in a fresh container" if self.graded == "fresh" else "graded in the agent's own container"
        note += f"; no readable reward: {verdict.reason}" if verdict.reason else ""
        state = cast(dict[str, Any], episode.state)
        state.update(verdict=verdict, note=note)
        measures = (bool(verdict.reason), verdict.timeout, self.graded == "shared")
        return {**verdict.parts, **dict(zip(_MEASURES, map(float, measures), strict=True))}

    def gold(self, task: Task) -> Sequence[str]:
        """Write the files of the solution into the container, then run it.

        Raises:
            NotImplementedError: the task has no solution, or one with something else than small text files.
        """
        harbor = _task_of(task)
        folder = harbor.folder / "solution"
        try:
            texts = {path.relative_to(folder).as_posix(): read_text(path) for path in sorted(folder.rglob("*"))}
        except TaskFault as error:
            raise NotImplementedError(f"the solution of {task.id} can't be played: {error}") from error
        if "solve.sh" not in texts:
            raise NotImplementedError(f"{task.id} has no solution")
        calls = [
            self.dialect.render("write_file", {"path": f"/solution/{name}", "content": text})
            for name, text in texts.items()
        ]
        env = {"DEBIAN_FRONTEND": "noninteractive", **harbor.solution_env}
        pairs = " ".join(f"{name}={shlex.quote(value)}" for name, value in env.items())
        return [*calls, self.dialect.render("shell", {"command": f"{pairs} bash /solution/solve.sh"}), "It is done."]


def _task_of(task: Task) -> HarborTask:
    return cast(HarborTask, task.data["harbor"])
