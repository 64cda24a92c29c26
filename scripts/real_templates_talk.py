"""The conversations that chat templates are tried with: a library's search tool, and an environment that has it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from agentrl.grading.numbers import last_boxed
from agentrl.toolenv.base import Episode, ToolEnv
from agentrl.toolenv.tasks import GeneratedTasks, TaskSet
from agentrl.toolenv.tools.function import tool
from agentrl.types import Message, Task

Call = tuple[str, Mapping[str, object]]


@tool
def search(query: str, limit: int = 5) -> str:
    """Search the library.

    Args:
        query: what to look for.
        limit: how many books to name.
    """
    return f"{limit} books about {query}"


class Library(ToolEnv):
    """Find a book; the checker plays this with each tokenizer."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.tools = (search,)

    def tasks(self, split: str) -> TaskSet:
        """Return books by number."""
        start = {"train": 12345, "test": 67891}[split]
        return GeneratedTasks(
            split, lambda i: Task(id="", prompt=f"Which book has the number {start + i}?", answer=f"{start + i}"[::-1])
        )

    def gold(self, task: Task) -> Sequence[str]:
        """One search, then the answer."""
        return [self.dialect.render("search", {"query": task.prompt, "limit": 1}), rf"\boxed{{{task.answer}}}"]

    def reward(self, episode: Episode) -> Mapping[str, float]:
        """Return 1 for the right answer in the box, else 0."""
        return {"correct": float(last_boxed(episode.final) == episode.task.answer)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """A turn of the assistant's, and the messages that answer it."""

    text: str = ""
    """The turn's text."""
    thought: str = ""
    """The thoughts before it."""
    calls: Sequence[Call] = ()
    """The tools that it calls."""
    answers: Sequence[Message] = ()
    """The environment's messages."""

    @property
    def answered_by(self) -> Literal["user", "tool"]:
        """The role of the first message after the turn."""
        return "tool" if self.answers[0]["role"] == "tool" else "user"


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A conversation to render; no content is part of an earlier one, so that each is found if it is there."""

    name: str
    opening: Sequence[Message]
    """The messages before the assistant's first turn."""
    rounds: Sequence[Round]
    """The turns, with their answers."""


def _system(content: str) -> Message:
    return Message(role="system", content=content)


def _user(content: str) -> Message:
    return Message(role="user", content=content)


def _results(*contents: str, first_number: int = 1) -> tuple[Message, ...]:
    return tuple(
        # Nine letters and digits are what the strictest templates ask for.
        Message(role="tool", content=content, name="search", tool_call_id=f"abcde{number:04d}")
        for number, content in enumerate(contents, start=first_number)
    )


def _asked(*queries: str) -> Sequence[Call]:
    return tuple(("search", {"query": query, "limit": 3}) for query in queries)


_HELP, _BEES = _system("Be helpful."), _user("Which book is about bees?")
_FIRST = Round(text="That is 'The Hive'.", answers=[_user("And about ants?")])
_SECOND = Round(text="Try 'The Hill'.", answers=[_user("Thanks. Wasps?")])
_ODD = 'd\u00e9j\u00e0 vu, "\u4f60\u597d" \U0001f642\n\n  {"a": 1}\t\u00bd \u200bcaf\u0065\u0301 <td><b>'
CONVERSATIONS = (
    Conversation(name="talk", opening=[_BEES], rounds=[_FIRST, _SECOND]),
    Conversation(name="talk under a system message", opening=[_HELP, _BEES], rounds=[_FIRST, _SECOND]),
    Conversation(
        name="thinking",
        opening=[_HELP, _BEES],
        rounds=[
            Round(thought="Bees live in hives.", text=_FIRST.text, answers=_FIRST.answers),
            Round(thought="Ants, now.", text=_SECOND.text, answers=_SECOND.answers),
        ],
    ),
    Conversation(
        name="a call",
        opening=[_HELP, _BEES],
        rounds=[Round(calls=_asked("bees"), answers=_results("Maeterlinck")), _FIRST],
    ),
    Conversation(
        name="words and a call",
        opening=[_BEES],
        rounds=[Round(text="Let me look.", calls=_asked("bees"), answers=_results("Maeterlinck"))],
    ),
    Conversation(
        name="parallel calls",
        opening=[_HELP, _BEES],
        rounds=[Round(calls=_asked("bees", "hives"), answers=_results("Maeterlinck", "Langstroth")), _FIRST],
    ),
    Conversation(
        name="calls in a row",
        opening=[_BEES],
        rounds=[
            Round(calls=_asked("bees"), answers=_results("Nothing.")),
            Round(calls=_asked("bee"), answers=_results("Maeterlinck", first_number=2)),
            Round(calls=_asked("apiary"), answers=_results("Langstroth", first_number=3)),
            _FIRST,
            Round(calls=_asked("ants"), answers=_results("Wilson", first_number=4)),
        ],
    ),
    Conversation(
        name="errors and empty results",
        opening=[_HELP, _BEES],
        rounds=[
            Round(calls=_asked("bees"), answers=_results("Traceback:\n  ValueError: 'bees'\n")),
            Round(calls=_asked("bee"), answers=_results("", first_number=2)),
            _FIRST,
        ],
    ),
    Conversation(
        name="a result and a question",
        opening=[_BEES],
        rounds=[Round(calls=_asked("bees"), answers=[*_results("Maeterlinck"), _user("Only one?")])],
    ),
    Conversation(
        name="odd letters",
        opening=[_system(_ODD), _user(f" {_ODD}\n")],
        rounds=[
            Round(calls=_asked("\u4f60\u597d \U0001f642"), answers=_results(_ODD)),
            Round(text="\u4f60\u597d!", answers=[_user(f"\n{_ODD} ")]),
        ],
    ),
    Conversation(
        name="empty contents",
        opening=[_system(""), _BEES],
        rounds=[Round(text="", answers=[_user("")]), _SECOND],
    ),
)
