"""An OpenAI-compatible server as the engine, for evaluation.

With the tokenizer of the server's model, prompts go to ``/v1/completions`` as token ids and ids come back, as vLLM
returns them: episodes are token-exact, as with the other engines. Without one, messages go to ``/v1/chat/completions``
and a text comes back, and an episode's tokens are the characters of its text.
"""

import asyncio
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from typing import Any

from agentrl.engines.base import Completion, Sampling
from agentrl.engines.replies import choice_of, fails, text_of, usage_of, words_of
from agentrl.errors import ConfigError, FaultRateError, InfrastructureError, RefusedError
from agentrl.render.transcript import Transcript

# By name, since pyright takes it for this file.
_openai: Any = import_module("openai")
_OLDER = {
    "max_completion_tokens": ("max_tokens", "max_tokens stands for it"),
    "seed": ("", "a second evaluation plays other episodes"),
}
"""Fields that some servers do not know: their name for each, which is empty where they have none, and what follows."""
_SETS = (("max_completion_tokens",), ("seed",), tuple(_OLDER))
"""Sets of these that are tried one after the other."""
_IN_A_ROW = 8
"""Refusals without any answer between them after which the requests are wrong, and not one prompt."""
_LONGEST_PAUSE_S, _LONGEST_ASKED_S = 8.0, 600.0
"""Longest pause between two requests, and longest one that a server may ask for."""


class OpenAIEngine:
    """Samples with a server that others run, whose weights never change.

    A server that refuses a request or fails is sent a harmless prompt, a greeting: if it answers that, the fault lies
    with the request and not with the server.

    Args:
        _policy: None; there is no model of ours.
        model: its name on the server.
        base_url: the server's, such as ``http://localhost:8000/v1``; empty for ``OPENAI_BASE_URL`` or OpenAI's own.
        tokenizer: of the server's model, a folder or a name on the Hugging Face hub; empty for chat messages.
        key_env: the environment variable that holds the key; it is read here and kept nowhere else.
        timeout: seconds for a turn.
        retries: how often a request is sent again, later and later, where the server is busy, fails or is not there.
        body: further fields of each request, such as ``top_p`` or ``reasoning_effort``.

    Raises:
        ConfigError: no model is named, or an option is for engines of our own.
    """

    exact = False
    """False, since concurrent requests, or the server that answers, may change an answer."""
    rounding = float("inf")
    """Infinite, since nothing is known of the server's arithmetic."""

    def __init__(
        self,
        _policy: None,
        *,
        model: str = "",
        base_url: str = "",
        tokenizer: str = "",
        key_env: str = "OPENAI_API_KEY",
        timeout: float = 600.0,
        retries: int = 5,
        **body: Any,
    ) -> None:
        if not model:
            raise ConfigError("engine 'openai' needs the model's name on the server: --model NAME")
        if unused := sorted({"slots", "max_length"} & body.keys()):
            raise ConfigError(f"engine 'openai' has no {unused[0]!r}: rollout.concurrency limits concurrent requests")
        self.notes = list[str]()
        """Sentences on what the server does in another way than it was asked to."""
        self._model, self._transcript, self._body = model, None if tokenizer else Transcript(), body
        self._key = os.environ.get(key_env, "")
        self._client: Any = _openai.AsyncOpenAI(
            # Servers of one's own want no key, but the library does.
            **{"api_key": self._key or "none", "base_url": base_url or None},
            # Retried in this class: the library does not know whether the server answers other requests.
            **{"timeout": timeout, "max_retries": 0},
            # No connection stays open, since the next request may come from another event loop.
            default_headers={"Connection": "close"},
        )
        self._retries = retries
        self._older: tuple[str, ...] = ()
        self._answers, self._refused = 0, 0
        self._over: Exception | None = None
        """Why no request is sent any more."""
        self._greeting = asyncio.Lock()

    async def generate(self, prompt_ids: tuple[int, ...], sampling: Sampling, *, seed: int) -> Completion:
        """Sample a continuation of ``prompt_ids``; one that the server has no room for is empty and cut off.

        Log-probs are the server's own, which need not be those at the temperature; 0 where it tells none.

        Raises:
            ConfigError: the server refuses whatever is asked, cuts calls out of a text that the dialect reads, or tells
                no token ids although there is a tokenizer.
            RefusedError: it refuses this request.
            FaultRateError: it answers nothing any more.
            InfrastructureError: it is not there, is busy, fails, or its answer can't be read.
        """
        request = self._request(prompt_ids, sampling, seed)
        for attempt in range(self._retries + 1):
            older, answers = self._older, self._answers
            try:
                reply = await self._send(request)
                if not self._overrun(reply, request):
                    return self._read(reply, request)
                continue
            except (_openai.APIError, ValueError, TypeError, LookupError, AttributeError) as caught:
                error = caught
            words = words_of(error, self._key)
            if fails(error):
                await self._recover(request, error, answers, attempt)
            elif not isinstance(error, _openai.APIStatusError):
                raise InfrastructureError(f"the server gave no answer that can be read: {words}") from None
            elif "context length" in words or "context_length" in words:
                return Completion(token_ids=(), logprobs=(), finish="length", version=0)
            else:
                await self._settle(request, error, older)
        raise InfrastructureError("the server needs other fields in each request")

    def _request(self, prompt_ids: tuple[int, ...], sampling: Sampling, seed: int) -> dict[str, Any]:
        # Some servers take 32 bits.
        common: dict[str, Any] = {"model": self._model, "temperature": sampling.temperature, "seed": seed % 2**31}
        if self._transcript:
            tools = self._transcript.tools(prompt_ids)
            common |= {"tools": tools} if tools else {}
            messages = list(self._transcript.messages(prompt_ids))
            return common | {"messages": messages, "max_completion_tokens": sampling.max_tokens}
        more = {"return_token_ids": True, "stop_token_ids": list(sampling.stop_ids), "ignore_eos": True}
        return common | {"prompt": list(prompt_ids), "max_tokens": sampling.max_tokens, "logprobs": 1} | more

    async def _send(self, request: Mapping[str, Any], older: tuple[str, ...] | None = None) -> Any:
        if self._over:
            raise self._over
        older = self._older if older is None else older
        names = {name: _OLDER[name][0] if name in older else name for name in request}
        fields = {names[name]: value for name, value in request.items() if names[name]}
        endpoint = self._client.chat.completions if self._transcript else self._client.completions
        # All fields go into the body: so the library sends fields that it does not know, and checks nothing.
        required = {name: fields.pop(name) for name in ("model", "messages", "prompt") if name in fields}
        reply = await endpoint.create(**required, extra_body=fields | self._body)
        self._answers += 1
        return reply

    async def _greet(self, request: Mapping[str, Any], older: tuple[str, ...], *, briefly: bool) -> Exception | None:
        """Send a harmless prompt with the fields of a request, and return why the server does not answer it."""
        if "prompt" in request:
            # Where token ids come, nothing but the limit need end an answer.
            hello = {"prompt": request["prompt"][:1], "max_tokens": 1}
        else:
            hello = {"messages": [{"role": "user", "content": "Hello"}]}
            hello |= {"max_completion_tokens": 1} if briefly else {}
        try:
            await self._send({**request, **hello}, older)
        except _openai.APIError as error:
            return error
        return None

    async def _settle(self, request: Mapping[str, Any], refusal: Any, older: tuple[str, ...]) -> None:
        """Find fields that the server takes, after it has refused a request with ``older`` ones.

        Raises:
            RefusedError: it takes the same fields with another prompt.
            ConfigError: it takes none.
        """
        words = f"the server refuses the request: {words_of(refusal, self._key)}"
        async with self._greeting:
            if older != self._older:
                return
            more = _SETS if refusal.status_code in (400, 422) and not older else ()
            for names in ((), *(names for names in more if all(name in request for name in names))):
                error = await self._greet(request, names or older, briefly=False)
                if error and fails(error):
                    raise InfrastructureError(self._failure(error))
                if error:
                    continue
                if names:
                    self._take_for_older(names)
                    return
                self._refused += 1
                if self._refused < _IN_A_ROW:
                    raise RefusedError(words)
                break
            self._over = ConfigError(words)
            raise self._over

    async def _recover(self, request: Mapping[str, Any], error: Exception, answers: int, attempt: int) -> None:
        """Wait until the server answers again, whoever is answered.

        Raises:
            InfrastructureError: it answers others, and has failed at this request too often.
            FaultRateError: it answers nobody.
        """
        if attempt == self._retries:
            raise InfrastructureError(self._failure(error))
        # One asks for all: a server that is gone gets few requests, however many episodes there are.
        async with self._greeting:
            for number in range(attempt, self._retries):
                if self._over:
                    raise self._over
                await asyncio.sleep(_pause(error, number))
                if self._answers > answers:
                    return
                again = await self._greet(request, self._older, briefly=True)
                if again is None or not fails(again):
                    return  # a refusal is an answer
                error = again
            self._over = FaultRateError(f"{self._retries + 1} requests in a row failed: {self._failure(error)}")
            raise self._over

    def _overrun(self, reply: Any, request: Mapping[str, Any]) -> bool:
        """Return True if the answer is longer than asked for, and so the server ignores the limit's newer name."""
        limit, usage = request.get("max_completion_tokens"), None if isinstance(reply, str) else usage_of(reply)
        if limit is None or usage is None or usage[1] <= limit or "max_completion_tokens" in self._older:
            return False
        self._take_for_older(("max_completion_tokens", *self._older))
        return True

    def _take_for_older(self, names: tuple[str, ...]) -> None:
        new = [name for name in names if name not in self._older]
        self.notes += [f"the server does not know the field {name!r}: {_OLDER[name][1]}" for name in new]
        self._older = names

    def _read(self, reply: Any, request: Mapping[str, Any]) -> Completion:
        self._refused = 0
        if not self._transcript:
            return _sampled(reply, greedy=request["temperature"] == 0)
        choice = choice_of(reply)
        if choice.finish_reason == "content_filter":
            raise RefusedError("the server's content filter has cut the answer off")
        calls = [_call(call.function) for call in choice.message.tool_calls or ()]
        if calls and "tools" not in request:
            raise ConfigError(
                f"the server has cut a call of {calls[0][0]!r} out of the text, where the dialect reads it: let the "
                "server read all calls, with the environment's argument dialect=native, or start it without its parser"
            )
        finish = "length" if choice.finish_reason == "length" else "stop"
        ids = self._transcript.turn(text_of(choice.message), calls, ended=finish == "stop")
        return Completion(token_ids=ids, logprobs=(0.0,) * len(ids), finish=finish, version=0, usage=usage_of(reply))

    def _failure(self, error: Exception) -> str:
        words = words_of(error, self._key)
        if isinstance(error, _openai.APIConnectionError):
            server = self._client.base_url.copy_with(userinfo=b"")
            return f"no server answers at {server}, as --base-url or OPENAI_BASE_URL names it: {words}"
        return f"the server failed: {words}"

    async def load_weights(self, named_tensors: object, version: int) -> None:
        """Refuse.

        Raises:
            ConfigError: always.
        """
        raise ConfigError("engine 'openai' only evaluates: its weights are the server's")

    def close(self) -> None:
        """Do nothing: no connection is open between two requests."""


def _pause(error: Exception, number: int) -> float:
    """Return the seconds to wait: those that the server names, else more each time."""
    headers: Mapping[str, str] = error.response.headers if isinstance(error, _openai.APIStatusError) else {}  # pyright: ignore
    for name, unit in (("retry-after-ms", 1000), ("retry-after", 1)):
        with suppress(KeyError, ValueError):
            return min(max(0.0, float(headers[name]) / unit), _LONGEST_ASKED_S)
    return min(0.5 * 2**number, _LONGEST_PAUSE_S)


def _call(function: Any) -> tuple[str, str]:
    arguments = function.arguments
    return str(function.name), arguments if isinstance(arguments, str) else json.dumps(arguments)


def _sampled(reply: Any, *, greedy: bool) -> Completion:
    choice = choice_of(reply)
    ids = (choice.model_extra or {}).get("token_ids")
    if ids is None:
        raise ConfigError("the server tells no token ids, as vLLM's does: leave --tokenizer out, to talk in messages")
    if not all(type(token) is int and token >= 0 for token in ids) or choice.finish_reason not in ("stop", "length"):
        raise ValueError(f"token ids {ids!r}, ended by {choice.finish_reason!r}")
    written = None if greedy or choice.logprobs is None else choice.logprobs.token_logprobs
    # Rounding may give a log-prob slightly above 0.
    logprobs = tuple(min(0.0, float(logp)) for logp in written) if written else (0.0,) * len(ids)
    if len(logprobs) != len(ids):
        raise ValueError(f"{len(ids)} tokens and {len(logprobs)} log-probs")
    return Completion(
        token_ids=tuple(ids), logprobs=logprobs, finish=choice.finish_reason, version=0, usage=usage_of(reply)
    )
