"""``agentrl compare``: pair the episodes of two agents, and find where and why they differ."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from agentrl.errors import UsageError
from agentrl.eval.episodes import config_of, load
from agentrl.eval.pages import Section, shorten
from agentrl.eval.paired import Contrast, contrast
from agentrl.runs.records import EPISODES, Record
from agentrl.runs.settings import differing
from agentrl.segments import Row, Segment, shared_length, turn_positions
from agentrl.toolenv.versions import PARTS

_AROUND = 60
"""Characters of text on each side of the first difference of two episodes."""
_SHOWN = 50
"""Most flips in a table; JSON has all."""
_LONGEST = 160
"""Characters of a difference in a table."""
_ROOMS = {"model": "model", "weights": "model", "rollout": "sampling", "seed": "sampling"}
"""What an entry of an evaluation's metadata is about, by the beginning of its name."""
Pair = tuple[Record, Record]
"""An episode of A, and that of B on the same task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parting:
    """The first token in which two episodes differ, in the order of their turns."""

    index: int
    """Its index among all tokens of A in that order, from 0; of B where A has ended."""
    turn: int
    """The assistant's turn that it is in or after, from 1; 0 in the prompt."""
    source: str
    """Where A's token comes from: ``prompt``, ``policy``, ``tool`` or ``template``; B's where A has ended. ``row``: the
    two continue with other rows."""
    before: str
    """The end of the text that both have."""
    a: str
    """A's text from there on, cut."""
    b: str
    """B's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip:
    """A task that one of two episodes won and the other lost."""

    task_id: str
    """The task."""
    seeds: tuple[int, int]
    """Seeds of A's and B's episode."""
    winner: str
    """``a`` or ``b``."""
    parting: Parting | None
    """Where they differ; None where all tokens are the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A fact that differs between A and B."""

    room: str
    """``config``, ``environment``, ``prompt``, ``dialect``, ``sampling``, ``model``, ``grader``, ``sandbox`` …"""
    name: str
    """Its name there."""
    a: str
    """Its values in A, as text."""
    b: str
    """Its values in B."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The result of comparing two agents."""

    names: tuple[str, str]
    """Paths of A and B."""
    episodes: int
    """Pairs of episodes."""
    overall: Contrast
    """All tasks."""
    tags: Mapping[str, Contrast]
    """The tasks of each tag."""
    differences: tuple[Difference, ...]
    """Facts that differ."""
    flips: tuple[Flip, ...]
    """Pairs of which one won and the other lost; those that A won first."""


def compare(a: Path, b: Path) -> Comparison:
    """Compare the episodes at two paths.

    Raises:
        UsageError: one has no episodes, or they are of different tasks.
        TrajectoryError: a file holds something else.
    """
    try:
        pairs = paired(load(a), load(b))
    except UsageError as error:
        # An evaluation that was stopped lacks episodes, which looks like other tasks: name it.
        stopped = [str(path) for path in (a, b) if (path / EPISODES).exists() and not (path / "summary.json").exists()]
        where = " and that in ".join(stopped)
        remedy = f"; the evaluation in {where} has not ended: resume it with its command" if stopped else ""
        raise UsageError(f"{error}{remedy}") from error
    flips = [_flip(*pair) for pair in pairs if pair[0].won != pair[1].won]
    tagged: dict[str, list[Pair]] = defaultdict(list)
    for pair in pairs:
        for tag in pair[0].trajectory.tags:
            tagged[tag].append(pair)
    return Comparison(
        names=(str(a), str(b)),
        episodes=len(pairs),
        overall=_contrast(pairs),
        tags={tag: _contrast(some) for tag, some in sorted(tagged.items())},
        differences=(*_settings(a, b), *_differences(pairs)),
        flips=tuple(sorted(flips, key=lambda flip: (flip.winner, flip.task_id))),
    )


def paired(a: Sequence[Record], b: Sequence[Record]) -> list[Pair]:
    """Pair episodes by task and, within a task, in the order of attempts, or of seeds where no attempt is recorded.

    Raises:
        UsageError: the tasks are not the same, or not as often.
    """
    # Several environments may have equal task ids, so their own id is part of the key. The id of a single one is not,
    # since B may name it differently.
    several = any(len({record.origin.env_id for record in side}) > 1 for side in (a, b))
    mine, theirs = (_by_task(side, several) for side in (a, b))
    if mine.keys() != theirs.keys():
        sides = (("A", mine.keys() - theirs.keys()), ("B", theirs.keys() - mine.keys()))
        missing = " and ".join(f"{len(only)} only in {side}, as {min(only)[1]!r}" for side, only in sides if only)
        raise UsageError(f"these are different tasks, {missing}: evaluate both on the same tasks of the same split")
    pairs: list[Pair] = []
    for key, left in mine.items():
        right = theirs[key]
        if len(left) != len(right):
            counts = f"{len(left)} episodes of task {key[1]!r} and B {len(right)}"
            raise UsageError(f"A has {counts}: evaluate both with the same number of attempts, to the end")
        # Episodes are written as they end, so their order in a file says little.
        pairs += zip(*(sorted(side, key=_attempt) for side in (left, right)), strict=True)
    # Equal task ids of two environments may be different tasks: only equal prompts show that they are not.
    if not several and a[0].origin.env_id != b[0].origin.env_id and all(_prompt("user", *pair) for pair in pairs):
        ids = f"{a[0].origin.env_id!r} and {b[0].origin.env_id!r}"
        raise UsageError(f"these are tasks of {ids}, which only share their names: compare agents on the same tasks")
    return pairs


def parting(a: Record, b: Record) -> Parting | None:
    """Find the first token in which two episodes differ; None where there is none.

    Where their prompts differ, which ``Comparison.differences`` shows, only the tokens after them are compared.
    """
    left, right = (list(_tokens(record)) for record in (a, b))
    prompts = [record.trajectory.segments[0].token_ids for record in (a, b)]
    # Different prompts hide where the agents differ. After them, the agents' own tokens are compared.
    if prompts[0] != prompts[1]:
        behind = left[len(prompts[0]) :], right[len(prompts[1]) :]
        if [token.id for token in behind[0]] != [token.id for token in behind[1]]:
            left, right = behind
    shared = shared_length([token.id for token in left], [token.id for token in right])
    if shared == len(left) == len(right):
        return None
    token = (left if shared < len(left) else right)[shared]
    before = "".join(token.text for token in left[max(0, shared - _AROUND) : shared])[-_AROUND:]
    after = ["".join(token.text for token in side[shared : shared + _AROUND])[:_AROUND] for side in (left, right)]
    return Parting(index=token.position, turn=token.turn, source=token.source, before=before, a=after[0], b=after[1])


class _Token(NamedTuple):
    """A token of an episode, with its position among all tokens; or the heading of a row."""

    position: int
    id: int | str
    text: str
    source: str
    turn: int


def _tokens(record: Record) -> Iterator[_Token]:
    """Yield the tokens in the order of turns, and a row's heading wherever the next ones are of another row."""
    turn, index, current = 0, 0, 0
    parts = _in_time(record)
    # Rows may stand in any order in the file, so they are numbered as they come here.
    numbers = {row: number for number, row in enumerate(dict.fromkeys(row for _, row, *_ in parts), start=1)}
    for _, row, segment, pieces in parts:
        if row != current:
            current, heading = row, _heading(record.trajectory.rows, row, numbers)
            yield _Token(index, heading, heading, "row", turn)
        turn += segment.trained
        for token, piece in zip(segment.token_ids, pieces, strict=True):
            yield _Token(index, token, piece, segment.source, turn)
            index += 1


def _in_time(record: Record) -> list[tuple[int, int, Segment, tuple[str, ...]]]:
    """Return the segments in the order of turns, each after a turn and its row, and before its texts."""
    turns, pieces = iter(turn_positions(record.trajectory.segments)), iter(record.pieces)
    parts: list[tuple[int, int, Segment, tuple[str, ...]]] = []
    for number, row in enumerate(record.trajectory.rows):
        ahead = [next(turns)[0] for segment in row.segments if segment.trained] or [len(record.pieces)]
        # A row reads what stands before a turn for that turn; what stands after its last one comes with that.
        for segment in row.segments:
            parts.append((ahead[0], number, segment, next(pieces)))
            ahead = ahead[segment.trained :] or ahead
    return [parts[0], *sorted(parts[1:], key=itemgetter(0))]


def _heading(rows: Sequence[Row], row: int, numbers: Mapping[int, int]) -> str:
    parent, fork = rows[row].parent, rows[row].fork
    # Whoever inherits no more than its parent inherited continues the row that this came from.
    while parent is not None and rows[parent].fork >= fork:
        parent = rows[parent].parent
    begin = "begins anew" if parent is None else f"continues row {numbers[parent]} after {fork} tokens"
    return f"[row {numbers[row]}, {begin}]"


def _by_task(records: Iterable[Record], several: bool) -> dict[tuple[str, str], list[Record]]:
    by_task: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for record in records:
        env = record.trajectory.env or (record.origin.env_id if several else "")
        by_task[env, record.trajectory.task_id].append(record)
    return by_task


def _attempt(record: Record) -> tuple[int, int]:
    return record.trajectory.attempt or 0, record.trajectory.seed


def _contrast(pairs: Sequence[Pair]) -> Contrast:
    # Attempts at one task are not independent, so each task counts once, with its share of wins.
    wins: dict[tuple[str, str], list[tuple[bool, bool]]] = defaultdict(list)
    for a, b in pairs:
        wins[a.origin.env_id, a.trajectory.task_id].append((a.won, b.won))
    shares = [[sum(pair[side] for pair in of) / len(of) for of in wins.values()] for side in (0, 1)]
    return contrast(*shares)


def _flip(a: Record, b: Record) -> Flip:
    seeds, winner = (a.trajectory.seed, b.trajectory.seed), "a" if a.won else "b"
    return Flip(task_id=a.trajectory.task_id, seeds=seeds, winner=winner, parting=parting(a, b))


def _settings(*paths: Path) -> list[Difference]:
    """Return the settings in which two runs differ; none where a path belongs to no run."""
    configs = [config for path in paths if (config := config_of(path))]
    rows = differing(*configs) if len(configs) == len(paths) else []
    return [Difference(room="config", name=name, a=repr(a), b=repr(b)) for name, a, b in rows]


def _facts(record: Record) -> Iterator[tuple[str, str, object]]:
    """Yield everything but the tokens that decides an episode, as room, name and value."""
    origin = record.origin
    yield from (("environment", name, getattr(origin, name)) for name in ("env_id", "split", "best_return"))
    yield from (("environment", f"env_args.{name}", value) for name, value in origin.env_args.items())
    yield from (("sampling", name, getattr(origin, name)) for name in ("temperature", "turn_tokens"))
    yield "dialect", "dialect", origin.dialect
    for name, value in origin.versions.items():
        yield name if name in ("environment", *PARTS) else "software", f"version of {name}", value
    for name, value in record.evaluation.items():
        yield _ROOMS.get(name.partition(".")[0], "evaluation"), name, value


def _differences(pairs: Sequence[Pair]) -> Iterator[Difference]:
    sides: list[dict[tuple[str, str], set[str]]] = []
    for records in zip(*pairs, strict=True):
        values: dict[tuple[str, str], set[str]] = defaultdict(set)
        for record in records:
            for room, name, value in _facts(record):
                values[room, name].add(repr(value))
        sides.append(values)
    for room, name in {**sides[0], **sides[1]}:
        a, b = (", ".join(sorted(side.get((room, name), {"not recorded"}))) for side in sides)
        if a != b:
            yield Difference(room=room, name=name, a=a, b=b)
    yield from _of_episodes(pairs)


def _of_episodes(pairs: Sequence[Pair]) -> Iterator[Difference]:
    """Yield the differences that only the episodes show: their prompts and verdicts."""
    for role in ("system", "user"):
        differing = [texts for pair in pairs if (texts := _prompt(role, *pair))]
        if differing:
            start = max(0, shared_length(*differing[0]) - _AROUND // 2)
            a, b = (repr(text[start : start + _AROUND]) for text in differing[0])
            name = f"{role} message, in {len(differing)} of {len(pairs)} episodes"
            yield Difference(room="prompt", name=name, a=a, b=b)
    # Equal tokens with different outcomes can only come from the grader.
    judged = [pair for pair in pairs if pair[0].won != pair[1].won and parting(*pair) is None]
    if judged:
        texts = ["won" if record.won else "lost" for record in judged[0]]
        name = f"verdict on the very same tokens, in {len(judged)} of {len(pairs)} episodes"
        yield Difference(room="grader", name=name, a=texts[0], b=texts[1])


def _prompt(role: str, a: Record, b: Record) -> tuple[str, str] | None:
    """Return a role's texts before the assistant's first turn in both episodes; None where they are the same."""
    texts: list[str] = []
    for record in (a, b):
        opening = takewhile(lambda message: message["role"] != "assistant", record.trajectory.messages)
        texts.append("\n".join(message["content"] for message in opening if message["role"] == role))
    return (texts[0], texts[1]) if texts[0] != texts[1] else None


def sections(comparison: Comparison) -> Iterator[Section]:
    """Yield the flips, the success rates and the differences, as sections of a report."""
    flips, differences = comparison.flips, comparison.differences
    lost = sum(flip.winner == "a" for flip in flips)
    more = [f"{len(flips) - _SHOWN} more are not shown: --json lists all."] if len(flips) > _SHOWN else []
    names = "A is {}, B is {}".format(*comparison.names)
    yield Section(
        title=f"{len(flips)} flips: {lost} won only by A, {len(flips) - lost} only by B",
        text=[f"{names}; {comparison.episodes} pairs of episodes.", *more],
        head=["task", "seed", "won by", "first differing token", "text before it", "A", "B"] if flips else (),
        rows=[_flip_row(flip) for flip in flips[:_SHOWN]],
    )
    yield Section(
        title="Success",
        text=[_needed(comparison.overall)],
        head=["", "tasks", "A", "B", "B - A (95% interval)", "B better", "A better", "McNemar's p"],
        rows=[_contrast_row(*named) for named in (("all", comparison.overall), *comparison.tags.items())],
    )
    yield Section(
        title="What was not the same",
        text=() if differences else ["Nothing that the files record, but for the policy's own tokens."],
        head=["", "", "A", "B"] if differences else (),
        rows=[(fact.room, fact.name, shorten(fact.a, _LONGEST), shorten(fact.b, _LONGEST)) for fact in differences],
    )


def _flip_row(flip: Flip) -> tuple[str, ...]:
    seed = str(flip.seeds[0]) if flip.seeds[0] == flip.seeds[1] else "{} and {}".format(*flip.seeds)
    parting = flip.parting
    if parting is None:
        return flip.task_id, seed, flip.winner.upper(), "none: the same tokens were judged differently", "", "", ""
    where = f"{parting.index}, {parting.source}, " + (f"turn {parting.turn}" if parting.turn else "before turn 1")
    texts = (repr(text) for text in (parting.before, parting.a, parting.b))
    return flip.task_id, seed, flip.winner.upper(), where, *texts


def _contrast_row(name: str, both: Contrast) -> tuple[str, ...]:
    difference = f"{100 * both.difference:+.1f} ({100 * both.low:+.1f} to {100 * both.high:+.1f})"
    shares = (f"{share:.1%}" for share in (both.a, both.b))
    return name, str(both.tasks), *shares, difference, str(both.better), str(both.worse), f"{both.p:.3g}"


def _needed(overall: Contrast) -> str:
    if overall.tasks_needed is None:
        return "A and B succeed equally often."
    return (
        f"About {overall.tasks_needed:,} tasks show a difference of this size four times in five; here are "
        f"{overall.tasks:,}. Intervals are of a bootstrap over tasks; the p of a tag is not corrected for their number."
    )
