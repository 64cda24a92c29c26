"""``agentrl probe``: audit rewards for wins that were not earned and for right answers that were not rewarded."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import groupby

from agentrl.errors import UnknownNameError, UsageError
from agentrl.eval.episodes import env_call, remake
from agentrl.eval.pages import Section, shorten
from agentrl.grading.latex import final_box, readable, require_math, same_answer, verified
from agentrl.runs.records import Record
from agentrl.types import Origin, Task

KINDS: Mapping[str, str] = {
    "unearned": "Won, and neither our grader nor math-verify accepts the answer",
    "cut": "Reward on a turn that was cut off",
    "graders": "Won, and one of our grader and math-verify does not accept the answer",
    "missed": "Lost, and both our grader and math-verify accept the answer",
    "no_tool": "Won without a tool call",
    "from_tool": "Won with an answer that only a tool wrote",
    "in_prompt": "Won with an answer that the prompt holds",
    "boxes": "Won with several boxed answers in one turn",
    "constant": "One answer to many tasks, of which it wins some",
}
"""Kinds of suspects, the gravest first."""
_SHOWN = 20
_LEAST_CONSTANT, _SHARE_CONSTANT = 3, 0.1
"""An answer counts as constant where so many tasks, and so large a share of them, get it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """An episode that a person should look at."""

    kind: str
    """A key of ``KINDS``."""
    task_id: str
    """Its task."""
    seed: int
    """Its seed."""
    why: str
    """The reason, with the texts that matter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """The suspects among some episodes."""

    episodes: int
    """How many were audited."""
    wins: int
    """How many succeeded."""
    suspects: tuple[Suspect, ...]
    """The gravest kind first, then by task."""
    notes: tuple[str, ...]
    """Checks that could not be made, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """An episode with its task."""

    record: Record
    """The episode."""
    task: Task | None
    """Its task; None where its environment was not made."""
    tools: bool
    """Whether its environment has tools."""

    @property
    def final(self) -> str:
        """The assistant's last text."""
        return self.record.trajectory.turns[-1][0] if self.record.trajectory.turns else ""

    @property
    def answer(self) -> str:
        """Its answer: the last box, or else the last line."""
        box = final_box(self.final)
        return (self.final.strip().rpartition("\n")[2] if box is None else box).strip()

    @property
    def expected(self) -> str:
        """The right answer where that is known; empty where it is not."""
        return self.task.answer.strip() if self.task else ""


def probe(records: Sequence[Record], *, trusted: bool, say: Callable[[str], None] = lambda _: None) -> Audit:
    """Look for suspicious episodes.

    Args:
        records: the episodes.
        trusted: see ``agentrl.eval.episodes.remake``; without the environment less can be looked for.
        say: prints a line for each environment before it is made.

    Raises:
        InfrastructureError: the grading processes do not work.
    """
    notes: list[str] = []
    cases = list(_cases(records, trusted, notes, say))
    try:
        require_math()
        second = True
    except UsageError as error:
        second = False
        notes.append(f"no second grader: {error}")
    reasons = [(case.record.trajectory, *reason) for case in cases for reason in _reasons(case, second)]
    suspects = [Suspect(kind=kind, task_id=of.task_id, seed=of.seed, why=why) for of, kind, why in reasons]
    suspects += _constant(cases)
    order = list(KINDS)
    suspects.sort(key=lambda suspect: (order.index(suspect.kind), suspect.task_id, suspect.seed))
    wins = sum(record.won for record in records)
    return Audit(episodes=len(records), wins=wins, suspects=tuple(suspects), notes=tuple(notes))


def sections(audit: Audit) -> Iterator[Section]:
    """Yield the sections of an audit's report, a table for each kind of suspect."""
    # ``probe`` has sorted them by kind.
    for kind, group in groupby(audit.suspects, key=lambda suspect: suspect.kind):
        rows = [(suspect.task_id, suspect.seed, suspect.why) for suspect in group]
        more = [f"{len(rows) - _SHOWN} more are not shown: --json lists all."] if len(rows) > _SHOWN else []
        title, head = f"{KINDS[kind]}: {len(rows)}", ["task", "seed", "why"]
        yield Section(title=title, text=more, head=head, rows=rows[:_SHOWN])
    nothing = [] if audit.suspects else ["Nothing suspicious was found."]
    yield Section(title=f"{audit.episodes} episodes, {audit.wins} won", text=[*nothing, *audit.notes])


def _cases(records: Sequence[Record], trusted: bool, notes: list[str], say: Callable[[str], None]) -> Iterator[_Case]:
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        groups[env_call(record.origin)].append(record)
    for key, some in groups.items():
        say(f"environment: {key}")
        tasks, tools = _tasks(some[0].origin, some, trusted, notes)
        # Where the environment was not made, a call in any episode shows that it has tools.
        tools = tools or any(record.trajectory.tool_runs for record in some)
        yield from (_Case(record=record, task=tasks.get(record.trajectory.task_id), tools=tools) for record in some)


def _tasks(
    origin: Origin, records: Iterable[Record], trusted: bool, notes: list[str]
) -> tuple[Mapping[str, Task], bool]:
    """Return the tasks of episodes by id, and whether their environment has tools."""
    tasks: dict[str, Task] = {}
    try:
        with closing(remake(origin, trusted=trusted)) as env:
            for task_id in {record.trajectory.task_id for record in records}:
                try:
                    tasks[task_id] = env.task_set.find(task_id)
                except UnknownNameError as error:
                    notes.append(f"the right answer is not known: {error}")
            return tasks, bool(env.tools)
    except UsageError as error:
        notes.append(f"the right answers are not known, so less was looked for: {error}")
        return {}, False


def _reasons(case: _Case, second: bool) -> Iterator[tuple[str, str]]:
    """Yield each kind of suspicion about an episode, with the reason; ``second``: ask both graders."""
    trajectory, won = case.record.trajectory, case.record.won
    paid = [index for index, turn in enumerate(trajectory.sampled) if turn.cut and trajectory.rewards[index] > 0]
    if paid:
        yield "cut", f"turn {paid[0] + 1} got {trajectory.rewards[paid[0]]:g}"
    if second:
        yield from _second_grade(case)
    if not won:
        return
    if case.tools and not trajectory.tool_runs:
        yield "no_tool", f"answered {_short(case.answer)}"
    texts: dict[str, str] = defaultdict(str)
    for message in trajectory.messages:
        texts[message["role"]] += message["content"] + "\n"
    expected = case.expected
    if expected and _holds(texts["tool"], expected) and not _holds(texts["assistant"], expected):
        yield "from_tool", f"{_short(expected)} stands in no turn of the assistant"
    # One sign, such as a choice's letter, is in every prompt.
    right = expected or case.answer
    if len(right) > 1 and _holds(texts["system"] + texts["user"], right):
        yield "in_prompt", f"the prompt holds {_short(right)}"
    boxes = {box.strip() for box in re.findall(r"\\boxed\{([^{}]*)", case.final)}
    if len(boxes) > 1:
        yield "boxes", f"{len(boxes)} answers: {_short(', '.join(sorted(boxes)))}"


def _second_grade(case: _Case) -> Iterator[tuple[str, str]]:
    """Yield the suspicion that the recorded verdict is not that of our grader and of math-verify."""
    box = final_box(case.final)
    if case.task is None or box is None or not readable(case.expected):
        return
    ours = same_answer(box, case.expected, problem=case.task.prompt)
    theirs = verified(box, case.expected)
    answers = f"answered {_short(box)}, expected {_short(case.expected)}"
    if case.record.won and not (ours and theirs):
        which = "neither accepts it" if not ours and not theirs else f"{'math-verify' if ours else 'ours'} does not"
        yield "graders" if ours or theirs else "unearned", f"{answers}: {which}"
    elif not case.record.won and ours and theirs:
        yield "missed", answers


def _constant(cases: Iterable[_Case]) -> Iterator[Suspect]:
    """Yield answers that many tasks got, of which some were won although not all of them want it."""
    by_answer: dict[tuple[str, str], list[_Case]] = defaultdict(list)
    tasks: dict[str, set[str]] = defaultdict(set)
    for case in cases:
        env = env_call(case.record.origin)
        by_answer[env, case.answer].append(case)
        tasks[env].add(case.record.trajectory.task_id)
    for (env, answer), group in by_answer.items():
        answered = {case.record.trajectory.task_id for case in group}
        wins = [case.record.trajectory for case in group if case.record.won]
        right = all(case.expected == answer for case in group)
        if len(answered) >= max(_LEAST_CONSTANT, _SHARE_CONSTANT * len(tasks[env])) and wins and not right:
            share = f"{len(answered)} of {len(tasks[env])} tasks wins {len(wins)} of {len(group)} episodes"
            why = f"{_short(answer)} to {share}"
            yield Suspect(kind="constant", task_id=wins[0].task_id, seed=wins[0].seed, why=why)


def _holds(text: str, answer: str) -> bool:
    """Return True if a text holds an answer as a word or number of its own, not as a part of a longer one."""
    return re.search(rf"(?<![\w.]){re.escape(answer)}(?!\w|\.\d)", text) is not None


def _short(text: str) -> str:
    return repr(shorten(text, 60))
