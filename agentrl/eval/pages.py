"""Results as sections of text and tables: Markdown for a terminal, and one HTML page. Texts in them are hostile."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl.errors import UsageError
from agentrl.runs.files import replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A heading with a table and text below it."""

    title: str
    """The heading."""
    text: Sequence[str] = ()
    """Paragraphs."""
    head: Sequence[str] = ()
    """Headings of a table's columns; none where there is no table."""
    rows: Sequence[Sequence[object]] = ()
    """Its rows."""


def markdown(title: str, sections: Iterable[Section]) -> str:
    """Write sections as Markdown for a terminal, whose ``Display`` escapes control characters."""
    parts = [f"# {title}"]
    for section in sections:
        parts += [f"## {section.title}", *([table(section.head, section.rows)] if section.head else []), *section.text]
    return "\n\n".join(parts)


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Write a table in Markdown."""
    # No text may end its cell or its line.
    texts = ([" ".join(str(cell).split()).replace("|", "¦") for cell in row] for row in (head, *rows))
    header, *lines = (f"| {' | '.join(row)} |" for row in texts)
    return "\n".join([header, f"|{'---|' * len(head)}", *lines])


def write_page(path: Path, title: str, sections: Iterable[Section]) -> None:
    """Write sections as one file of HTML that loads nothing; its texts are escaped.

    Raises:
        UsageError: the file can't be written.
        ModuleNotFoundError: jinja2 is not installed.
    """
    from agentrl.runs.report.page import template

    text = template("page.html", "agentrl.eval").render(title=title, sections=list(sections))
    try:
        replace(path, text.encode())
    except OSError as error:
        raise UsageError(f"the page {str(path)!r} can't be written: {error.strerror}") from error


def shorten(text: str, longest: int) -> str:
    """Cut a text to so many characters, the last of which is then an ellipsis."""
    return text if len(text) <= longest else text[: longest - 1] + "…"
