"""Make every table and figure of ``docs/results.md`` from the rows in ``experiments/rows``, and a page of part B.

A table stands between two comments of its name in the page. A figure is a file in ``docs/results``, and the page has
its picture, or a word that the part was not run yet, between two such comments.
"""

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import curriculum
import every_gradient
import long
import pretrained
import show_exact
import show_gradients
import show_learning
import show_updates
from rows import FOLDER, ROOT, read_rows
from schedule import so_far
from verdict import NOT_RUN, Rows, written

EXAMPLES = """examples:
  python experiments/figures.py           write them
  python experiments/figures.py --check   write nothing; 1 is the exit code where they are not those of the rows
"""
PARTS = ("A", "B", "W", "C", "D", "E", "F", "G", "H", "curriculum")
Maker = Callable[[Rows], str]


def _of(part: str, make: Maker) -> Maker:
    """Make a table that says where its part is not done."""

    def made(rows: Rows) -> str:
        text = make(rows)
        progress = "" if text == NOT_RUN else so_far(part, rows)
        return f"{text}\n\n{progress}" if progress else text

    return made


def _statements(rows: Rows) -> str:
    """Make the table of all verdicts; those of a part that is not done decide nothing yet."""
    unfinished = {part for part in "CDEF" if so_far(part, rows)}
    verdicts = [verdict for module in _MODULES for verdict in module.verdicts(rows)]
    return written(
        replace(verdict, holds=None, figures=f"{verdict.figures}; runs are to come")
        if verdict.figures and verdict.name[0] in unfinished
        else verdict
        for verdict in verdicts
    )


TABLES: Mapping[str, Maker] = {
    "statements": _statements,
    "table 1": show_exact.estimators,
    "table 1a": show_exact.pools,
    "table 2a": show_gradients.weights,
    "table 2b": show_gradients.worths("0/1"),
    "table 2c": show_gradients.worths("-1/1"),
    "table 2d": show_gradients.few_successes,
    "table 2e": show_gradients.pool_weights,
    "table 3a": _of("C", partial(show_learning.rates, "C")),
    "table 3": _of("D", partial(show_learning.tokens, "D")),
    "table 3b": show_learning.contrasts,
    "table 3d": show_learning.areas,
    "table 3c": show_learning.spread,
    "table 4": _of("E", partial(show_learning.tokens, "E")),
    "table 4a": show_updates.by_loss,
    "table 4b": _of("E", partial(show_learning.rates, "E")),
    "table 5": show_exact.ratios,
    "table 6": _of("F", show_updates.both),
    "table 7": pretrained.results,
    "table 8": long.results,
    "table 9": lambda rows: curriculum.table(rows["curriculum"]) if rows.get("curriculum") else NOT_RUN,
}  # fmt: skip
"""Markdown by name."""
_MODULES = (show_exact, show_gradients, show_learning, show_updates, long)
FIGURES: Mapping[str, tuple[str, Maker]] = {
    "figure 1": ("Noise of each baseline: the formula's and the measured one", show_gradients.prediction),
    "figure 2": ("Which baseline wins where, and the measured weights", show_gradients.wins),
    "figure 3": ("Learning curves of six arms, mean over seeds with 95% intervals", show_learning.curves),
    "figure 4": ("Norms of gradients of six arms", show_learning.norms),
    "figure 5": ("Success by learning rate", show_learning.success_by_rate),
    "figure 6": ("Tokens to 50% by loss and passes", show_updates.tokens_by_loss),
    "figure 7": ("Spread of the cumulative log ratio by position", long.spread),
    "figure 8": ("Clipped share by position", long.clipped),
    "figure 9": ("Norm of a token's gradient by its probability", show_gradients.norms),
}
"""Caption and SVG by name."""


def made(rows: Rows, page: str) -> dict[str, str]:
    """Make the page and the figures.

    Args:
        rows: by part.
        page: the text of the page, whose tables are replaced.

    Returns:
        The text of each file, by its path in ``docs``.

    Raises:
        ValueError: the page has no place for one of them.
    """
    files: dict[str, str] = {}
    for name, make in TABLES.items():
        page = _replaced(page, name, make(rows))
    for name, (caption, make) in FIGURES.items():
        path = f"results/{name.replace(' ', '-')}.svg"
        if drawn := make(rows):
            files[path] = drawn
        page = _replaced(page, name, f"![{caption}]({path})\n\n*{name.capitalize()}. {caption}.*" if drawn else NOT_RUN)
    if every := every_gradient.page(rows):
        files["results/gradients.md"] = every
    return {"results.md": page, **files}


def _replaced(page: str, name: str, text: str) -> str:
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    if page.count(begin) != 1 or page.count(end) != 1:
        raise ValueError(f"the page needs one {begin!r} and, after it, one {end!r}")
    return re.sub(f"{begin}.*?{end}", lambda _: f"{begin}\n{text}\n{end}", page, flags=re.DOTALL)


def read_all(folder: Path = FOLDER) -> Rows:
    """Read the rows of every part."""
    return {part: read_rows(folder / f"{part}.jsonl") for part in PARTS}


def differing(docs: Path, files: Mapping[str, str]) -> list[str]:
    """List files that are not as they would be made, and figures that would not be made."""
    drawn = {f"results/{path.name}" for path in (docs / "results").iterdir()}
    wrong = [name for name, text in files.items() if _text(docs / name) != text]
    return sorted({*wrong, *(drawn - files.keys())})


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def main(argv: Sequence[str] | None = None) -> int:
    """Write, or check, the page and its figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing, and fail where a file differs")
    arguments = parser.parse_args(argv)
    docs = ROOT / "docs"
    files = made(read_all(), _text(docs / "results.md"))
    wrong = differing(docs, files)
    if arguments.check:
        print("\n".join(f"{name} differs: run experiments/figures.py" for name in wrong), end="\n" if wrong else "")
        return int(bool(wrong))
    for name in wrong:
        if name not in files:
            (docs / name).unlink()
            continue
        (docs / name).parent.mkdir(exist_ok=True)
        (docs / name).write_text(files[name], encoding="utf-8")
    print("\n".join(f"wrote docs/{name}" for name in wrong) or "nothing to write")
    return 0


if __name__ == "__main__":
    sys.exit(main())
