"""The contract of ``reset`` and ``step``: what is seen, how episodes end, and that the same gives the same."""

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

from agentrl.checker.play import (
    SEED,
    Subject,
    Turn,
    alike,
    both,
    calls_of,
    gold_of,
    hostile_turns,
    parting,
    play,
    score,
    scripts,
    short,
    shut,
    step,
)
from agentrl.checker.report import Finding
from agentrl.env import ToolEnv
from agentrl.errors import EnvContractError
from agentrl.types import Message, Task

TOLERANCE = 1e-9
"""Scores closer than this are the same: they are sums of weights."""


def check_first_observation(subject: Subject) -> Iterator[Finding]:
    """ARL-E001, E002: the first observation is well formed and the task's own, on every instance."""
    env = subject.env
    firsts: list[tuple[Message, ...]] = []
    for task in subject.tasks:
        first, _ = env.reset(seed=SEED, options={"task": task.id})
        firsts.append(copy.deepcopy(first))
        if not env.observation_space.contains(first):
            yield Finding(code="ARL-E001", message=f"The first observation {short(str(first))} is outside its space.")
        elif not first or first[-1]["role"] != "user":
            yield Finding(code="ARL-E001", message="The first observation does not end with the user's message.")
        for seed in (SEED, SEED + 1):
            if (again := env.reset(seed=seed, options={"task": task.id})[0]) != first:
                message = f"Task {task.id!r} began in two ways on one instance, {both(first, again)}."
                yield Finding(code="ARL-E002", message=message)
    if subject.again is not None:
        other = subject.again()
        try:
            for task, first in zip(subject.tasks, firsts, strict=True):
                if (again := other.reset(seed=SEED, options={"task": task.id})[0]) != first:
                    message = f"Task {task.id!r} began in two ways on two instances, {both(first, again)}."
                    yield Finding(code="ARL-E002", message=message)
        finally:
            shut(other)


def check_turns(subject: Subject) -> Iterator[Finding]:
    """ARL-E004 to E006, E010 to E012, R007, S005: every text that a model may write is taken as a turn."""
    env = subject.env
    for action in hostile_turns(env):
        if not env.action_space.contains(action):
            yield Finding(code="ARL-S005", message=f"The action space leaves out the text {short(action)}.")
        for turn in play(env, subject.tasks[0], [action]):
            yield from _turn_findings(env, action, turn)


def _turn_findings(env: ToolEnv, action: str, turn: Turn) -> Iterator[Finding]:
    if turn.terminated and turn.truncated:
        yield Finding(code="ARL-E006", message=f"The text {short(action)} both terminated and truncated the episode.")
    if env.dialect.parse(action):
        if turn.terminated or (turn.truncated and env.max_turns > 1):
            yield Finding(code="ARL-E004", message=f"The call {short(action)} ended the episode.")
    elif not turn.over:
        yield Finding(code="ARL-E011", message=f"The text {short(action)} has no call, yet the episode goes on.")
    if not env.observation_space.contains(turn.messages):
        yield Finding(code="ARL-E010", message=f"What follows the text {short(action)} is outside its space.")
    if not (isinstance(turn.reward, float) and math.isfinite(turn.reward)):
        yield Finding(code="ARL-E012", message=f"The text {short(action)} earned {turn.reward!r}.")
    yield from part_findings(turn)


def part_findings(turn: Turn) -> Iterator[Finding]:
    """ARL-R007: no part of a final reward is above 1."""
    for name, value in turn.parts.items():
        if value > 1 + TOLERANCE:
            yield Finding(code="ARL-R007", message=f"The part {name!r} of a reward was {value:g}.")


def check_turn_limit(subject: Subject) -> Iterator[Finding]:
    """ARL-E006, E011: running out of turns truncates the episode, no sooner and no later."""
    env = subject.env
    for call in calls_of(env)[:1]:
        turns = list(play(env, subject.tasks[0], [call] * (env.max_turns + 1)))
        if len(turns) != env.max_turns or not turns[-1].over:
            yield Finding(code="ARL-E011", message=f"{len(turns)} turns, not {env.max_turns}, were allowed.")
        elif turns[-1].terminated:
            yield Finding(code="ARL-E006", message="Running out of turns terminated the episode.")


def check_gold(subject: Subject) -> Iterator[Finding]:
    """ARL-E003, E022, R007: the perfect player's calls work, it scores the maximum, and its last turn is the end."""
    env = subject.env
    for task in subject.tasks:
        actions = gold_of(env, task)
        if actions is None:
            return
        turns, failed = _heard(env, task, actions)
        if failed:
            yield Finding(code="ARL-E022", message=f"Gold's call of {failed[0]} on task {task.id!r}.")
        reached, top = score(env, turns), env.best_return
        cut_off = bool(turns) and turns[-1].truncated and not turns[-1].terminated
        if len(turns) != len(actions) or cut_off or reached < top - TOLERANCE:
            message = (
                f"Gold scored {reached:g} of {top:g} in {len(turns)} of its {len(actions)} turns of task {task.id!r}"
                f"{', and the turn limit cut it off' if cut_off else ''}."
            )
            yield Finding(code="ARL-E003", message=message)
        for turn in turns[-1:]:
            yield from part_findings(turn)


def _heard(env: ToolEnv, task: Task, actions: Sequence[str]) -> tuple[list[Turn], list[str]]:
    """The turns, and for each call that failed its tool and what it answered."""
    turns: list[Turn] = []
    failed: list[str] = []
    before = 0
    for turn in play(env, task, actions):
        turns.append(turn)
        runs = env.episode.tool_runs
        answered = zip(runs[before:], turn.messages, strict=False)  # what respond says comes after the results
        failed += [f"{run.name!r} failed with {short(said['content'], 100)}" for run, said in answered if not run.ok]
        before = len(runs)
    return turns, failed


def check_record(subject: Subject) -> Iterator[Finding]:
    """ARL-E016: what ``reset`` and ``step`` returned stays as it was, and is what ``env.episode`` holds."""
    env = subject.env
    for actions in scripts(env, subject.tasks[0]):
        first, _ = env.reset(seed=SEED, options={"task": subject.tasks[0].id})
        given: list[object] = [first]
        said = [copy.deepcopy(first)]
        for action in actions:
            turn = step(env, action)
            given.append(turn.given)
            said += [(Message(role="assistant", content=action),), turn.messages]
            if turn.over:
                break
        if given != said[::2]:
            yield Finding(code="ARL-E016", message="Messages were changed after reset or step had returned them.")
        elif list(env.episode.messages) != list(itertools.chain.from_iterable(said)):
            yield Finding(
                code="ARL-E016", message="The record in env.episode holds other messages than reset and step exchanged."
            )


def check_misuse(subject: Subject) -> Iterator[Finding]:
    """ARL-E017: ``step`` before ``reset`` and after the end raises the typed error."""
    env = subject.env
    turns = list(play(env, subject.tasks[0], ["", *[""] * env.max_turns]))
    if turns and turns[-1].over and (seen := _misused(env)):
        yield Finding(code="ARL-E017", message=f"After the end of an episode step {seen}.")
    if subject.again is not None:
        fresh = subject.again()
        try:
            if seen := _misused(fresh):
                yield Finding(code="ARL-E017", message=f"Before the first reset step {seen}.")
        finally:
            shut(fresh)


def _misused(env: ToolEnv) -> str:
    """What ``step`` did where it should refuse; empty where it refused."""
    try:
        env.step("")
    except EnvContractError:
        return ""
    except Exception as error:  # an environment under check may raise anything
        return f"raised {error!r}"
    return "went on"


def check_reproducibility(subject: Subject) -> Iterator[Finding]:
    """ARL-E007: the same task, seed and actions give the same turns."""
    env = subject.env
    for task in subject.tasks:
        for actions in scripts(env, task):
            one, other = list(play(env, task, actions)), list(play(env, task, actions))
            if not alike(one, other):
                message = f"Task {task.id!r} was played twice alike and gave {parting(one, other)}."
                yield Finding(code="ARL-E007", message=message)


def check_independence(subject: Subject) -> Iterator[Finding]:
    """ARL-E008: an episode goes the same way alone and beside a second instance."""
    if subject.again is None:
        return
    task = subject.tasks[0]
    plays = scripts(subject.env, task)
    alone = [_alone(subject.again, task, actions) for actions in plays]
    one, other = subject.again(), subject.again()
    try:
        playing = [play(env, task, actions) for env, actions in zip((one, other), plays, strict=True)]
        together = list(itertools.zip_longest(*playing))
    finally:
        shut(one)
        shut(other)
    for number, turns in enumerate(alone):
        beside = [turn for pair in together if (turn := pair[number]) is not None]
        if not alike(beside, turns):
            message = f"An episode alone and beside a second instance gave {parting(turns, beside)}."
            yield Finding(code="ARL-E008", message=message)


def _alone(make_env: Callable[[], ToolEnv], task: Task, actions: Sequence[str]) -> list[Turn]:
    env = make_env()
    try:
        return list(play(env, task, actions))
    finally:
        shut(env)
