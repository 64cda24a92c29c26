"""``agentrl compare``: pair the episodes of two agents, and say where and why they part."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from agentrl.config import Config
from agentrl.errors import UsageError
from agentrl.eval.episodes import config_of, load
from agentrl.eval.pages import shared_length
from agentrl.eval.paired import Contrast, contrast
from agentrl.runs.records import EPISODES, Record
from agentrl.runs.settings import settings_of
from agentrl.toolenv.versions import PARTS

_AROUND = 60
"""Characters of text on each side of the place where two episodes part."""
_ROOMS = {"model": "model", "weights": "model", "rollout": "sampling", "seed": "sampling"}
"""What an entry of an evaluation's metadata is about, by the beginning of its name."""
Pair = tuple[Record, Record]
"""An episode of A, and that of B on the same task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parting:
    """The first token in which two episodes differ."""

    index: int
    """Its place among all tokens of A, from 0; of B where A has ended."""
    turn: int
    """The assistant's turn that it is in or behind, from 1; 0 in the prompt."""
    source: str
    """Where A's token comes from: ``prompt``, ``policy``, ``tool`` or ``template``; B's where A has ended."""
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
    """Where they part; None where all tokens are the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Something that was not the same for A and B."""

    room: str
    """``config``, ``environment``, ``prompt``, ``dialect``, ``sampling``, ``model``, ``grader``, ``sandbox`` …"""
    name: str
    """What it is there."""
    a: str
    """Its values in A, as text."""
    b: str
    """Its values in B."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All that was found."""

    names: tuple[str, str]
    """Paths of A and B."""
    episodes: int
    """Pairs of episodes."""
    overall: Contrast
    """All tasks."""
    tags: Mapping[str, Contrast]
    """The tasks of each tag."""
    differences: tuple[Difference, ...]
    """What was not the same."""
    flips: tuple[Flip, ...]
    """Pairs of which one won and the other lost; those that A won first."""


def compare(a: Path, b: Path) -> Comparison:
    """Compare the episodes at two places.

    Raises:
        UsageError: one has no episodes, or they are of different tasks.
        TrajectoryError: a file holds something else.
    """
    try:
        pairs = paired(load(a), load(b))
    except UsageError as error:
        stopped = [str(path) for path in (a, b) if (path / EPISODES).exists() and not (path / "summary.json").exists()]
        where = " and that in ".join(stopped)
        on = f"; the evaluation in {where} has not ended: go on with its command" if stopped else ""
        raise UsageError(f"{error}{on}") from error
    flips = [_flip(pair) for pair in pairs if pair[0].won != pair[1].won]
    tagged: dict[str, list[Pair]] = defaultdict(list)
    for pair in pairs:
        for tag in pair[0].trajectory.tags:
            tagged[tag].append(pair)
    return Comparison(
        names=(str(a), str(b)),
        episodes=len(pairs),
        overall=_contrast(pairs),
        tags={tag: _contrast(some) for tag, some in sorted(tagged.items())},
        differences=(*_settings(config_of(a), config_of(b)), *_differences(pairs)),
        flips=tuple(sorted(flips, key=lambda flip: (flip.winner, flip.task_id))),
    )


def paired(a: Sequence[Record], b: Sequence[Record]) -> list[Pair]:
    """Pair episodes by task and, within a task, by attempt; else by seed where both have the same; else by order.

    Raises:
        UsageError: the tasks are not the same, or not as often.
    """
    several = any(len({record.origin.env_id for record in side}) > 1 for side in (a, b))
    mine, theirs = (_by_task(side, several) for side in (a, b))
    if mine.keys() != theirs.keys():
        sides = (("A", mine.keys() - theirs.keys()), ("B", theirs.keys() - mine.keys()))
        told = " and ".join(f"{len(only)} only in {side}, as {min(only)[1]!r}" for side, only in sides if only)
        raise UsageError(f"these are different tasks, {told}: evaluate both on the same tasks of the same split")
    pairs: list[Pair] = []
    for key, one in mine.items():
        other = theirs[key]
        if len(one) != len(other):
            counts = f"{len(one)} episodes of task {key[1]!r} and B {len(other)}"
            raise UsageError(f"A has {counts}: evaluate both with the same number of attempts, to the end")
        pairs += zip(*_in_order(one, other), strict=True)
    if not several and a[0].origin.env_id != b[0].origin.env_id and all(_prompt("user", *pair) for pair in pairs):
        ids = f"{a[0].origin.env_id!r} and {b[0].origin.env_id!r}"
        raise UsageError(f"these are tasks of {ids}, which only share their names: compare agents on the same tasks")
    return pairs


def parting(a: Record, b: Record) -> Parting | None:
    """Find the first token in which two episodes differ; None where there is none.

    Where their prompts differ, which ``Comparison.differences`` shows, the first one behind them is of more use.
    """
    left, right = (list(_tokens(record)) for record in (a, b))
    prompts = [record.trajectory.segments[0].token_ids for record in (a, b)]
    if prompts[0] != prompts[1]:
        behind = left[len(prompts[0]) :], right[len(prompts[1]) :]
        if [one.id for one in behind[0]] != [one.id for one in behind[1]]:
            left, right = behind
    shared = shared_length([one.id for one in left], [one.id for one in right])
    if shared == len(left) == len(right):
        return None
    first = (left if shared < len(left) else right)[shared]
    before = "".join(one.text for one in left[max(0, shared - _AROUND) : shared])[-_AROUND:]
    after = ["".join(one.text for one in side[shared : shared + _AROUND])[:_AROUND] for side in (left, right)]
    return Parting(index=first.place, turn=first.turn, source=first.source, before=before, a=after[0], b=after[1])


class _Token(NamedTuple):
    """A token where it stands in its episode."""

    place: int
    id: int
    text: str
    source: str
    turn: int


def _tokens(record: Record) -> Iterator[_Token]:
    turn, place = 0, 0
    for segment, pieces in zip(record.trajectory.segments, record.pieces, strict=True):
        turn += segment.trained
        for token, piece in zip(segment.token_ids, pieces, strict=True):
            yield _Token(place, token, piece, segment.source, turn)
            place += 1


def _by_task(records: Iterable[Record], several: bool) -> dict[tuple[str, str], list[Record]]:
    found: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for record in records:
        env = record.trajectory.env or (record.origin.env_id if several else "")
        found[env, record.trajectory.task_id].append(record)
    return found


def _in_order(a: Sequence[Record], b: Sequence[Record]) -> Sequence[Sequence[Record]]:
    seed: Callable[[Record], int] = lambda record: record.trajectory.seed
    if None not in (record.attempt for record in (*a, *b)):
        return [sorted(side, key=lambda record: record.attempt or 0) for side in (a, b)]
    # Episodes are written as they end: only their seeds, or nothing, say which is which.
    in_seeds = [sorted(side, key=seed) for side in (a, b)]
    return in_seeds if [*map(seed, in_seeds[0])] == [*map(seed, in_seeds[1])] else [a, b]


def _contrast(pairs: Sequence[Pair]) -> Contrast:
    wins: dict[tuple[str, str], list[tuple[bool, bool]]] = defaultdict(list)
    for a, b in pairs:
        wins[a.origin.env_id, a.trajectory.task_id].append((a.won, b.won))
    shares = [[sum(pair[side] for pair in of) / len(of) for of in wins.values()] for side in (0, 1)]
    return contrast(*shares)


def _flip(pair: Pair) -> Flip:
    a, b = pair
    return Flip(
        task_id=a.trajectory.task_id,
        seeds=(a.trajectory.seed, b.trajectory.seed),
        winner="a" if a.won else "b",
        parting=parting(a, b),
    )


def _settings(a: Config | None, b: Config | None) -> Iterator[Difference]:
    if a is None or b is None:
        return
    left, right = settings_of(a), settings_of(b)
    for name, value in left.items():
        if value != right[name] and name not in ("run.name", "run.dir"):  # where it is, not what it does
            yield Difference(room="config", name=name, a=repr(value), b=repr(right[name]))


def _facts(record: Record) -> Iterator[tuple[str, str, object]]:
    """Yield all that decides an episode beside its tokens: room, name and value."""
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
    """Yield what shows in the episodes alone."""
    for name in ("system", "user"):
        found = [both for pair in pairs if (both := _prompt(name, *pair))]
        if found:
            a, b = found[0]
            at = max(0, shared_length(a, b) - _AROUND // 2)
            texts = [repr(text[at : at + _AROUND]) for text in (a, b)]
            name = f"{name} message, in {len(found)} of {len(pairs)} episodes"
            yield Difference(room="prompt", name=name, a=texts[0], b=texts[1])
    tokens = [pair for pair in pairs if _differ_in_tokens(*pair)]
    if tokens:
        ids = [f"{len(record.trajectory.segments[0].token_ids)} tokens" for record in tokens[0]]
        name = f"tokens of one text (chat template or tokenizer), in {len(tokens)} of {len(pairs)} episodes"
        yield Difference(room="prompt", name=name, a=ids[0], b=ids[1])
    judged = [pair for pair in pairs if pair[0].won != pair[1].won and parting(*pair) is None]
    if judged:
        texts = ["won" if record.won else "lost" for record in judged[0]]
        name = f"verdict on the very same tokens, in {len(judged)} of {len(pairs)} episodes"
        yield Difference(room="grader", name=name, a=texts[0], b=texts[1])


def _differ_in_tokens(a: Record, b: Record) -> bool:
    same = a.trajectory.segments[0].token_ids == b.trajectory.segments[0].token_ids
    return not same and not any(_prompt(role, a, b) for role in ("system", "user"))


def _prompt(role: str, a: Record, b: Record) -> tuple[str, str] | None:
    """Give what a role says before the assistant's first turn, where that differs."""
    texts: list[str] = []
    for record in (a, b):
        messages = record.trajectory.messages
        roles = [message["role"] for message in messages]
        first = messages[: roles.index("assistant") if "assistant" in roles else len(roles)]
        texts.append("\n".join(message["content"] for message in first if message["role"] == role))
    return (texts[0], texts[1]) if texts[0] != texts[1] else None
