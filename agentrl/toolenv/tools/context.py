"""What a tool is called in: the episode, and the policy whose turns a sub-agent takes."""

import asyncio
import copy
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from agentrl.toolenv.tools.timed import ToolThread
from agentrl.types import Exchange, Message, Task

Sample: TypeAlias = Callable[[Sequence[Message], Sequence[Mapping[str, object]]], Future[str]]
"""Begins to sample a turn after messages, with tools for the chat template to describe; called from any thread."""


class ToolError(Exception):
    """A tool could not answer; the model reads the error's text."""


class SubTurn(str):
    """A turn of ``gold`` that a sub-agent takes, during the call that the agent's turn before it makes."""

    __slots__ = ()


def _nobody(messages: Sequence[Message], tools: Sequence[Mapping[str, object]]) -> Future[str]:
    raise ToolError("no policy plays sub-agents here: only a collector's episodes have one")


class SubPolicy:
    """Samples turns of the episode's policy for sub-agents, as long as the tool call lasts.

    Such a turn is recorded and trained like the agent's own turns. Histories of several sub-agents may grow side by
    side.

    Args:
        sample: begins to sample a turn; by default a turn is a ``ToolError``, which says that there is no policy.
    """

    def __init__(self, sample: Sample = _nobody) -> None:
        self._sample = sample
        self._turns = list[Future[str]]()
        self._closed = False

    def turn(self, messages: Sequence[Message], tools: Sequence[Mapping[str, object]] = ()) -> str:
        """Sample the assistant's next turn and wait for it; an ``async def`` tool awaits ``turn_async`` instead.

        Args:
            messages: the sub-agent's history, from its first message on.
            tools: schemas of tools for the chat template to describe.

        Returns:
            The text; a ``CutTurn`` where a limit of tokens ended it.

        Raises:
            ToolError: no tokens are left, there is no policy, or the tool call is over.
            InfrastructureError: the engine failed; the episode is retried, even if the tool catches this.
        """
        return self.begin(messages, tools).result()

    async def turn_async(self, messages: Sequence[Message], tools: Sequence[Mapping[str, object]] = ()) -> str:
        """Sample the assistant's next turn, as ``turn`` does."""
        return await asyncio.wrap_future(self.begin(messages, tools))

    def begin(self, messages: Sequence[Message], tools: Sequence[Mapping[str, object]]) -> Future[str]:
        """Begin to sample a turn, from any thread; it is cancelled where the tool call ends before it."""
        if self._closed:
            raise ToolError("the tool call is over, so its sub-agents take no more turns")
        turn = self._sample(messages, tools)
        self._turns.append(turn)
        # Another thread may have closed this meanwhile: then it has cancelled this turn, or not seen it.
        if self._closed:
            turn.cancel()
        return turn

    def close(self) -> None:
        """Cancel the turns that are being sampled, and refuse others."""
        self._closed = True
        for turn in list(self._turns):
            turn.cancel()


def scripted(turns: Sequence[str]) -> SubPolicy:
    """Return what takes the turns of a script that are a ``SubTurn``, and says nothing after the last."""
    script = iter([turn for turn in turns if isinstance(turn, SubTurn)])

    def sample(*_: object) -> Future[str]:
        turn = Future[str]()
        turn.set_result(next(script, ""))
        return turn

    return SubPolicy(sample)


@dataclass(slots=True, kw_only=True)
class Exchanges:
    """The exchanges of one episode with fixed models."""

    new: list[Exchange] = field(default_factory=list[Exchange])
    """Those that were made, in order."""
    recorded: Sequence[Exchange] | None = None
    """In a replay, those that were recorded: they are used again, and no model is asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolContext:
    """The episode that a tool is called in; ``state``, ``rng`` and ``thread`` are those of all its calls."""

    task: Task
    """The task being played."""
    seed: int
    """Follows from the seed of the episode."""
    # Any: whoever puts a value in knows its type, and would have to narrow an object at every use.
    state: dict[str, Any] = field(default_factory=dict[str, Any])
    """Whatever tools want to remember until the episode ends; rewards read it as ``episode.state``."""
    policy: SubPolicy = field(default_factory=SubPolicy, repr=False, compare=False)
    """Takes turns for sub-agents of this call."""
    dialect: str = "fence"
    """Name of the dialect that the agent writes calls in."""
    exchanges: Exchanges = field(default_factory=Exchanges)
    """What judges and simulated users were asked and answered."""
    thread: ToolThread = field(default_factory=ToolThread, repr=False, compare=False)
    """The thread of the episode's sync functions, and of the environment's own methods from ``open_episode`` on."""
    rng: np.random.Generator = field(init=False)
    """The tools' source of randomness, seeded with ``seed``."""
    _ends: list[None] = field(default_factory=list[None], repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rng", np.random.default_rng(self.seed))

    def end(self) -> None:
        """End the episode after this turn, such as where a game is over: it is graded, and no further turn is taken."""
        self._ends.append(None)

    @property
    def ended(self) -> bool:
        """True after :meth:`end`."""
        return bool(self._ends)

    @contextmanager
    def during_call(self) -> Generator["ToolContext"]:
        """Return the context of one call, which shares all but ``policy``: its sub-agents end with the call."""
        own, policy = copy.copy(self), SubPolicy(self.policy.begin)
        object.__setattr__(own, "policy", policy)
        try:
            yield own
        finally:
            policy.close()
