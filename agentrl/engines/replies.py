"""What OpenAI-compatible servers answer, and how they fail."""

from importlib import import_module
from typing import Any

# By name, since pyright takes it for the file beside this one.
_openai: Any = import_module("openai")
_PASSING = (408, 409, 429)
"""Statuses below 500 that may be another one the next time."""
_THINKING = ("thinking", "reasoning")
"""Parts of an answer that are no part of its text."""
_MOST_WORDS = 300


def fails(error: Exception) -> bool:
    """Return True where another request may fare better."""
    if isinstance(error, _openai.APIStatusError):
        status: int = error.status_code  # pyright: ignore[reportAttributeAccessIssue]
        return status >= 500 or status in _PASSING
    return isinstance(error, _openai.APIConnectionError)


def choice_of(reply: Any) -> Any:
    """Return the answer within a reply.

    Raises:
        ValueError: it holds none.
    """
    # A proxy's page comes as text, and some servers send an error with status 200: their words are the reason.
    if isinstance(reply, str) or not reply.choices:
        raise ValueError(f"no choices, but {reply if isinstance(reply, str) else reply.model_extra!r}")
    return reply.choices[0]


def text_of(message: Any) -> str:
    """Return what an answer says, which is a text or a list of parts."""
    if not isinstance(message.content, list):
        return message.content or message.refusal or ""
    parts: list[Any] = message.content
    return "".join(part["text"] for part in parts if part["type"] not in _THINKING)


def words_of(error: Exception, key: str) -> str:
    """Return what an error says in one line, without the key that the server was sent."""
    # A server may say anything, even the key.
    text = str(error).replace(key, "…") if key else str(error)
    return "".join(char if char.isprintable() else " " for char in f"{type(error).__name__}: {text}")[:_MOST_WORDS]


def usage_of(reply: Any) -> tuple[int, int] | None:
    """Return how many tokens the server says it has read and written; None where it tells nothing.

    Raises:
        ValueError: a number is negative.
    """
    if not reply.usage:
        return None
    read, written = int(reply.usage.prompt_tokens), int(reply.usage.completion_tokens)
    if min(read, written) < 0:
        raise ValueError(f"{read} tokens read and {written} written")
    return read, written
