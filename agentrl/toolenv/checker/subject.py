"""The environment under check, and the scripted turns that it is played with."""

import copy
import dataclasses
import itertools
import tomllib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec

from agentrl.errors import EnvContractError, InfrastructureError
from agentrl.render.tokens import ChatTokenizer
from agentrl.toolenv.base import ToolEnv
from agentrl.toolenv.checker.report import Finding
from agentrl.toolenv.dialects.sample import sample_arguments
from agentrl.toolenv.tools.context import SubTurn, scripted
from agentrl.toolenv.tools.function import Tool
from agentrl.types import Message, Task

SEED = 7
SNIPPETS = ("x = 41", "print(x + 1)", "import random\nprint(random.random())")
"""Arguments for every tool: for Python, they set state, read state and draw a random number."""
IGNORANT = ("I do not know.", r"\boxed{unknown}")
"""Answers without knowledge; their score is the floor."""
LONG = 100_000
"""Characters of an over-long text."""
TEXTS: Mapping[str, Sequence[str]] = tomllib.loads(Path(__file__).with_name("texts.toml").read_text(encoding="utf-8"))
"""Texts that are written in the agent's place, by what they are to show."""
NOISE = (
    *TEXTS["noise"],
    *(IGNORANT[0], "e\u0301\u0323Z\u0334\u031b\u0300" * 20, "{}" * 500, "word " * (LONG // 5)),
)
"""Texts without a call in most dialects: a model may write any of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The result of one ``step``."""

    messages: tuple[Message, ...]
    """The new messages, as they were when they were returned."""
    reward: float
    """The turn's reward."""
    terminated: bool
    """True if a final answer ended the episode."""
    truncated: bool
    """True if a limit ended the episode."""
    parts: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])
    """The parts of the final reward."""
    returned: object = dataclasses.field(default=(), repr=False)
    """The returned objects themselves, which the environment may have changed since."""

    @property
    def over(self) -> bool:
        """True if the episode has ended."""
        return self.terminated or self.truncated


def difference(turns: Sequence[Turn], others: Sequence[Turn]) -> str:
    """Describe the first difference between two episodes, such as ``'a' and 'b' in turn 2``; empty where there is none.

    NaN equals NaN here, unlike among floats.
    """
    for number, (turn, other) in enumerate(itertools.zip_longest(turns, others), start=1):
        if turn is None or other is None:
            return f"{len(turns)} turns and {len(others)}"
        for name in ("messages", "reward", "terminated", "truncated", "parts"):
            values = getattr(turn, name), getattr(other, name)
            if repr(values[0]) != repr(values[1]):
                return f"{contrast(*values) if name == 'messages' else f'{name} {contrast(*values)}'} in turn {number}"
    return ""


def contrast(*values: object) -> str:
    """Quote two values, each from shortly before it differs from the other; messages are quoted by content."""
    texts = [_contents(value) for value in values]
    # The same contents: the difference is in the messages' roles or names.
    if texts[0] == texts[1]:
        texts = [str(value) for value in values]
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*texts, strict=False))
    begin = max(sum(1 for _ in same) - 20, 0)
    return " and ".join(short(f"{'…' if begin else ''}{text[begin:]}", 60) for text in texts)


def _contents(value: object) -> str:
    try:
        return "\n".join(message["content"] for message in value)  # pyright: ignore
    except Exception:  # not messages, or malformed ones
        return str(value)


def shut(env: ToolEnv) -> str:
    """Close ``env`` and return what ``close`` raised, since raising it would hide a check's findings."""
    try:
        env.close()
    except Exception as error:  # an environment under check may raise anything
        return repr(error)
    return ""


class StepRaised(Exception):
    """``step`` raised; the cause is its exception."""


def short(text: str, length: int = 40) -> str:
    """Quote ``text``, cut after ``length`` characters."""
    return repr(text if len(text) <= length else text[:length] + "…")


def as_sentence(error: object) -> str:
    """Write an error's message as a sentence on one line."""
    text = " ".join(str(error).split()).rstrip(".")
    return f"{text[:1].upper()}{text[1:]}."


def raised(error: Exception, doing: str) -> Finding:
    """Return the finding of an error of the environment; one of its contract says by itself what to do."""
    code, cause = ("ARL-E005", error.__cause__) if isinstance(error, StepRaised) else ("ARL-E000", error)
    if isinstance(cause, EnvContractError):
        return Finding(code, as_sentence(cause), method=str(cause).split()[0])
    return Finding(code, as_sentence(error) if cause is not error else f"{doing} raised {error!r}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The environment under check, and ways to play it."""

    env: ToolEnv
    """The environment."""
    tasks: tuple[Task, ...]
    """The tasks that it is checked on."""
    tokenizer: ChatTokenizer | None = None
    """Writes the messages as tokens; None where tokens are not checked."""
    skipped: list[str] = dataclasses.field(default_factory=list[str])
    """A sentence for each thing that could not be checked, with the reason; checks append to it."""
    _scores: dict[tuple[str, tuple[str, ...]], float] = dataclasses.field(init=False, default_factory=dict, repr=False)

    def another(self, spec: EnvSpec | None = None, **changes: Any) -> "Subject":
        """Make another instance of this one's specification, or of ``spec``; only where ``make`` built this one."""
        spec = self.env.spec if spec is None else spec
        assert spec is not None
        # The specification holds the arguments that the instance was made with.
        env = gymnasium.make(spec, disable_env_checker=True, **changes).unwrapped
        assert isinstance(env, ToolEnv), "it was when it was made before"
        return dataclasses.replace(self, env=env)

    @contextmanager
    def fresh(self, spec: EnvSpec | None = None) -> Generator["Subject"]:
        """Make another instance, and close it afterwards."""
        other = self.another(spec)
        try:
            yield other
        finally:
            shut(other.env)

    def begin(self, task: Task, seed: int = SEED) -> tuple[Message, ...]:
        """Begin an episode; return the first observation."""
        return self.env.reset(seed=seed, options={"task": task.id})[0]

    def turns(self, task: Task, actions: Sequence[str]) -> Iterator[Turn]:
        """Begin an episode and take ``actions`` lazily, until they or the episode end; sub-agents take their own.

        Raises:
            StepRaised: ``step`` raised.
            InfrastructureError: a tool's sandbox or server failed.
        """
        self.env.sub_policy = scripted(actions)
        self.begin(task)
        for action in actions:
            if isinstance(action, SubTurn):
                continue
            turn = self.step(action)
            yield turn
            if turn.over:
                return

    def step(self, action: str) -> Turn:
        """Take one turn.

        Raises:
            StepRaised: ``step`` raised.
            InfrastructureError: a tool's sandbox or server failed.
        """
        try:
            messages, reward, terminated, truncated, info = self.env.step(action)
        except InfrastructureError:
            raise
        except (Exception, SystemExit) as error:  # an environment under check may raise anything
            raise StepRaised(f"step raised {error!r} on the text {short(action)}") from error
        return Turn(
            # Copied, since the environment may change a message later.
            messages=copy.deepcopy(messages),
            reward=reward,
            terminated=terminated,
            truncated=truncated,
            parts=info.get("parts", {}),
            returned=messages,
        )

    def gold(self, task: Task) -> list[str] | None:
        """Return the turns of the gold player; None where there is none."""
        try:
            return list(self.env.gold_turns(task))
        except NotImplementedError:
            return None

    def score(self, turns: Sequence[Turn]) -> float:
        """Return the weighted sum of the final reward's parts, without the turns' own rewards."""
        # Below every score: a gold player without turns must not pass as one that scores 0.
        if not turns:
            return float("-inf")
        return sum(self.env.reward_weights[name] * value for name, value in turns[-1].parts.items())

    def score_of(self, task: Task, actions: Sequence[str]) -> float:
        """Return the score of an episode with ``actions``; one that was scored before is not played again."""
        key = task.id, tuple(actions)
        if key not in self._scores:
            self._scores[key] = self.score(list(self.turns(task, actions)))
        return self._scores[key]

    def call(self, tool: Tool, text: str) -> str:
        """Write a call of ``tool`` with ``text`` for every text argument; empty where the dialect can't write it."""
        dialect = self.env.dialect
        try:
            written = dialect.render(tool.name, sample_arguments(tool.parameters, text, optional=True))
        except Exception:  # a dialect may raise anything on a tool that it can't write, which is reported as ARL-E013
            return ""
        calls = dialect.parse(written)
        return written if [call.name for call in calls] == [tool.name] and not calls[0].error else ""

    def calls(self) -> list[str]:
        """Return turns that call each callable tool with each snippet."""
        return [turn for tool in self.env.tools for snippet in SNIPPETS if (turn := self.call(tool, snippet))]

    def hostile_turns(self) -> list[str]:
        """Return turns that a careless or hostile model may write, with calls and without, each once."""
        turns = [*NOISE, *self.calls()]
        # Broken in the places where dialects differ: the closing mark, thinking around a call, two calls in one turn.
        for call in filter(None, (self.call(tool, SNIPPETS[0]) for tool in self.env.tools)):
            turns += [call[:-1], call[:-3], call[: len(call) // 2], f"{call}\n{call}", f"{call}{call}"]
            turns += [f"<think>\n{call}\n</think>\nHm.", f"<think>\n{call}"]
            turns += [call.replace(SNIPPETS[0], "\u202ee\u0301\u200b")]
        for tool in self.env.tools[:1]:
            call = self.call(tool, SNIPPETS[0])
            renamed = (call.replace(tool.name, name, 1) for name in ("no_such_tool", "\u00e9 <x>"))
            turns += filter(None, (*renamed, self.call(tool, "#" * LONG)))
        return list(dict.fromkeys(turns))

    def scripts(self, task: Task) -> list[list[str]]:
        """Return two ways to play a task, both of which change any state that outlives a turn."""
        calls, end = self.calls(), self.gold(task) or [""]
        return [[*calls, ""], [*calls[1:2], *end]]


Check = Callable[[Subject], Iterator[Finding]]
