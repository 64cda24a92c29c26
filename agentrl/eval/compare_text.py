"""A comparison in words and tables."""

from collections.abc import Iterator

from agentrl.eval.compare import Comparison, Flip
from agentrl.eval.pages import Section
from agentrl.eval.paired import Contrast

_SHOWN = 50
"""Most flips in a table; JSON has all."""


def sections(found: Comparison) -> Iterator[Section]:
    """Give the flips, the numbers, and what was not the same."""
    lost = sum(flip.winner == "a" for flip in found.flips)
    more = [f"{len(found.flips) - _SHOWN} more are not shown: --json lists all."] if len(found.flips) > _SHOWN else []
    yield Section(
        title=f"{len(found.flips)} flips: {lost} won only by A, {len(found.flips) - lost} only by B",
        text=[f"A is {found.names[0]}, B is {found.names[1]}; {found.episodes} pairs of episodes.", *more],
        head=["task", "seed", "won by", "first differing token", "text before it", "A", "B"] if found.flips else (),
        rows=[_flip_row(flip) for flip in found.flips[:_SHOWN]],
    )
    yield Section(
        title="Success",
        text=[_needed(found.overall)],
        head=["", "tasks", "A", "B", "B - A (95% interval)", "B better", "A better", "McNemar's p"],
        rows=[_contrast_row(*one) for one in (("all", found.overall), *found.tags.items())],
    )
    yield Section(
        title="What was not the same",
        text=() if found.differences else ["Nothing that the files record, but for the policy's own tokens."],
        head=["", "", "A", "B"] if found.differences else (),
        rows=[(one.room, one.name, _cut(one.a), _cut(one.b)) for one in found.differences],
    )


def _flip_row(flip: Flip) -> tuple[str, ...]:
    seed = str(flip.seeds[0]) if flip.seeds[0] == flip.seeds[1] else "{} and {}".format(*flip.seeds)
    parting = flip.parting
    if parting is None:
        return flip.task_id, seed, flip.winner.upper(), "none: the same tokens were judged differently", "", "", ""
    where = f"{parting.index}, {parting.source}, " + (f"turn {parting.turn}" if parting.turn else "before turn 1")
    texts = (repr(text) for text in (parting.before, parting.a, parting.b))
    return flip.task_id, seed, flip.winner.upper(), where, *texts


def _contrast_row(name: str, one: Contrast) -> tuple[str, ...]:
    difference = f"{100 * one.difference:+.1f} ({100 * one.low:+.1f} to {100 * one.high:+.1f})"
    shares = (f"{share:.1%}" for share in (one.a, one.b))
    return name, str(one.tasks), *shares, difference, str(one.better), str(one.worse), f"{one.p:.3g}"


def _needed(overall: Contrast) -> str:
    if overall.tasks_needed is None:
        return "A and B succeed equally often."
    return (
        f"About {overall.tasks_needed:,} tasks show a difference of this size four times in five; here are "
        f"{overall.tasks:,}. Intervals are of a bootstrap over tasks; the p of a tag is not corrected for their number."
    )


def _cut(text: str) -> str:
    return text if len(text) <= 160 else text[:159] + "…"
