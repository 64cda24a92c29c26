"""Checks of tasks and specification: ids, splits, prompts that give the answer away, and a spec's JSON form."""

import itertools
import re
from collections.abc import Iterator, Sequence

from gymnasium.envs.registration import EnvSpec

from agentrl.errors import ConfigError
from agentrl.toolenv.checker.report import Finding
from agentrl.toolenv.checker.subject import SEED, Subject, contrast, short, shut
from agentrl.types import Message, Task

SPLIT_SAMPLE = 200
"""Number of tasks of each split that are compared."""
_LONG_ANSWER = 20
"""Length of an answer that does not occur in a prompt by chance [characters]."""
_LABELLED = r"(?:answer|solution|result)s?\b[^\n\w]{0,4}(?:is\b|=|:)[^\n\w]{0,8}"


def check_tasks(subject: Subject) -> Iterator[Finding]:
    """ARL-E014, E015, S001 to S003: tasks are found by id, and none is empty, shared by splits or given away."""
    env = subject.env
    for task in subject.tasks:
        expected, found_by_id = facts(task), facts(env.task_set.find(task.id))
        for what, text in expected.items():
            if found_by_id[what] != text:
                differ = contrast(text, found_by_id[what])
                yield Finding("ARL-E015", f"The id {task.id!r} leads to another task: their {what} is {differ}.")
                break
    samples = {split: list(itertools.islice(env.tasks(split), SPLIT_SAMPLE)) for split in env.splits}
    for split, tasks in samples.items():
        yield from _split_findings(split, tasks)
    # By content, since the same problem may have a different id in each split.
    seen: dict[tuple[str, str, str], str] = {}
    for split, tasks in samples.items():
        for task in tasks:
            other = seen.setdefault((_plain(task.prompt), task.answer, facts(task)["data"]), split)
            if other != split:
                yield Finding("ARL-E014", f"Splits {other!r} and {split!r} share the task {short(task.prompt)}.")
                return


def check_splits(subject: Subject) -> Iterator[Finding]:
    """ARL-E000: the environment takes ``split``, which training and evaluation set."""
    if subject.env.spec is None:
        return
    try:
        shut(subject.another(split=subject.env.split).env)
    except (TypeError, ConfigError) as error:
        yield Finding("ARL-E000", f"Making it with split={subject.env.split!r} raised {short(str(error), 90)}.")


def facts(task: Task) -> dict[str, str]:
    """Return the texts by which two tasks are compared, without the addresses in the ``repr`` of the data."""
    data = re.sub(r" at 0x[0-9a-f]+", "", repr(sorted(task.data.items())))
    return {"id": task.id, "prompt": task.prompt, "answer": task.answer, "data": data}


def _plain(text: str) -> str:
    return " ".join(text.lower().split())


def _split_findings(split: str, tasks: Sequence[Task]) -> Iterator[Finding]:
    ids: set[str] = set()
    for task in tasks:
        if task.id in ids:
            yield Finding("ARL-S001", f"Two tasks of split {split!r} have the id {task.id!r}.")
            break
        ids.add(task.id)
    empty = [task for task in tasks if not task.prompt.strip() or not task.id]
    if empty:
        yield Finding("ARL-S002", f"Task {empty[0].id!r} of split {split!r} has an empty prompt or id.")
    telling = [task for task in tasks if gives_away(task)]
    # A few may hold it by chance, or because the prompt offers answers to choose from.
    if len(telling) > len(tasks) / 2:
        message = f"{len(telling)} of {len(tasks)} prompts of split {split!r} hold their answer, such as"
        yield Finding("ARL-S003", f"{message} {short(telling[0].answer)}.")


def gives_away(task: Task) -> bool:
    """Return True if the prompt holds the answer, labelled as such or too long to occur there by chance."""
    answer = task.answer.strip()
    if len(answer) >= _LONG_ANSWER and answer in task.prompt:
        return True
    # Without a label there is no match; to compile a pattern for each answer takes milliseconds.
    if not answer or not re.search(_LABELLED, task.prompt, re.IGNORECASE):
        return False
    return re.search(rf"{_LABELLED}{re.escape(answer)}(?!\w)", task.prompt, re.IGNORECASE) is not None


def check_drawing(subject: Subject) -> Iterator[Finding]:
    """ARL-S006: the seed alone decides which task is drawn."""
    env = subject.env
    drawn = [env.reset(seed=seed)[1].get("task_id") for seed in (SEED, SEED + 1, SEED, SEED + 1)]
    if drawn[:2] != drawn[2:]:
        yield Finding("ARL-S006", f"The same seeds drew the tasks {drawn[:2]} and then {drawn[2:]}.")


def check_spec(subject: Subject) -> Iterator[Finding]:
    """ARL-S004: the specification survives JSON and makes the same environment."""
    spec = subject.env.spec
    if spec is None:
        return
    if callable(spec.entry_point):
        reason = "that takes an entry point 'module:Class', as a text."
        subject.skipped.append(f"whether the specification can be written as JSON: {reason}")
        return
    try:
        back = EnvSpec.from_json(spec.to_json())
    except (TypeError, ValueError) as error:
        yield Finding("ARL-S004", f"The specification can't be written as JSON: {error}.")
        return
    # If instances of one specification differ already, that is ARL-E002.
    observations: list[tuple[Message, ...]] = []
    for each in (spec, back):
        with subject.fresh(each) as other:
            observations.append(other.begin(other.tasks[0]))
    if observations[1] != observations[0] == subject.begin(subject.tasks[0]):
        differ = contrast(*observations)
        yield Finding("ARL-S004", f"The specification read back from JSON makes another environment: {differ}.")
