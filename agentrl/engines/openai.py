"""An OpenAI-compatible server as the engine, for evaluation.

With the tokenizer of the server's model, prompts go to ``/v1/completions`` as token ids and ids come back, as vLLM
returns them: episodes are token-exact, as with the other engines. Without one, messages go to ``/v1/chat/completions``
and a text comes back, and an episode's tokens are the characters of its text.
"""

import os
from importlib import import_module
from typing import Any

from agentrl.engines.base import Completion, Sampling
from agentrl.errors import ConfigError, InfrastructureError
from agentrl.render.transcript import Transcript

# By name, since pyright takes it for this file.
_openai: Any = import_module("openai")
_PASSING = (408, 409, 429)
"""Statuses below 500 that may be another one the next time."""
_MOST_WORDS = 300


class OpenAIEngine:
    """Samples with a server that others run, whose weights never change.

    Args:
        _policy: None; there is no model of ours.
        model: its name on the server.
        base_url: the server's, such as ``http://localhost:8000/v1``; empty for ``OPENAI_BASE_URL`` or OpenAI's own.
        tokenizer: of the server's model, a folder or a name on the Hugging Face hub; empty for chat messages.
        key_env: the environment variable that holds the key; it is read here and kept nowhere else.
        timeout: seconds for a turn.
        retries: how often a request is sent again, later and later, where the server is busy, fails or is not there.
        slots: ignored; ``rollout.concurrency`` says how many requests there are.
        max_length: ignored; the server has its own.
        body: further fields of each request, such as ``top_p`` or ``reasoning_effort``.

    Raises:
        ConfigError: no model is named.
    """

    exact = False
    """What the server computes beside a request, or which server answers, may change it."""
    rounding = float("inf")
    """Nothing is known of the server's arithmetic."""
    cache = None
    """Nor of its memory."""

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
        slots: int = 0,
        max_length: int = 0,
        **body: Any,
    ) -> None:
        if not model:
            raise ConfigError("engine 'openai' needs the model's name on the server: --model NAME")
        self._model, self._transcript, self._body = model, None if tokenizer else Transcript(), body
        self._key = os.environ.get(key_env, "")
        self._client: Any = _openai.AsyncOpenAI(
            # Servers of one's own want no key, but the library does.
            **{"api_key": self._key or "none", "base_url": base_url or None},
            **{"timeout": timeout, "max_retries": retries},
            # No connection stays open: the next request may come from another event loop.
            default_headers={"Connection": "close"},
        )

    async def generate(self, prompt_ids: tuple[int, ...], sampling: Sampling, *, seed: int) -> Completion:
        """Sample a continuation of ``prompt_ids``; one that the server has no room for is empty and cut off.

        Log-probs are the server's own, which need not be those at the temperature; 0 where it tells none.

        Raises:
            ConfigError: the server refuses the request, or with a tokenizer it tells no token ids.
            InfrastructureError: it is not there, is busy, fails, or its answer can't be read.
        """
        # Some servers take 32 bits.
        common: dict[str, Any] = {"model": self._model, "temperature": sampling.temperature, "seed": seed % 2**31}
        try:
            if self._transcript:
                reply = await self._client.chat.completions.create(
                    **common,
                    messages=list(self._transcript.messages(prompt_ids)),
                    max_completion_tokens=sampling.max_tokens,
                    extra_body=self._body,
                )
                return _spoken(reply, self._transcript)
            tokens = {"return_token_ids": True, "stop_token_ids": list(sampling.stop_ids), "ignore_eos": True}
            reply = await self._client.completions.create(
                **common,
                prompt=list(prompt_ids),
                max_tokens=sampling.max_tokens,
                logprobs=1,
                extra_body=tokens | self._body,
            )
            return _sampled(reply, greedy=sampling.temperature == 0)
        except _openai.APIStatusError as error:
            words = self._words(error)
            if "context length" in words or "context_length" in words:
                return Completion(token_ids=(), logprobs=(), finish="length", version=0)
            if error.status_code >= 500 or error.status_code in _PASSING:
                raise InfrastructureError(f"the server failed: {words}") from None
            raise ConfigError(f"the server refuses the request: {words}") from None
        except _openai.APIConnectionError as error:
            place = self._client.base_url.copy_with(userinfo=b"")
            raise InfrastructureError(
                f"no server answers at {place}, as --base-url or OPENAI_BASE_URL names it: {self._words(error)}"
            ) from None
        except (_openai.APIError, ValueError, TypeError, IndexError, AttributeError) as error:
            raise InfrastructureError(f"the server gave no answer that can be read: {self._words(error)}") from None

    def _words(self, error: Exception) -> str:
        # A server may say anything, even the key that it was sent.
        text = str(error).replace(self._key, "…") if self._key else str(error)
        return "".join(char if char.isprintable() else " " for char in f"{type(error).__name__}: {text}")[:_MOST_WORDS]

    async def load_weights(self, named_tensors: object, version: int) -> None:
        """Refuse.

        Raises:
            ConfigError: always.
        """
        raise ConfigError("engine 'openai' only evaluates: its weights are the server's")

    def close(self) -> None:
        """Do nothing: no connection is open between two requests."""


def _choice(reply: Any) -> Any:
    # A proxy's page comes as text, and some servers send an error with status 200: their words are the reason.
    if isinstance(reply, str) or not reply.choices:
        raise ValueError(f"no choices, but {reply if isinstance(reply, str) else reply.model_extra!r}")
    return reply.choices[0]


def _spoken(reply: Any, transcript: Transcript) -> Completion:
    choice = _choice(reply)
    ids = transcript.turn(choice.message.content or "", whole=choice.finish_reason != "length")
    finish = "length" if choice.finish_reason == "length" else "stop"
    return Completion(token_ids=ids, logprobs=(0.0,) * len(ids), finish=finish, version=0, usage=_usage(reply))


def _sampled(reply: Any, *, greedy: bool) -> Completion:
    choice = _choice(reply)
    ids = (choice.model_extra or {}).get("token_ids")
    if ids is None:
        raise ConfigError("the server tells no token ids, as vLLM's does: leave --tokenizer out, to talk in messages")
    if not all(type(one) is int and one >= 0 for one in ids) or choice.finish_reason not in ("stop", "length"):
        raise ValueError(f"token ids {ids!r}, ended by {choice.finish_reason!r}")
    told = None if greedy or choice.logprobs is None else choice.logprobs.token_logprobs
    # Rounding may give a log-prob slightly above 0.
    logprobs = tuple(min(0.0, float(one)) for one in told) if told else (0.0,) * len(ids)
    if len(logprobs) != len(ids):
        raise ValueError(f"{len(ids)} tokens and {len(logprobs)} log-probs")
    return Completion(
        token_ids=tuple(ids), logprobs=logprobs, finish=choice.finish_reason, version=0, usage=_usage(reply)
    )


def _usage(reply: Any) -> tuple[int, int] | None:
    if not reply.usage:
        return None
    read, written = int(reply.usage.prompt_tokens), int(reply.usage.completion_tokens)
    if min(read, written) < 0:
        raise ValueError(f"{read} tokens read and {written} written")
    return read, written
