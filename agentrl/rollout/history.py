"""What the policy is shown of the past: the histories of :class:`agentrl.rollout.driver.StepDriver`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from agentrl.errors import ConfigError, UnknownNameError
from agentrl.rollout.policy import Past, Policy
from agentrl.types import Message

Messages = tuple[Message, ...]
_LINE = "[result of {name} cut: {length:,} characters]"
_SUMMARIZE = (
    "Your context is nearly full. Write a summary for yourself: what the task asks, what you have done and found, and "
    "what is left to do. You will see the task and this summary, and nothing else."
)
_GO_ON = Message(role="user", content="Go on.")


class _Line(str):
    """What stands for a result that was cut, and is not cut again."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Append:
    """Shows all messages, and each turn as it was sampled: the episode is one row."""

    past: ClassVar[Past] = "sampled"
    """How earlier turns are shown."""

    async def shown(self, policy: Policy, messages: Messages) -> Messages:
        """Return the messages that the policy is shown next, and that later messages are added to.

        Raises:
            TokenLimitError: there is no room left for a turn that writes them.
        """
        return messages


class Template(Append):
    """Shows earlier turns as the chat template does, which may drop their thinking."""

    past: ClassVar[Past] = "template"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shorten(Append):
    """Shortens old tool results to a line each, oldest first, where a row would be too long.

    Results that the policy has not read yet stay.
    """

    budget: int
    """Most tokens of a row before the next turn."""
    line: str = _LINE
    """The line, in which ``name`` is the tool's name and ``length`` how many characters its result had."""

    def __post_init__(self) -> None:
        _check(self.budget)
        try:
            self.line.format(name="python", length=1)
        except (AttributeError, LookupError, ValueError) as error:
            raise ConfigError(f"line = {self.line!r} can't be filled in: use {{name}} and {{length}} alone") from error

    async def shown(self, policy: Policy, messages: Messages) -> Messages:
        """Return the messages, with as many results shortened as the budget demands."""
        spoken = max((index for index, message in enumerate(messages) if message["role"] == "assistant"), default=0)
        for index, message in enumerate(messages[:spoken]):
            content = message["content"]
            line = _Line(self.line.format(name=message.get("name", "a tool"), length=len(content)))
            if message["role"] != "tool" or len(line) >= len(content) or isinstance(content, _Line):
                continue
            if policy.tokens(messages) <= self.budget:
                break
            messages = (*messages[:index], cast(Message, {**message, "content": line}), *messages[index + 1 :])
        return messages


@dataclass(frozen=True, slots=True, kw_only=True)
class Summarize(Append):
    """Asks the policy for a summary where a row would be too long, and goes on from there in a new row.

    The summary is a turn like any other. After it the policy is shown the system message, the task, and the summary.
    An episode whose turns are given by a script, such as one of the warm start, has no summaries.
    """

    budget: int
    """Most tokens of a row before the next turn."""
    request: str = _SUMMARIZE
    """What the user says to ask for a summary."""

    def __post_init__(self) -> None:
        _check(self.budget)

    async def shown(self, policy: Policy, messages: Messages) -> Messages:
        """Return the messages, or where they are too long the task and a summary."""
        spoken = any(message["role"] == "assistant" for message in messages)
        if not spoken or policy.spec.script is not None or policy.tokens(messages) <= self.budget:
            return messages
        text = await policy.turn((*messages, Message(role="user", content=self.request)))
        summary = Message(role="user", content=text.rpartition("</think>")[2].strip())
        task = next(index for index, message in enumerate(messages) if message["role"] == "user")
        return (*messages[: task + 1], summary, _GO_ON)


_HISTORIES: Mapping[str, type[Append]] = {
    "append": Append,
    "shorten": Shorten,
    "summarize": Summarize,
    "template": Template,
}


def make_history(name: str, options: Mapping[str, Any]) -> Append:
    """Make a history by its name.

    Raises:
        UnknownNameError: there is no such history.
        ConfigError: it does not take one of the options, lacks its budget, or the budget is less than one token.
    """
    if name not in _HISTORIES:
        raise UnknownNameError("history", name, _HISTORIES)
    try:
        return _HISTORIES[name](**options)
    except TypeError as error:
        reason = str(error).partition("() ")[2] or str(error)
        raise ConfigError(f"history {name!r} can't be made with rollout.driver.options: {reason}") from error


def _check(budget: int) -> None:
    if not isinstance(cast(object, budget), int) or budget < 1:
        raise ConfigError(f"a history's budget is a number of tokens from 1, not {budget!r}: correct its options")
