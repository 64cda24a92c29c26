"""The policy as a driver sees it: it samples turns, and records their tokens in rows.

The record holds exactly what was sampled. Each prompt is a row's tokens so far plus new ones; a turn that comes back in
a history is its own sampled tokens again, and is never tokenized anew.
"""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from agentrl.engines.base import Completion, Engine, Sampling
from agentrl.engines.rng import derive_seed
from agentrl.errors import TokenLimitError
from agentrl.render.transcript import Writer
from agentrl.rollout.collected import Clock
from agentrl.rollout.gate import Gate
from agentrl.rollout.plan import EpisodeSpec
from agentrl.segments import Row, Segment
from agentrl.toolenv.author import ask
from agentrl.toolenv.base import ToolEnv
from agentrl.toolenv.tools.context import SubPolicy
from agentrl.types import CutTurn, CutTurns, Message, Stop

_Key = tuple[object, ...]
"""A message as a value: equal where two spellings mean the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLimits:
    """Limits of an episode's length."""

    episode_tokens: int
    """Most tokens of a row, prompt and tool output included."""
    total_tokens: int = 0
    """Most tokens of all rows together, those that a row inherits not counted; 0 for four times ``episode_tokens``."""
    cut_turns: CutTurns = "end"
    """How to treat a turn that the limit of a turn, or of a row, cut off."""
    penalty: int = 0
    """Over so many tokens before a limit the reward falls by up to 1; 0 for no penalty."""

    def after_cut(self, spent: bool) -> CutTurns:
        """Return how to treat a cut turn; an episode whose tokens are ``spent`` can't continue."""
        return "end" if spent and self.cut_turns == "continue" else self.cut_turns

    def penalty_of(self, rows: Sequence[Row], stop: Stop, turn_tokens: int) -> float:
        """Compute the penalty for length of an episode (DAPO's soft overlong punishment).

        It rises linearly from 0 to 1 over the last ``penalty`` tokens that a row, or its longest turn, may have. For an
        episode that ran out of tokens it is 1.

        Source: arXiv 2503.14476, equation 13, where an episode is one turn.
        """
        turns = [len(segment.token_ids) for row in rows for segment in row.segments if segment.trained]
        if not self.penalty or not sum(turns):
            return 0.0
        room = min(turn_tokens - max(turns), self.episode_tokens - max(row.fork + len(row.token_ids) for row in rows))
        # The tool output that no longer fitted is not in the record, which may then end before the limit.
        room = 0 if stop is Stop.TOKEN_LIMIT else room
        return max(0.0, 1 - room / self.penalty)


@dataclass(slots=True, kw_only=True)
class Player:
    """The threads that environments run in, the limits of an episode, and the clock."""

    limits: EpisodeLimits
    """Limits of each episode."""
    threads: ThreadPoolExecutor
    """Threads in which environments step."""
    gate: Gate
    """Bounds the episodes at a time."""
    clock: Clock = field(default_factory=Clock)
    """Time spent so far."""

    async def in_thread(
        self, on_cancel: Callable[[], None], function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Run a blocking call of an environment while other episodes run.

        Args:
            on_cancel: called where the caller is cancelled, to shorten the call.
            function: the blocking function.
            args: its arguments.
            kwargs: its arguments by name.
        """

        def timed() -> tuple[Any, float]:
            began = time.perf_counter()
            # A BaseException, such as from sys.exit() in the environment's own code, would end the process.
            result = ask(function.__qualname__, lambda: function(*args, **kwargs), passing=(Exception,))
            return result, time.perf_counter() - began

        call = self.threads.submit(timed)
        done = asyncio.wrap_future(call)
        try:
            result, seconds = await asyncio.shield(done)
        except asyncio.CancelledError:
            # The caller closes the environment next. That must not happen while a thread is still inside of it, even
            # if the caller is cancelled again.
            call.cancel()
            on_cancel()
            while not done.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([done])
            _ = done.cancelled() or done.exception()  # read, or asyncio would print it
            raise
        self.clock.tools += seconds
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class _Turn:
    """A sampled turn where it stands in a row."""

    position: int
    """How many messages of the row come before it."""
    start: int
    """How many tokens of the row come before it."""
    token_ids: tuple[int, ...]
    """Its tokens."""

    @property
    def end(self) -> int:
        """How many tokens the row has up to its end."""
        return self.start + len(self.token_ids)


@dataclass(slots=True, kw_only=True)
class _GrowingRow:
    """A row, and the history that its tokens spell."""

    token_ids: list[int]
    """All tokens, inherited ones included."""
    history: list[_Key] = field(default_factory=list[_Key])
    """The tools and messages that they spell, as values."""
    turns: list[_Turn] = field(default_factory=list[_Turn])
    """The turns that were sampled in this row."""
    segments: list[Segment] = field(default_factory=list[Segment])
    """The row's own segments."""
    parent: int | None = None
    """Index of the row that it continues."""
    fork: int = 0
    """Number of tokens inherited from there."""
    waits: bool = False
    """True while a turn is sampled at its end."""

    def ends_with(self, turn: _Turn | None) -> bool:
        """Return True if nothing follows ``turn`` in this row."""
        return turn is not None and not self.waits and turn.end == len(self.token_ids)


class Policy:
    """Samples the turns of one episode and records their tokens.

    Args:
        engine: samples.
        renderer: writes messages as tokens.
        spec: the episode's task and seed.
        sampling: temperature; ``max_tokens`` is the limit of a turn.
        player: threads, limits and clock.
    """

    def __init__(self, engine: Engine, renderer: Writer, spec: EpisodeSpec, sampling: Sampling, player: Player) -> None:
        self.spec = spec
        """The episode's task and seed."""
        self.forks = Counter[str]()
        """How often a row began after the first one, by its cause: ``again`` (the same history once more), ``branch``
        (another continuation of a turn) or ``anew`` (no turn of the history is at its old place)."""
        self.rewards = list[float]()
        """The reward of each turn, in the order of turns."""
        self.usages = list[tuple[int, int]]()
        """Tokens that a server says it has read and written, of each turn."""
        self._engine, self._renderer, self._sampling, self._player = engine, renderer, sampling, player
        self._rows = list[_GrowingRow]()
        self._own_turns = dict[_Key, tuple[int, ...]]()
        """The tokens of each turn, by the message that it became."""
        self._asked = 0
        self._sub_policy = SubPolicy()
        self._fault: Exception | None = None
        """What a sub-agent's turn has raised beside a limit of tokens."""

    async def turn(self, messages: Sequence[Message], tools: Sequence[Mapping[str, object]] | None = None) -> str:
        """Sample the assistant's next turn.

        Where the messages continue a row's history, so do the tokens. Where they part from it, a new row begins: with
        the tokens up to the last turn that both have, or with none. An assistant's message that is one of the policy's
        own turns becomes its sampled tokens; any other one is context, which was never sampled.

        Args:
            messages: the history, from the first message on; the assistant's are texts as this method returned them.
            tools: schemas of tools for the chat template to describe; by default the environment's.

        Returns:
            The text; a ``CutTurn`` where a limit of tokens ended it.

        Raises:
            TokenLimitError: the messages leave no room for a turn.
            InfrastructureError: the engine failed.
        """
        number, self._asked = self._asked, self._asked + 1
        row, room = self._row(messages, tools)
        row.waits = True
        sampling = replace(
            self._sampling, max_tokens=min(room, self._sampling.max_tokens), stop_ids=self._renderer.stop_ids
        )
        began = time.perf_counter()
        seed = derive_seed(self.spec.seed, number)
        done = await self._engine.generate(tuple(row.token_ids), sampling, seed=seed)
        self._player.clock.engine += time.perf_counter() - began
        self._player.gate.observe(self._engine.cache)
        text = self._record(row, done)
        if done.finish != "length":
            return text
        # A cut turn that has filled the room reached the row's limit, otherwise that of the turn.
        spent = len(done.token_ids) == room
        stop = Stop.TOKEN_LIMIT if spent else Stop.TURN_CUT
        return CutTurn(text, self._player.limits.after_cut(spent), stop)

    async def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a blocking function, such as ``env.step``, in a thread while other episodes are played."""
        result = await self._player.in_thread(self._sub_policy.close, function, *args, **kwargs)
        # Whatever a tool has made of a fault of its sub-agent's turn, the fault says nothing about the agent.
        if self._fault is not None:
            raise self._fault
        return result

    @contextmanager
    def sub_agents(self, env: ToolEnv) -> Generator[None]:
        """Let the tools of ``env`` play sub-agents, whose turns are sampled on the event loop that calls this."""
        loop = asyncio.get_running_loop()

        async def turn(messages: Sequence[Message], tools: Sequence[Mapping[str, object]]) -> str:
            try:
                return await self.turn(messages, tools)
            except TokenLimitError:
                raise
            except Exception as error:
                self._fault = error
                raise

        env.sub_policy = self._sub_policy = SubPolicy(
            lambda messages, tools: asyncio.run_coroutine_threadsafe(turn(messages, tools), loop)
        )
        try:
            yield
        finally:
            # A tool that ran past its time limit may still play.
            self._sub_policy.close()
            env.sub_policy = SubPolicy()

    def pay(self, reward: float) -> None:
        """Add a reward to the turn that was sampled last, over all rows; without a turn it is dropped."""
        if self.rewards:
            self.rewards[-1] += reward

    def rows(self) -> tuple[Row, ...]:
        """Return the rows that were recorded, their turns numbered where there are several rows."""
        # A turn that was cancelled, as by a tool's time limit, leaves context behind which nothing was sampled.
        rows = [row for row in self._rows if row.turns] or self._rows[:1]
        if len(rows) == 1:
            return (Row(tuple(replace(part, turn=None) if part.trained else part for part in rows[0].segments)),)
        numbers = {id(row): number for number, row in enumerate(rows)}
        return tuple(
            Row(tuple(row.segments), None if row.parent is None else numbers[id(self._rows[row.parent])], row.fork)
            for row in rows
        )

    def _record(self, row: _GrowingRow, done: Completion) -> str:
        turn = _Turn(position=len(row.history), start=len(row.token_ids), token_ids=done.token_ids)
        cut, number = done.finish == "length", len(self.rewards)
        segment = Segment("policy", done.token_ids, done.logprobs, done.version, cut, done.swaps, turn=number)
        text = self._renderer.text(done.token_ids)
        key = _key(Message(role="assistant", content=text))
        row.segments.append(segment)
        row.turns.append(turn)
        row.history.append(key)
        row.token_ids += done.token_ids
        row.waits = False
        self.rewards.append(0.0)
        self.usages += [done.usage] if done.usage else []
        self._own_turns[key] = done.token_ids
        return text

    def _row(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, object]] | None
    ) -> tuple[_GrowingRow, int]:
        """Find or begin the row whose tokens spell ``messages``; return the room that is left in it."""
        history = [("tools", json.dumps(tools)), *map(_key, messages)]
        parent, turn = self._shared(history)
        # The same history is to be continued once more: from where the turn began.
        again = turn is not None and turn.position == len(history)
        start = 0 if turn is None else turn.start if again else turn.end
        renderer = self._renderer if tools is None else self._renderer.describing(tools)
        new = [] if again else list(_written(renderer, self._own_turns, messages, turn))
        room = self._room(start, new)
        if room < 1 and self._rows:
            raise TokenLimitError("the history leaves no room for a turn")
        if parent is not None and not again and self._rows[parent].ends_with(turn):
            row = self._rows[parent]
        else:
            inherited = [] if parent is None else self._rows[parent].token_ids[:start]
            row = _GrowingRow(token_ids=inherited, parent=parent, fork=start)
            self.forks.update([_cause(turn, again=again)] if self._rows else [])
            self._rows.append(row)
        row.segments += new
        row.token_ids += [token for segment in new for token in segment.token_ids]
        row.history = history
        # The first prompt is recorded also where it is too long: an episode has at least one row.
        if room < 1:
            raise TokenLimitError("the history leaves no room for a turn")
        return row, room

    def _room(self, start: int, new: Sequence[Segment]) -> int:
        """Return how many tokens may follow ``new`` in a row that begins with ``start`` tokens of another."""
        limits, count = self._player.limits, sum(len(segment.token_ids) for segment in new)
        recorded = sum(len(row.token_ids) - row.fork for row in self._rows)
        total = limits.total_tokens or 4 * limits.episode_tokens
        return min(limits.episode_tokens - start - count, total - recorded - count)

    def _shared(self, history: Sequence[_Key]) -> tuple[int | None, _Turn | None]:
        """Return the row and the turn in it up to which ``history`` is the same, or which it ends before.

        It is the last such turn; where several rows have one, that of the newest.
        """
        best: tuple[int | None, _Turn | None] = None, None
        for index, row in enumerate(self._rows):
            for turn in row.turns:
                shared = turn.position + (turn.position < len(history))
                if (best[1] is None or turn.position >= best[1].position) and row.history[:shared] == history[:shared]:
                    best = index, turn
        return best


def _written(
    renderer: Writer, own_turns: Mapping[_Key, tuple[int, ...]], messages: Sequence[Message], turn: _Turn | None
) -> Iterator[Segment]:
    """Write the messages after a turn, or all where there is none; turns of the assistant among them are context."""
    # The history of a row begins with its tools, which are no message.
    token_ids, rest = (None, messages) if turn is None else (turn.token_ids, messages[turn.position :])
    while True:
        count = next((index for index, message in enumerate(rest) if message["role"] == "assistant"), len(rest))
        if token_ids is None:
            yield renderer.prompt(rest[:count])
        else:
            yield from renderer.extend(token_ids, rest[:count])
        if count == len(rest):
            return
        spoken, rest = rest[count], rest[count + 1 :]
        answered_by = "tool" if rest and rest[0]["role"] == "tool" else "user"
        own = own_turns.get(_key(spoken))
        token_ids = tuple(renderer.turn(spoken["content"], answered_by=answered_by)) if own is None else own
        yield Segment("prompt", token_ids)


def _cause(turn: _Turn | None, *, again: bool) -> str:
    return "anew" if turn is None else "again" if again else "branch"


def _key(message: Message) -> _Key:
    text = message["content"] if message["content"].strip() else ""
    return message["role"], text, message.get("name", ""), message.get("tool_call_id", "")
