"""The types that flow through the house: task → messages → segments → trajectory → group.

A trajectory is a record, never a plan: it is frozen, append-only, and each fact in it is stated once.
*Trained* is not stored anywhere; it means that a segment's source is ``"policy"``.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, NotRequired, TypedDict

from agentrl.errors import TrajectoryError

Role = Literal["system", "user", "assistant", "tool"]
Source = Literal["prompt", "policy", "tool", "template"]
CutTurns = Literal["answer", "end", "continue"]
"""What becomes of a turn that a limit of tokens cut off.

``answer``: it is a turn like any other: its calls run, and a text without one is the final answer. ``end``: the episode
ends there without an answer, and calls in it do not run. ``continue``: its calls run, and a text without one is no
answer: the agent is told to go on.
"""

_LARGEST_REWARD = 1e9
"""What training sums and squares in float32 must not overflow."""


class CutTurn(str):
    """The text of a turn that a limit of tokens ended, not the assistant: an action for ``ToolEnv.step`` that says so.

    It is a text like any other to Gymnasium, whose wrappers pass it on.

    Args:
        text: what the assistant had said by then.
        then: what becomes of it.
    """

    then: CutTurns

    def __new__(cls, text: str, then: CutTurns = "end") -> "CutTurn":
        """A text that knows what becomes of it."""
        made = super().__new__(cls, text)
        made.then = then
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
    """Names the call within its turn, so that a result can say what it answers."""
    error: str = ""
    """Why the call could not be read, in words the model can learn from; empty for a well-formed call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One problem instance of an environment."""

    id: str
    """Stable name within the environment: ``reset(options={"task": id})`` gives this very task again."""
    prompt: str
    """What the agent reads, as the user's message."""
    answer: str = ""
    """The expected answer; the agent never sees it."""
    data: Mapping[str, object] = field(default_factory=dict[str, object])
    """Whatever else the environment needs to play and grade the task; the agent never sees it."""


class Stop(StrEnum):
    """Why an episode ended."""

    TERMINATED = "terminated"
    """The environment reached its end: a final answer was given."""
    TURN_LIMIT = "turn_limit"
    """The environment truncated the episode: its number of turns is used up."""
    TOKEN_LIMIT = "token_limit"
    """The collector truncated the episode: its token budget is used up."""
    TURN_CUT = "turn_cut"
    """The collector truncated the episode: a turn was cut at its limit of tokens, and so is no answer."""

    @property
    def truncated(self) -> bool:
        """Whether the episode was cut off rather than ended."""
        return self is not Stop.TERMINATED


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of token ids from one source.

    Log-probs and a weight version exist exactly where the source is ``"policy"``.

    Example:
        >>> Segment("policy", (5, 9), (-0.1, -2.3), 0).trained
        True

    Raises:
        TrajectoryError: log-probs are missing, superfluous, of another length, not finite or above 0.
    """

    source: Source
    """Who produced the tokens."""
    token_ids: tuple[int, ...]
    """The ids, exactly as sampled or rendered [n]."""
    logprobs: tuple[float, ...] | None = None
    """Log-prob of each token under the distribution it was sampled from [n], in nats."""
    version: int | None = None
    """The version of the weights that sampled the tokens."""
    cut: bool = False
    """Whether a limit of tokens ended the turn, and not the policy."""

    def __post_init__(self) -> None:
        if self.source not in ("prompt", "policy", "tool", "template"):
            raise TrajectoryError(f"unknown segment source {self.source!r}: use prompt, policy, tool or template")
        object.__setattr__(self, "token_ids", tuple(self.token_ids))
        if self.source != "policy":
            if self.logprobs is not None or self.version is not None or self.cut:
                raise TrajectoryError(
                    f"a {self.source} segment was not sampled: it has no log-probs and no version, and is never cut"
                )
            return
        if self.logprobs is None or self.version is None:
            raise TrajectoryError("a policy segment needs the log-probs it was sampled with and its weights' version")
        object.__setattr__(self, "logprobs", tuple(self.logprobs))
        if len(self.logprobs) != len(self.token_ids):
            raise TrajectoryError(f"{len(self.token_ids)} sampled tokens came with {len(self.logprobs)} log-probs")
        for logprob in self.logprobs:
            if not (math.isfinite(logprob) and logprob <= 0.0):
                raise TrajectoryError(f"{logprob} is no log-prob of a sampled token: it must be finite and at most 0")

    @property
    def trained(self) -> bool:
        """Whether the loss may touch these tokens: exactly where the policy sampled them."""
        return self.source == "policy"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolRun:
    """What one tool call cost."""

    name: str
    """The tool's name as called."""
    ok: bool
    """Whether the tool answered; False for malformed calls and for errors inside the tool."""
    wall_s: float
    """Seconds from call to answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One episode as it was played: tokens, rewards, and why it ended.

    Example:
        A turn that calls a tool, the tool's answer, and the final turn::

            segments = prompt[20] · policy[9] · template[4] · tool[7] · template[6] · policy[8]
            rewards  =              0.0                                               1.0

    Raises:
        TrajectoryError: the number of rewards is not the number of policy segments, or the first segment is no prompt.
    """

    task_id: str
    """The task that was played."""
    seed: int
    """The seed of the episode: environment and sampling derive theirs from it."""
    segments: tuple[Segment, ...]
    """All tokens in order; the next prompt was always the previous tokens plus new ones."""
    rewards: tuple[float, ...]
    """One reward per policy segment, paid on the segment's last token."""
    stop: Stop
    """Why the episode ended."""
    messages: tuple[Message, ...] = ()
    """The conversation as text, for people to read; training reads tokens only."""
    parts: Mapping[str, float] = field(default_factory=dict[str, float])
    """Named parts of the final reward, before weighting."""
    tool_runs: tuple[ToolRun, ...] = ()
    """One entry per tool call, in order."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "segments", tuple(self.segments))
        object.__setattr__(self, "rewards", tuple(self.rewards))
        if not self.segments or self.segments[0].source != "prompt":
            raise TrajectoryError(f"episode of task {self.task_id!r} does not begin with a prompt")
        if len(self.rewards) != len(self.sampled):
            raise TrajectoryError(f"{len(self.sampled)} policy segments came with {len(self.rewards)} rewards")
        if not all(abs(reward) <= _LARGEST_REWARD for reward in self.rewards):  # NaN fails too
            raise TrajectoryError(
                f"episode of task {self.task_id!r} has a reward that is not finite or beyond ±{_LARGEST_REWARD:g}: "
                f"{self.rewards}; give rewards of about 1"
            )

    @property
    def sampled(self) -> tuple[Segment, ...]:
        """The policy segments, in order."""
        return tuple(segment for segment in self.segments if segment.trained)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens of the episode, laid end to end [T]."""
        return tuple(token for segment in self.segments for token in segment.token_ids)

    @property
    def n_sampled(self) -> int:
        """How many tokens the policy sampled."""
        return sum(len(segment.token_ids) for segment in self.sampled)

    @property
    def cut_turns(self) -> int:
        """How many turns a limit of tokens cut off."""
        return sum(segment.cut for segment in self.segments)

    @property
    def ret(self) -> float:
        """The episode's return: the sum of its rewards, undiscounted."""
        return math.fsum(self.rewards)


@dataclass(frozen=True, slots=True)
class Group:
    """Several episodes of one task, to be compared with each other.

    Raises:
        TrajectoryError: the group is empty, mixes tasks, or its members began with different prompts.
    """

    trajectories: tuple[Trajectory, ...]
    """The episodes, in the order of their seeds."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "trajectories", tuple(self.trajectories))
        if not self.trajectories:
            raise TrajectoryError("a group needs at least one episode")
        first = self.trajectories[0]
        for other in self.trajectories[1:]:
            if other.task_id != first.task_id:
                raise TrajectoryError(f"a group holds one task, not {first.task_id!r} and {other.task_id!r}")
            if other.segments[0] != first.segments[0]:
                raise TrajectoryError(f"members of the group of task {first.task_id!r} began with different prompts")

    @property
    def task_id(self) -> str:
        """The task that every member played."""
        return self.trajectories[0].task_id

    def __iter__(self) -> Iterator[Trajectory]:
        return iter(self.trajectories)

    def __len__(self) -> int:
        return len(self.trajectories)


def flatten(groups: Sequence[Group]) -> list[Trajectory]:
    """All episodes of ``groups``, in order."""
    return [trajectory for group in groups for trajectory in group]
