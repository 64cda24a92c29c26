"""Probes of the reward: answers and programs that are worth nothing must stay at the floor.

The floor is what an answer that knows nothing scores. Where a probe calls a tool, its floor calls that tool as well: an
environment may pay for a call.
"""

import builtins
import itertools
import math
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import ModuleType

from agentrl.checker.contract import TOLERANCE
from agentrl.checker.play import (
    IGNORANT,
    LONG,
    SEED,
    StepRaised,
    Subject,
    as_sentence,
    call_text,
    gold_of,
    play,
    score,
    short,
    step,
)
from agentrl.checker.report import Finding
from agentrl.checker.tasks import facts
from agentrl.env import ToolEnv
from agentrl.types import Message, Task

CONSTANTS = ("0", "1", "-1", "2", "42", "yes", "no", "True", "None", "A", "[]")
"""Answers that say the same whatever was asked."""
_MORE_TASKS = 20
_FORMS = ("{}", r"\boxed{{{}}}", "<answer>{}</answer>")
_NO_NUMBERS = (
    "nan",
    "NaN",
    "inf",
    "-inf",
    "Infinity",
    r"\infty",
    "1e999",
    "-1e999",
    "9" * 5000,
    "1/0",
    "0/0",
    "10**5000",
)
_MARK = "agentrl_was_here"
_PLANT = f"__import__('builtins').__dict__.__setitem__('{_MARK}', 1)"
_INJECTIONS = (_PLANT, f"({_PLANT} or 1)", f"1 if {_PLANT} else 1")
_TAMPERING = (
    "import sys\nsys.exit(0)",
    f"import builtins\nbuiltins.{_MARK} = 1\nbuiltins.print = lambda *a, **k: None",
    "class Same:\n    __eq__ = lambda *a: True\n    __ne__ = lambda *a: False\n    __hash__ = lambda *a: 0\n"
    "answer = result = expected = solution = Same()",
    "import builtins\nfor name in ('float', 'abs', 'round', 'eval', 'all', 'any'):\n"
    "    setattr(builtins, name, lambda *a, **k: True)",
    "import sys\nfor name in ('agentrl.grading', '__main__'):\n    module = sys.modules.get(name)\n"
    "    for key in ('equal', 'last_boxed', 'grade', 'verify', 'check', 'reward'):\n"
    "        module and setattr(module, key, lambda *a, **k: True)",
)
"""Programs that would win where they run beside the grader."""
_COUNTS = (24, 1_000, 10_000, LONG)
"""How often a piece is repeated: exponential time shows in the first, quadratic time in those between."""
_SLOW_S = 3.0
"""Seconds of CPU time that a turn of ``LONG`` characters may take; a shorter one in proportion."""
_REPEATED = ("(", r"\boxed{", "9", " ", "a", "{", "```python\n", "<tool_call>", "\\frac{", "<answer>", "\n- ")


def check_worthless_answers(subject: Subject) -> Iterator[Finding]:
    """ARL-E009: answers that say nothing or everything score no more than the floor."""
    env = subject.env
    for task in subject.tasks:
        floor = _floor(env, task)
        if floor >= env.best_return - TOLERANCE:
            yield Finding(code="ARL-E009", message=f"An answer that knows nothing scores {floor:g}, the maximum.")
        first, _ = env.reset(seed=SEED, options={"task": task.id})
        # What shows how to call a tool would call it, and an environment may pay for that.
        for what, text in _probes(task, [message for message in first if not env.dialect.parse(message["content"])]):
            reached = _reached(env, task, [text, ""])
            if reached > floor + TOLERANCE:
                yield Finding(code="ARL-E009", message=f"{what} scores {reached:g} on task {task.id!r}.")


def _probes(task: Task, first: Sequence[Message]) -> Iterator[tuple[str, str]]:
    """Answers that must be worth nothing, each with what to call it."""
    yield "An empty answer", ""
    yield "An empty box", r"\boxed{}"
    yield "A copy of the prompt", task.prompt
    yield "A copy of the prompt in a box", rf"\boxed{{{task.prompt}}}"
    yield "A copy of everything read", "\n".join(message["content"] for message in first)
    # The calculation itself, which a lenient grader may work out on the agent's behalf.
    for sum_ in re.findall(r"[0-9(][0-9+\-*/(). ]*[+\-*/][0-9+\-*/(). ]*[0-9)]", task.prompt):
        yield "The calculation in a box, not worked out,", rf"\boxed{{{sum_}}}"
    # Right in the middle: neither a grader of the first box nor one of the last may find it.
    guesses = ["guess one", *map(str, range(20)), task.answer, "guess two"]
    yield "A box for every guess", " ".join(rf"\boxed{{{guess}}}" for guess in guesses)


def check_no_numbers(subject: Subject) -> Iterator[Finding]:
    """ARL-R003: what looks like a number and is none scores no more than a number that is wrong."""
    env, task = subject.env, subject.tasks[0]
    floor = max(_floor(env, task), *(_reached(env, task, [form.format("-123456789.5")]) for form in _FORMS))
    for text in _NO_NUMBERS:
        for form in _FORMS:
            floor = max(floor, _filler(env, task, len(form.format(text))))
            reached = _reached(env, task, [form.format(text)])
            # The other way round, a score that is NaN itself would pass.
            if text != task.answer and not reached <= floor + TOLERANCE:
                yield Finding(code="ARL-R003", message=f"The answer {short(form.format(text))} scores {reached:g}.")
                break


def check_constants(subject: Subject) -> Iterator[Finding]:
    """ARL-R005: no constant answer is right on all tasks, where their answers differ."""
    env = subject.env
    if len({task.answer or (task.prompt, facts(task)["data"]) for task in subject.tasks}) < 2:
        return
    if any(_floor(env, task) >= env.best_return - TOLERANCE for task in subject.tasks):
        return  # anything is right there, which is ARL-E009
    for text in (form.format(constant) for constant in CONSTANTS for form in _FORMS):
        if not _right_everywhere(env, subject.tasks, text):
            continue
        # Three tasks in a row may well have the same answer, where there are but two: look at more of them.
        more = list(itertools.islice(env.task_set, _MORE_TASKS))
        if _right_everywhere(env, more, text):
            message = f"The answer {short(text)} scores the maximum on all of {len(more)} tasks."
            yield Finding(code="ARL-R005", message=message)
            return


def _right_everywhere(env: ToolEnv, tasks: Iterable[Task], text: str) -> bool:
    return all(_reached(env, task, [text]) >= env.best_return - TOLERANCE for task in tasks)


def check_tool_answers(subject: Subject) -> Iterator[Finding]:
    """ARL-R001: an answer that a tool has printed, and the agent has not said, counts for nothing."""
    env = subject.env
    for task in subject.tasks:
        gold = gold_of(env, task)
        # The gold player's last turn has the form that the environment asks for.
        for answer in [gold[-1]] if gold else [form.format(task.answer) for form in _FORMS if task.answer]:
            yield from _printed(env, task, answer)


def _printed(env: ToolEnv, task: Task, answer: str) -> Iterator[Finding]:
    # Spelled in bytes, the answer stands nowhere but in what a program prints.
    hidden = f"print(bytes.fromhex('{answer.encode().hex()}').decode())"
    for tool in env.tools:
        idle = call_text(env, tool, "print('nothing')")
        for call in (call_text(env, tool, f"print({answer!r})"), call_text(env, tool, hidden)):
            for final in ("", "See above.") if call and idle else ():
                floor, reached = _reached(env, task, [idle, final]), _reached(env, task, [call, final])
                if reached > max(floor, _floor(env, task)) + TOLERANCE:
                    message = f"An answer that only {tool.name!r} has printed scores {reached:g} on task {task.id!r}."
                    yield Finding(code="ARL-R001", message=message)
                    return


def check_tampering(subject: Subject) -> Iterator[Finding]:
    """ARL-R002, R006: code in a tool call or an answer changes neither this process nor the grade."""
    env, task = subject.env, subject.tasks[0]
    floor = _floor(env, task)
    for code in _TAMPERING:
        for tool in env.tools:
            call, idle = call_text(env, tool, code), call_text(env, tool, "pass")
            if call and idle:
                allowed = max(floor, _reached(env, task, [idle, IGNORANT[1]]))
                yield from _tampered(env, task, [call, IGNORANT[1]], allowed, "ARL-R002")
        for form in ("{}", "```python\n{}\n```"):
            idle = max(_filler(env, task, len(code)), _reached(env, task, [form.format("pass"), ""]))
            yield from _tampered(env, task, [form.format(code), ""], max(floor, idle), "ARL-R002")
    for text in (form.format(injection) for injection in _INJECTIONS for form in _FORMS):
        yield from _tampered(env, task, [text], max(floor, _filler(env, task, len(text))), "ARL-R006")


def _filler(env: ToolEnv, task: Task, length: int) -> float:
    """What as many words score that say nothing: an environment that pays for length is ARL-E009."""
    return _reached(env, task, [("word " * length)[:length]])


def _tampered(env: ToolEnv, task: Task, actions: Sequence[str], allowed: float, code: str) -> Iterator[Finding]:
    before = {module: dict(vars(module)) for module in _within_reach()}
    try:
        reached, raised = _reached(env, task, actions), ""
    except StepRaised as error:
        reached, raised = -math.inf, str(error)
    changed = _restore(before)
    if changed:
        message = f"The text {short(actions[0])} changed {changed[0]} in the process that grades."
        yield Finding(code=code, message=message)
    elif "SystemExit" in raised:
        yield Finding(code=code, message=f"The text {short(actions[0])} ended the process that grades.")
    elif raised:
        yield Finding(code="ARL-E005", message=as_sentence(raised))
    elif reached > allowed + TOLERANCE:
        message = f"The text {short(actions[0])} scores {reached:g} on task {task.id!r}."
        yield Finding(code=code, message=message)


def _within_reach() -> list[ModuleType]:
    return [builtins, *(sys.modules[name] for name in ("agentrl.grading", "__main__") if name in sys.modules)]


def _restore(before: Mapping[ModuleType, dict[str, object]]) -> list[str]:
    """Undo what code that ran in this process did to it, since the check has to go on; the names that it changed."""
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
    env, task = subject.env, subject.tasks[0]
    for piece in _REPEATED:
        for count in _COUNTS:
            text = (piece * count)[:LONG] + "!"
            # In proportion: what is too slow on a short text would take for ever on the longest.
            allowed = max(_SLOW_S * len(text) / LONG, 0.1)
            if (took := _seconds(env, task, text, allowed)) > allowed:
                message = f"A text of {len(text)} characters, {short(piece)} repeated, took {took:.1f} s of CPU time."
                yield Finding(code="ARL-R004", message=message)
                return


def _seconds(env: ToolEnv, task: Task, text: str, enough: float) -> float:
    """CPU seconds of a turn with ``text``, in all threads: the best of three, for a shared core counts others' too."""
    best = math.inf
    for _ in range(3):
        env.reset(seed=SEED, options={"task": task.id})
        began = time.process_time()
        step(env, text)
        best = min(best, time.process_time() - began)
        if best <= enough:
            break
    return best


def _floor(env: ToolEnv, task: Task) -> float:
    return max(_reached(env, task, [text]) for text in IGNORANT)


def _reached(env: ToolEnv, task: Task, actions: Sequence[str]) -> float:
    return score(env, list(play(env, task, actions)))
