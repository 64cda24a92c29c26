"""Playing an environment by a script, and the turns that scripts are made of."""

import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

from agentrl.checker.report import Finding
from agentrl.dialects.sample import sample_arguments
from agentrl.env import ToolEnv
from agentrl.errors import InfrastructureError
from agentrl.render import ChatTokenizer
from agentrl.tools import Tool
from agentrl.types import Message, Task

SEED = 7
SNIPPETS = ("x = 41", "print(x + 1)", "import random\nprint(random.random())")
"""What is given to every tool, whatever it makes of it: state is set, state is read, chance is drawn."""
IGNORANT = ("I do not know.", r"\boxed{unknown}")
"""Answers that know nothing; what they score is the floor."""
LONG = 100_000
"""Characters of an over-long text."""
NOISE = (
    "",
    " \n\t",
    IGNORANT[0],
    "h\u00e9llo \u6f22\u5b57 \U0001f642",
    "\u202e\u05e9\u05dc\u05d5\u05dd\u202c \u0645\u0631\u062d\u0628\u0627",
    "zero\u200bwidth\u200d\ufeff",
    "e\u0301\u0323Z\u0334\u031b\u0300" * 20,
    "\x00\x1b[2J\x7f\u2028\u0085\ufffe",
    "```",
    "<tool_call>{",
    "<think>",
    "{}" * 500,
    "word " * (LONG // 5),
)
"""Texts without a call in most dialects: a model may write any of them."""


class ControlTokens(ChatTokenizer, Protocol):
    """What is asked of a tokenizer beyond rendering: which of its tokens steer a conversation."""

    @property
    def all_special_tokens(self) -> list[str]:
        """The control tokens, spelled."""
        ...

    @property
    def all_special_ids(self) -> list[int]:
        """Their ids."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is under check."""

    env: ToolEnv
    """The environment."""
    tasks: tuple[Task, ...]
    """The tasks that it is checked on."""
    again: Callable[[], ToolEnv] | None
    """Makes another instance of the same; None where the instance was not built by ``make``."""
    tokenizer: ControlTokens | None = None
    """Writes the messages as tokens; None where tokens are not checked."""
    skipped: list[str] = dataclasses.field(default_factory=list[str])
    """What a check could not tell and why, a sentence each; checks add to it."""


Check = Callable[[Subject], Iterator[Finding]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What one ``step`` returned."""

    messages: tuple[Message, ...]
    """The new messages, as they were when they were returned."""
    reward: float
    """The turn's reward."""
    terminated: bool
    """Whether a final answer ended the episode."""
    truncated: bool
    """Whether a limit ended the episode."""
    parts: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])
    """The parts of the final reward."""
    given: object = dataclasses.field(default=(), repr=False)
    """The very messages that were returned, which the environment may have changed since."""

    @property
    def over(self) -> bool:
        """Whether the episode has ended."""
        return self.terminated or self.truncated


def alike(one: Sequence[Turn], other: Sequence[Turn]) -> bool:
    """Whether two episodes went the same way; NaN is the same as NaN, unlike in a comparison of floats."""
    return repr(one) == repr(other)


def parting(one: Sequence[Turn], other: Sequence[Turn]) -> str:
    """What two episodes that are not alike gave where they part, such as ``'a' and 'b' in turn 2``."""
    for number, (first, second) in enumerate(itertools.zip_longest(one, other), start=1):
        if first is None or second is None:
            return f"{len(one)} turns and {len(other)}"
        for name in ("messages", "reward", "terminated", "truncated", "parts"):
            values = getattr(first, name), getattr(second, name)
            if repr(values[0]) != repr(values[1]):
                return f"{both(*values) if name == 'messages' else f'{name} {both(*values)}'} in turn {number}"
    return "the same"


def both(one: object, other: object) -> str:
    """Two things in quotes, each cut to where it begins to differ from the other; of messages what they say."""
    texts = [_said(thing) for thing in (one, other)]
    if texts[0] == texts[1]:
        texts = [str(one), str(other)]
    alike = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*texts, strict=False))
    begin = max(sum(1 for _ in alike) - 20, 0)
    return " and ".join(short(f"{'…' if begin else ''}{text[begin:]}", 60) for text in texts)


def _said(thing: object) -> str:
    try:
        return "\n".join(message["content"] for message in thing)  # pyright: ignore
    except Exception:  # no messages, or such as an environment under check may give
        return str(thing)


def shut(env: ToolEnv) -> str:
    """Close ``env``; what ``close`` raised is given back, since it must not hide what a check has found."""
    try:
        env.close()
    except Exception as error:  # an environment under check may raise anything
        return repr(error)
    return ""


class StepRaised(Exception):
    """``step`` raised; the cause says what."""


def _nothing() -> None:
    pass


on_turn: ContextVar[Callable[[], None]] = ContextVar("on_turn", default=_nothing)
"""Called after every turn that is played."""


def play(env: ToolEnv, task: Task, actions: Sequence[str], seed: int = SEED) -> Iterator[Turn]:
    """Play ``actions`` until they or the episode end.

    Raises:
        StepRaised: ``step`` raised.
        InfrastructureError: what a tool runs on failed.
    """
    env.reset(seed=seed, options={"task": task.id})
    for action in actions:
        turn = step(env, action)
        yield turn
        if turn.over:
            return


def step(env: ToolEnv, action: str) -> Turn:
    """Take one turn.

    Raises:
        StepRaised: ``step`` raised.
        InfrastructureError: what a tool runs on failed.
    """
    try:
        messages, reward, terminated, truncated, info = env.step(action)
    except InfrastructureError:
        raise
    except (Exception, SystemExit) as error:  # an environment under check may raise anything
        raise StepRaised(f"step raised {error!r} on the text {short(action)}") from error
    on_turn.get()()
    return Turn(
        # Copied: an environment that changes a message later must not change what was seen.
        messages=copy.deepcopy(messages),
        reward=reward,
        terminated=terminated,
        truncated=truncated,
        parts=info.get("parts", {}),
        given=messages,
    )


def short(text: str, length: int = 40) -> str:
    """``text`` in quotes, cut where it has more than ``length`` characters."""
    return repr(text if len(text) <= length else text[:length] + "…")


def as_sentence(said: object) -> str:
    """What an error says, on one line and as a sentence."""
    text = " ".join(str(said).split()).rstrip(".")
    return f"{text[:1].upper()}{text[1:]}."


def gold_of(env: ToolEnv, task: Task) -> list[str] | None:
    """The turns of the gold player; None where there is none."""
    try:
        return list(env.gold_turns(task))
    except NotImplementedError:
        return None


def call_text(env: ToolEnv, tool: Tool, text: str) -> str:
    """A call of ``tool`` with ``text`` for every argument that takes text; empty where the dialect can't write it."""
    try:
        written = env.dialect.render(tool.name, sample_arguments(tool.parameters, text, optional=True))
    except Exception:  # a dialect may raise anything on a tool that it can't write: that tool is ARL-E013
        return ""
    calls = env.dialect.parse(written)
    return written if [call.name for call in calls] == [tool.name] and not calls[0].error else ""


def calls_of(env: ToolEnv, snippets: Sequence[str] = SNIPPETS) -> list[str]:
    """Turns that call every tool that can be called, with each snippet."""
    return [turn for tool in env.tools for snippet in snippets if (turn := call_text(env, tool, snippet))]


def hostile_turns(env: ToolEnv) -> list[str]:
    """Turns that a careless or hostile model may write, with calls and without, each once."""
    calls = calls_of(env)
    first = [turn for tool in env.tools if (turn := call_text(env, tool, SNIPPETS[0]))]
    turns = [*NOISE, *calls]
    for call in first:
        turns += [call[:-1], call[:-3], call[: len(call) // 2], f"<think>\n{call}\n</think>\nHm.", f"{call}\n{call}"]
        turns += [f"<think>\n{call}", call.replace(SNIPPETS[0], "\u202ee\u0301\u200b"), f"{call}{call}"]
    for tool in env.tools[:1]:
        turns += [unknown for name in ("no_such_tool", "\u00e9 <x>") if (unknown := _renamed(env, tool, name))]
        turns += [long for long in [call_text(env, tool, "#" * LONG)] if long]
    return list(dict.fromkeys(turns))


def _renamed(env: ToolEnv, tool: Tool, name: str) -> str:
    return call_text(env, tool, SNIPPETS[0]).replace(tool.name, name, 1)


def scripts(env: ToolEnv, task: Task) -> list[list[str]]:
    """Two ways to play a task that leave traces in whatever remembers."""
    calls, end = calls_of(env), gold_of(env, task) or [""]
    return [[*calls, ""], [*calls[1:2], *end]]


def score(env: ToolEnv, turns: Sequence[Turn]) -> float:
    """The weighted parts of the final reward, without the rewards of single turns."""
    if not turns:
        return float("-inf")
    return sum(env.reward_weights[name] * value for name, value in turns[-1].parts.items())
