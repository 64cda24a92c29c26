"""The policy as a driver sees it: it samples turns, and records their tokens in rows.

The record holds exactly what was sampled. Each prompt is a row's tokens so far plus new ones; a turn that comes back in
a history is its own sampled tokens again, and is never tokenized anew.
"""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

from agentrl.engines.base import Completion, Engine, Sampling
from agentrl.engines.rng import derive_seed
from agentrl.errors import TokenLimitError
from agentrl.render.renderer import Renderer
from agentrl.render.transcript import Writer
from agentrl.rollout.growing import GrowingRow, Key, NextTurn, RowTurn, RowTurns, after
from agentrl.rollout.plan import EpisodeSpec
from agentrl.rollout.player import Player
from agentrl.segments import Row, Segment, shared_length
from agentrl.toolenv.base import ToolEnv
from agentrl.toolenv.tools.context import SubPolicy, ToolError
from agentrl.types import CutTurn, Message, Stop

Past = Literal["sampled", "template"]
"""How earlier turns are shown: as they were sampled, or as the chat template writes them, which may drop thinking."""
Tools = Sequence[Mapping[str, object]]
"""Schemas of tools for the chat template to describe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """A turn that was sampled."""

    text: str
    """What was said; a ``CutTurn`` where a limit of tokens ended it."""
    cut: bool
    """True if a limit of tokens ended it."""
    prompt_tokens: int
    """How many tokens of the row come before it."""
    tokens: int
    """How many tokens it has."""


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
        (another continuation of a turn), ``anew`` (no turn of the history is at its old place), ``thinking`` (the chat
        template shows an earlier turn otherwise than it was sampled), or ``token`` (the same, where that begins
        inside of a token, which then stays whole)."""
        self.rewards = list[float]()
        """The reward of each turn, in the order of turns."""
        self.steps = list[int]()
        """Which turn each step of the environment was; a driver fills it that also plays turns that are none."""
        self.usages = list[tuple[int, int]]()
        """Tokens that a server says it has read and written, of each turn."""
        self._engine, self._renderer, self._sampling, self._player = engine, renderer, sampling, player
        self._rows = list[GrowingRow]()
        self._turns = RowTurns()
        self._renderers = dict[str, Writer]()
        """The renderer for each list of tools: a chat template is analysed once for it."""
        self._unrecorded = 0
        self._asked = 0
        self._sub_policy = SubPolicy()
        self._fault: Exception | None = None
        """What a sub-agent's turn has raised beside a limit of tokens."""

    async def turn(self, messages: Sequence[Message], tools: Tools | None = None, *, past: Past = "sampled") -> str:
        """Sample the assistant's next turn.

        Where the messages continue a row's history, so do the tokens. Where they part from it, a new row begins: with
        the tokens up to the last turn that both have, or with none. An assistant's message that is one of the policy's
        own turns becomes its sampled tokens; any other one is context, which was never sampled.

        Args:
            messages: the history, from the first message on; the assistant's are texts as this method returned them.
            tools: the tools to describe; by default the environment's.
            past: how earlier turns are shown.

        Returns:
            The text; a ``CutTurn`` where a limit of tokens ended it.

        Raises:
            TokenLimitError: the messages leave no room for a turn.
            InfrastructureError: the engine failed.
        """
        return (await self.sample(messages, tools, past=past)).text

    async def sample(
        self,
        messages: Sequence[Message],
        tools: Tools | None = None,
        *,
        past: Past = "sampled",
        max_tokens: int | None = None,
        opening: str = "",
        cause: Callable[[str], str] = str,
        watch: Callable[[int], bool] | None = None,
        deliver: Callable[[Sampled], Awaitable[None]] | None = None,
    ) -> Sampled:
        """Sample the assistant's next turn, as :meth:`turn` does, for somebody who may go away meanwhile.

        Args:
            messages: the history.
            tools: the tools to describe.
            past: how earlier turns are shown.
            max_tokens: most tokens of this turn, if fewer than the episode's own limit.
            opening: how the turn begins: context, which is not trained.
            cause: names the cause of a fork, given the policy's own name of it.
            watch: sees each token, and ends the turn where it returns True.
            deliver: hands the turn over. Where it raises, and where this call is cancelled, nothing is recorded.

        Raises:
            TokenLimitError: the messages leave no room for a turn.
            InfrastructureError: the engine failed.
        """
        number, self._asked = self._asked, self._asked + 1
        row, undo, room = self._row(messages, tools, past, cause)
        opened = tuple(self._renderer.turn(opening, ended=False)) if opening else ()
        try:
            limit = min(room - len(opened), self._sampling.max_tokens, max_tokens or room)
            if limit < 1:
                raise TokenLimitError("the history leaves no room for a turn")
            sampling = replace(self._sampling, max_tokens=limit, stop_ids=self._renderer.stop_ids, watch=watch)
            began = time.perf_counter()
            seed = derive_seed(self.spec.seed, number)
            done = await self._engine.generate((*row.token_ids, *opened), sampling, seed=seed)
            self._player.clock.engine += time.perf_counter() - began
            sampled = self._sampled(row, opened, done, spent=len(opened) + len(done.token_ids) == room)
            if deliver is not None:
                await deliver(sampled)
        except BaseException:
            undo()
            raise
        self._record(row, opened, done, str(sampled.text))
        return sampled

    def unrecorded(self) -> "Policy":
        """Return a policy that samples likewise, and whose turns are in no record."""
        made = Policy(self._engine, self._renderer, self.spec, self._sampling, self._player)
        # Other noise than that of the turns that are recorded.
        made._asked, self._unrecorded = 2**32 + self._unrecorded, self._unrecorded + 1
        return made

    @property
    def opens_thinking(self) -> bool:
        """True if the chat template begins a turn with thinking."""
        prompt = self._renderer.prompt([Message(role="user", content="x")])
        return self._renderer.text(prompt.token_ids).rstrip().endswith("<think>")

    def text(self, token_ids: Sequence[int]) -> str:
        """Decode tokens of a turn."""
        return self._renderer.text(token_ids)

    def tokens(self, messages: Sequence[Message], tools: Tools | None = None, *, past: Past = "sampled") -> int:
        """Return how many tokens the row would have before a turn that :meth:`turn` sampled with these arguments."""
        return self._next(messages, tools, past).tokens

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

        async def turn(messages: Sequence[Message], tools: Tools) -> str:
            try:
                return await self.turn(messages, tools)
            except TokenLimitError as error:
                raise ToolError("no tokens are left for a sub-agent") from error
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
        rows = [row for row in self._rows if row.turns] or [row for row in self._rows[:1] if row.segments]
        if not rows:
            # Nobody has asked for a turn, or whoever has asked did not wait for it.
            return (Row((self._renderer.prompt([Message(role="user", content="")]),)),)
        if len(rows) == 1:
            return (Row(tuple(replace(part, turn=None) if part.trained else part for part in rows[0].segments)),)
        numbers = {id(row): number for number, row in enumerate(rows)}
        return tuple(
            Row(tuple(row.segments), None if row.parent is None else numbers[id(self._rows[row.parent])], row.fork)
            for row in rows
        )

    def _sampled(self, row: GrowingRow, opened: tuple[int, ...], done: Completion, *, spent: bool) -> Sampled:
        text: str = self._renderer.text((*opened, *done.token_ids))
        cut = done.finish == "length"
        if cut:
            # A cut turn that has filled the room reached the row's limit, otherwise that of the turn.
            stop = Stop.TOKEN_LIMIT if spent else Stop.TURN_CUT
            then = self._player.limits.cut_turns
            # An episode whose tokens are spent can't continue.
            text = CutTurn(text, "end" if spent and then == "continue" else then, stop)
        before = len(row.token_ids) + len(opened)
        return Sampled(text=text, cut=cut, prompt_tokens=before, tokens=len(done.token_ids))

    def _record(self, row: GrowingRow, opened: tuple[int, ...], done: Completion, text: str) -> None:
        token_ids = (*opened, *done.token_ids)
        cut, number = done.finish == "length", len(self.rewards)
        segment = Segment("policy", done.token_ids, done.logprobs, done.version, cut, done.swaps, turn=number)
        row.segments += [Segment("template", opened), segment] if opened else [segment]
        position, start = len(row.history), len(row.token_ids)
        row.history.append(_key(Message(role="assistant", content=text)))
        row.turns.append(RowTurn(position=position, start=start, token_ids=token_ids))
        row.token_ids += token_ids
        row.waits = False
        self.rewards.append(0.0)
        self.usages += [done.usage] if done.usage else []
        self._turns.add(self._rows.index(row), row)

    def _row(
        self, messages: Sequence[Message], tools: Tools | None, past: Past, name_cause: Callable[[str], str]
    ) -> tuple[GrowingRow, Callable[[], None], int]:
        """Find or begin the row whose tokens spell ``messages``.

        Returns:
            The row, what takes back whatever was written into it, and the room that is left in it.
        """
        following = self._next(messages, tools, past)
        room = self._room(following)
        if room < 1 and self._rows:
            raise TokenLimitError("the history leaves no room for a turn")
        cause = ""
        if following.row is not None and not following.cause:
            row = self._rows[following.row]
        else:
            inherited = [] if following.row is None else self._rows[following.row].token_ids[: following.start]
            row = GrowingRow(token_ids=inherited, parent=following.row, fork=following.start)
            cause = name_cause(following.cause) if any(row.turns for row in self._rows) else ""
            self.forks.update([cause] if cause else [])
            self._rows.append(row)
        history, tokens, segments = row.history, len(row.token_ids), len(row.segments)

        def undo() -> None:
            row.history, row.waits = history, False
            del row.token_ids[tokens:], row.segments[segments:]
            self.forks.subtract([cause] if cause else [])

        row.segments += following.new
        row.token_ids += [token for segment in following.new for token in segment.token_ids]
        row.history = following.history
        # The first prompt is recorded also where it is too long: an episode has at least one row.
        if room < 1:
            raise TokenLimitError("the history leaves no room for a turn")
        row.waits = True
        return row, undo, room

    def _next(self, messages: Sequence[Message], tools: Tools | None, past: Past) -> NextTurn:
        """Find out where the turn after ``messages`` is to be sampled, and change nothing."""
        # The history of a row begins with its tools, which are no message.
        spelled = json.dumps(tools)
        history: list[Key] = [("tools", spelled), *map(_key, messages)]
        parent, turn = self._turns.shared(history)
        # The same history is to be continued once more: from where the turn began.
        again = turn is not None and turn.position == len(history)
        start = 0 if turn is None else turn.start if again else turn.end
        ends = parent is not None and not again and self._rows[parent].ends_with(turn)
        if spelled not in self._renderers:
            own = self._renderer
            self._renderers[spelled] = own if tools is None else own.describing(tools, own.marks)
        renderer = self._renderers[spelled]
        if past == "template" and isinstance(renderer, Renderer) and renderer.drops_thinking:
            cause = "thinking" if ends else _cause(turn, again=again)
            return self._as_template(renderer, history, messages, cause)
        new = [] if again else list(self._written(renderer, messages, turn))
        cause = "" if ends else _cause(turn, again=again)
        return NextTurn(history=history, row=parent, start=start, new=new, cause=cause)

    def _as_template(self, renderer: Renderer, history: list[Key], messages: Sequence[Message], cause: str) -> NextTurn:
        """Write the whole history as the chat template does, and find the row that begins most like it."""
        turns = {
            index: self._turns.at(history, index + 1) or renderer.turn(message["content"])
            for index, message in enumerate(messages)
            if message["role"] == "assistant"
        }
        segments, inside = renderer.rewrite(messages, turns)
        token_ids = [token for segment in segments for token in segment.token_ids]
        start, ends, parent = 0, False, None
        for index, row in enumerate(self._rows):
            shared = shared_length(row.token_ids, token_ids)
            whole = shared == len(row.token_ids) and not row.waits
            # A row without a turn may be left out of the record, so no other may continue it.
            if row.turns and (shared, whole) > (start, ends):
                start, ends, parent = shared, whole, index
        cause = "" if ends else "token" if inside and cause == "thinking" else cause
        return NextTurn(history=history, row=parent, start=start, new=list(after(segments, start)), cause=cause)

    def _written(self, renderer: Writer, messages: Sequence[Message], turn: RowTurn | None) -> Iterator[Segment]:
        """Write the messages after a turn, or all where there is none; the assistant's among them are context."""
        # A position counts the tools too, with which a history begins.
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
            own = self._turns.of(_key(spoken))
            token_ids = tuple(renderer.turn(spoken["content"], answered_by=answered_by)) if own is None else own
            yield Segment("prompt", token_ids)

    def _room(self, following: NextTurn) -> int:
        """Return how many tokens the turn may have."""
        limits = self._player.limits
        # A first prompt that was too long is left behind without a turn.
        recorded = sum(len(row.token_ids) - row.fork for row in self._rows if row.turns or row.waits)
        total = limits.total_tokens or 4 * limits.episode_tokens
        return min(limits.episode_tokens - following.tokens, total - recorded - following.tokens + following.start)


def _cause(turn: RowTurn | None, *, again: bool) -> str:
    return "anew" if turn is None else "again" if again else "branch"


def _key(message: Message) -> Key:
    text = message["content"] if message["content"].strip() else ""
    return message["role"], text, message.get("name", ""), message.get("tool_call_id", "")
