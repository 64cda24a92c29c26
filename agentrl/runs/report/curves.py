"""Curves of several runs in one chart: a line for each choice of settings, and a band over its seeds."""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from agentrl.runs.report.axes import Frame, Point, draw_axes, span, value_range
from agentrl.runs.report.charts import DIAGNOSTICS, REWARD, figure, swatch, targets
from agentrl.runs.report.folder import RunData, env_of, series
from agentrl.runs.report.text import brief, tag

_SUCCESS = ("success", "Success", "on held-out problems")
_REWARD = (REWARD, "Training reward", "mean over the episodes of a step")
_OWN = ("run.name", "run.seed")
"""What runs may differ in and still be one family."""
_STYLES = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Runs with equal settings but for name and seed."""

    title: str
    """The settings that tell it from the other families, or its runs' names where they are of no help."""
    runs: Sequence[RunData]
    """Its runs."""


def families(runs: Sequence[RunData]) -> list[Family]:
    """Put runs with equal settings together, in order of their first one."""
    found: dict[str, list[RunData]] = {}
    settings: dict[str, Mapping[str, str]] = {}
    for run in runs:
        mine = _settings(run)
        key = repr(sorted(mine.items()))
        settings[key] = mine
        found.setdefault(key, []).append(run)
    names = {name for mine in settings.values() for name in mine}
    telling = sorted(name for name in names if len({mine.get(name) for mine in settings.values()}) > 1)
    return [
        Family(title=_title(members, {name: settings[key].get(name, "unset") for name in telling}), runs=members)
        for key, members in found.items()
    ]


def compared(runs: Sequence[RunData]) -> list[Markup]:
    """A chart for each quantity that one of the runs has: success and reward for each environment of a mix too."""
    found = families(runs)
    envs = sorted({"", *(env_of(row) for run in runs for row in run.evals)})
    wanted = [(*quantity, env) for quantity in (_SUCCESS, _REWARD) for env in envs] + [
        (*one, "") for one in DIAGNOSTICS
    ]
    return [chart for key, title, what, env in wanted if (chart := _chart(found, key, title, what, env))]


def _settings(run: RunData) -> Mapping[str, str]:
    try:
        sections = tomllib.loads(run.config)
    except (ValueError, RecursionError):
        sections = {}
    flat = {
        f"{section}.{key}": str(value)
        for section, values in sections.items()
        if isinstance(values, dict) and section != "versions"
        for key, value in values.items()
    }
    # Without settings nothing says that two runs are alike.
    return {name: value for name, value in flat.items() if name not in _OWN} or {"run": run.name}


def _title(runs: Sequence[RunData], telling: Mapping[str, str]) -> str:
    names = ", ".join(run.name for run in runs)
    said = ", ".join(f"{name}={value}" for name, value in telling.items())
    return f"{said} ({names})" if said and len(said) < 100 else names


def _points(run: RunData, key: str, env: str) -> dict[float, float]:
    if key != "success":
        return dict(series(run.steps, f"env/{env}/{key}" if env else key))
    # As in the overview of one run, of several splits the first is drawn.
    first = [(row.get("split"), env) for row in run.evals[:1]]
    return dict(series([row for row in run.evals if (row.get("split"), env_of(row)) in first], key))


def _chart(found: Sequence[Family], key: str, title: str, what: str, env: str) -> Markup:
    drawn = [(family, [points for run in family.runs if (points := _points(run, key, env))]) for family in found]
    values = [value for _, lines in drawn for points in lines for value in points.values()]
    if not values:
        return Markup()
    steps = [step for _, lines in drawn for points in lines for step in points]
    means = [_mean(lines) for _, lines in drawn]
    frame = Frame(width=520, height=240, steps=span(steps), values=value_range(values, 5))
    body = [draw_axes(frame, about=(6, 5))]
    keys: list[Markup] = []
    for place, (family, lines) in enumerate(drawn):
        if lines:
            style = f"run{place % _STYLES}"
            body += _drawn(frame, means[place], lines, style)
            keys.append(swatch(style, f"{family.title}, {len(lines)} run{'s' if len(lines) > 1 else ''}"))
    # One target for all lines of a step: those of each line would lie on top of each other.
    told: dict[float, list[str]] = {}
    for (family, _), mean in zip(drawn, means, strict=True):
        for step, value in mean:
            told.setdefault(step, []).append(f"{family.title} {brief(value)}")
    body += targets(frame, [(step, " · ".join(told[step])) for step in sorted(told)])
    notes = [tag("span", what, class_="what"), tag("span", *keys, class_="what")]
    name, title = (f"runs-{key}-{env}", f"{title}: {env}") if env else (f"runs-{key}", title)
    return figure(name, title, notes, frame, body)


def _mean(lines: Sequence[Mapping[float, float]]) -> list[Point]:
    """The mean over seeds at the steps that all of them have: where one ended early it would jump."""
    shared = sorted(set(lines[0]).intersection(*lines[1:])) if lines else ()
    return [(step, sum(points[step] for points in lines) / len(lines)) for step in shared]


def _drawn(frame: Frame, mean: Sequence[Point], lines: Sequence[Mapping[float, float]], style: str) -> Iterator[Markup]:
    """The mean over seeds, with a band from the smallest to the largest where there are several."""
    if not mean:
        return
    if len(lines) > 1:
        edges = [[(step, bound(points[step] for points in lines)) for step, _ in mean] for bound in (max, min)]
        edge = edges[0] + edges[1][::-1]
        yield tag("path", class_=f"range {style}", d=f"{frame.path(edge)}Z")
    yield tag("path", class_=f"line {style}", d=frame.path(mean))
    if len(mean) <= 30:
        yield from (
            tag("circle", class_=f"dot {style}", cx=frame.x(step), cy=frame.y(value), r=2.2) for step, value in mean
        )
