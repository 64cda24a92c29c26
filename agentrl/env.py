"""The environment contract: Gymnasium's reset and step, over chat messages.

To write an environment, subclass :class:`ToolEnv`, give ``tasks`` and ``reward``, and list ``tools``. Optional are
``gold`` (a perfect player), ``respond`` (say more after a tool's answer), ``turn_reward``, and ``open_episode`` with
``close_episode`` for what an episode holds.

Example:
    >>> class Capitals(ToolEnv):
    ...     tools = (look_up,)
    ...
    ...     def tasks(self, split):
    ...         return [Task(id=land, prompt=f"What is the capital of {land}?", answer=city) for land, city in ...]
    ...
    ...     def reward(self, episode):
    ...         return {"correct": episode.final == episode.task.answer}
"""

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, TypeVar, cast

import gymnasium

from agentrl.contract import as_messages, as_parts, as_task_set, as_turns, ask, check_tools, gave, is_ctrl_c, own_tools
from agentrl.dialects import Dialect, get_dialect
from agentrl.errors import AgentRLError, ConfigError, EnvContractError, InfrastructureError, UnknownNameError
from agentrl.sandboxes import SandboxError
from agentrl.spaces import Messages, Unicode
from agentrl.tasks import TaskSet
from agentrl.tools import Tool, ToolContext, ToolError, cut_middle, shown
from agentrl.types import CutTurn, CutTurns, Message, Task, ToolCall, ToolRun

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """What happened so far, for ``reward`` and ``respond`` to read."""

    task: Task
    """The task being played."""
    messages: tuple[Message, ...]
    """The whole conversation, the assistant's turns included."""
    tool_runs: tuple[ToolRun, ...] = ()
    """One entry per tool call, in order."""
    turns: int = 0
    """How often the assistant has spoken."""
    cut: Literal["", CutTurns] = ""
    """Where a limit of tokens cut off the assistant's last turn, what becomes of it; empty where it was whole."""
    # Any: whoever puts a value in knows its type, and would have to narrow an object at every use.
    state: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What tools put into ``ToolContext.state``."""
    parts: Mapping[str, float] | None = None
    """The parts of the final reward, once the episode is over."""

    @property
    def final(self) -> str:
        """The assistant's last text; empty before its first turn, and where it was cut off and is no answer."""
        if self.cut in ("end", "continue"):
            return ""
        texts = [message["content"] for message in self.messages if message["role"] == "assistant"]
        return texts[-1] if texts else ""


class ToolEnv(gymnasium.Env[tuple[Message, ...], str]):
    """An environment whose observations are new chat messages and whose actions are the assistant's raw text.

    A text with tool calls runs them and returns their results; one without is the final answer and ends the episode.
    Malformed calls, unknown tools, bad arguments and errors inside a tool are observations, never the end.

    Tools are listed in the class, as ``tools = (search,)``, or made in ``__init__``, after ``super().__init__()``.
    Every instance gets a copy of those in the class; a tool that can't be copied is made in ``__init__``.

    Args:
        split: which tasks ``reset`` draws from.
        dialect: how tool calls are written.
        max_turns: how often the assistant may speak before the episode is truncated.

    Raises:
        UnknownNameError: there is no such dialect or split.
        ConfigError: ``max_turns`` is less than 1.
    """

    splits: ClassVar[tuple[str, ...]] = ("train", "test")
    instructions: ClassVar[str] = ""
    """What the system message says before it describes the tools."""
    reward_weights: ClassVar[Mapping[str, float]] = {"correct": 1.0}
    """The weight of each part that ``reward`` names."""
    cut_message: ClassVar[str] = "Your last turn was cut off at its limit of tokens. Go on, in fewer words."
    """What the user says after a turn that was cut off and is to go on."""
    tools: Sequence[Tool] = ()
    """What the agent can call."""

    def __init__(self, *, split: str = "train", dialect: str = "fence", max_turns: int = 8) -> None:
        if split not in self.splits:
            raise UnknownNameError("split", split, self.splits)
        if max_turns < 1:
            raise ConfigError(f"max_turns is {max_turns}: an agent needs at least one turn")
        self.split = split
        get_dialect(dialect)  # a wrong name is an error now, although the tools are not known yet
        self._dialect_name = dialect
        self.max_turns = max_turns
        self.tools = own_tools(self._place("tools"), type(self).tools, self)
        self.observation_space = Messages()
        self.action_space = Unicode()
        self._tasks: TaskSet | None = None
        self._episode: Episode | None = None
        self._context: ToolContext | None = None
        self._held: ToolContext | None = None
        """The context that ``close_episode`` has not had yet."""

    def __getstate__(self) -> dict[str, object]:
        # Tasks may be made by a function that can't be sent; whoever gets the environment makes them anew.
        return {**self.__dict__, "_tasks": None}

    @functools.cached_property
    def dialect(self) -> Dialect:
        """Reads and writes calls of this instance's tools.

        Raises:
            EnvContractError: ``tools`` holds something that is no tool, or two of one name.
        """
        check_tools(self._place("tools"), self.tools)
        return get_dialect(self._dialect_name, self.tools)

    def tasks(self, split: str) -> TaskSet | Sequence[Task]:
        """The tasks of ``split``, as a list or a set; called once per instance."""
        raise EnvContractError(f"{self._place('tasks')} is not written: let it return a list of Task for {split!r}")

    def reward(self, episode: Episode) -> Mapping[str, float]:
        """Grade a finished episode: named parts, weighted by ``reward_weights``."""
        raise EnvContractError(f"{self._place('reward')} is not written: let it return parts, as in {{'correct': 1.0}}")

    def turn_reward(self, episode: Episode) -> float:
        """A reward for the turn just taken; none by default."""
        return 0.0

    def respond(self, episode: Episode) -> tuple[Message, ...]:
        """Messages that follow the tool results of a turn; none by default."""
        return ()

    def open_episode(self, context: ToolContext) -> None:
        """Begin what an episode holds, such as a connection, and put it into ``context.state``; nothing by default.

        This, the functions that are tools, ``respond``, ``turn_reward``, ``reward`` and ``close_episode`` run in one
        thread of the episode, but for what follows a tool that overran its time limit.
        """

    def close_episode(self, context: ToolContext) -> None:
        """Give back what ``open_episode`` and the tools put into ``context.state``; nothing by default.

        Every episode that ``open_episode`` has begun has it once: when it is over and graded, else in ``close`` or the
        next ``reset``.
        """

    def gold(self, task: Task) -> Sequence[str]:
        """The turns of a perfect player.

        Raises:
            NotImplementedError: this environment has none.
        """
        raise NotImplementedError(f"{type(self).__name__} has no gold player")

    def gold_turns(self, task: Task) -> tuple[str, ...]:
        """What ``gold`` gives, checked.

        Raises:
            NotImplementedError: this environment has no gold player.
            EnvContractError: ``gold`` raised, or gave something else than a list of texts.
        """
        place = self._place("gold")
        return as_turns(place, ask(place, lambda: self.gold(task), task, passing=(AgentRLError, NotImplementedError)))

    @property
    def best_return(self) -> float:
        """The most that the weighted parts can add up to, each part being at most 1."""
        return sum(weight for weight in self.reward_weights.values() if weight > 0)

    @property
    def task_set(self) -> TaskSet:
        """The tasks of this instance's split.

        Raises:
            EnvContractError: ``tasks`` raised, or gave something else than tasks with ids of their own.
        """
        if self._tasks is None:
            self._tasks = as_task_set(self._place("tasks"), self._ask("tasks", lambda: self.tasks(self.split)))
        return self._tasks

    @property
    def episode(self) -> Episode:
        """The episode being played.

        Raises:
            EnvContractError: ``reset`` was not called yet.
        """
        if self._episode is None:
            raise EnvContractError(f"{type(self).__name__}: call reset before step")
        return self._episode

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[tuple[Message, ...], dict[str, Any]]:
        """Begin an episode.

        Args:
            seed: seeds this instance's ``np_random``.
            options: ``{"task": id}`` asks for a task; without it one is drawn at random.

        Returns:
            The system and user messages, and an info dict with the task's id.

        Raises:
            UnknownNameError: the split has no such task.
            EnvContractError: the environment's own code raised or gave something wrong; the message says what to do.
        """
        super().reset(seed=seed)
        task = self._choose(options or {})
        # Drawn whether or not a tool needs it, so that an environment's own draws do not depend on its tools.
        tool_seed = int(self.np_random.integers(2**31))
        dialect = self.dialect  # before anything is opened: it checks the tools
        self._end()
        for tool in self.tools:
            self._ask(f"tools: {tool.name}.open", functools.partial(tool.open, tool_seed), task)
        context = ToolContext(task=task, seed=tool_seed)
        if type(self).open_episode is not ToolEnv.open_episode:
            self._ask("open_episode", lambda: context.thread.run(lambda: self.open_episode(context), begin=True), task)
        self._context = self._held = context
        system = "\n".join(part for part in (self.instructions, dialect.instructions()) if part)
        opening = (Message(role="system", content=system),) if system else ()
        messages = (*opening, Message(role="user", content=task.prompt))
        self._episode = Episode(task=task, messages=messages, state=context.state)
        return messages, {"task_id": task.id}

    def step(self, action: str) -> tuple[tuple[Message, ...], float, bool, bool, dict[str, Any]]:
        """Take the assistant's turn.

        Args:
            action: the assistant's text, exactly as sampled; a ``CutTurn`` where a limit of tokens ended it.

        Returns:
            New messages, the turn's reward, terminated, truncated, and an info dict.

        Raises:
            EnvContractError: there is no episode, it is over, or the environment's own code raised or gave something
                wrong; the message says what to do.
            InfrastructureError: what a tool runs on failed; the episode says nothing about the agent.
        """
        episode = self.episode
        if episode.parts is not None:
            raise EnvContractError(f"{type(self).__name__}: the episode is over: call reset")
        cut = action.then if isinstance(action, CutTurn) else ""
        calls = () if cut == "end" else self.dialect.parse(action)
        answers = [self._answer(call) for call in calls]
        results = tuple(message for message, _ in answers)
        episode = replace(
            episode,
            messages=(*episode.messages, Message(role="assistant", content=str(action)), *results),
            tool_runs=(*episode.tool_runs, *(run for _, run in answers)),
            turns=episode.turns + 1,
            cut=cut,
        )
        terminated = not calls and cut in ("", "answer")
        truncated = not terminated and (cut == "end" or episode.turns >= self.max_turns)
        extra: tuple[Message, ...] = ()
        if not calls and not terminated and not truncated:
            extra = (Message(role="user", content=self.cut_message),)
        if calls:
            given = self._ask_inside("respond", lambda: self.respond(episode))
            extra = as_messages(self._place("respond"), given)
        episode = replace(episode, messages=(*episode.messages, *extra))
        reward = self._ask_inside("turn_reward", lambda: float(self.turn_reward(episode)))
        if terminated or truncated:
            given = self._ask_inside("reward", lambda: self.reward(episode))
            parts = as_parts(self._place("reward"), given, self.reward_weights)
            reward += sum(self.reward_weights[name] * value for name, value in parts.items())
            episode = replace(episode, parts=parts)
        self._episode = episode
        if episode.parts is not None:
            self._end()
        return (*results, *extra), reward, terminated, truncated, {"parts": dict(episode.parts or {})}

    def close(self) -> None:
        """Give back whatever the episode and its tools hold. Safe to call twice."""
        with ExitStack() as stack:  # one that raises must not keep the others open
            for tool in reversed(self.tools):
                stack.callback(self._ask, f"tools: {tool.name}.close", tool.close)
            self._end()

    def _end(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            try:
                self._ask("close_episode", lambda: held.thread.run(lambda: self.close_episode(held)), held.task)
            finally:
                held.thread.close()

    def _choose(self, options: Mapping[str, Any]) -> Task:
        if unknown := set(options) - {"task"}:
            raise UnknownNameError("reset option", sorted(unknown)[0], ["task"])
        tasks = self.task_set
        if "task" in options:
            return self._ask("tasks", lambda: tasks.find(str(options["task"])))
        size = tasks.size
        index = int(self.np_random.integers(2**31 if size is None else size))
        return self._ask("tasks", lambda: tasks[index])

    def _ask(self, method: str, function: Callable[[], _T], task: Task | None = None) -> _T:
        return ask(self._place(method), function, task)

    def _ask_inside(self, method: str, function: Callable[[], _T]) -> _T:
        """The same in the thread of the episode."""
        context = self._context
        assert context is not None, "reset makes a context before anything is asked about the episode"
        return self._ask(method, lambda: context.thread.run(function), context.task)

    def _place(self, part: str) -> str:
        return f"{type(self).__name__}.{part}"

    def _answer(self, call: ToolCall) -> tuple[Message, ToolRun]:
        began = time.perf_counter()
        try:
            content, ok = self._run(call), True
        except ToolError as error:
            content, ok = shown(error), False
        name = _writable(call.name)
        message = Message(role="tool", content=_writable(content), name=name, tool_call_id=call.id)
        return message, ToolRun(name=name, ok=ok, wall_s=time.perf_counter() - began)

    def _run(self, call: ToolCall) -> str:
        if call.error:
            raise ToolError(call.error)
        for tool in self.tools:
            if tool.name == call.name:
                return self._called(tool, call)
        names = ", ".join(tool.name for tool in self.tools)
        raise ToolError(f"there is no tool {cut_middle(repr(call.name), 100)}; the tools are: {names}")

    def _called(self, tool: Tool, call: ToolCall) -> str:
        assert self._context is not None, "reset makes a context before any tool is called"
        try:
            content = cast(object, tool.call(call.arguments, self._context))
        except (AgentRLError, ToolError):
            raise
        except SandboxError as error:
            raise InfrastructureError(f"sandbox failed: {error}") from error
        except BaseException as error:  # a tool's own fault is an observation, whatever it raises
            if is_ctrl_c(error):
                raise
            raise ToolError(cut_middle(f"{type(error).__name__}: {shown(error)}", 2000)) from error
        if not isinstance(content, str):
            raise gave(self._place(f"tools: {tool.name}.call"), content, "return text")
        return content


def _writable(text: str) -> str:
    """``text`` without lone surrogates, which a model can spell in JSON and no file can hold."""
    return str.encode(text, "utf-8", errors="replace").decode("utf-8")  # a tool's own kind of text may do otherwise
