"""Whether an environment keeps its contract, found by playing it; every finding has a code that stays.

A script plays good calls, malformed ones, unknown tools, odd Unicode, over-long and cut-off turns, hostile programs and
the gold player; ``codes.CODES`` says what each code means and what to do. Not covered: whether tasks are any good, how
well a model reads the environment, and leaks of grandchildren.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import gymnasium

from agentrl.checker import contract, leaks, play, rewards, tasks, tokens, tools
from agentrl.checker.codes import CODES, Code
from agentrl.checker.play import Check, ControlTokens, StepRaised, Subject, as_sentence, gold_of
from agentrl.checker.report import Finding, Report
from agentrl.dialects import resolve_dialect
from agentrl.env import ToolEnv
from agentrl.errors import ConfigError, EnvContractError, InfrastructureError
from agentrl.registry import make
from agentrl.render import load_tokenizer

__all__ = ["CODES", "Code", "Finding", "Report", "check_env"]

_SHOWN = 3
"""Findings of one code that a report lists: the first ones say it all."""
_CHECKS: tuple[Check, ...] = (
    tasks.check_tasks,
    tasks.check_spec,
    contract.check_first_observation,
    tasks.check_drawing,
    tools.check_tools_work,
    tools.check_tools,
    contract.check_turns,
    contract.check_turn_limit,
    contract.check_gold,
    contract.check_record,
    contract.check_misuse,
    rewards.check_worthless_answers,
    rewards.check_no_numbers,
    rewards.check_constants,
    rewards.check_tool_answers,
    rewards.check_tampering,
    rewards.check_time,
    contract.check_reproducibility,
    contract.check_independence,
    leaks.check_leaks,
    tokens.check_tokens,
)


def check_env(
    env: str | ToolEnv,
    *,
    tasks: int = 3,
    dialect: str | None = None,
    tokenizer: str | Path | ControlTokens | None = None,
    say: Callable[[str], None] = lambda _: None,
    on_turn: Callable[[], None] = lambda: None,
) -> Report:
    """Play an environment by hostile, careless and perfect turns, and report where it breaks its contract.

    Args:
        env: the id of an environment, or an instance. One that ``make`` did not build can't be checked for what takes a
            second instance; the report says so. A given instance is left open, in the middle of an episode.
        tasks: how many tasks to play, from the first of its split.
        dialect: how tool calls are written; the environment's own choice by default, and for an instance its own.
            ``native`` is the form that the tokenizer's chat template writes.
        tokenizer: checks tokens as well, with this tokenizer or the one loaded from this folder or hub name.
        say: told before each check what is looked at and how many checks there are, as in ``"turns, 7 of 22"``.
        on_turn: called after every turn that is played.

    Raises:
        UnknownNameError: there is no such id or dialect.
        UsageError: the tokenizer can't be loaded.
        ConfigError: ``tasks`` is less than 1, ``dialect`` is given with an instance, or there is no native one.
        InfrastructureError: what a tool runs on failed, which says nothing about the environment.
    """
    if tasks < 1:
        raise ConfigError(f"tasks is {tasks}: a check needs at least one task")
    if dialect is not None and not isinstance(env, str):
        raise ConfigError("an instance has its dialect already: make it with the one to check, or give its id")
    loaded = load_tokenizer(tokenizer) if isinstance(tokenizer, str | Path) else tokenizer
    try:
        made = _made(env, dialect, loaded) if isinstance(env, str) else env
    except EnvContractError as error:
        return Report(findings=(Finding(code="ARL-E000", message=f"It can't be made: {error}."),))
    before = play.on_turn.set(on_turn)
    try:
        if unplayable := tools.unplayable(made):
            return Report(findings=tuple(unplayable))
        subject, findings = _subject(made, tasks, loaded), list[Finding]()
        if not isinstance(subject, Subject):
            return Report(findings=(subject,))
        for number, check in enumerate(_CHECKS, start=1):
            say(f"{_name(check)}, {number} of {len(_CHECKS)}")
            findings += _guarded(check, subject)
            if any(finding.code == "ARL-E024" for finding in findings):
                subject.skipped.append("what plays on: each call would take the tool's whole time.")
                break
        return Report(findings=tuple(_few(dict.fromkeys(findings))), skipped=(*subject.skipped, *_skipped(subject)))
    finally:
        play.on_turn.reset(before)
        if isinstance(env, str):
            made.close()


def _made(env_id: str, dialect: str | None, tokenizer: ControlTokens | None) -> ToolEnv:
    if dialect is None:
        return make(env_id)
    return make(env_id, dialect=dialect if tokenizer is None else resolve_dialect(dialect, tokenizer))


def _subject(env: ToolEnv, count: int, tokenizer: ControlTokens | None) -> Subject | Finding:
    try:
        tasks = tuple(itertools.islice(env.task_set, count))
    except Exception as error:  # an environment under check may raise anything
        return Finding(code="ARL-E000", message=f"Making its tasks raised {error!r}.")
    if not tasks:
        return Finding(code="ARL-E000", message=f"Its split {env.split!r} has no task.")
    spec = env.spec

    def again() -> ToolEnv:
        assert spec is not None
        other = gymnasium.make(spec, disable_env_checker=True).unwrapped
        assert isinstance(other, ToolEnv)
        return other

    return Subject(env=env, tasks=tasks, again=None if spec is None else again, tokenizer=tokenizer)


def _few(findings: Iterable[Finding]) -> Iterator[Finding]:
    """The first findings under each code; the last of those says how many there are more."""
    by_code: dict[str, list[Finding]] = {}
    for finding in findings:
        by_code.setdefault(finding.code, []).append(finding)
    for alike in by_code.values():
        yield from alike[: _SHOWN - 1]
        for last in alike[_SHOWN - 1 : _SHOWN]:
            more = len(alike) - _SHOWN
            yield replace(last, message=f"{last.message} ({more} more like it.)") if more else last


def _name(check: Check) -> str:
    return check.__name__.removeprefix("check_").replace("_", " ")


def _guarded(check: Check, subject: Subject) -> list[Finding]:
    findings: list[Finding] = []
    try:
        findings.extend(check(subject))
    except InfrastructureError:
        raise
    except StepRaised as error:
        findings.append(Finding(code="ARL-E005", message=as_sentence(error)))
    except Exception as error:  # an environment under check may raise anything
        findings.append(Finding(code="ARL-E000", message=f"Checking its {_name(check)} raised {error!r}."))
    return findings


def _skipped(subject: Subject) -> Iterator[str]:
    spec = subject.env.spec
    if spec is None:
        yield "what takes a second instance, shared state and leaks: this one was not built by make."
    elif callable(spec.entry_point):
        yield "whether the specification can be written as JSON: its entry point is no 'module:Class'."
    if spec is not None and not leaks.can_look():
        yield "what is left running: this machine has no /proc."
    try:
        lacking = gold_of(subject.env, subject.tasks[0]) is None
    except Exception:  # whatever it raised was found when gold was played
        lacking = False
    if lacking:
        yield "whether the maximum can be reached: there is no gold player."
