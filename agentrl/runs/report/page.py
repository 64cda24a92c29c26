"""The page: what run folders and files of episodes hold, put together as one HTML file that needs nothing else."""

import base64
import hashlib
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from agentrl.errors import RunFolderError
from agentrl.runs.files import replace
from agentrl.runs.progress import Display, as_argument
from agentrl.runs.records import count_episodes, episode_files
from agentrl.runs.report.charts import curve, diagnostics, seconds_by_phase, size_of, whisker
from agentrl.runs.report.curves import compared
from agentrl.runs.report.folder import RunData, RunRow, env_of, is_run, read_folder, series, step_of
from agentrl.runs.report.pack import Packed, block
from agentrl.runs.report.text import brief, duration, marked, number, percent, visible

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
"""Episodes of each file in a run's own report, which is to stay small."""


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
    """Write a page of runs and files of episodes, to look through and to compare; standard error tells how far it is.

    Args:
        paths: run folders, files of episodes, or folders of such, as ``agentrl eval`` writes them.
        out: the page.
        every: show the episodes of all steps that a run has saved, not of the first and the last one alone.

    Returns:
        How many episodes are in it.

    Raises:
        RunFolderError: a folder is no run's, or the page can't be written.
        TrajectoryError: a file holds something else than episodes.
    """
    try:
        alone = {path: episode_files(path) for path in paths if not is_run(path)}
        runs = {path: read_folder(path) for path in paths if not alone.get(path)}
        packed = Packed(notes=[note for run in runs.values() for note in run.notes])
        files = [
            _files(runs[path], every=every) if path in runs else [("", file) for file in alone[path]] for path in paths
        ]
        total = sum(count_episodes(file) for some in files for _, file in some)
        with Display().phase("packing", total) as bar:
            for place, (path, some) in enumerate(zip(paths, files, strict=True)):
                packed.add(place, some, strict=path not in runs, added=partial(bar.advance, "episodes"))
        if len(paths) == 2:
            packed.pair()
        replace(out, render(_names(paths), [runs[path] for path in paths if path in runs], packed, ""))
    except OSError as error:
        raise RunFolderError(f"{out} can't be written: {error}") from error
    return len(packed.rows)


def render(names: Sequence[str], runs: Sequence[RunData], packed: Packed, hint: str) -> bytes:
    """The whole page.

    Args:
        names: of its sources.
        runs: those of them that are runs.
        packed: their episodes.
        hint: where there are more.
    """
    alone = _overview(runs[0]) if len(runs) == 1 else {}
    page = template("page.html").render(
        {"outcomes": (), "facts": (), "curve": "", "charts": "", "evals": (), "columns": (), "config": ""} | alone,
        names=names,
        overview=bool(runs),
        compared=compared(runs) if len(runs) > 1 else (),
        notes=packed.notes,
        hint=hint,
        episodes=len(packed.rows),
        index=Markup(block("index", {"sources": list(names), "rows": packed.rows})),
    )
    # Behind the script, so that the page can be used while the browser still reads them.
    return "".join([page, "\n", *packed.blocks, "</body>\n</html>\n"]).encode()


def _overview(run: RunData) -> dict[str, object]:
    """What is told of a run besides its episodes."""
    # The split that was evaluated first is compared; the others are in the table only.
    evals = [row for row in run.evals if row.get("split") == run.evals[0].get("split")]
    envs = list(dict.fromkeys(map(env_of, evals))) or [""]
    by_env = {name: [row for row in evals if env_of(row) == name] for name in envs}
    known = [column for column in _COLUMNS if series(run.evals, column[0])]
    return {
        "outcomes": [outcome for name, rows in by_env.items() for outcome in _outcomes(rows, name)],
        "facts": _facts(run),
        "curve": Markup().join(curve(rows, run.steps, name) for name, rows in by_env.items()),
        "charts": Markup().join([*diagnostics(run.steps), seconds_by_phase(run.steps)]),
        "columns": ["step", "split", *["environment"] * any(envs), *(title for _, title, _ in known)],
        "evals": [
            [f"{step_of(row):g}", row.get("split", ""), *[env_of(row)] * any(envs), *_cells(row, known)]
            for row in run.evals
        ],
        "config": run.config,
    }


def _files(run: RunData, *, every: bool) -> list[tuple[str, Path]]:
    chosen = run.episodes if every else run.episodes[:1] + run.episodes[1:][-1:]
    return [(f"step {step}", path) for step, path in chosen]


def _names(paths: Sequence[Path]) -> list[str]:
    """The last parts of each path that tell them apart: files of different runs have one name."""
    whole = [path.resolve().parts for path in paths]
    tails = [["/".join(parts[-count:]) for parts in whole] for count in range(1, 9)]
    return next((names for names in tails if len({*names}) == len({*whole})), tails[0])


@cache
def template(name: str, *packages: str) -> Template:
    """A template: whatever is put into it is made visible and escaped, unless it is markup.

    Args:
        name: of its file.
        packages: where it may lie, before this one, whose style others include.
    """
    templates = Environment(
        loader=ChoiceLoader([PackageLoader(one, "") for one in (*packages, "agentrl.runs.report")]),
        autoescape=True,
        finalize=visible,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    functions = (marked, policy_hash)
    return templates.get_template(name, globals={function.__name__: function for function in functions})


def _outcomes(evals: list[RunRow], env: str) -> list[tuple[object, ...]]:
    """Title, step, rate, its drawing, its interval and the size of the evaluations that are compared."""
    known = [row for row in evals if number(row.get("success")) is not None]
    titles = ("Before", "After") if len(known) > 1 else ("Measured",)
    return [
        _outcome(f"{title} {env}".rstrip(), row) for title, row in zip(titles, known[:1] + known[1:][-1:], strict=False)
    ]


def _outcome(title: str, row: RunRow) -> tuple[object, ...]:
    success, low, high = (number(row.get(key)) for key in ("success", "low", "high"))
    assert success is not None, "rows without success are no outcome"
    interval = "" if low is None or high is None else f"{percent(low)} to {percent(high)}"
    return title, f"{step_of(row):g}", percent(success), whisker(success, low, high), interval, size_of(row)


def _facts(run: RunData) -> list[tuple[str, str]]:
    facts: list[tuple[str, str]] = []
    if run.steps:
        facts.append(("Training steps", str(len(run.steps))))
    if tokens := series(run.steps, "sampled_tokens"):
        facts.append(("Sampled tokens", brief(sum(value for _, value in tokens))))
    if seconds := _wall_time(run):
        facts.append(("Wall time", duration(seconds)))
    return facts


def _wall_time(run: RunData) -> float:
    """Seconds of the whole run."""
    rows = sorted([*run.steps, *run.evals], key=step_of)
    clock = [value for _, value in series(rows, "seconds_run")]
    # The clock starts again where a run was resumed: what it showed before that counts as well.
    return sum(before for before, after in pairwise([*clock, 0.0]) if after < before)


def _cells(row: RunRow, columns: Sequence[_Column]) -> list[str]:
    known = ((number(row.get(key)), write) for key, _, write in columns)
    return ["" if value is None else write(value) for value, write in known]


def policy_hash(inline: str) -> str:
    """What the page's policy calls a style or a script that is allowed."""
    return "sha256-" + base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()
