"""The page of runs and episodes: one HTML file that loads nothing else."""

import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from agentrl.errors import RunFolderError
from agentrl.runs.files import replace
from agentrl.runs.folder import number
from agentrl.runs.progress import Display, as_argument
from agentrl.runs.records import episode_files
from agentrl.runs.report.charts import Chart, curve, data, diagnostics, planned, seconds_by_phase, size_of
from agentrl.runs.report.curves import compared
from agentrl.runs.report.folder import RunData, RunRow, env_of, holds_run, read_folder, series, step_of
from agentrl.runs.report.pack import Packed, block
from agentrl.runs.report.text import brief, duration, marked, percent, visible
from agentrl.runs.symptoms import Onset, watched

_Column: TypeAlias = tuple[str, str, Callable[[float], str]]
_COLUMNS: tuple[_Column, ...] = (
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
_IN_REPORT = 16
"""Episodes of each file in a run's own report, which has to stay small."""


def write_report(run: Path) -> Path:
    """Write ``report.html`` into a run folder, in place of an older one.

    The page works from ``file://``: styles, data and scripts are in it, and its policy forbids it to load anything.
    It lacks what the run has not written yet.

    Args:
        run: the run's folder.

    Returns:
        The path of the report.

    Raises:
        RunFolderError: ``run`` is no run's folder, or can't be read or written.
    """
    path = run / "report.html"
    try:
        data = read_folder(run)
        packed = Packed(notes=list(data.notes))
        packed.add(0, _files(data, every=False), _IN_REPORT, strict=False)
        hint = f"The first {_IN_REPORT} of a step. All of them: agentrl view {as_argument(run)}"
        replace(path, render([run.resolve().name], [data], packed, hint))
    except OSError as error:
        raise RunFolderError(f"no report can be written for {run}: {error}") from error
    return path


def write_view(paths: Sequence[Path], out: Path, *, every: bool = False) -> int:
    """Write a page of runs and files of episodes, to look through and to compare; progress goes to standard error.

    Args:
        paths: run folders, files of episodes, or folders of such, as ``agentrl eval`` writes them.
        out: the page.
        every: show the episodes of all saved steps of a run, instead of only the first and the last one.

    Returns:
        The number of episodes in the page.

    Raises:
        RunFolderError: a folder is no run's, or the page can't be written.
        TrajectoryError: a file holds something else than episodes.
    """
    try:
        alone = {path: episode_files(path) for path in paths if not holds_run(path)}
        runs = {path: read_folder(path) for path in paths if not alone.get(path)}
        packed = Packed(notes=[note for run in runs.values() for note in run.notes])
        files = [
            _files(runs[path], every=every) if path in runs else [("", file) for file in alone[path]] for path in paths
        ]
        with Display().phase("packing", sum(map(len, files))) as bar:
            for source, (path, some) in enumerate(zip(paths, files, strict=True)):
                packed.add(source, some, strict=path not in runs, added=partial(bar.advance, "files"))
        if len(paths) == 2:
            packed.pair()
        replace(out, render(_names(paths), [runs[path] for path in paths if path in runs], packed, ""))
    except OSError as error:
        raise RunFolderError(f"{out} can't be written: {error}") from error
    return len(packed.rows)


def render(names: Sequence[str], runs: Sequence[RunData], packed: Packed, hint: str) -> bytes:
    """Return the page as HTML.

    Args:
        names: names of its sources.
        runs: the sources that are runs.
        packed: their episodes.
        hint: a sentence about where there are more episodes.
    """
    alone = _overview(runs[0]) if len(runs) == 1 else {}
    charts: dict[str, list[Chart]] = {"curve": [], "training": [], "compared": compared(runs) if runs[1:] else []}
    charts |= _charts(runs[0]) if len(runs) == 1 else {}
    page = template("page.html").render(
        {"outcomes": (), "facts": (), "evals": (), "columns": (), "config": ""} | alone,
        symptoms=[
            (f"{_span(onset)} of {run.name}" if runs[1:] else _span(onset), onset.sentence)
            for run in runs
            for onset in watched(run.steps).onsets
        ],
        names=names,
        overview=bool(runs),
        charts=charts,
        notes=packed.notes,
        hint=hint,
        episodes=len(packed.rows),
        index=Markup(block("index", {"sources": list(names), "rows": packed.rows}) + charts_block(charts)),
    )
    # The blocks follow the script, so that the page can be used while the browser still reads them.
    return "".join([page, "\n", *packed.blocks, "</body>\n</html>\n"]).encode()


def charts_block(charts: Mapping[str, Sequence[Chart]]) -> str:
    """Return the element with the data of a page's charts, by the name of their list."""
    return block("charts", {name: data(some) for name, some in charts.items()})


def _by_env(run: RunData) -> dict[str, list[RunRow]]:
    """Return the evaluations that are compared, by environment: those of the split that was evaluated first."""
    evals = [row for row in run.evals if row.get("split") == run.evals[0].get("split")]
    envs = list(dict.fromkeys(map(env_of, evals))) or [""]
    return {name: [row for row in evals if env_of(row) == name] for name in envs}


def _charts(run: RunData) -> dict[str, list[Chart]]:
    curves = [chart for name, rows in _by_env(run).items() for chart in curve(rows, run.steps, name)]
    return {"curve": curves, "training": [*diagnostics(run.steps), *planned(run.steps), *seconds_by_phase(run.steps)]}


def _overview(run: RunData) -> dict[str, object]:
    """Return the parts of a run's page beside its charts and episodes."""
    by_env = _by_env(run)
    columns = [column for column in _COLUMNS if series(run.evals, column[0])]
    return {
        "outcomes": [outcome for name, rows in by_env.items() for outcome in _outcomes(rows, name)],
        "facts": _facts(run),
        "columns": ["step", "split", *["environment"] * any(by_env), *(title for _, title, _ in columns)],
        "evals": [
            [f"{step_of(row):g}", row.get("split", ""), *[env_of(row)] * any(by_env), *_cells(row, columns)]
            for row in run.evals
        ],
        "config": run.config,
    }


def _files(run: RunData, *, every: bool) -> list[tuple[str, Path]]:
    chosen = run.episodes if every else run.episodes[:1] + run.episodes[1:][-1:]
    return [(f"step {step}", path) for step, path in chosen]


def _names(paths: Sequence[Path]) -> list[str]:
    """Return the last parts of each path, as many as make them differ: files of different runs have equal names."""
    absolute = [path.resolve().parts for path in paths]
    tails = [["/".join(parts[-count:]) for parts in absolute] for count in range(1, 9)]
    return next((names for names in tails if len({*names}) == len({*absolute})), tails[0])


@cache
def template(name: str, *packages: str) -> Template:
    """Load a template, which escapes its values and makes them visible, unless they are markup.

    Args:
        name: the name of its file.
        packages: where it may lie beside this package, whose style and scripts others include.
    """
    templates = Environment(
        loader=ChoiceLoader([PackageLoader(package, "") for package in (*packages, "agentrl.runs.report")]),
        autoescape=True,
        finalize=visible,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    functions = (marked, percent, policy_hash)
    return templates.get_template(name, globals={function.__name__: function for function in functions})


def _outcomes(evals: list[RunRow], env: str) -> list[dict[str, str | float | None]]:
    """Return the summary's numbers of the first and the last evaluation of an environment."""
    measured = [row for row in evals if number(row.get("success")) is not None]
    titles = ("Before", "After") if len(measured) > 1 else ("Measured",)
    numbers = ("step", "success", "low", "high")
    return [
        {"title": f"{title} {env}".rstrip(), "size": size_of(row)} | {key: number(row.get(key)) for key in numbers}
        for title, row in zip(titles, measured[:1] + measured[1:][-1:], strict=False)
    ]


def _facts(run: RunData) -> list[tuple[str, str]]:
    facts: list[tuple[str, str]] = []
    if run.steps:
        facts.append(("Training steps", str(len(run.steps))))
    if tokens := series(run.steps, "sampled_tokens"):
        facts.append(("Sampled tokens", brief(sum(value for _, value in tokens))))
    if seconds := _wall_time(run):
        facts.append(("Wall time", duration(seconds)))
    return facts


def _span(onset: Onset) -> str:
    """Return the steps at which a symptom was shown, in words."""
    return f"From step {onset.step:g}" + ("" if onset.end is None else f" to {onset.end:g}")


def _wall_time(run: RunData) -> float:
    """Return the seconds of the run, all of its processes together."""
    rows = sorted([*run.steps, *run.evals], key=step_of)
    clock = [value for _, value in series(rows, "seconds_run")]
    # Where the clock falls, the run was resumed from an earlier step: the time before that counts as well.
    return sum(before for before, after in pairwise([*clock, 0.0]) if after < before)


def _cells(row: RunRow, columns: Sequence[_Column]) -> list[str]:
    values = ((number(row.get(key)), write) for key, _, write in columns)
    return ["" if value is None else write(value) for value, write in values]


def policy_hash(inline: str) -> str:
    """Return the hash by which the page's policy allows a style or a script."""
    return "sha256-" + base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()
