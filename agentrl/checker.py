r"""Whether an environment keeps the contract, found by playing it; every finding has a code that stays.

========= ==========================================================================================
ARL-E000  something raised where nothing should
ARL-E001  the first observation is outside its space, or does not end with the user's message
ARL-E002  one task gave two different first observations
ARL-E003  the gold player does not score the maximum
ARL-E004  a turn with a tool call ended the episode before its turns were used up
ARL-E005  ``step`` raised on a text that a model may write
ARL-E006  an episode was terminated and truncated at once
ARL-E007  the same task, seed and actions gave different turns
ARL-E008  two instances played side by side disturb each other
ARL-E009  a worthless answer scores
ARL-E010  an observation after the first is outside its space
ARL-E011  an episode does not end: neither by a text without a call nor when its turns are used up
ARL-E012  a reward is not a finite float
ARL-E013  a tool can't be called in the environment's dialect
ARL-E014  two splits share a task
ARL-E015  a task can't be found by its id
========= ==========================================================================================

Not covered: how a tokenizer or a chat template treats the messages, and whether tasks are any good.
"""

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import gymnasium

from agentrl.env import ToolEnv
from agentrl.errors import ConfigError, InfrastructureError
from agentrl.registry import make
from agentrl.tools import Tool
from agentrl.types import Message, Task

SPLIT_SAMPLE = 200
"""How many tasks of each split are compared with those of the others."""
_SEED = 7
_SNIPPETS = ("x = 41", "print(x + 1)", "import random\nprint(random.random())")
"""What is given to every tool, whatever it makes of it: state is set, state is read, chance is drawn."""
_NOISE = (
    "",
    " \n\t",
    "I do not know.",
    "h\u00e9llo \u6f22\u5b57 \U0001f642 \u200b\u202e",
    "\x00\x1b[2J",
    "```",
    "<tool_call>{",
    "{}" * 500,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One way in which the environment breaks its contract."""

    code: str
    """Names the kind of finding, for ever; the module's docstring lists them."""
    message: str
    """What was seen, in one sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What ``check_env`` found."""

    findings: tuple[Finding, ...]
    """What breaks the contract, in the order it was seen."""
    skipped: tuple[str, ...] = ()
    """What could not be checked, a sentence each."""

    @property
    def ok(self) -> bool:
        """Whether nothing breaks the contract, as far as it was checked."""
        return not self.findings

    def __str__(self) -> str:
        lines = [f"{finding.code}  {finding.message}" for finding in self.findings]
        return "\n".join([*(lines or ["no findings"]), *(f"not checked: {sentence}" for sentence in self.skipped)])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Turn:
    """What one ``step`` returned; compared to see whether two episodes are the same."""

    messages: tuple[Message, ...]
    reward: float
    terminated: bool
    truncated: bool
    parts: Mapping[str, float]

    @property
    def over(self) -> bool:
        return self.terminated or self.truncated


@dataclass(frozen=True, slots=True, kw_only=True)
class _Subject:
    """The environment under check, the tasks it is checked on, and how to make another of the same."""

    env: ToolEnv
    tasks: tuple[Task, ...]
    again: Callable[[], ToolEnv] | None


class _StepRaised(Exception):
    """``step`` raised; the cause says what."""


def check_env(env: str | ToolEnv, *, tasks: int = 3) -> Report:
    """Play an environment by hostile, careless and perfect turns, and report where it breaks its contract.

    Args:
        env: the id of an environment, or an instance. One that ``make`` did not build can't be checked for state that
            instances share; the report says so. A given instance is left open, in the middle of an episode.
        tasks: how many tasks to play, from the first of its split.

    Raises:
        UnknownNameError: there is no such id.
        ConfigError: ``tasks`` is less than 1.
        InfrastructureError: what a tool runs on failed, which says nothing about the environment.
    """
    if tasks < 1:
        raise ConfigError(f"tasks is {tasks}: a check needs at least one task")
    made = make(env) if isinstance(env, str) else env
    try:
        subject, findings = _subject(made, tasks), list[Finding]()
        if not isinstance(subject, _Subject):
            return Report(findings=(subject,))
        for check in _CHECKS:
            findings += _guarded(check, subject)
        return Report(findings=tuple(dict.fromkeys(findings)), skipped=tuple(_skipped(subject)))
    finally:
        if isinstance(env, str):
            made.close()


def _subject(env: ToolEnv, count: int) -> _Subject | Finding:
    try:
        tasks = tuple(itertools.islice(env.task_set, count))
    except Exception as error:  # an environment under check may raise anything
        return Finding(code="ARL-E000", message=f"making its tasks raised {error!r}.")
    if not tasks:
        return Finding(code="ARL-E000", message=f"its split {env.split!r} has no task.")
    spec = env.spec

    def again() -> ToolEnv:
        assert spec is not None
        other = gymnasium.make(spec, disable_env_checker=True).unwrapped
        assert isinstance(other, ToolEnv)
        return other

    return _Subject(env=env, tasks=tasks, again=None if spec is None else again)


def _guarded(check: Callable[[_Subject], Iterator[Finding]], subject: _Subject) -> list[Finding]:
    findings: list[Finding] = []
    try:
        findings.extend(check(subject))
    except InfrastructureError:
        raise
    except _StepRaised as error:
        findings.append(Finding(code="ARL-E005", message=f"{error}."))
    except Exception as error:  # an environment under check may raise anything
        name = check.__name__.removeprefix("_check_").replace("_", " ")
        findings.append(Finding(code="ARL-E000", message=f"checking its {name} raised {error!r}."))
    return findings


def _skipped(subject: _Subject) -> Iterator[str]:
    if subject.again is None:
        yield "whether instances share state: the instance was not built by make, so there is no second one."
    try:
        lacking = _gold(subject.env, subject.tasks[0]) is None
    except Exception:  # whatever it raised was found when gold was played
        lacking = False
    if lacking:
        yield "whether the maximum can be reached: there is no gold player."


def _gold(env: ToolEnv, task: Task) -> list[str] | None:
    try:
        return list(env.gold_turns(task))
    except NotImplementedError:
        return None


def _calls(env: ToolEnv) -> list[str]:
    """Turns that call every tool that can be called, with each snippet."""
    turns = [env.dialect.render(tool.name, _arguments(tool, snippet)) for tool in env.tools for snippet in _SNIPPETS]
    return [turn for turn in turns if env.dialect.parse(turn)]


def _arguments(tool: Tool, snippet: str) -> dict[str, object]:
    return dict.fromkeys(cast(Mapping[str, object], tool.parameters["properties"]), snippet)


def _play(env: ToolEnv, task: Task, actions: Sequence[str], seed: int = _SEED) -> Iterator[_Turn]:
    """Play ``actions`` until they or the episode end."""
    env.reset(seed=seed, options={"task": task.id})
    for action in actions:
        turn = _step(env, action)
        yield turn
        if turn.over:
            return


def _step(env: ToolEnv, action: str) -> _Turn:
    try:
        messages, reward, terminated, truncated, info = env.step(action)
    except InfrastructureError:
        raise
    except Exception as error:  # an environment under check may raise anything
        raise _StepRaised(f"step raised {error!r} on the text {_short(action)}") from error
    return _Turn(
        messages=messages, reward=reward, terminated=terminated, truncated=truncated, parts=info.get("parts", {})
    )


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:40] + "…")


def _check_tasks(subject: _Subject) -> Iterator[Finding]:
    env = subject.env
    for task in subject.tasks:
        found = env.task_set.find(task.id)
        if (found.id, found.prompt, found.answer) != (task.id, task.prompt, task.answer):
            yield Finding(code="ARL-E015", message=f"the id {task.id!r} leads to another task, {found.id!r}.")
    seen: dict[tuple[str, str], str] = {}
    for split in env.splits:
        for task in itertools.islice(env.tasks(split), SPLIT_SAMPLE):
            other = seen.setdefault((task.prompt, task.answer), split)
            if other != split:
                yield Finding(code="ARL-E014", message=f"{split} and {other} share the task {_short(task.prompt)}.")
                return


def _check_first_observation(subject: _Subject) -> Iterator[Finding]:
    env = subject.env
    for task in subject.tasks:
        first, _ = env.reset(seed=_SEED, options={"task": task.id})
        if not env.observation_space.contains(first):
            yield Finding(code="ARL-E001", message=f"the first observation {_short(str(first))} is outside its space.")
        elif not first or first[-1]["role"] != "user":
            yield Finding(code="ARL-E001", message="the first observation does not end with the user's message.")
        for seed in (_SEED, _SEED + 1):
            if env.reset(seed=seed, options={"task": task.id})[0] != first:
                yield Finding(code="ARL-E002", message=f"task {task.id!r} began in two ways.")


def _check_tools(subject: _Subject) -> Iterator[Finding]:
    env = subject.env
    for tool in env.tools:
        if not env.dialect.parse(env.dialect.render(tool.name, _arguments(tool, "x"))):
            yield Finding(code="ARL-E013", message=f"dialect {env.dialect.name} can't call {tool.name!r}.")


def _check_turns(subject: _Subject) -> Iterator[Finding]:
    env = subject.env
    calls = _calls(env)
    broken = [call[: len(call) - cut] for call in calls for cut in (1, 3)]
    for action in (*_NOISE, *calls, *broken):
        for turn in _play(env, subject.tasks[0], [action]):
            yield from _turn_findings(env, action, turn)


def _turn_findings(env: ToolEnv, action: str, turn: _Turn) -> Iterator[Finding]:
    if turn.terminated and turn.truncated:
        yield Finding(code="ARL-E006", message=f"the text {_short(action)} both terminated and truncated the episode.")
    if env.dialect.parse(action):
        if turn.terminated or (turn.truncated and env.max_turns > 1):
            yield Finding(code="ARL-E004", message=f"the call {_short(action)} ended the episode.")
    elif not turn.over:
        yield Finding(code="ARL-E011", message=f"the text {_short(action)} has no call, yet the episode goes on.")
    if not env.observation_space.contains(turn.messages):
        yield Finding(code="ARL-E010", message=f"what follows the text {_short(action)} is outside its space.")
    if not (isinstance(turn.reward, float) and math.isfinite(turn.reward)):
        yield Finding(code="ARL-E012", message=f"the text {_short(action)} earned {turn.reward!r}.")


def _check_turn_limit(subject: _Subject) -> Iterator[Finding]:
    env = subject.env
    for call in _calls(env)[:1]:
        turns = list(_play(env, subject.tasks[0], [call] * (env.max_turns + 1)))
        if len(turns) != env.max_turns or not turns[-1].over:
            yield Finding(code="ARL-E011", message=f"{len(turns)} turns, not {env.max_turns}, were allowed.")
        elif turns[-1].terminated:
            yield Finding(code="ARL-E006", message="running out of turns terminated the episode: it must truncate it.")


def _check_gold(subject: _Subject) -> Iterator[Finding]:
    env = subject.env
    for task in subject.tasks:
        actions = _gold(env, task)
        if actions is None:
            return
        turns = list(_play(env, task, actions))
        score, top = _score(env, turns), _top(env)
        if len(turns) != len(actions) or not turns[-1].terminated or score < top:
            message = (
                f"gold scored {score:g} of {top:g} in {len(turns)} of its {len(actions)} turns of task {task.id!r}."
            )
            yield Finding(code="ARL-E003", message=message)


def _top(env: ToolEnv) -> float:
    """The best score: every part that counts for the agent is 1, every part that counts against it 0."""
    return math.fsum(weight for weight in env.reward_weights.values() if weight > 0)


def _score(env: ToolEnv, turns: Sequence[_Turn]) -> float:
    """The weighted parts of the final reward, without the rewards of single turns."""
    if not turns:
        return -math.inf
    return math.fsum(env.reward_weights[name] * value for name, value in turns[-1].parts.items())


def _check_reward(subject: _Subject) -> Iterator[Finding]:
    env = subject.env
    for task in subject.tasks:
        floor = max(_score(env, list(_play(env, task, [wrong]))) for wrong in ("I do not know.", r"\boxed{unknown}"))
        if floor >= _top(env):
            yield Finding(code="ARL-E009", message=f"an answer that knows nothing scores {floor:g}, the maximum.")
        for what, text in _probes(task, env.reset(seed=_SEED, options={"task": task.id})[0]):
            score = _score(env, list(_play(env, task, [text, ""])))
            if score > floor:
                yield Finding(code="ARL-E009", message=f"{what} scores {score:g} on task {task.id!r}.")


def _probes(task: Task, first: Sequence[Message]) -> Iterator[tuple[str, str]]:
    """Answers that must be worth nothing, each with what to call it."""
    yield "an empty answer", ""
    yield "an empty box", r"\boxed{}"
    yield "a copy of the prompt", task.prompt
    yield "a copy of the prompt in a box", rf"\boxed{{{task.prompt}}}"
    yield "a copy of everything read", "\n".join(message["content"] for message in first)
    # The calculation itself, which a lenient grader may work out on the agent's behalf.
    for sum_ in re.findall(r"[0-9(][0-9+\-*/(). ]*[+\-*/][0-9+\-*/(). ]*[0-9)]", task.prompt):
        yield "the calculation in a box, not worked out,", rf"\boxed{{{sum_}}}"
    # Right in the middle: neither a grader of the first box nor one of the last may find it.
    guesses = ["guess one", *map(str, range(20)), task.answer, "guess two"]
    yield "a box for every guess", " ".join(rf"\boxed{{{guess}}}" for guess in guesses)


def _check_reproducibility(subject: _Subject) -> Iterator[Finding]:
    env = subject.env
    for task in subject.tasks:
        for actions in _scripts(env, task):
            if list(_play(env, task, actions)) != list(_play(env, task, actions)):
                yield Finding(
                    code="ARL-E007", message=f"task {task.id!r} was played twice alike and answered in two ways."
                )


def _scripts(env: ToolEnv, task: Task) -> list[list[str]]:
    calls, end = _calls(env), _gold(env, task) or [""]
    return [[*calls, ""], [*calls[1:2], *end]]


def _check_independence(subject: _Subject) -> Iterator[Finding]:
    if subject.again is None:
        return
    scripts = _scripts(subject.env, subject.tasks[0])
    alone = [_alone(subject.again, subject.tasks[0], actions) for actions in scripts]
    one, other = subject.again(), subject.again()
    try:
        playing = [_play(env, subject.tasks[0], actions) for env, actions in zip((one, other), scripts, strict=True)]
        together = list(itertools.zip_longest(*playing))
    finally:
        one.close()
        other.close()
    for number, turns in enumerate(alone):
        if [pair[number] for pair in together if pair[number] is not None] != turns:
            yield Finding(code="ARL-E008", message="an episode went another way beside a second instance.")


def _alone(make_env: Callable[[], ToolEnv], task: Task, actions: Sequence[str]) -> list[_Turn]:
    env = make_env()
    try:
        return list(_play(env, task, actions))
    finally:
        env.close()


_CHECKS: tuple[Callable[[_Subject], Iterator[Finding]], ...] = (
    _check_tasks,
    _check_first_observation,
    _check_tools,
    _check_turns,
    _check_turn_limit,
    _check_gold,
    _check_reward,
    _check_reproducibility,
    _check_independence,
)
