"""What the rows say of the plan's statements."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from agentrl.eval.pages import table

Rows = Mapping[str, list[dict[str, Any]]]
"""Rows by part."""
NOT_RUN = "*not run yet*"


@dataclass(frozen=True, slots=True)
class Verdict:
    """A statement, and whether the rows refute it."""

    name: str
    """Its number in the plan."""
    claim: str
    """In a few words."""
    holds: bool | None = None
    """None where the rows do not decide it."""
    figures: str = ""
    """The figures; empty where nothing was run."""
    described: bool = False
    """Whether the plan only asks for its figures."""


def written(verdicts: Iterable[Verdict]) -> str:
    """Tabulate verdicts."""
    words = {True: "holds", False: "**refuted**", None: "open"}
    lines = list[list[str]]()
    for verdict in verdicts:
        word = "described" if verdict.described else words[verdict.holds]
        cells = (word, verdict.figures) if verdict.figures else ("", NOT_RUN)
        lines.append([verdict.name, verdict.claim, *cells])
    return table(["", "statement", "verdict", "found"], lines)
