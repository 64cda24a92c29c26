"""``agentrl probe``: look for rewards that were not earned, and for answers that were right and got none."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

from agentrl.errors import UnknownNameError, UsageError
from agentrl.eval.episodes import remake, told
from agentrl.eval.pages import Section
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
"""What is looked for, the gravest first."""
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
    """What was found, with the texts that matter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """All that was found."""

    episodes: int
    """How many were looked at."""
    wins: int
    """How many succeeded."""
    suspects: tuple[Suspect, ...]
    """The gravest kind first, then by task."""
    notes: tuple[str, ...]
    """What could not be looked for, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """An episode with what is known of its task."""

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
    def given(self) -> str:
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
        say: told of each environment before it is made.

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
    found = [Suspect(kind=kind, task_id=case.record.trajectory.task_id, seed=case.record.trajectory.seed, why=why)
             for case in cases for kind, why in _looks(case, second)]  # fmt: skip
    order = list(KINDS)
    found = sorted([*found, *_constant(cases)], key=lambda one: (order.index(one.kind), one.task_id, one.seed))
    wins = sum(record.won for record in records)
    return Audit(episodes=len(records), wins=wins, suspects=tuple(found), notes=tuple(notes))


def sections(found: Audit) -> Iterator[Section]:
    """Give an audit for people."""
    by_kind: dict[str, list[Suspect]] = defaultdict(list)
    for one in found.suspects:
        by_kind[one.kind].append(one)
    for kind, some in by_kind.items():
        more = [f"{len(some) - _SHOWN} more are not shown: --json lists all."] if len(some) > _SHOWN else []
        rows = [(one.task_id, one.seed, one.why) for one in some[:_SHOWN]]
        yield Section(title=f"{KINDS[kind]}: {len(some)}", text=more, head=["task", "seed", "why"], rows=rows)
    nothing = [] if found.suspects else ["Nothing suspicious was found."]
    yield Section(title=f"{found.episodes} episodes, {found.wins} won", text=[*nothing, *found.notes])


def _cases(records: Sequence[Record], trusted: bool, notes: list[str], say: Callable[[str], None]) -> Iterator[_Case]:
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        groups[told(record.origin)].append(record)
    for key, some in groups.items():
        say(f"environment: {key}")
        tasks, tools = _tasks(some[0].origin, some, trusted, notes)
        # Where the environment is not there, a call in any episode tells that it has tools.
        tools = tools or any(record.trajectory.tool_runs for record in some)
        yield from (_Case(record=record, task=tasks.get(record.trajectory.task_id), tools=tools) for record in some)


def _tasks(
    origin: Origin, records: Iterable[Record], trusted: bool, notes: list[str]
) -> tuple[Mapping[str, Task], bool]:
    """Find the tasks of episodes, and say whether their environment has tools."""
    found: dict[str, Task] = {}
    try:
        with closing(remake(origin, trusted=trusted)) as env:
            for task_id in {record.trajectory.task_id for record in records}:
                try:
                    found[task_id] = env.task_set.find(task_id)
                except UnknownNameError as error:
                    notes.append(f"the right answer is not known: {error}")
            return found, bool(env.tools)
    except UsageError as error:
        notes.append(f"the right answers are not known, so less was looked for: {error}")
        return {}, False


def _looks(case: _Case, second: bool) -> Iterator[tuple[str, str]]:
    """Yield what is suspicious about one episode."""
    trajectory, won = case.record.trajectory, case.record.won
    paid = [at for at, turn in enumerate(trajectory.sampled) if turn.cut and trajectory.rewards[at] > 0]
    if paid:
        yield "cut", f"turn {paid[0] + 1} got {trajectory.rewards[paid[0]]:g}"
    if second:
        yield from _second_grade(case)
    if not won:
        return
    if case.tools and not trajectory.tool_runs:
        yield "no_tool", f"answered {_short(case.given)}"
    said = {role: "\n".join(one["content"] for one in trajectory.messages if one["role"] == role)
            for role in ("system", "user", "assistant", "tool")}  # fmt: skip
    expected = case.expected
    if expected and _holds(said["tool"], expected) and not _holds(said["assistant"], expected):
        yield "from_tool", f"{_short(expected)} stands in no turn of the assistant"
    # One sign, such as a choice's letter, is in every prompt.
    right = expected or case.given
    if len(right) > 1 and _holds(said["system"] + "\n" + said["user"], right):
        yield "in_prompt", f"the prompt holds {_short(right)}"
    boxes = {box.strip() for box in re.findall(r"\\boxed\{([^{}]*)", case.final)}
    if len(boxes) > 1:
        yield "boxes", f"{len(boxes)} answers: {_short(', '.join(sorted(boxes)))}"


def _second_grade(case: _Case) -> Iterator[tuple[str, str]]:
    """Yield where the recorded verdict is not that of our grader and of math-verify."""
    box = final_box(case.final)
    if case.task is None or box is None or not readable(case.expected):
        return
    ours = same_answer(box, case.expected, problem=case.task.prompt)
    theirs = verified(box, case.expected)
    told = f"answered {_short(box)}, expected {_short(case.expected)}"
    if case.record.won and not (ours and theirs):
        which = "neither accepts it" if not ours and not theirs else f"{'math-verify' if ours else 'ours'} does not"
        yield "graders" if ours or theirs else "unearned", f"{told}: {which}"
    elif not case.record.won and ours and theirs:
        yield "missed", told


def _constant(cases: Iterable[_Case]) -> Iterator[Suspect]:
    """Yield answers that many tasks got, of which some were won although not all want it."""
    said: dict[tuple[str, str], list[_Case]] = defaultdict(list)
    tasks: dict[str, set[str]] = defaultdict(set)
    for case in cases:
        env = told(case.record.origin)
        said[env, case.given].append(case)
        tasks[env].add(case.record.trajectory.task_id)
    for (env, answer), some in said.items():
        got = {case.record.trajectory.task_id for case in some}
        wins = Counter(case.record.won for case in some)[True]
        wanted = all(case.expected == answer for case in some)
        if len(got) >= max(_LEAST_CONSTANT, _SHARE_CONSTANT * len(tasks[env])) and wins and not wanted:
            first = next(case for case in some if case.record.won).record.trajectory
            why = f"{_short(answer)} to {len(got)} of {len(tasks[env])} tasks wins {wins} of {len(some)} episodes"
            yield Suspect(kind="constant", task_id=first.task_id, seed=first.seed, why=why)


def _holds(text: str, answer: str) -> bool:
    """Return True if a text holds an answer as a word or number of its own, not as a part of a longer one."""
    return re.search(rf"(?<![\w.]){re.escape(answer)}(?!\w|\.\d)", text) is not None


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:59] + "…")
