"""Checks of ``reset`` and ``step``: observations, the end of episodes, and reproducibility."""

import copy
import itertools
import math
from collections.abc import Iterator

from agentrl.errors import EnvContractError
from agentrl.toolenv.base import ToolEnv
from agentrl.toolenv.checker.report import Finding
from agentrl.toolenv.checker.subject import SEED, Subject, Turn, contrast, difference, short
from agentrl.toolenv.tools.context import SubTurn
from agentrl.types import Message

TOLERANCE = 1e-9
"""Tolerance for rounding between scores, which are sums of weights."""


def check_first_observation(subject: Subject) -> Iterator[Finding]:
    """ARL-E001, E002: the first observation is well formed and depends on the task alone, on every instance."""
    env = subject.env
    observations: list[tuple[Message, ...]] = []
    for task in subject.tasks:
        observation = subject.begin(task)
        # A copy, since the environment may change what it returned.
        observations.append(copy.deepcopy(observation))
        if not env.observation_space.contains(observation):
            yield Finding("ARL-E001", f"The first observation {short(str(observation))} is outside its space.")
        elif not observation or observation[-1]["role"] != "user":
            yield Finding("ARL-E001", "The first observation does not end with the user's message.")
        # Another seed as well: it draws tasks, but must not change a task that is asked for by id.
        for seed in (SEED, SEED + 1):
            if (again := subject.begin(task, seed)) != observation:
                message = f"Task {task.id!r} began in two ways on one instance, {contrast(observation, again)}."
                yield Finding("ARL-E002", message)
    if env.spec is not None:
        with subject.fresh() as other:
            for task, observation in zip(subject.tasks, observations, strict=True):
                if (again := other.begin(task)) != observation:
                    message = f"Task {task.id!r} began in two ways on two instances, {contrast(observation, again)}."
                    yield Finding("ARL-E002", message)


def check_turns(subject: Subject) -> Iterator[Finding]:
    """ARL-E004 to E006, E010 to E012, R007, S005: ``step`` takes every text that a model may write."""
    env = subject.env
    for action in subject.hostile_turns():
        if not env.action_space.contains(action):
            yield Finding("ARL-S005", f"The action space leaves out the text {short(action)}.")
        for turn in subject.turns(subject.tasks[0], [action]):
            yield from _turn_findings(env, action, turn)


def _turn_findings(env: ToolEnv, action: str, turn: Turn) -> Iterator[Finding]:
    if turn.terminated and turn.truncated:
        yield Finding("ARL-E006", f"The text {short(action)} both terminated and truncated the episode.")
    if env.dialect.parse(action):
        # With a limit of one turn, any call uses up the turns.
        if (turn.terminated and not env.episode.ended) or (turn.truncated and env.max_turns > 1):
            yield Finding("ARL-E004", f"The call {short(action)} ended the episode.")
    elif not turn.over:
        yield Finding("ARL-E011", f"The text {short(action)} has no call, yet the episode continues.")
    if not env.observation_space.contains(turn.messages):
        yield Finding("ARL-E010", f"What follows the text {short(action)} is outside its space.")
    if not (isinstance(turn.reward, float) and math.isfinite(turn.reward)):
        yield Finding("ARL-E012", f"The text {short(action)} earned {turn.reward!r}.")
    yield from part_findings(turn)


def part_findings(turn: Turn) -> Iterator[Finding]:
    """ARL-R007: no part of a final reward is above 1."""
    for name, value in turn.parts.items():
        if value > 1 + TOLERANCE:
            yield Finding("ARL-R007", f"The part {name!r} of a reward was {value:g}.")


def check_turn_limit(subject: Subject) -> Iterator[Finding]:
    """ARL-E006, E011: running out of turns truncates the episode, no sooner and no later."""
    env = subject.env
    # One call more than is allowed: an environment without a limit would take it.
    for call in subject.calls()[:1]:
        turns = list(subject.turns(subject.tasks[0], [call] * (env.max_turns + 1)))
        if env.episode.ended:
            continue
        if len(turns) != env.max_turns or not turns[-1].over:
            yield Finding("ARL-E011", f"{len(turns)} turns, not {env.max_turns}, were allowed.")
        elif turns[-1].terminated:
            yield Finding("ARL-E006", "Running out of turns terminated the episode.")


def check_gold(subject: Subject) -> Iterator[Finding]:
    """ARL-E003, E022, R007: the gold player's calls work, and its last turn ends the episode with the maximum."""
    for task in subject.tasks:
        actions = subject.gold(task)
        if actions is None:
            subject.skipped.append("whether the maximum can be reached: there is no gold player.")
            return
        turns, episode = list(subject.turns(task, actions)), subject.env.episode
        results = [message["content"] for message in episode.messages if message["role"] == "tool"]
        for run, result in zip(episode.tool_runs, results, strict=False):
            if not run.ok:
                yield Finding(
                    "ARL-E022", f"Gold's call of {run.name!r} failed with {short(result, 100)} on task {task.id!r}."
                )
                break
        reached, top = subject.score(turns), subject.env.best_return
        cut_off = bool(turns) and turns[-1].truncated and not turns[-1].terminated
        own = sum(not isinstance(action, SubTurn) for action in actions)
        if len(turns) != own or cut_off or reached < top - TOLERANCE:
            message = (
                f"Gold scored {reached:g} of {top:g} in {len(turns)} of its {own} turns of task {task.id!r}"
                f"{', and the turn limit cut it off' if cut_off else ''}."
            )
            yield Finding("ARL-E003", message)
        for turn in turns[-1:]:
            yield from part_findings(turn)


def check_record(subject: Subject) -> Iterator[Finding]:
    """ARL-E016: returned messages are never changed afterwards, and ``env.episode`` holds the same ones."""
    env = subject.env
    for actions in (*subject.scripts(subject.tasks[0]), *([text, ""] for text in subject.hostile_turns())):
        observation = subject.begin(subject.tasks[0])
        returned: list[object] = [observation]
        exchanged = [copy.deepcopy(observation)]
        for action in actions:
            turn = subject.step(action)
            returned.append(turn.returned)
            exchanged += [(Message(role="assistant", content=action),), turn.messages]
            if turn.over:
                break
        # Every second entry was returned by the environment; those between are the assistant's turns.
        if returned != exchanged[::2]:
            yield Finding("ARL-E016", "Messages were changed after reset or step had returned them.")
        elif list(env.episode.messages) != list(itertools.chain.from_iterable(exchanged)):
            yield Finding("ARL-E016", "The record in env.episode holds other messages than reset and step exchanged.")


def check_misuse(subject: Subject) -> Iterator[Finding]:
    """ARL-E017: ``step`` before ``reset`` and after the end raises the typed error."""
    # More turns than are allowed, so that the episode ends whatever an empty text means to the environment.
    turns = list(subject.turns(subject.tasks[0], [""] * (subject.env.max_turns + 1)))
    if turns and turns[-1].over and (seen := _misused(subject.env)):
        yield Finding("ARL-E017", f"After the end of an episode step {seen}.")
    if subject.env.spec is not None:
        with subject.fresh() as other:
            if seen := _misused(other.env):
                yield Finding("ARL-E017", f"Before the first reset step {seen}.")


def _misused(env: ToolEnv) -> str:
    """Call ``step`` where it should refuse; return what it did instead, empty where it refused."""
    try:
        env.step("")
    except EnvContractError:
        return ""
    except Exception as error:  # an environment under check may raise anything
        return f"raised {error!r}"
    return "continued"


def check_reproducibility(subject: Subject) -> Iterator[Finding]:
    """ARL-E007: the same task, seed and actions give the same turns."""
    for task in subject.tasks:
        for actions in subject.scripts(task):
            turns, again = (list(subject.turns(task, actions)) for _ in range(2))
            if differ := difference(turns, again):
                yield Finding("ARL-E007", f"Task {task.id!r} was played twice alike and gave {differ}.")


def check_independence(subject: Subject) -> Iterator[Finding]:
    """ARL-E008: an episode takes the same course alone and beside a second instance."""
    if subject.env.spec is None:
        return
    task = subject.tasks[0]
    scripts = subject.scripts(task)
    alone: list[list[Turn]] = []
    for actions in scripts:
        with subject.fresh() as other:
            alone.append(list(other.turns(task, actions)))
    with subject.fresh() as left, subject.fresh() as right:
        episodes = [other.turns(task, actions) for other, actions in zip((left, right), scripts, strict=True)]
        # ``turns`` is lazy: zip_longest makes the two take turns.
        pairs = list(itertools.zip_longest(*episodes))
    for turns, beside in zip(alone, zip(*pairs, strict=True), strict=True):
        if differ := difference(turns, [turn for turn in beside if turn is not None]):
            yield Finding("ARL-E008", f"An episode alone and beside a second instance gave {differ}.")
