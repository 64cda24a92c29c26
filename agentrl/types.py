"""The types that flow through the package: task → messages → segments → trajectory → group.

A trajectory is a record: frozen, append-only, and each fact in it is stated once. *Trained* is not stored; it is
derived: a segment is trained where its source is ``"policy"``.
"""

import math
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import Any, ClassVar, Literal, NotRequired, cast

from typing_extensions import TypedDict  # that of Python 3.11 lacks what pydantic needs to check messages

from agentrl.errors import EnvContractError, TrajectoryError
from agentrl.segments import Row, Segment, parents_first, turn_order

Role = Literal["system", "user", "assistant", "tool"]
CutTurns = Literal["answer", "end", "continue"]
"""How the environment treats a turn that a token limit cut off.

``answer``: as any other turn: its calls run, and a text without a call is the final answer. ``end``: the episode ends
there without an answer, and its calls do not run. ``continue``: its calls run, and a text without a call is no answer:
a message tells the agent to continue.
"""

_NO_MORE: Mapping[str, object] = {"extra": "forbid"}
"""For classes that are read from untrusted files: an unknown field is an error."""
_LARGEST_REWARD = 1e9
"""Largest absolute reward: training sums and squares rewards in float32, which must not overflow."""
_PARTS = 64
"""Most parts of a reward, and most characters of a part's name."""
_ROUNDING = 1e-9
"""Tolerance for rounding where a return is compared with the best return."""


class CutTurn(str):
    """A turn's text that was cut off by a token limit: an action for ``ToolEnv.step`` that carries this fact.

    It is a ``str``, so Gymnasium's wrappers pass it on.

    Args:
        text: what the assistant had said by then.
        then: how the environment treats the turn.
        stop: why the episode stops if the turn ends it.
    """

    then: CutTurns
    stop: "Stop"

    def __new__(cls, text: str, then: CutTurns = "end", stop: "Stop | None" = None) -> "CutTurn":
        """Make the text and attach the other two."""
        made = super().__new__(cls, text)
        made.then, made.stop = then, stop or Stop.TURN_CUT
        return made


class Message(TypedDict):
    """One chat message, in the form that chat templates take.

    ``name`` and ``tool_call_id`` are set on tool results only: the tool's name and the call that it answers.
    """

    role: Role
    content: str
    name: NotRequired[str]
    tool_call_id: NotRequired[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call that a dialect found in the assistant's text."""

    name: str
    """The tool's name as the model wrote it; it need not exist."""
    arguments: Mapping[str, object]
    """The arguments as parsed, not yet validated against the tool."""
    id: str = ""
    """Names the call within its turn; a result refers to it."""
    error: str = ""
    """The reason why the call can't be read, in words the model can learn from; empty for a well-formed call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One problem, such as ``Task(id="train:7", prompt="What is 6 * 7?", answer="42", tags=("level:1",))``.

    The agent reads only ``prompt``. Tools read all fields as ``context.task``, and ``reward`` as ``episode.task``.

    Raises:
        EnvContractError: a field has another type than the one below.
    """

    id: str
    """Stable name within the environment: ``reset(options={"task": id})`` begins this task again."""
    prompt: str
    """The user's message that the agent reads."""
    answer: str = ""
    """The expected answer; the agent never sees it."""
    data: Mapping[str, object] = field(default_factory=dict[str, object])
    """Further data for playing and grading the task; the agent never sees it."""
    tags: tuple[str, ...] = ()
    """Kinds of task that evaluations report separately, such as ``level:3``."""

    def __post_init__(self) -> None:
        # An id that is a number, or one tag without its comma, would be found only where the episode's file is read.
        fields, tags = cast(list[object], [self.id, self.prompt, self.answer]), cast(object, self.tags)
        if not all(isinstance(field, str) for field in fields):
            raise EnvContractError(f"a task's id, prompt and answer are {reprlib.repr(fields)}: make all three texts")
        if not isinstance(cast(object, self.data), Mapping):
            raise EnvContractError(f"the data of task {self.id!r} are {reprlib.repr(self.data)}: make them a dict")
        if not isinstance(tags, tuple | list) or not all(isinstance(tag, str) for tag in cast(list[object], tags)):
            raise EnvContractError(f'the tags of task {self.id!r} are {tags!r}: make them texts, as in ("level:3",)')


class Stop(StrEnum):
    """The reason why an episode ended."""

    TERMINATED = "terminated"
    """The environment reached its end: a final answer was given."""
    TURN_LIMIT = "turn_limit"
    """The environment truncated the episode: its number of turns is used up."""
    TOKEN_LIMIT = "token_limit"
    """The collector truncated the episode: its token budget is used up."""
    TURN_CUT = "turn_cut"
    """The collector truncated the episode: a turn was cut at its token limit and counts as no answer."""
    TIME_LIMIT = "time_limit"
    """The driver ended the agent's program: its time is used up."""
    CRASHED = "crashed"
    """The agent's program failed: by its exit code, a signal, or beyond its memory."""

    @property
    def truncated(self) -> bool:
        """True if the episode was cut off rather than ended."""
        return self is not Stop.TERMINATED


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolRun:
    """The cost and outcome of one tool call."""

    __pydantic_config__: ClassVar = _NO_MORE
    name: str
    """The tool's name as called."""
    ok: bool
    """True if the tool answered; False for malformed calls and for errors inside the tool."""
    wall_s: float
    """Seconds from call to answer."""
    arguments: Mapping[str, object] = field(default_factory=dict[str, object])
    """The arguments as the tool received them. Its answer is the tool message at the same place in ``messages``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """A question to a fixed model, such as a judge or a simulated user, and its answer."""

    __pydantic_config__: ClassVar = _NO_MORE
    model: str
    """The model's name on its server."""
    messages: tuple[Message, ...]
    """What it was asked."""
    answer: str
    """What it answered."""
    usage: tuple[int, int] | None = None
    """Tokens that the server says it has read and written; None where it counts none, or a cache answered."""


class _Derived(tuple[Any, ...]):
    """Rows that were made of an episode's segments, or segments of its rows: they follow when the others change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One episode as it was played: tokens, rewards, and why it ended.

    Most episodes are one row of tokens, given as ``segments``. Where the history was rewritten, or sub-agents played,
    there are several, given as ``rows``.

    Example:
        A turn that calls a tool, the tool's answer, and the final turn::

            segments = prompt[20] · policy[9] · template[4] · tool[7] · template[6] · policy[8]
            rewards  =              0.0                                               1.0

    Raises:
        TrajectoryError: the number of rewards is not the number of policy segments, a row begins nowhere, turns or
            steps have no order, or a reward or a part is none that training can use.
    """

    task_id: str
    """The task that was played."""
    seed: int
    """The seed of the episode: environment and sampling derive theirs from it."""
    segments: tuple[Segment, ...] = ()
    """The segments of all rows, row by row; in an episode of one row, all tokens in order."""
    rows: tuple[Row, ...] = ()
    """The rows; one row of ``segments`` by default."""
    rewards: tuple[float, ...]
    """One reward per policy segment, in the order of turns, paid on the segment's last token."""
    penalty: float = 0.0
    """A penalty for length, at least 0, that training subtracts from the last reward; success ignores it."""
    stop: Stop
    """The reason why the episode ended."""
    messages: tuple[Message, ...] = ()
    """The conversation as text, for people to read; training reads tokens only."""
    parts: Mapping[str, float] = field(default_factory=dict[str, float])
    """Named parts of the final reward, before weighting."""
    tool_runs: tuple[ToolRun, ...] = ()
    """One entry per tool call, in order."""
    env: str = ""
    """Name of its environment in a run that mixes several; empty where there is one."""
    attempt: int | None = None
    """Which attempt at its task it is in an evaluation, from 0; None elsewhere."""
    tags: tuple[str, ...] = ()
    """The task's tags."""
    answer: str | None = None
    """The final answer as :meth:`ToolEnv.answer_of` returns it; None where the environment can't."""
    expected: str = ""
    """The task's expected answer; empty where it has none."""
    usage: tuple[int, int] | None = None
    """Tokens that a server says it has read and written, over all turns; None where no server played."""
    steps: tuple[int, ...] = ()
    """Which turn each of the assistant's messages is; empty where all turns are in ``messages``, in order. Summaries
    and the turns of sub-agents are not."""
    forks: Mapping[str, int] = field(default_factory=dict[str, int])
    """How often a further row began, by cause, as ``agentrl.rollout.policy.Policy.forks`` counts them."""
    exchanges: tuple[Exchange, ...] = ()
    """What judges and simulated users were asked and answered, in order."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "rewards", tuple(self.rewards))
        self._set_rows()
        if len(self.rewards) != len(self.sampled):
            raise TrajectoryError(f"{len(self.sampled)} policy segments came with {len(self.rewards)} rewards")
        if list(self.steps) != sorted({*self.steps} & {*range(len(self.rewards))}):
            raise TrajectoryError(f"episode of task {self.task_id!r} has steps {self.steps}: give turns in order")
        if not all(abs(reward) <= _LARGEST_REWARD for reward in (*self.rewards, self.penalty)):  # NaN fails too
            raise TrajectoryError(
                f"episode of task {self.task_id!r} has a reward that is not finite or beyond ±{_LARGEST_REWARD:g}: "
                f"{self.rewards}; give rewards of about 1"
            )
        # Parts become names of metrics, and may come from an untrusted file.
        if len(self.parts) > _PARTS or not all(len(n) <= _PARTS and math.isfinite(v) for n, v in self.parts.items()):
            raise TrajectoryError(
                f"episode of task {self.task_id!r} has more than {_PARTS} parts of a reward, one that is not finite, "
                f"or a name of more than {_PARTS} characters"
            )

    def _set_rows(self) -> None:
        """Derive the rows from the segments, or the segments from the rows."""
        segments, rows = self.segments, self.rows
        if not rows or (isinstance(rows, _Derived) and not isinstance(segments, _Derived)):
            try:
                segments, rows = tuple(segments), _Derived((Row(tuple(segments)),))
            except TrajectoryError as error:
                raise TrajectoryError(f"episode of task {self.task_id!r} does not begin with a prompt") from error
        else:
            of_rows = _Derived(segment for row in rows for segment in row.segments)
            if segments and not isinstance(segments, _Derived) and tuple(segments) != of_rows:
                raise TrajectoryError(f"episode of task {self.task_id!r} has segments and other rows: give either")
            segments, rows = of_rows, tuple(rows)
            parents_first(rows)
        object.__setattr__(self, "segments", segments)
        object.__setattr__(self, "rows", rows)

    @property
    def sampled(self) -> tuple[Segment, ...]:
        """The policy segments of all rows, in the order of turns."""
        segments = [segment for segment in self.segments if segment.trained]
        return tuple(segments[turn] for turn in turn_order(segments))

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens of ``segments``, concatenated: each token of the episode once."""
        return tuple(token for segment in self.segments for token in segment.token_ids)

    @property
    def n_sampled(self) -> int:
        """How many tokens the policy sampled."""
        return sum(len(segment.token_ids) for segment in self.sampled)

    @property
    def written(self) -> int:
        """How many tokens the policy wrote: as its server counts them, where one played."""
        return self.usage[1] if self.usage else self.n_sampled

    @property
    def cut_turns(self) -> int:
        """How many turns were cut off at a token limit."""
        return sum(segment.cut for segment in self.segments)

    @property
    def turns(self) -> tuple[tuple[str, tuple[Message, ...]], ...]:
        """The text of each of the assistant's turns, with the messages that answered it."""
        spoke = [at for at, message in enumerate(self.messages) if message["role"] == "assistant"]
        return tuple(
            (self.messages[at]["content"], self.messages[at + 1 : end])
            for at, end in pairwise([*spoke, len(self.messages)])
        )

    @property
    def ret(self) -> float:
        """The episode's return: the sum of its rewards, undiscounted."""
        # fsum rounds once, so rounding errors do not grow with the number of turns.
        return math.fsum(self.rewards)

    @property
    def learned_return(self) -> float:
        """The return that training learns from: less the penalty for length."""
        return self.ret - self.penalty


@dataclass(frozen=True, slots=True)
class Group:
    """Several episodes of one task, whose returns are compared with each other.

    Raises:
        TrajectoryError: the group is empty, mixes environments or tasks, or its members began with different prompts.
    """

    trajectories: tuple[Trajectory, ...]
    """The episodes, in the order of their seeds."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "trajectories", tuple(self.trajectories))
        if not self.trajectories:
            raise TrajectoryError("a group needs at least one episode")
        leader = self.trajectories[0]
        for other in self.trajectories[1:]:
            if other.task_id != leader.task_id:
                raise TrajectoryError(f"a group holds one task, not {leader.task_id!r} and {other.task_id!r}")
            if other.env != leader.env:
                raise TrajectoryError(f"a group is of one environment, not of {leader.env!r} and {other.env!r}")
            # Returns are comparable only from the same starting point.
            if other.rows[0].segments[0] != leader.rows[0].segments[0]:
                raise TrajectoryError(f"members of the group of task {leader.task_id!r} began with different prompts")

    @property
    def task_id(self) -> str:
        """The task that every member played."""
        return self.trajectories[0].task_id

    @property
    def env(self) -> str:
        """The name of its environment in a run that mixes several."""
        return self.trajectories[0].env

    def __iter__(self) -> Iterator[Trajectory]:
        return iter(self.trajectories)

    def __len__(self) -> int:
        return len(self.trajectories)


def flatten(groups: Sequence[Group]) -> list[Trajectory]:
    """Return all episodes of ``groups``, in order."""
    return [trajectory for group in groups for trajectory in group]


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """An episode's environment and sampling settings, which suffice to judge it without that environment."""

    __pydantic_config__: ClassVar = _NO_MORE
    env_id: str
    """The environment's id."""
    env_args: Mapping[str, object]
    """The environment's own arguments, without the split."""
    split: str
    """The task's split."""
    best_return: float
    """Largest return that the environment's reward allows."""
    dialect: str
    """Name and hash of the dialect of its tool calls."""
    temperature: float
    """Sampling temperature."""
    turn_tokens: int
    """Token limit of a turn."""
    versions: Mapping[str, str] = field(default_factory=dict[str, str])
    """Versions of all that plays and grades it, as ``agentrl.toolenv.versions`` returns them."""


def won(trajectory: Trajectory, best_return: float) -> bool:
    """Return True if an episode succeeded: its return reaches ``best_return``, up to rounding."""
    return trajectory.ret >= best_return - _ROUNDING
