"""The environment checker: it plays an environment and reports contract violations under stable codes.

Scripts play good calls, malformed ones, unknown tools, odd Unicode, over-long and cut-off turns, hostile programs and
the gold player; ``CODES`` gives each code's meaning and remedy. Not covered: the tasks' quality, how well a model
reads the environment, and leaks of grandchild processes.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from agentrl.errors import ConfigError, EnvContractError, InfrastructureError
from agentrl.render.loading import load_tokenizer
from agentrl.render.tokens import ChatTokenizer
from agentrl.toolenv.base import ToolEnv
from agentrl.toolenv.checker import contract, leaks, rewards, tasks, tokens, tools
from agentrl.toolenv.checker.report import CODES, Fault, Finding, Report
from agentrl.toolenv.checker.subject import Check, Subject, raised
from agentrl.toolenv.dialects import resolve_dialect
from agentrl.toolenv.registry import make

__all__ = ["CODES", "Fault", "Finding", "Report", "check_env"]

_SHOWN = 3
"""Most findings of one code that a report lists: the first ones are enough."""
# Tools are tried early: a tool that always times out (ARL-E024) ends the check before the many plays that follow.
CHECKS: tuple[Check, ...] = (
    tasks.check_tasks,
    tasks.check_splits,
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
    tokens.check_tokenizer,
)


def check_env(
    env: str | ToolEnv,
    *,
    arguments: Mapping[str, Any] = MappingProxyType({}),
    tasks: int = 3,
    dialect: str | None = None,
    tokenizer: str | Path | ChatTokenizer | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Report:
    """Play an environment with hostile, careless and perfect turns, and report contract violations.

    Args:
        env: the id of an environment, or an instance. For an instance that ``make`` did not build, checks that need a
            second instance are skipped, and the report says so. A given instance is left open, within an episode.
        arguments: the environment's own, to make that of an id with.
        tasks: how many tasks to play, from the beginning of the split.
        dialect: how tool calls are written; the environment's own choice by default, and for an instance its own.
            ``native`` is the form that the tokenizer's chat template writes.
        tokenizer: a tokenizer, or the folder or hub name of one, to check tokens with as well.
        say: receives each check's name before it begins, as in ``"turns"``.

    Raises:
        UnknownNameError: there is no such id or dialect.
        UsageError: the tokenizer can't be loaded.
        ConfigError: ``tasks`` is less than 1, ``dialect`` or ``arguments`` are given with an instance, or there is no
            native dialect.
        InfrastructureError: a tool's sandbox or server failed, which says nothing about the environment.
    """
    if tasks < 1:
        raise ConfigError(f"tasks is {tasks}: a check needs at least one task")
    if (dialect is not None or arguments) and not isinstance(env, str):
        raise ConfigError("an instance has its dialect and arguments already: make it with those to check")
    loaded = load_tokenizer(tokenizer) if isinstance(tokenizer, str | Path) else tokenizer
    try:
        made = _made(env, arguments, dialect, loaded) if isinstance(env, str) else env
    except EnvContractError as error:
        return Report(findings=(raised(error, "making it"),))
    try:
        if unplayable := tools.unplayable(made):
            return Report(findings=tuple(unplayable))
        subject, findings = _subject(made, tasks, loaded), list[Finding]()
        if isinstance(subject, Finding):
            return Report(findings=(subject,))
        for check in CHECKS:
            say(_name(check))
            findings += _guarded(check, subject)
            if any(finding.code == "ARL-E024" for finding in findings):
                subject.skipped.append("all other checks: each call would take the tool's whole time.")
                break
        # Two checks may find the same: the dict removes duplicates and keeps the order.
        return Report(findings=tuple(_few(dict.fromkeys(findings))), skipped=tuple(subject.skipped))
    finally:
        if isinstance(env, str):
            made.close()


def _made(env_id: str, arguments: Mapping[str, Any], dialect: str | None, tokenizer: ChatTokenizer | None) -> ToolEnv:
    if dialect := dialect or arguments.get("dialect"):
        dialect = dialect if tokenizer is None else resolve_dialect(dialect, tokenizer)
        arguments = {**arguments, "dialect": dialect}
    return make(env_id, **arguments)


def _subject(env: ToolEnv, count: int, tokenizer: ChatTokenizer | None) -> Subject | Finding:
    try:
        tasks = tuple(itertools.islice(env.task_set, count))
    except Exception as error:  # an environment under check may raise anything
        return raised(error, "Making its tasks")
    if not tasks:
        return Finding("ARL-E000", f"Its split {env.split!r} has no task.")
    subject = Subject(env=env, tasks=tasks, tokenizer=tokenizer)
    if env.spec is None:
        subject.skipped.append("what takes a second instance, shared state and leaks: this one was not built by make.")
    return subject


def _few(findings: Iterable[Finding]) -> Iterator[Finding]:
    """Keep the first findings of each code; the last one kept says how many more there are.

    Errors from one method are one finding, whatever they say of the text that was being graded.
    """
    by_code: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        by_code.setdefault((finding.code, finding.method), []).append(finding)
    for (_, method), alike in by_code.items():
        shown = alike[: 1 if method else _SHOWN]
        if not method and (more := len(alike) - _SHOWN) > 0:
            shown[-1] = replace(shown[-1], message=f"{shown[-1].message} ({more} more like it.)")
        yield from shown


def _name(check: Check) -> str:
    return check.__name__.removeprefix("check_").replace("_", " ")


def _guarded(check: Check, subject: Subject) -> Iterator[Finding]:
    try:
        yield from check(subject)
    except InfrastructureError:  # no finding: it says nothing about the environment
        raise
    except Exception as error:  # an environment under check may raise anything
        yield raised(error, f"Checking its {_name(check)}")
