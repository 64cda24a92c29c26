"""Episodes of several rows, at random."""

import random
from dataclasses import replace

from agentrl.segments import Row, Segment, complete_rows
from agentrl.types import Stop, Trajectory


def tokens(rng: random.Random, most: int = 5) -> tuple[int, ...]:
    return tuple(rng.randrange(3, 250) for _ in range(rng.randint(1, most)))


def sampled(rng: random.Random, turn: int | None = None) -> Segment:
    ids = tokens(rng)
    return Segment("policy", ids, tuple(-5.5 - 3 * rng.random() for _ in ids), 0, turn=turn)


def forest(rng: random.Random, opening: Segment, rows: int) -> Trajectory:
    """An episode whose rows begin anew or fork anywhere, and whose turns were sampled in any order."""
    made = [Row((opening, sampled(rng), Segment("tool", tokens(rng)), sampled(rng)))]
    for _ in range(rows - 1):
        lengths = list(map(len, complete_rows(made)))
        parent = rng.choice([None, *range(len(made))])
        context = Segment("prompt" if parent is None else "template", tokens(rng))
        turns = [sampled(rng), *([Segment("tool", tokens(rng)), sampled(rng)] if rng.random() < 0.5 else [])]
        if parent is None:
            made.append(Row((context, *turns)))
        else:
            begin = (context,) if rng.random() < 0.7 else ()
            made.append(Row((*begin, *turns), parent, rng.randint(1, lengths[parent])))
    count = sum(segment.trained for row in made for segment in row.segments)
    numbers = iter(rng.sample(range(3 * count), count))
    numbered = [
        replace(row, segments=tuple(replace(s, turn=next(numbers)) if s.trained else s for s in row.segments))
        for row in made
    ]
    rewards = tuple(rng.choice([0.0, 0.25, 1.0]) for _ in range(count))
    return Trajectory(
        task_id="t", seed=rng.randrange(10**6), rows=tuple(numbered), rewards=rewards, stop=Stop.TERMINATED
    )


def shuffled(episode: Trajectory, rng: random.Random) -> Trajectory:
    """The same episode with its rows in another order, except that the first stays."""
    order = [0, *rng.sample(range(1, len(episode.rows)), len(episode.rows) - 1)]
    rows = [episode.rows[number] for number in order]
    moved = [row if row.parent is None else replace(row, parent=order.index(row.parent)) for row in rows]
    return replace(episode, segments=(), rows=tuple(moved))


def cut(whole: Trajectory) -> Trajectory:
    """The same episode in rows: each turn continues the row of the one before, whose tokens it all inherits."""
    rows, length, own = list[Row](), 0, list[Segment]()
    for segment in whole.segments:
        own.append(segment)
        if segment.trained:
            rows.append(Row(tuple(own), len(rows) - 1 if rows else None, length))
            length, own = length + len(rows[-1].token_ids), []
    return replace(whole, segments=(), rows=tuple(rows))
