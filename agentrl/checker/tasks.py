"""The tasks and the specification: ids, splits, prompts that say too much, and a spec that can be written down."""

import itertools
import re
from collections.abc import Iterator, Sequence

import gymnasium
from gymnasium.envs.registration import EnvSpec

from agentrl.checker.play import SEED, Subject, both, short, shut
from agentrl.checker.report import Finding
from agentrl.env import ToolEnv
from agentrl.types import Task

SPLIT_SAMPLE = 200
"""How many tasks of each split are looked at."""
_LONG_ANSWER = 20
"""An answer of so many characters does not stand in a prompt by chance."""
_LABELLED = r"(?:answer|solution|result)s?\b[^\n\w]{0,4}(?:is\b|=|:)[^\n\w]{0,8}"


def check_tasks(subject: Subject) -> Iterator[Finding]:
    """ARL-E014, E015, S001 to S003: tasks can be found again, and none is empty, shared or given away."""
    env = subject.env
    for task in subject.tasks:
        found = env.task_set.find(task.id)
        wanted, got = facts(task), facts(found)
        if wanted != got:
            what = next(name for name in wanted if wanted[name] != got[name])
            message = f"The id {task.id!r} leads to another task: their {what} is {both(wanted[what], got[what])}."
            yield Finding(code="ARL-E015", message=message)
    samples = {split: list(itertools.islice(env.tasks(split), SPLIT_SAMPLE)) for split in env.splits}
    for split, tasks in samples.items():
        yield from _split_findings(split, tasks)
    seen: dict[tuple[str, str, str], str] = {}
    for split, tasks in samples.items():
        for task in tasks:
            other = seen.setdefault((_plain(task.prompt), task.answer, facts(task)["data"]), split)
            if other != split:
                yield Finding(
                    code="ARL-E014", message=f"Splits {other!r} and {split!r} share the task {short(task.prompt)}."
                )
                return


def facts(task: Task) -> dict[str, str]:
    """What makes a task another one; data may be anything, of which its place in memory does not count."""
    data = re.sub(r" at 0x[0-9a-f]+", "", repr(sorted(task.data.items())))
    return {"id": task.id, "prompt": task.prompt, "answer": task.answer, "data": data}


def _plain(text: str) -> str:
    return " ".join(text.lower().split())


def _split_findings(split: str, tasks: Sequence[Task]) -> Iterator[Finding]:
    ids: set[str] = set()
    for task in tasks:
        if task.id in ids:
            yield Finding(code="ARL-S001", message=f"Two tasks of split {split!r} have the id {task.id!r}.")
            break
        ids.add(task.id)
    empty = [task for task in tasks if not task.prompt.strip() or not task.id]
    if empty:
        yield Finding(code="ARL-S002", message=f"Task {empty[0].id!r} of split {split!r} has an empty prompt or id.")
    telling = [task for task in tasks if gives_away(task)]
    # A few may do so by chance, or because the answer is to be picked from what the prompt offers.
    if len(telling) > len(tasks) / 2:
        message = f"{len(telling)} of {len(tasks)} prompts of split {split!r} hold their answer, such as"
        yield Finding(code="ARL-S003", message=f"{message} {short(telling[0].answer)}.")


def gives_away(task: Task) -> bool:
    """Whether the prompt holds the answer, named as such or too long to stand there by chance."""
    answer = task.answer.strip()
    if len(answer) >= _LONG_ANSWER and answer in task.prompt:
        return True
    return bool(answer) and re.search(rf"{_LABELLED}{re.escape(answer)}(?!\w)", task.prompt, re.IGNORECASE) is not None


def check_drawing(subject: Subject) -> Iterator[Finding]:
    """ARL-S006: the seed alone decides which task is drawn."""
    env = subject.env
    drawn = [env.reset(seed=seed)[1].get("task_id") for seed in (SEED, SEED + 1, SEED, SEED + 1)]
    if drawn[:2] != drawn[2:]:
        yield Finding(code="ARL-S006", message=f"The same seeds drew the tasks {drawn[:2]} and then {drawn[2:]}.")


def check_spec(subject: Subject) -> Iterator[Finding]:
    """ARL-S004: the specification survives JSON and makes the same environment."""
    spec = subject.env.spec
    if spec is None or callable(spec.entry_point):
        return
    try:
        back = EnvSpec.from_json(spec.to_json())
    except (TypeError, ValueError) as error:
        yield Finding(code="ARL-S004", message=f"The specification can't be written as JSON: {error}.")
        return
    # Where every instance begins in its own way, that is ARL-E002.
    firsts = [_first(gymnasium.make(known, disable_env_checker=True).unwrapped, subject) for known in (spec, back)]
    if firsts[1] != firsts[0] == _begin(subject.env, subject):
        message = f"The specification read back from JSON makes another environment: {both(*firsts)}."
        yield Finding(code="ARL-S004", message=message)


def _first(made: object, subject: Subject) -> object:
    assert isinstance(made, ToolEnv), "it was when it was made before"
    try:
        return _begin(made, subject)
    finally:
        shut(made)


def _begin(env: ToolEnv, subject: Subject) -> object:
    return env.reset(seed=SEED, options={"task": subject.tasks[0].id})[0]
