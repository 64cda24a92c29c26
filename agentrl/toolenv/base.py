"""The environment contract: Gymnasium's reset and step, over chat messages; see :class:`ToolEnv`."""

import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from inspect import iscoroutine
from typing import Any, ClassVar, Self, TypeVar, cast

import gymnasium

from agentrl.errors import AgentRLError, ConfigError, EnvContractError, UnknownNameError
from agentrl.toolenv import author
from agentrl.toolenv.calls import answer
from agentrl.toolenv.dialects import Dialect, get_dialect
from agentrl.toolenv.episode import Episode
from agentrl.toolenv.spaces import Messages, Unicode
from agentrl.toolenv.tasks import TaskSet
from agentrl.toolenv.tools.context import SubPolicy, ToolContext
from agentrl.toolenv.tools.function import Tool
from agentrl.toolenv.tools.timed import call_async
from agentrl.types import CutTurn, Exchange, Message, Stop, Task, ToolRun

_T = TypeVar("_T")


class ToolEnv(gymnasium.Env[tuple[Message, ...], str]):
    r"""An environment for a language agent that uses tools, with Gymnasium's ``reset`` and ``step``.

    An observation is a tuple of new chat messages, and an action is the assistant's text. If the text holds tool calls,
    they run, and their results are the next observation. So are malformed calls, unknown tools, bad arguments and
    errors inside a tool. A text without a call is the final answer: it ends the episode and is graded. A tool ends it
    by ``context.end()``.

    To write an environment, list its ``tools``, return its ``tasks``, and grade an episode in ``reward``:

    Example:
        >>> CAPITALS = {"Fiji": "Suva", "Peru": "Lima"}
        >>> @tool
        ... def look_up(country: str) -> str:
        ...     "Look up the capital of a country."
        ...     return CAPITALS[country]
        >>> class Capitals(ToolEnv):
        ...     tools = (look_up,)
        ...
        ...     def tasks(self, split):
        ...         return [Task(id=c, prompt=f"What is {c}'s capital?", answer=CAPITALS[c]) for c in CAPITALS]
        ...
        ...     def reward(self, episode):
        ...         return {"correct": episode.final == episode.task.answer}
        >>> env = Capitals()
        >>> messages, info = env.reset(options={"task": "Fiji"})
        >>> messages, reward, terminated, truncated, info = env.step("```look_up\nFiji\n```")
        >>> messages[0]["content"], env.step("Suva")[1]
        ('Suva', 1.0)

    Optional methods: ``gold`` returns the turns of a perfect player, from which the warm start learns. ``respond`` adds
    messages after the tool results of a turn, and ``turn_reward`` rewards a single turn. ``open_episode`` and
    ``close_episode`` set up and release what an episode needs, such as a database. ``answer_of`` returns the final
    answer as a text by which several attempts vote. Every instance copies the tools of its class; make a tool that
    can't be copied in ``__init__``, after ``super().__init__()``. ``agentrl.register`` gives the class an id;
    ``agentrl.check_env`` reports its faults.

    Args:
        split: the split that ``reset`` draws tasks from.
        dialect: how tool calls are written; by default what the class says, as in ``dialect = "hermes"``, else "fence".
        max_turns: how often the assistant may speak before the episode is truncated; the class's own by default.

    Raises:
        UnknownNameError: there is no such dialect or split.
        ConfigError: ``max_turns`` is less than 1, or the class has no such argument.
    """

    splits: ClassVar[tuple[str, ...]] = ("train", "test")
    instructions: str = ""
    """Beginning of the system message, before the description of the tools."""
    reward_weights: ClassVar[Mapping[str, float]] = {"correct": 1.0}
    """The weight of each part that ``reward`` names."""
    cut_message: ClassVar[str] = "Your last turn was cut off at its limit of tokens. Go on, in fewer words."
    """The user's message after a turn that was cut off and is to continue."""
    tools: Sequence[Tool] = ()
    """The tools that the agent can call."""
    max_turns: int = 8
    """How often the assistant may speak."""
    _dialect_name: str = "fence"

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # An instance's dialect knows its tools; a class can only name one.
        if isinstance(name := cls.__dict__.get("dialect"), str):
            cls._dialect_name = name
            del cls.dialect

    def __new__(cls, *_: Any, **options: Any) -> Self:
        """Refuse arguments that the class does not take, as Python would, in a sentence that names the nearest."""
        author.check_arguments(cls, options)
        return super().__new__(cls)

    def __init__(self, *, split: str = "train", dialect: str | None = None, max_turns: int | None = None) -> None:
        if split not in self.splits:
            raise UnknownNameError("split", split, self.splits)
        self.max_turns = type(self).max_turns if max_turns is None else max_turns
        if self.max_turns < 1:
            raise ConfigError(f"max_turns is {self.max_turns}: an agent needs at least one turn")
        self.split = split
        self._dialect_name = type(self)._dialect_name if dialect is None else dialect
        get_dialect(self._dialect_name)  # a wrong name is an error now, although the tools are not known yet
        self.tools = author.own_tools(self._label("tools"), type(self).tools, self)
        self.observation_space = Messages()
        self.action_space = Unicode()
        self.sub_policy = SubPolicy()
        """Takes turns for sub-agents; whoever plays with a policy sets it before ``reset``."""
        self.recorded: Sequence[Exchange] | None = None
        """The exchanges with judges and users that the next episode uses again; a replay sets it before ``reset``."""
        self._tasks: TaskSet | None = None
        self._episode: Episode | None = None
        self._context: ToolContext | None = None
        self._held: ToolContext | None = None
        """The context that still has to go to ``close_episode``."""

    def __getstate__(self) -> dict[str, object]:
        # Tasks may hold a function that can't be pickled; the receiver makes them anew.
        return {**self.__dict__, "_tasks": None}

    @functools.cached_property
    def dialect(self) -> Dialect:
        """The dialect that reads and writes calls of this instance's tools.

        Raises:
            EnvContractError: ``tools`` holds something that is no tool, or two of one name.
        """
        author.validate_tools(self._label("tools"), self.tools)
        return get_dialect(self._dialect_name, self.tools)

    def tasks(self, split: str) -> TaskSet | Sequence[Task]:
        """Return the tasks of ``split``, as a list or a :class:`TaskSet`; called once per instance."""
        raise EnvContractError(f"{self._label('tasks')} is not written: let it return a list of Task for {split!r}")

    def reward(self, episode: Episode) -> Mapping[str, float] | Awaitable[Mapping[str, float]]:
        """Grade an episode that has ended: named parts, weighted by ``reward_weights``; may be ``async def``.

        Every end is graded, also where a limit of turns or tokens truncated the episode: ``episode.stop`` says why.
        """
        raise EnvContractError(f"{self._label('reward')} is not written: let it return parts, as in {{'correct': 1.0}}")

    def answer_of(self, episode: Episode) -> str | None:
        """Return the final answer of a finished episode, spelled so that equal answers are equal texts.

        Evaluations let the attempts at a task vote by it. Return "" where the agent gave no answer, and None, as by
        default, where answers can't be compared as texts.
        """
        return None

    def turn_reward(self, episode: Episode) -> float:
        """Return a reward for the turn just taken; 0 by default."""
        return 0.0

    def respond(self, episode: Episode) -> tuple[Message, ...]:
        """Return messages that follow the tool results of a turn; none by default."""
        return ()

    def open_episode(self, context: ToolContext) -> None:
        """Open an episode's resources, such as a connection, and put them into ``context.state``; nothing by default.

        This method, sync tools, ``respond``, ``turn_reward``, ``reward`` and ``close_episode`` run in one thread per
        episode. After a tool has overrun its time limit, later calls run in another thread.
        """

    def close_episode(self, context: ToolContext) -> None:
        """Release what ``open_episode`` and the tools put into ``context.state``; nothing by default.

        Each episode that ``open_episode`` has begun is closed once: after grading, or in ``close`` or ``reset``.
        """

    def gold(self, task: Task) -> Sequence[str]:
        """Return the turns of a perfect player.

        Raises:
            NotImplementedError: this environment has none.
        """
        raise NotImplementedError(f"{type(self).__name__} has no gold player")

    def gold_turns(self, task: Task) -> tuple[str, ...]:
        """Return the turns of ``gold``, checked.

        Raises:
            NotImplementedError: this environment has no gold player.
            EnvContractError: ``gold`` raised, or returned something else than a list of texts.
        """
        passing = (AgentRLError, NotImplementedError)
        turns = author.ask(self._label("gold"), lambda: self.gold(task), task, passing=passing)
        return author.as_turns(self._label("gold"), turns)

    @property
    def best_return(self) -> float:
        """The most that the weighted parts can add up to, each part being at most 1."""
        return sum(weight for weight in self.reward_weights.values() if weight > 0)

    @property
    def task_set(self) -> TaskSet:
        """The tasks of this instance's split.

        Raises:
            EnvContractError: ``tasks`` raised, or returned something else than tasks with unique ids.
        """
        if self._tasks is None:
            self._tasks = author.as_task_set(self._label("tasks"), self._ask("tasks", lambda: self.tasks(self.split)))
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
            options: ``{"task": id}`` asks for a task; without it, a task is drawn at random.

        Returns:
            The system and user messages, and an info dict with the task's id.

        Raises:
            UnknownNameError: the split has no such task.
            EnvContractError: the environment's own code raised or returned a wrong result; the message says what to do.
        """
        super().reset(seed=seed)
        task = self._choose(options or {})
        # Drawn even if no tool needs it, so that the environment's own draws do not depend on its tools.
        tool_seed = int(self.np_random.integers(2**31))
        dialect = self.dialect  # before anything is opened: it checks the tools
        self._end()
        for tool in self.tools:
            self._ask(f"tools: {tool.name}.open", functools.partial(tool.open, tool_seed), task)
        context = ToolContext(task=task, seed=tool_seed, policy=self.sub_policy, dialect=self._dialect_name)
        context.exchanges.recorded = self.recorded
        # The default opens nothing, so it needs no thread.
        if type(self).open_episode is not ToolEnv.open_episode:
            self._ask("open_episode", lambda: context.thread.run(lambda: self.open_episode(context), begin=True), task)
        # Set only now: an episode whose open_episode raised was not begun and is not closed.
        self._context = self._held = context
        system = "\n".join(part for part in (self.instructions, dialect.instructions()) if part)
        opening = (Message(role="system", content=system),) if system else ()
        messages = (*opening, Message(role="user", content=task.prompt))
        self._episode = Episode(task=task, messages=messages, state=context.state, exchanges=context.exchanges)
        return messages, {"task_id": task.id}

    def step(self, action: str) -> tuple[tuple[Message, ...], float, bool, bool, dict[str, Any]]:
        """Take the assistant's turn.

        Args:
            action: the assistant's text, exactly as sampled; a ``CutTurn`` where a limit of tokens ended it.

        Returns:
            New messages, the turn's reward, terminated, truncated, and an info dict.

        Raises:
            EnvContractError: there is no episode, it is over, or the environment's own code raised or returned a wrong
                result; the message says what to do.
            InfrastructureError: a tool's sandbox or server failed; the episode says nothing about the agent.
        """
        episode, context = self.episode, self._context
        if episode.stop is not None:
            raise EnvContractError(f"{type(self).__name__}: the episode is over: call reset")
        if not isinstance(cast(object, action), str):
            raise author.gave(f"the player of {type(self).__name__}", action, "an action is the agent's text, a str")
        assert context is not None, "reset makes a context before any tool is called"
        cut = action.then if isinstance(action, CutTurn) else ""
        calls = () if cut == "end" else self.dialect.parse(action)
        answers = [answer(call, self.tools, context, self._label("tools")) for call in calls]
        results = tuple(message for message, _ in answers)
        episode = replace(
            episode,
            messages=(*episode.messages, Message(role="assistant", content=str(action)), *results),
            tool_runs=(*episode.tool_runs, *(run for _, run in answers)),
            turns=episode.turns + 1,
            cut=cut,
        )
        stop = self._stop_after(action, episode, called=bool(calls))
        if calls:
            extra = author.as_messages(self._label("respond"), self._ask_about("respond", episode))
            stop = Stop.TERMINATED if context.ended else stop
        else:
            extra = () if stop else (Message(role="user", content=self.cut_message),)
        episode = replace(episode, messages=(*episode.messages, *extra), stop=stop, ended=context.ended)
        paid: Any = self._ask_about("turn_reward", episode)
        reward = self._ask("turn_reward", lambda: float(paid), episode.task)
        if stop:
            episode, graded = self._graded(episode)
            reward += graded
        # Assigned last: where the author's code raised above, the record still shows the turn before.
        self._episode = episode
        if stop:
            self._end()
        ends = stop is Stop.TERMINATED, stop not in (None, Stop.TERMINATED)
        return (*results, *extra), reward, *ends, {"parts": dict(episode.parts or {})}

    def record(self, messages: Sequence[Message], turns: int, state: Mapping[str, Any]) -> None:
        """Record what was played by somebody else than ``step``, before ``truncate`` ends the episode.

        Args:
            messages: the conversation; how long its tools took, and whether they failed, nobody knows.
            turns: how often the assistant has spoken.
            state: what ``reward`` is to find in ``episode.state``.
        """
        assert self._context is not None, "reset makes a context before anything is played"
        self._context.state.update(state)
        messages = tuple(messages) or self.episode.messages
        names = (message.get("name", "") for message in messages if message["role"] == "tool")
        runs = tuple(ToolRun(name=name, ok=True, wall_s=0.0) for name in names)
        self._episode = replace(self.episode, messages=messages, tool_runs=runs, turns=turns)

    def truncate(self, stop: Stop) -> float:
        """End the episode from outside, such as where its tokens are used up, and grade it.

        An episode in which the assistant has not spoken is not graded.

        Returns:
            The reward.

        Raises:
            EnvContractError: there is no episode, it is over, or the environment's own code raised.
        """
        episode = replace(self.episode, stop=stop)
        if self.episode.stop is not None:
            raise EnvContractError(f"{type(self).__name__}: the episode is over: call reset")
        self._episode, reward = self._graded(episode) if episode.turns else (episode, 0.0)
        self._end()
        return reward

    def _stop_after(self, action: str, episode: Episode, *, called: bool) -> Stop | None:
        # A turn with a call is never a final answer, however it was cut.
        if not called and episode.cut in ("", "answer"):
            return Stop.TERMINATED
        if isinstance(action, CutTurn) and action.then == "end":
            return action.stop
        return Stop.TURN_LIMIT if episode.turns >= self.max_turns else None

    def _graded(self, episode: Episode) -> tuple[Episode, float]:
        """Grade an episode that has ended, and return it with its reward."""
        parts = author.as_parts(self._label("reward"), self._ask_about("reward", episode), self.reward_weights)
        final = author.as_answer(self._label("answer_of"), self._ask_about("answer_of", episode))
        reward = sum(self.reward_weights[name] * value for name, value in parts.items())
        return replace(episode, parts=parts, answer=final), reward

    def close(self) -> None:
        """Release whatever the episode and its tools hold. Safe to call twice."""
        # The stack closes every tool even if one raises; close_episode runs before, since it may use the tools.
        with ExitStack() as stack:
            for tool in reversed(self.tools):
                if author.is_tool(tool):  # anything else was refused, and can't be closed
                    stack.callback(self._ask, f"tools: {tool.name}.close", tool.close)
            self._end()

    def _end(self) -> None:
        # Taken first: a close_episode that raises is not called again.
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
        # An endless set is sampled from its first 2**31 tasks.
        index = int(self.np_random.integers(2**31 if tasks.size is None else tasks.size))
        return self._ask("tasks", lambda: tasks[index])

    def _ask(self, method: str, function: Callable[[], _T], task: Task | None = None) -> _T:
        return author.ask(self._label(method), function, task)

    def _ask_about(self, method: str, episode: Episode) -> object:
        """Call a method of the author's with the episode so far, in the episode's thread."""
        context = self._context
        assert context is not None, "reset makes a context before anything is asked about the episode"

        def asked() -> object:
            result = context.thread.run(lambda: getattr(self, method)(episode))
            # Grading may wait for a judge; the other methods are called too often to wait.
            return call_async(lambda: result, None).result() if method == "reward" and iscoroutine(result) else result

        return self._ask(method, asked, episode.task)

    def _label(self, part: str) -> str:
        return f"{type(self).__name__}.{part}"
