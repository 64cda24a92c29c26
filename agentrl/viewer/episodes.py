"""Episodes as people read them: every token in its place, apart by source, with what training made of it."""

import math
from collections.abc import Iterator, Sequence

from agentrl.records import Record
from agentrl.types import Segment, Stop, Trajectory
from agentrl.viewer.choose import Chosen, solved
from agentrl.viewer.text import brief, escape, marked, number, signed

_MOST_TOKENS = 3000
"""Of a longer segment only both ends are shown, with a line that says how much is left out."""
_SHADES = 4
_STOPS = {
    Stop.TERMINATED: "the environment ended it: a final answer was given",
    Stop.TURN_LIMIT: "cut off: all turns were used up",
    Stop.TOKEN_LIMIT: "cut off: the token budget was used up",
    Stop.TURN_CUT: "cut off: the last turn ran into its limit of tokens",
}


def render_episode(chosen: Chosen, *, anchor: str) -> str:
    """One episode as an HTML article.

    Args:
        chosen: the episode and its place in the run.
        anchor: the article's id.
    """
    record, trajectory = chosen.record, chosen.record.trajectory
    good = solved(record)
    head = (
        f'<header><span class="outcome {"good" if good else "bad"}">{"✓ solved" if good else "✗ failed"}</span>'
        f"<h3>{escape(chosen.when).capitalize()}: step {chosen.step}</h3>"
        f"<p>task <code>{escape(trajectory.task_id)}</code>, seed {escape(trajectory.seed)}</p></header>"
    )
    body = "".join(_segments(record))
    return (
        f'<article class="episode" id="{escape(anchor)}">{head}{_facts(trajectory)}{body}{_tools(trajectory)}</article>'
    )


def _facts(trajectory: Trajectory) -> str:
    rewards = ", ".join(brief(reward) for reward in trajectory.rewards) or "none"
    facts = [
        ("Stop", f"<code>{escape(trajectory.stop.value)}</code> {_stop(trajectory)}"),
        ("Rewards, by turn", escape(rewards)),
        ("Sampled tokens", f"{trajectory.n_sampled} of {len(trajectory.token_ids)}"),
    ]
    if trajectory.parts:
        told = (f"<code>{escape(name)}</code> {_part(value)}" for name, value in trajectory.parts.items())
        facts.append(("Reward parts", ", ".join(told)))
    return (
        "<dl class='facts'>" + "".join(f"<div><dt>{name}</dt><dd>{text}</dd></div>" for name, text in facts) + "</dl>"
    )


def _stop(trajectory: Trajectory) -> str:
    if trajectory.stop is Stop.TERMINATED and trajectory.sampled and trajectory.sampled[-1].cut:
        return "the environment ended it: a turn that was cut off was taken as the final answer"
    return _STOPS[trajectory.stop]


def _segments(record: Record) -> Iterator[str]:
    trajectory, turn, done = record.trajectory, 0, 0
    advantages = record.advantages
    largest = max((abs(value) for value in map(number, advantages or ()) if value is not None), default=0.0)
    for segment, pieces in zip(trajectory.segments, record.pieces, strict=True):
        count = f"{len(segment.token_ids)} token{'' if len(segment.token_ids) == 1 else 's'}"
        if not segment.trained:
            yield _block(segment, segment.source, [count], _given(segment, pieces))
            continue
        mine = None if advantages is None else advantages[done : done + len(pieces)]
        notes = [count, f"reward {brief(trajectory.rewards[turn])}", f"weights v{escape(segment.version)}"]
        if segment.cut:
            notes.append(f"<b>cut at {count}</b>")
        turn, done = turn + 1, done + len(pieces)
        yield _block(segment, f"policy · turn {turn}", notes, _sampled(segment, pieces, mine, largest))


def _block(segment: Segment, title: str, notes: Sequence[str], tokens: list[str]) -> str:
    hidden = len(tokens) - _MOST_TOKENS
    if hidden > 0:
        half = _MOST_TOKENS // 2
        tokens = [*tokens[:half], f'<p class="cut">{hidden} tokens not shown</p>', *tokens[-half:]]
    told = "".join(f"<span>{note}</span>" for note in notes)
    return (
        f'<section class="segment {segment.source}"><h4>{escape(title)}{told}</h4>'
        f'<div class="tokens">{"".join(tokens)}</div></section>'
    )


def _given(segment: Segment, pieces: Sequence[str]) -> list[str]:
    # <bdi> keeps right-to-left text from moving the tokens around it.
    return [
        f'<bdi title="{segment.source}, token {escape(token)}">{marked(piece)}</bdi>'
        for token, piece in zip(segment.token_ids, pieces, strict=True)
    ]


def _sampled(segment: Segment, pieces: Sequence[str], advantages: Sequence[float] | None, largest: float) -> list[str]:
    assert segment.logprobs is not None, "policy segments have log-probs"
    shown = advantages or (None,) * len(pieces)
    tokens: list[str] = []
    for token, piece, logprob, advantage in zip(segment.token_ids, pieces, segment.logprobs, shown, strict=True):
        title = f"sampled, token {escape(token)}: log-prob {_minus(logprob)}, probability {math.exp(logprob):.1%}"
        if advantage is not None:
            title += f", advantage {_told(advantage)}"
        shade = _shade(number(advantage), largest)
        tokens.append(f'<bdi class="{shade}" title="{title}">{marked(piece)}</bdi>')
    return tokens


def _shade(advantage: float | None, largest: float) -> str:
    """A class by sign and size: ``up1`` to ``up4``, ``down1`` to ``down4``, or ``even``."""
    if not advantage or not largest:
        return "even"
    size = math.ceil(_SHADES * abs(advantage) / largest)
    return f"{'up' if advantage > 0 else 'down'}{min(max(size, 1), _SHADES)}"


def _tools(trajectory: Trajectory) -> str:
    if not trajectory.tool_runs:
        return '<p class="none">No tool was called.</p>'
    rows = "".join(
        f"<tr><td>{at}</td><td><code>{escape(run.name)}</code></td>"
        f'<td class="{"good" if run.ok else "bad"}">{"✓ ok" if run.ok else "✗ error"}</td>'
        f"<td>{_ms(run.wall_s)}</td></tr>"
        for at, run in enumerate(trajectory.tool_runs, start=1)
    )
    head = "<tr><th>#</th><th>Tool</th><th>Outcome</th><th>ms</th></tr>"
    return f'<table class="runs"><caption>Tool runs</caption><thead>{head}</thead><tbody>{rows}</tbody></table>'


def _ms(seconds: object) -> str:
    known = number(seconds)
    return escape(seconds) if known is None else f"{1000 * known:.1f}"


def _part(value: object) -> str:
    known = number(value)
    return escape(value) if known is None else brief(known)


def _told(value: object) -> str:
    """A signed number; what is no finite number is shown as it stands."""
    known = number(value)
    return escape(value) if known is None else signed(known)


def _minus(value: float) -> str:
    return f"{value:.3f}".replace("-", "\N{MINUS SIGN}")
