"""The report: what a run folder holds, put together as one HTML file that needs nothing else."""

import base64
import hashlib
from importlib import resources
from itertools import pairwise
from pathlib import Path
from string import Template

from agentrl.errors import RunFolderError
from agentrl.viewer.charts import PHASES, curve, diagnostics, seconds_by_phase, size_of
from agentrl.viewer.choose import choose
from agentrl.viewer.episodes import render_episode
from agentrl.viewer.folder import Row, RunFolder, read_folder, series, step_of
from agentrl.viewer.text import brief, duration, escape, marked, number, percent

_COLUMNS = (
    ("n", "problems", brief),
    ("tasks", "problems", brief),
    ("attempts", "attempts", brief),
    ("success", "success", percent),
    ("low", "low", percent),
    ("high", "high", percent),
    ("turns_mean", "turns", brief),
    ("tool_calls_mean", "tool calls", brief),
    ("tool_errors_mean", "tool errors", brief),
    ("truncated", "truncated", brief),
    ("cut_turns", "cut turns", brief),
)
"""Key, heading and writer of each column of the evaluations' table."""


def write_report(run: Path) -> Path:
    """Write ``report.html`` into a run folder, in place of an older one.

    The page works from ``file://``: styles, charts and scripts are in it, and its policy forbids it to load anything.
    What the run has not written yet is left out of the page.

    Args:
        run: the run's folder.

    Returns:
        The path of the report.

    Raises:
        RunFolderError: ``run`` is no run's folder, or can't be read or written.
    """
    try:
        page = render(read_folder(run))
        path, temporary = run / "report.html", run / ".report.html.tmp"
        temporary.write_text(page, encoding="utf-8", newline="\n")
        temporary.replace(path)
    except OSError as error:
        raise RunFolderError(f"no report can be written for {run}: {error}") from error
    return path


def render(run: RunFolder) -> str:
    """The whole page."""
    notes = list(run.notes)
    main = _main_split(run)
    evals = [row for row in run.evals if row.get("split") == main]
    episodes = _episodes(run, notes)
    charts = [*diagnostics(run.steps), seconds_by_phase(run.steps)]
    style, script = _asset("report.css"), _asset("report.js")
    return Template(_asset("report.html")).substitute(
        name=escape(run.name),
        style=style,
        script=script,
        style_hash=_hash(style),
        script_hash=_hash(script),
        result=_result(evals),
        facts=_facts(run),
        notes=_notes(notes),
        curve=_part("Learning curve", "curve", curve(evals, run.steps)),
        health=_part("Training", "training", "".join(charts)),
        episodes=_part("Episodes", "episodes", episodes),
        evals=_evals_table(run.evals),
        config=_config(run.config),
    )


def _main_split(run: RunFolder) -> object:
    """The split that was evaluated first; the others are in the table only."""
    return run.evals[0].get("split") if run.evals else None


def _result(evals: list[Row]) -> str:
    known = [row for row in evals if number(row.get("success")) is not None]
    if not known:
        return '<p class="none">There is no evaluation on held-out problems yet.</p>'
    if len(known) == 1:
        return f'<table class="result"><tbody>{_outcome("Measured", known[0])}</tbody></table>'
    rows = _outcome("Before", known[0]) + _outcome("After", known[-1])
    return f'<table class="result"><tbody>{rows}</tbody></table>'


def _outcome(title: str, row: Row) -> str:
    success, low, high = (number(row.get(key)) for key in ("success", "low", "high"))
    assert success is not None, "rows without success are no outcome"
    interval = "" if low is None or high is None else f"{percent(low)} to {percent(high)}"
    return (
        f"<tr><th>{title}<small>step {step_of(row):g}</small></th><td class='rate'>{percent(success)}</td>"
        f"<td>{_whisker(success, low, high)}<small>{interval}</small></td><td><small>{size_of(row)}</small></td></tr>"
    )


def _whisker(success: float, low: float | None, high: float | None) -> str:
    """A rate on a line from 0 to 1, with its interval."""
    at = [4 + 192 * min(max(value, 0.0), 1.0) for value in (success, low or 0.0, high or 0.0)]
    interval = "" if low is None or high is None else f'<path class="reach" d="M{at[1]:.1f} 9H{at[2]:.1f}"/>'
    return (
        '<svg class="whisker-line" viewBox="0 0 200 18" aria-hidden="true">'
        '<path class="axis" d="M4 9H196M4 5V13M196 5V13"/>'
        f'{interval}<circle class="dot success" cx="{at[0]:.1f}" cy="9" r="5"/></svg>'
    )


def _facts(run: RunFolder) -> str:
    facts: list[tuple[str, str]] = []
    if run.steps:
        facts.append(("Training steps", str(len(run.steps))))
    if tokens := series(run.steps, "sampled_tokens"):
        facts.append(("Sampled tokens", brief(sum(value for _, value in tokens))))
    if seconds := _wall_time(run):
        facts.append(("Wall time", duration(seconds)))
    return "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>" for name, text in facts)


def _wall_time(run: RunFolder) -> float:
    """Seconds of the whole run where it kept a clock, or else of its steps."""
    rows = sorted([*run.steps, *run.evals], key=step_of)
    if clock := [value for _, value in series(rows, "seconds_run")]:
        # The clock starts again where a run was resumed: what it showed before that counts as well.
        return sum(before for before, after in pairwise(clock) if after < before) + clock[-1]
    keys = ("seconds_step",) if series(run.steps, "seconds_step") else tuple(f"seconds_{phase}" for phase in PHASES)
    return sum(value for key in keys for _, value in series(run.steps, key))


def _episodes(run: RunFolder, notes: list[str]) -> str:
    chosen = choose(run.episodes, notes)
    articles = (render_episode(one, anchor=f"episode-{at}") for at, one in enumerate(chosen, start=1))
    return _asset("legend.html") + "".join(articles) if chosen else ""


def _part(title: str, name: str, body: str) -> str:
    return f'<section class="part" id="{name}"><h2>{title}</h2>{body}</section>' if body else ""


def _evals_table(evals: tuple[Row, ...]) -> str:
    if not evals:
        return ""
    columns = [column for column in _COLUMNS if any(number(row.get(column[0])) is not None for row in evals)]
    head = "<th>step</th><th>split</th>" + "".join(f"<th>{title}</th>" for _, title, _ in columns)
    rows = ""
    for row in evals:
        known = [(number(row.get(key)), write) for key, _, write in columns]
        cells = "".join(f"<td>{'' if value is None else write(value)}</td>" for value, write in known)
        rows += f"<tr><td>{step_of(row):g}</td><td>{escape(row.get('split', ''))}</td>{cells}</tr>"
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return (
        f'<details class="part" id="evals"><summary>All evaluations</summary><div class="wide">{table}</div></details>'
    )


def _config(text: str) -> str:
    if not text:
        return ""
    return (
        f'<details class="part" id="config"><summary>Configuration</summary><pre>{marked_lines(text)}</pre></details>'
    )


def marked_lines(text: str) -> str:
    """Like ``marked``, without signs at line ends."""
    return "\n".join(marked(line) for line in text.splitlines())


def _notes(notes: list[str]) -> str:
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return f'<aside id="notes"><b>Not everything could be read</b><ul>{items}</ul></aside>' if items else ""


def _asset(name: str) -> str:
    return resources.files("agentrl.viewer").joinpath(name).read_text(encoding="utf-8")


def _hash(inline: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()
