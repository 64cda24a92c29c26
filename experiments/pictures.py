"""Draw the pictures of the README and of ``docs`` from run folders: success curves, and two episodes token by token."""

import argparse
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from curves import figure
from markupsafe import Markup
from plot import tag

from agentrl import read_episodes
from agentrl.runs.records import Record, step_files
from agentrl.runs.report.text import visible

EXAMPLES = """examples:
  for seed in 0 1 2 3 4 5 6 7 8 9; do agentrl train --preset quickstart --set run.seed=$seed --name seed-$seed; done
  python experiments/pictures.py runs/seed-*
"""
DOCS = Path(__file__).resolve().parents[1] / "docs"
_WIDTH, _HEIGHT, _GUTTER, _LONGEST = 7.8, 20.0, 66.0, 30
"""Pixels of a character and of a line; pixels beside the text, and the characters of a line."""
_HEAD = 96.0
_STYLE = (
    "text{font:13px ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace;white-space:pre}"
    ".words,.soft{font-family:system-ui,sans-serif}.soft{font-size:11px;fill:#5b6474}.words{font-size:14px;fill:#1c2230}"
    ".prompt{fill:#7c8596}.template{fill:#a0a6b1}.tool{fill:#7a3fb8}.policy{fill:#1c2230}"
)
_LABELS = {"prompt": "prompt", "policy": "sampled", "tool": "tool"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """One token of an episode."""

    text: str
    """Its text."""
    source: str
    """The source of its segment."""
    advantage: float | None = None
    """Its advantage; None for a token that was not sampled."""
    opens: bool = False
    """True for the first token of its segment."""


@dataclass(slots=True)
class _Pen:
    """Where the next token of a column goes, and what was drawn so far."""

    left: float
    column: int = 0
    line: int = 0
    parts: list[Markup] = field(default_factory=list[Markup])

    def draw(self, token: Token) -> None:
        shown = visible(token.text.replace("\n", "⏎"))
        if self.column and self.column + len(shown) > _LONGEST:
            self._break()
        x, y, width = self.left + _GUTTER + self.column * _WIDTH, _HEAD + self.line * _HEIGHT, len(shown) * _WIDTH
        if token.opens and not self.column and token.source in _LABELS:
            self.parts.append(tag("text", _LABELS[token.source], class_="soft", x=self.left, y=y))
        if token.advantage is not None:
            self.parts.append(_shade(token.advantage, x, y, width))
        # The given width keeps the tokens in their places whatever font the reader has.
        size = {"textLength": width, "lengthAdjust": "spacingAndGlyphs"}
        self.parts.append(tag("text", shown, class_=token.source, x=x, y=y, **size))
        self.column += len(shown)
        if token.text.endswith("\n"):
            self._break()

    def _break(self) -> None:
        self.line, self.column = self.line + 1, 0


def tokens(record: Record) -> Iterator[Token]:
    """Yield an episode's tokens."""
    advantages = iter(record.advantages or ())
    for segment, pieces in zip(record.trajectory.segments, record.pieces, strict=True):
        for index, text in enumerate(pieces):
            advantage = next(advantages, 0.0) if segment.source == "policy" else None
            yield Token(text=text, source=segment.source, advantage=advantage, opens=index == 0)


def contrast(records: Iterable[Record]) -> tuple[Record, Record]:
    """Choose a solved and a failed episode of one task: of equally many turns, the pair with the fewest tokens.

    Episodes of several rows are left out: a picture has no room for them.

    Raises:
        ValueError: no task has both.
    """
    played: dict[tuple[str, int, bool], Record] = {}
    single = (record for record in records if len(record.trajectory.rows) == 1)
    for record in sorted(single, key=_length, reverse=True):  # the shortest comes last, and stays
        played[record.trajectory.task_id, len(record.trajectory.sampled), record.won] = record
    pairs = [(record, played.get((task, turns, False))) for (task, turns, won), record in played.items() if won]
    both = [(solved, failed) for solved, failed in pairs if failed]
    if not both:
        raise ValueError("no task has a solved and a failed episode of equally many turns: choose another step")
    return min(both, key=lambda pair: sum(map(_length, pair)))


def episodes(solved: Record, failed: Record) -> str:
    """Draw two episodes side by side, each token in the colour of its source, sampled ones shaded; return SVG."""
    between = _GUTTER + (_LONGEST + 2) * _WIDTH
    pens = [_Pen(16.0), _Pen(16.0 + between)]
    for pen, record, outcome in zip(pens, (solved, failed), ("solved", "failed"), strict=True):
        words = f"{outcome}, return {record.trajectory.ret:g}"
        pen.parts.append(tag("text", words, class_="words", x=pen.left + _GUTTER, y=66.0))
        for token in tokens(record):
            pen.draw(token)
    width, height = 16.0 + 2 * between, _HEAD + max(pen.line for pen in pens) * _HEIGHT + 24
    title = tag("text", "Two episodes of one task, token by token", class_="words", x=16, y=24, font_weight=600)
    legend = (
        "Shaded tokens were sampled: only they enter the loss. Advantage: blue positive, orange negative, grey none."
    )
    head = [tag("style", Markup(_STYLE)), tag("rect", width=width, height=height, rx=6, fill="#fff"), title]
    head.append(tag("text", legend, class_="soft", x=16, y=43))
    size = {"viewBox": f"0 0 {width:.0f} {height:.0f}", "width": f"{width:.0f}", "height": f"{height:.0f}"}
    drawn = chain.from_iterable(pen.parts for pen in pens)
    return f"{tag('svg', *head, *drawn, xmlns='http://www.w3.org/2000/svg', **size)}\n"


def _length(record: Record) -> int:
    return len(record.trajectory.token_ids)


def _shade(advantage: float, x: float, y: float, width: float) -> Markup:
    # A token without any advantage still shows that it was sampled.
    colour = "#5b6474" if abs(advantage) < 0.005 else "#1f5fbf" if advantage > 0 else "#d96c0c"
    opacity = f"{0.1 + 0.35 * min(1.0, abs(advantage)):.2f}"
    return tag("rect", x=x + 0.5, y=y - 14, width=width - 1, height=18, rx=2, fill=colour, fill_opacity=opacity)


def main(argv: Sequence[str] | None = None) -> None:
    """Write both pictures."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+", help="run folders; the first one's episodes are shown")
    parser.add_argument("--title", default="The quickstart: success by step", help="of the curves")
    parser.add_argument("--step", type=int, default=1, help="the step whose episodes are shown (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=DOCS, help="folder to write to (default: %(default)s)")
    arguments = parser.parse_args(argv)
    chosen = contrast(read_episodes(dict(step_files(arguments.runs[0]))[arguments.step]))
    drawings = {"quickstart.svg": figure(arguments.runs, arguments.title), "episode.svg": episodes(*chosen)}
    for name, svg in drawings.items():
        (arguments.out / name).write_text(svg, encoding="utf-8")
        print(f"wrote {arguments.out / name}")


if __name__ == "__main__":
    main()
