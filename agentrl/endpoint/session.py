"""One episode's conversations with a client: requests in, turns of the policy out."""

import asyncio
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any, Literal, TypeAlias

from agentrl.endpoint.speech import Reply, Speech
from agentrl.endpoint.turns import OwnTurn, OwnTurns, calls_of, read_turn
from agentrl.endpoint.wire import Answer, BadRequestError, Item, Request, ToolSpec, Wire
from agentrl.errors import EnvContractError
from agentrl.rollout.policy import Past, Policy, Sampled
from agentrl.segments import shared_length
from agentrl.toolenv.dialects import Dialect, get_dialect
from agentrl.types import Message

Kind = Literal["main", "sub_agent", "title"]
"""What a request is for. Titles are answered and not trained."""
KindOf: TypeAlias = Callable[[Request, Mapping[str, str], Kind], Kind]
"""Decides what a request is for: from the request, its headers in lower case, and what the endpoint takes it for."""

_LABELS = ("x-claude-code-agent-id", "thread-id", "x-session-id")
"""Headers in which clients say which of an agent's conversations a request belongs to."""
_FORMS = ("output_config", "response_format", "text")
"""Fields in which clients describe the form of an answer."""
_TITLE = re.compile(r"'required': \['title'\]|[Gg]enerate a title for this conversation")
"""How clients ask for a conversation's title."""
_THINK = "<think>"
_NOTICED_S = 0.05
"""Seconds in which the server notices that a client has hung up."""
_RETRIES = "x-stainless-retry-count"
"""Header in which the libraries of OpenAI and Anthropic count the retries of a request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How an endpoint treats what the policy can't follow."""

    strict: bool = False
    """Refuse a request for something that the policy does not do, such as another temperature; else count it."""
    past: Past = "sampled"
    """How earlier turns are shown; with "template" their thoughts are dropped where the chat template does that."""
    kind_of: KindOf | None = None
    """Decides what a request is for."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Attempt:
    """A request that is being answered."""

    label: str
    """The conversation that it belongs to, as its client calls it."""
    messages: Sequence[Message]
    """Its history."""
    task: "asyncio.Task[Any] | None"
    """What answers it."""
    cause: str
    """Why its history may part from those before."""
    sampled: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once its turn is sampled, and on its way."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the turn is recorded, or never will be."""


class Session:
    """The conversations of one episode.

    Args:
        policy: samples the turns and records them.
        dialect: name of the dialect in which it writes calls.
        name: unique over the run; the ids of calls begin with it.
        options: how to treat what the policy can't follow.
    """

    def __init__(self, policy: Policy, dialect: str, name: str, options: Options | None = None) -> None:
        self.counts = Counter[str]()
        """What happened: requests by kind, and what was ignored, retried, or never delivered."""
        self.messages: tuple[Message, ...] = ()
        """The conversation of the main agent, as far as it has come."""
        self.fault: Exception | None = None
        """What the engine has raised: then the episode says nothing about the agent."""
        self._policy, self._dialect_name, self._name = policy, dialect, name
        self._options = options or Options()
        self._turns, self._attempts = OwnTurns(), list[_Attempt]()
        self._dialects = dict[str, tuple[Dialect, dict[str, ToolSpec]]]()
        self._responses = dict[str, tuple[Item, ...]]()
        """The history up to each answer, for clients that name the answer in place of its history."""
        self._histories = dict[str, Sequence[Message]]()
        """The last history of each conversation."""
        self._main_label: str | None = None
        self._thinks = policy.opens_thinking
        self._answers = 0

    async def answer(self, wire: Wire, request: Request, headers: Mapping[str, str], reply: Reply) -> Answer:
        """Answer a request by a turn of the policy, which is recorded once it is sent.

        Args:
            wire: the protocol.
            request: as it was read.
            headers: their names in lower case.
            reply: where the answer is sent to.

        Raises:
            BadRequestError: the request can't be answered; the sentence says why.
            TokenLimitError: the history leaves no room for an answer.
            ClientGoneError: the client has hung up.
            InfrastructureError: the engine failed.
        """
        if self._options.strict and request.ignored:
            raise BadRequestError(f"the policy does not do what is asked for: take out {', '.join(request.ignored)}")
        self.counts.update(f"ignored {name}" for name in request.ignored)
        label = next((headers[name] for name in _LABELS if headers.get(name)), "")
        kind = self._kind(request, headers, label)
        self.counts[f"requests {kind}"] += 1
        # Whoever has read an answer may already build on it, before it is recorded here.
        for attempt in list(self._attempts):
            if attempt.sampled.is_set():
                await attempt.ended.wait()
        if request.previous:
            request = replace(request, items=self._continued(request))
        dialect, tools = self._tools(request.tools)
        edited = self.counts["edited"]
        messages = self._messages(request.items, dialect)
        cause = "edited" if self.counts["edited"] > edited else self._cause(label, messages)
        attempt = _Attempt(label=label, messages=messages, task=asyncio.current_task(), cause=cause)
        earlier = list(self._attempts)
        self._attempts.append(attempt)
        try:
            await self._end_earlier_attempts(attempt, earlier, headers)
            answer, text = await self._sample(wire, request, kind, dialect, tools, attempt, reply)
        finally:
            self._attempts.remove(attempt)
            attempt.ended.set()
        self._histories[label] = messages
        if kind == "main":
            self.messages = (*messages, Message(role="assistant", content=text))
        return answer

    def count(self, request: Request) -> int:
        """Return how many tokens the history of a request has."""
        dialect, _ = self._tools(request.tools)
        return self._policy.tokens(self._messages(request.items, dialect), dialect.template_tools)

    async def _sample(
        self,
        wire: Wire,
        request: Request,
        kind: Kind,
        dialect: Dialect,
        tools: Mapping[str, ToolSpec],
        attempt: _Attempt,
        reply: Reply,
    ) -> tuple[Answer, str]:
        policy = self._policy if kind != "title" else self._policy.unrecorded()
        turn_id, self._answers = f"{self._name}{self._answers:04d}", self._answers + 1
        writer = wire.writer(turn_id, request) if request.stream else None
        opening = _call_opening(dialect, request.must_call)
        # Where a template opens thinking, a call that must be made closes it.
        opening = f"</think>\n\n{opening}" if opening and self._thinks else opening
        begins = f"{_THINK if self._thinks else ''}{opening}"
        speech = Speech(dialect, request.stop, policy.text, reply, writer, begins)
        delivered = list[Answer]()

        async def deliver(sampled: Sampled) -> None:
            attempt.sampled.set()
            text = f"{_THINK if self._thinks else ''}{speech.cut(str(sampled.text))}"
            spoken = read_turn(dialect, text)
            calls = tuple(calls_of(spoken, tools, turn_id))
            answer = Answer(
                id=turn_id,
                thinking=spoken.thinking,
                text=spoken.text,
                calls=calls,
                finish="length" if sampled.cut else "calls" if calls else "stop",
                stopped_by=speech.stopped_by,
                usage=(sampled.prompt_tokens, sampled.tokens),
            )
            answer = wire.fit(answer, request)
            delivered.append(await speech.end(answer, lambda answer: wire.whole(answer, request)))

        try:
            sampled = await policy.sample(
                attempt.messages,
                dialect.template_tools,
                past=self._options.past,
                max_tokens=request.max_tokens,
                opening=opening,
                cause=lambda cause: cause if cause in ("again", "thinking", "token") else attempt.cause,
                watch=speech.hear,
                deliver=deliver,
            )
        finally:
            await speech.close()
        answer = delivered[0]
        words = answer.text if answer.text.strip() else ""
        position, raw = len(request.items), str(sampled.text)
        self._turns.add(OwnTurn(position=position, raw=raw, thinking=answer.thinking, text=words, calls=answer.calls))
        spoken = Item(role="assistant", texts=(words,) if words else (), thinking=answer.thinking, calls=answer.calls)
        # Also where the client sends "store": false: Codex names such answers on a connection that stays open.
        if "input" in request.body:
            self._responses[turn_id] = self._shared((*request.items[request.instructed :], spoken))
        return answer, raw

    def _continued(self, request: Request) -> tuple[Item, ...]:
        if request.previous not in self._responses:
            raise BadRequestError("previous_response_id names no response of this session: send the complete input")
        # The instructions are those of this request, and stand at the beginning.
        new = request.items
        return (*new[: request.instructed], *self._responses[request.previous], *new[request.instructed :])

    def _shared(self, items: tuple[Item, ...]) -> tuple[Item, ...]:
        """Return ``items`` with those that the last history has too as its objects: each request repeats them all."""
        last = next(reversed(self._responses.values()), ())
        shared = shared_length(last, items)
        return (*last[:shared], *items[shared:])

    def _cause(self, label: str, messages: Sequence[Message]) -> str:
        """Guess why a history parts from those before, if it does."""
        before = self._histories.get(label)
        if before is None:
            return "sub_agent"
        # Clients that drop a turn write after it, or add to the message before it; a summary has no such beginning.
        pairs = list(zip(before, messages, strict=False))[:2]
        same = all(new["role"] == old["role"] and new["content"].startswith(old["content"]) for old, new in pairs)
        return "dropped" if same else "rewritten"

    def _kind(self, request: Request, headers: Mapping[str, str], label: str) -> Kind:
        if self._main_label is None and request.tools:
            self._main_label = label
        # Clients ask for a title at the beginning, without tools.
        begins = not any(item.role == "assistant" for item in request.items)
        forms = [request.body.get(name) for name in _FORMS]
        asked = f"{forms} {[item.texts for item in request.items]}" if begins and not request.tools else ""
        kind: Kind = "main" if self._main_label in (None, label) else "sub_agent"
        if _TITLE.search(asked):
            kind = "title"
        return self._options.kind_of(request, headers, kind) if self._options.kind_of else kind

    async def _end_earlier_attempts(
        self, attempt: _Attempt, earlier: Sequence[_Attempt], headers: Mapping[str, str]
    ) -> None:
        """End the attempts that this one retries: the same history, while they are still being answered."""
        # A library that counts retries says so where it means two samples.
        if headers.get(_RETRIES) == "0":
            return
        for other in earlier:
            if (other.label, other.messages) == (attempt.label, attempt.messages) and other.task is not None:
                # Of two requests, that of a client which has hung up may be read last: it ends here.
                await asyncio.sleep(_NOTICED_S)
                if not (other.sampled.is_set() or other.ended.is_set() or other.task.cancelling()):
                    self.counts["retried"] += 1
                    other.task.cancel()
                await other.ended.wait()

    def _tools(self, specs: Sequence[ToolSpec]) -> tuple[Dialect, Mapping[str, ToolSpec]]:
        key = repr(specs)
        if key not in self._dialects:
            named = {spec.name: spec for spec in specs}
            try:
                dialect = get_dialect(self._dialect_name, tuple(named.values()))
                dialect.instructions()
            except (EnvContractError, ValueError, RecursionError) as error:
                raise BadRequestError(f"tools can't be described to the policy: {error}") from error
            self._dialects[key] = dialect, named
        return self._dialects[key]

    def _messages(self, items: Sequence[Item], dialect: Dialect) -> list[Message]:
        """Write a history as the policy is shown it: its own turns as they were sampled, all others in its dialect."""
        messages = list[Message]()
        for position, item in enumerate(items):
            if item.role == "assistant":
                turn, skipped = self._turns.find(item, position)
                self.counts["edited"] += turn is None and self._turns.is_edited(item)
                foreign = "".join(item.texts[:skipped]) if turn else _written(item, dialect)
                if foreign:
                    _append(messages, "assistant", foreign)
                if turn:
                    messages.append(Message(role="assistant", content=turn.raw))
            elif item.role == "tool":
                number, name = self._turns.number_of(item.call_id) or _call_in(items, item.call_id)
                content = "\n".join(item.texts)
                messages.append(Message(role="tool", content=content, name=name, tool_call_id=f"call_{number}"))
            else:
                # Chat templates take a system message at the beginning alone.
                begins = all(message["role"] == "system" for message in messages)
                _append(messages, "system" if item.role == "system" and begins else "user", "\n".join(item.texts))
        if instructions := dialect.instructions():
            system = messages.pop(0)["content"] if messages and messages[0]["role"] == "system" else ""
            content = "\n".join(filter(None, [system, instructions]))
            messages.insert(0, Message(role="system", content=content))
        if not messages or messages[-1]["role"] in ("system", "assistant"):
            messages.append(Message(role="user", content=""))
        return messages


def _append(messages: list[Message], role: Literal["system", "user", "assistant"], content: str) -> None:
    """Append a message; one of the same role is continued, since chat templates refuse two in a row."""
    if messages and messages[-1]["role"] == role != "assistant":
        messages[-1] = Message(role=role, content=f"{messages[-1]['content']}\n\n{content}")
    else:
        messages.append(Message(role=role, content=content))


def _written(item: Item, dialect: Dialect) -> str:
    """Write an assistant's item that the policy has not sampled."""
    thinking = [f"<think>{item.thinking}</think>"] if item.thinking else []
    calls = [
        f"{call.name} {call.arguments if isinstance(call.arguments, str) else json.dumps(call.arguments)}"
        for call in item.calls
    ]
    return "\n".join([*thinking, *item.texts, *calls])


def _call_in(items: Sequence[Item], call_id: str) -> tuple[int, str]:
    """Return the number and the name of a call that the policy has not sampled."""
    calls = ((number, call) for item in items for number, call in enumerate(item.calls))
    return next(((number, call.name) for number, call in calls if call.id == call_id), (0, ""))


def _call_opening(dialect: Dialect, must_call: bool | str) -> str:
    """Return how every call of the tools begins, or of the one that is named, up to the end of its first line."""
    named = [tool for tool in dialect.tools.values() if must_call in (True, tool.name)] if must_call else []
    # Two calls of each tool: where their arguments differ, the beginning ends.
    others = (
        {key: f"-{value}" if isinstance(value, str) else [value] for key, value in tool.example.items()}
        for tool in named
    )
    calls = [
        dialect.write_call(tool.name, arguments)
        for tool, other in zip(named, others, strict=True)
        for arguments in (tool.example, other)
    ]
    alike = takewhile(lambda letters: len(set(letters)) == 1, zip(*calls, strict=False))
    begins = "".join(letters[0] for letters in alike)
    return begins[: begins.find("\n") + 1] or begins
