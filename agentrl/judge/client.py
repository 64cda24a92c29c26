"""A fixed model behind an OpenAI-compatible server, which judges or plays a user; nobody trains it."""

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

from agentrl.errors import AgentRLError, ConfigError, InfrastructureError, RefusedError, UsageError
from agentrl.judge.cache import Cache
from agentrl.judge.limits import Meter, Spent, Use
from agentrl.processes.per_process import PerProcess
from agentrl.toolenv.author import writable
from agentrl.toolenv.episode import Episode
from agentrl.toolenv.tools.context import Exchanges, ToolContext
from agentrl.toolenv.tools.timed import call_async
from agentrl.types import Exchange, Message

_T = TypeVar("_T")
Asking: TypeAlias = Episode | ToolContext
"""What a question belongs to; its ``exchanges`` keep it."""
_CHARS = 3
"""Characters that an estimate takes for a token."""
_REFUSING = (401, 404)
"""Statuses that say that the key or the model is wrong, whatever is asked."""
_IN_A_ROW = 8
"""Refusals without any answer between them after which the requests are wrong, and not one text."""
_CUT = "\n(cut off)"
"""How an answer ends that a limit of tokens has cut: a reader of last lines must not take what is left for one."""
_UNREADABLE = (ValueError, TypeError, LookupError, AttributeError)
"""What reading a reply of an unusual form can raise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """A model that is asked in chat messages. In a process, all that have the same server and limits share the limits.

    A request that meets a busy server, or none, is sent again and again, later and later: with the default of
    ``retries`` for more than a minute.

    Raises:
        ConfigError: no model is named, or a limit is below 1.
    """

    model: str
    """The model's name on the server."""
    base_url: str = ""
    """The server's URL, such as ``http://localhost:8000/v1``; empty for ``OPENAI_BASE_URL`` or OpenAI's own."""
    cache: str = ""
    """Folder of answers that need not be asked for again; empty for none."""
    temperature: float = 0.0
    """Sampling temperature."""
    max_tokens: int = 1024
    """Most tokens of an answer."""
    body: Mapping[str, object] = field(default_factory=dict[str, object], hash=False)
    """Further fields of each request, such as ``reasoning_effort``."""
    at_once: int = 16
    """Most requests at once."""
    requests_a_minute: float = float("inf")
    """Most requests in any minute, retries included."""
    tokens_a_minute: float = float("inf")
    """Most tokens in any minute, read and written; an estimate until the server has counted them."""
    timeout: float = 120.0
    """Seconds for an answer."""
    retries: int = 16
    """How often a request is sent again."""
    key_env: str = "OPENAI_API_KEY"
    """The environment variable that holds the key."""

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("a judge needs the name of a model on its server")
        limits = {name: getattr(self, name) for name in ("at_once", "requests_a_minute", "tokens_a_minute")}
        for name, value in limits.items():
            if not value >= 1:
                raise ConfigError(f"{name} of the model {self.model!r} is {value}: allow at least 1")

    @property
    def spent(self) -> Spent:
        """What this process has spent on the server, with all models."""
        return self._connection.spent

    @property
    def _connection(self) -> "_Connection":
        # What differs between requests shares the connection all the same.
        return _connections.get(replace(self, model="any", cache="", temperature=0.0, max_tokens=0, body={}))

    async def ask(
        self, messages: Sequence[Message], asking: Asking | None, read: Callable[[str], _T], *, refused: str = ""
    ) -> _T:
        """Return the answer to a question, as ``read`` reads it; one that can't be read is asked for once more.

        Args:
            messages: what to ask.
            asking: the episode, or a tool's context, which keeps the exchange. A replay finds it there.
            read: reads an answer, and raises a ``ValueError`` that says how to write it.
            refused: stands for the answer where the server refuses this request; empty raises an error.

        Raises:
            InfrastructureError: the server is not there, fails, or gives no answer that can be read; in a replay, the
                episode has no answer to these messages.
            RefusedError: the server refuses this request.
            ConfigError: it refuses whatever is asked.
        """
        exchanges, fault = asking.exchanges if asking else Exchanges(), ""
        for _ in range(2):
            request = self._request(messages)
            try:
                exchange, new = await self._exchange(request, messages, exchanges)
            except RefusedError:
                if not refused:
                    raise
                exchange, new = Exchange(model=self.model, messages=tuple(messages), answer=refused), False
            exchanges.new.append(exchange)
            try:
                answer = read(exchange.answer)
            except ValueError as error:
                fault = str(error)
                spoken = Message(role="assistant", content=exchange.answer)
                messages = (*messages, spoken, Message(role="user", content=fault))
                continue
            if new and self.cache:
                # Only what can be read: another answer would be wrong for ever.
                await asyncio.to_thread(Cache(self.cache).put, request, exchange.answer)
            return answer
        raise InfrastructureError(f"the model {self.model!r} gave no answer that can be read, twice: {fault}")

    def say(self, messages: Sequence[Message], asking: Asking | None = None) -> str:
        """Let the model speak, and wait for it: for ``respond`` and other functions that are not async.

        Raises:
            InfrastructureError: see :meth:`ask`; an answer without a word, or one that is cut off, can't be read.
        """
        return call_async(lambda: self.ask(messages, asking, _spoken), None).result()

    def _request(self, messages: Sequence[Message]) -> dict[str, Any]:
        sampling = {"temperature": self.temperature, "max_completion_tokens": self.max_tokens}
        return {"model": self.model, "messages": list(messages), **sampling, **self.body}

    async def _exchange(
        self, request: Mapping[str, Any], messages: Sequence[Message], exchanges: Exchanges
    ) -> tuple[Exchange, bool]:
        """Return a question with its answer, and whether the server has given it."""
        if exchanges.recorded is not None:
            return _recorded(exchanges.recorded, exchanges.new, self.model, messages), False
        answer = await asyncio.to_thread(Cache(self.cache).get, request) if self.cache else None
        if answer is not None:
            self.spent.cached += 1
            return Exchange(model=self.model, messages=tuple(messages), answer=answer), False
        answer, usage = await self._connection.send(request)
        return Exchange(model=self.model, messages=tuple(messages), answer=answer, usage=usage), True


def _spoken(answer: str) -> str:
    if not answer.strip() or answer.endswith(_CUT):
        raise ValueError("Say it again, in fewer words.")
    return answer.strip()


def _recorded(
    recorded: Sequence[Exchange], new: Sequence[Exchange], model: str, messages: Sequence[Message]
) -> Exchange:
    """Return what was recorded of a question, the n-th time it is asked the n-th one."""
    alike = [[it for it in some if (it.model, it.messages) == (model, tuple(messages))] for some in (recorded, new)]
    if len(alike[0]) <= len(alike[1]):
        raise InfrastructureError(
            f"the episode has no answer of {model!r} to this question: replay it with --tools live to ask the server"
        )
    return alike[0][len(alike[1])]


@dataclass(slots=True, kw_only=True)
class _Sending:
    """A request on its way, which the client may send several times."""

    tokens: float
    """Its tokens by estimate."""
    uses: list[Use]
    """The times that it was sent."""


_sending = ContextVar[_Sending]("_sending")


class _Connection:
    """A process's client of a server, with the limits that all requests share."""

    def __init__(self, chat: Chat) -> None:
        try:
            self._openai: Any = import_module("openai")
            self._replies = import_module("agentrl.engines.replies")
        except ModuleNotFoundError as error:
            raise UsageError("judges and simulated users need openai: pip install 'agentrl[openai]'") from error
        self.spent = Spent()
        self._key = os.environ.get(chat.key_env, "")
        self._meter = Meter(chat.requests_a_minute, chat.tokens_a_minute)
        self._at_once, self._slots = chat.at_once, WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]()
        self._refused = 0
        self._client: Any = self._openai.AsyncOpenAI(
            # Servers of one's own want no key, but the library does.
            **{"api_key": self._key or "none", "base_url": chat.base_url or None},
            # The library sends again what fails, and doubles its pauses up to 8 s.
            **{"timeout": chat.timeout, "max_retries": chat.retries},
            # Called each time that a request is sent.
            http_client=self._openai.DefaultAsyncHttpxClient(event_hooks={"request": [self._admit]}),
            # No connection stays open, since the next request may come from another event loop.
            default_headers={"Connection": "close"},
        )

    async def send(self, request: Mapping[str, Any]) -> tuple[str, tuple[int, int] | None]:
        """Send a request, and return the text of the answer and the tokens that were read and written."""
        fields = dict(request)
        required = {name: fields.pop(name) for name in ("model", "messages")}
        chars = sum(len(message["content"]) for message in request["messages"])
        sending = _Sending(tokens=chars / _CHARS + float(request["max_completion_tokens"]), uses=[])
        _sending.set(sending)
        # A semaphore belongs to one event loop.
        slots = self._slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._at_once))
        usage = None
        try:
            async with slots:
                # In the body: so the library sends fields that it does not know, and checks nothing.
                reply = await self._client.chat.completions.create(**required, extra_body=fields)
            choice = self._replies.choice_of(reply)
            usage, text = self._replies.usage_of(reply), self._replies.text_of(choice.message)
            if choice.finish_reason == "content_filter":
                raise RefusedError("the judge's server has cut the answer off by its content filter")
            if type(text) is not str:
                raise TypeError(f"the answer is no text but {type(text).__name__}")
        except (self._openai.APIError, *_UNREADABLE) as error:
            raise self._fault(error) from None
        finally:
            self._settle(sending, usage)
        self._refused = 0
        text = writable(text)
        return text if choice.finish_reason != "length" else text + _CUT, usage

    async def _admit(self, _request: object) -> None:
        sending = _sending.get()
        sending.uses.append(await self._meter.admit(sending.tokens))
        self.spent.requests += 1

    def _settle(self, sending: _Sending, usage: tuple[int, int] | None) -> None:
        """Correct the estimates: a request that failed has cost no tokens."""
        for use in sending.uses:
            use.tokens = 0.0
        if usage:
            sending.uses[-1].tokens = float(sum(usage))
            self.spent.read += usage[0]
            self.spent.written += usage[1]

    def _fault(self, error: Exception) -> AgentRLError:
        words = self._replies.words_of(error, self._key)
        if isinstance(error, self._openai.APIStatusError) and not self._replies.fails(error):
            self._refused += 1
            text = f"the judge's server refuses the request: {words}"
            status: int = error.status_code  # pyright: ignore[reportAttributeAccessIssue]
            return ConfigError(text) if status in _REFUSING or self._refused >= _IN_A_ROW else RefusedError(text)
        if isinstance(error, self._openai.APIConnectionError):
            server = self._client.base_url.copy_with(userinfo=b"")
            return InfrastructureError(f"no judge's server answers at {server}, as base_url names it: {words}")
        return InfrastructureError(f"the judge's server failed: {words}")


_connections = PerProcess(_Connection)
