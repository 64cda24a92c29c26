"""Results as sections of text and tables: Markdown for a terminal, and one HTML page. Texts in them are hostile."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl.errors import UsageError
from agentrl.runs.files import replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A heading with what stands below it."""

    title: str
    """The heading."""
    text: Sequence[str] = ()
    """Paragraphs."""
    head: Sequence[str] = ()
    """Headings of a table's columns; none where there is no table."""
    rows: Sequence[Sequence[object]] = ()
    """Its rows."""
    figure: str = ""
    """A chart as markup, which only the page shows."""


def markdown(title: str, sections: Iterable[Section]) -> str:
    """Write sections for a terminal, which escapes what it must not obey."""
    lines = [f"# {title}"]
    for section in sections:
        lines += ["", f"## {section.title}", "", *body(section)]
    return "\n".join(lines).rstrip()


def body(section: Section) -> list[str]:
    """Give the lines of a section without its heading: the table, then the text."""
    lines = table(section.head, section.rows).splitlines() if section.head else []
    for text in section.text:
        lines += ["", text] if lines else [text]
    return lines


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Write a table in Markdown."""
    # No text may end its cell or its line.
    texts = ([" ".join(str(cell).split()).replace("|", "¦") for cell in row] for row in (head, *rows))
    first, *rest = (f"| {' | '.join(row)} |" for row in texts)
    return "\n".join([first, f"|{'---|' * len(head)}", *rest])


def write_page(path: Path, title: str, sections: Iterable[Section]) -> None:
    """Write sections as one file of HTML that loads nothing; its texts are escaped.

    Raises:
        UsageError: the file can't be written.
        ModuleNotFoundError: jinja2 is not installed.
    """
    from agentrl.runs.report.page import template

    # The report's style belongs to it too: charts are drawn by the same code.
    text = template("page.html", "agentrl.eval").render(title=title, sections=list(sections))
    try:
        replace(path, text.encode())
    except OSError as error:
        raise UsageError(f"the page {str(path)!r} can't be written: {error.strerror}") from error


def shared_length(a: Sequence[object], b: Sequence[object]) -> int:
    """Return how many items both begin with."""
    differing = (at for at, (one, other) in enumerate(zip(a, b, strict=False)) if one != other)
    return next(differing, min(len(a), len(b)))
