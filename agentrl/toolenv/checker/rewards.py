"""Checks of the reward: worthless answers and programs must not score above the floor.

The floor is the score of an answer without knowledge. Where a check's turns call a tool, its floor calls that tool as
well, since an environment may reward calls.
"""

import itertools
import math
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import ModuleType

from agentrl.toolenv.checker.contract import TOLERANCE
from agentrl.toolenv.checker.report import Finding
from agentrl.toolenv.checker.subject import IGNORANT, LONG, TEXTS, StepRaised, Subject, raised, short
from agentrl.toolenv.checker.tasks import facts
from agentrl.types import Task

_MORE_TASKS = 20
_FORMS = ("{}", r"\boxed{{{}}}", "<answer>{}</answer>")
_PLANT = "__import__('builtins').__dict__.__setitem__('agentrl_was_here', 1)"
_INJECTIONS = (_PLANT, f"({_PLANT} or 1)", f"1 if {_PLANT} else 1")
_COUNTS = (24, 1_000, 10_000, LONG)
"""Repetitions of a piece: exponential time shows at the first, quadratic time at the middle ones."""
_SLOW_S = 3.0
"""Allowed seconds of CPU time for a turn of ``LONG`` characters, and proportionally less for a shorter one."""


def check_worthless_answers(subject: Subject) -> Iterator[Finding]:
    """ARL-E009: answers that say nothing, or list every guess, score no more than the floor."""
    env = subject.env
    for task in subject.tasks:
        floor = _floor(subject, task)
        if floor >= env.best_return - TOLERANCE:
            yield Finding("ARL-E009", f"An answer that knows nothing scores {floor:g}, the maximum.")
        # Messages that show a tool call are skipped: copied, they would be a call, which may be rewarded.
        shown = [text for message in subject.begin(task) if not env.dialect.parse(text := message["content"])]
        for what, text in _worthless(task, shown):
            if (score := subject.score_of(task, [text, ""])) > floor + TOLERANCE:
                yield Finding("ARL-E009", f"{what} scores {score:g} on task {task.id!r}.")


def _worthless(task: Task, shown: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield answers that must be worth nothing, each with a name for the finding."""
    yield "An empty answer", ""
    yield "An empty box", r"\boxed{}"
    yield "A copy of the prompt", task.prompt
    yield "A copy of the prompt in a box", rf"\boxed{{{task.prompt}}}"
    yield "A copy of everything read", "\n".join(shown)
    # A lenient grader may evaluate a calculation that the agent has only copied.
    for sum_ in re.findall(r"[0-9(][0-9+\-*/(). ]*[+\-*/][0-9+\-*/(). ]*[0-9)]", task.prompt):
        yield "The calculation in a box, not worked out,", rf"\boxed{{{sum_}}}"
    # The right answer is in the middle, where a grader of only the first or last box does not look.
    guesses = ["guess one", *map(str, range(20)), task.answer, "guess two"]
    yield "A box for every guess", " ".join(rf"\boxed{{{guess}}}" for guess in guesses)


def check_no_numbers(subject: Subject) -> Iterator[Finding]:
    """ARL-R003: what looks like a number but is none scores no more than a wrong number."""
    task = subject.tasks[0]
    # A wrong number belongs to the floor: an environment may reward the form of an answer.
    wrong = [[form.format("-123456789.5")] for form in _FORMS]
    for text in (*TEXTS["no_numbers"], "9" * 5000):
        for answer in (form.format(text) for form in _FORMS if text != task.answer):
            score = subject.score_of(task, [answer])
            # Not ``score > floor + TOLERANCE``, which a score that is NaN would pass.
            if not score <= _floor(subject, task, *wrong, _filler(len(answer))) + TOLERANCE:
                yield Finding("ARL-R003", f"The answer {short(answer)} scores {score:g}.")
                break


def check_constants(subject: Subject) -> Iterator[Finding]:
    """ARL-R005: no constant answer is right on all tasks, where their answers differ."""
    env = subject.env
    if len({task.answer or (task.prompt, facts(task)["data"]) for task in subject.tasks}) < 2:
        return
    if any(_floor(subject, task) >= env.best_return - TOLERANCE for task in subject.tasks):
        return  # anything is right there, which is ARL-E009
    for text in (form.format(constant) for constant in TEXTS["constants"] for form in _FORMS):
        if not _right_everywhere(subject, subject.tasks, text):
            continue
        # A few tasks may share an answer by chance, such as yes or no: only more tasks can tell.
        more = list(itertools.islice(env.task_set, _MORE_TASKS))
        if _right_everywhere(subject, more, text):
            yield Finding("ARL-R005", f"The answer {short(text)} scores the maximum on all of {len(more)} tasks.")
            return


def _right_everywhere(subject: Subject, tasks: Iterable[Task], text: str) -> bool:
    return all(subject.score_of(task, [text]) >= subject.env.best_return - TOLERANCE for task in tasks)


def check_tool_answers(subject: Subject) -> Iterator[Finding]:
    """ARL-R001: an answer that only a tool has printed, not the agent's final text, scores nothing."""
    for task in subject.tasks:
        gold = subject.gold(task)
        # The gold player's last turn has the form that the environment asks for.
        for answer in [gold[-1]] if gold else [form.format(task.answer) for form in _FORMS if task.answer]:
            yield from _printed(subject, task, answer)


def _printed(subject: Subject, task: Task, answer: str) -> Iterator[Finding]:
    # Written in hex, the answer occurs only in the program's output, not in the agent's own text.
    hidden = f"print(bytes.fromhex('{answer.encode().hex()}').decode())"
    for tool in subject.env.tools:
        idle = subject.call(tool, "print('nothing')")
        for call in (subject.call(tool, f"print({answer!r})"), subject.call(tool, hidden)):
            for final in ("", "See above.") if call and idle else ():
                score = subject.score_of(task, [call, final])
                if score > _floor(subject, task, [idle, final]) + TOLERANCE:
                    message = f"An answer that only {tool.name!r} has printed scores {score:g} on task {task.id!r}."
                    yield Finding("ARL-R001", message)
                    return


def check_tampering(subject: Subject) -> Iterator[Finding]:
    """ARL-R002, R006: code in a tool call or an answer affects neither this process nor the grade."""
    task, end = subject.tasks[0], IGNORANT[1]
    for code in TEXTS["tampering"]:
        for tool in subject.env.tools:
            call, idle = subject.call(tool, code), subject.call(tool, "pass")
            if call and idle:
                yield from _tampered(subject, task, "ARL-R002", [call, end], _floor(subject, task, [idle, end]))
        for form in ("{}", "```python\n{}\n```"):
            floor = _floor(subject, task, _filler(len(code)), [form.format("pass"), ""])
            yield from _tampered(subject, task, "ARL-R002", [form.format(code), ""], floor)
    for text in (form.format(injection) for injection in _INJECTIONS for form in _FORMS):
        yield from _tampered(subject, task, "ARL-R006", [text], _floor(subject, task, _filler(len(text))))


def _filler(length: int) -> list[str]:
    """Return a meaningless text of ``length``, as a play: rewarding length is no tampering but ARL-E009."""
    return [("word " * length)[:length]]


def _tampered(subject: Subject, task: Task, code: str, actions: Sequence[str], floor: float) -> Iterator[Finding]:
    reachable = [sys.modules.get(name) for name in ("builtins", "agentrl.grading.numbers", "__main__")]
    before = {module: dict(vars(module)) for module in reachable if module is not None}
    try:
        score, failed = subject.score_of(task, actions), None
    except StepRaised as error:
        score, failed = -math.inf, error
    # Before anything else: the program may have replaced the builtins that the following lines use.
    changed = _restore(before)
    if changed:
        yield Finding(code, f"The text {short(actions[0])} changed {changed[0]} in the process that grades.")
    elif "SystemExit" in str(failed):
        yield Finding(code, f"The text {short(actions[0])} ended the process that grades.")
    elif failed:
        yield raised(failed, "grading")
    elif score > floor + TOLERANCE:
        yield Finding(code, f"The text {short(actions[0])} scores {score:g} on task {task.id!r}.")


def _restore(before: Mapping[ModuleType, dict[str, object]]) -> list[str]:
    """Undo changes to modules of this process, since the check has to continue; return the changed names."""
    changed: list[str] = []
    for module, names in before.items():
        now = vars(module)
        touched = [name for name in now if name not in names or now[name] is not names[name]]
        for name in [name for name in touched if name not in names]:
            del now[name]
        now.update(names)
        changed += touched
    return changed


def check_time(subject: Subject) -> Iterator[Finding]:
    """ARL-R004: parsing and grading take linear time, whatever the text."""
    task = subject.tasks[0]
    for piece in TEXTS["repeated"]:
        for count in _COUNTS:
            text = (piece * count)[:LONG] + "!"
            # Shorter texts have a proportional limit: what is too slow there would not end on the longest.
            allowed = max(_SLOW_S * len(text) / LONG, 0.1)
            if (took := _seconds(subject, task, text, allowed)) > allowed:
                message = f"A text of {len(text)} characters, {short(piece)} repeated, took {took:.1f} s of CPU time."
                yield Finding("ARL-R004", message)
                return


def _seconds(subject: Subject, task: Task, text: str, enough: float) -> float:
    """Return the CPU seconds of a turn with ``text`` over all threads: the least of three, as others may be slowed."""
    best = math.inf
    for _ in range(3):
        subject.begin(task)
        began = time.process_time()
        subject.step(text)
        best = min(best, time.process_time() - began)
        if best <= enough:
            break
    return best


def _floor(subject: Subject, task: Task, *plays: Sequence[str]) -> float:
    """Return the best score of answers without knowledge, and of further ``plays`` that show as little."""
    return max(subject.score_of(task, actions) for actions in (*([text] for text in IGNORANT), *plays))
