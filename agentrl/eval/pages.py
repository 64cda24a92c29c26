"""Results as sections of text and tables: Markdown for a terminal, and one HTML page. Texts in them are hostile."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl.errors import UsageError
from agentrl.runs.folder import replace


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
    lines = [*map(_row, (section.head, ["---"] * len(section.head), *section.rows))] if section.head else []
    for text in section.text:
        lines += ["", text] if lines else [text]
    return lines


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


def _row(cells: Iterable[object]) -> str:
    # No text may end its cell or its line.
    return f"| {' | '.join(' '.join(str(cell).split()).replace('|', '¦') for cell in cells)} |"
