"""Curves of several runs in one chart: a line for each choice of settings, and a band over its seeds."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agentrl.runs.report.charts import DIAGNOSTICS, REWARD, STYLES, Chart, Line
from agentrl.runs.report.folder import RunData, env_of, series

_SUCCESS = ("success", "Success", "on held-out problems")
_REWARD = (REWARD, "Training reward", "mean over the episodes of a step")
_OWN = ("run.name", "run.seed")
"""Settings in which the runs of one family may differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Runs with equal settings but for name and seed."""

    title: str
    """The settings in which it differs from the other families, with its runs' names."""
    runs: Sequence[RunData]
    """Its runs."""


def families(runs: Sequence[RunData]) -> list[Family]:
    """Group runs with equal settings, in order of their first one."""
    groups: dict[str, list[RunData]] = {}
    settings: dict[str, Mapping[str, str]] = {}
    for run in runs:
        mine = _settings(run)
        key = repr(sorted(mine.items()))
        settings[key] = mine
        groups.setdefault(key, []).append(run)
    names = {name for mine in settings.values() for name in mine}
    telling = sorted(name for name in names if len({mine.get(name) for mine in settings.values()}) > 1)
    return [
        Family(title=_title(members, {name: settings[key].get(name, "unset") for name in telling}), runs=members)
        for key, members in groups.items()
    ]


def compared(runs: Sequence[RunData]) -> list[Chart]:
    """Return a chart for each quantity that one of the runs has; success and reward for each environment of a mix."""
    groups = families(runs)
    envs = sorted({"", *(env_of(row) for run in runs for row in run.evals)})
    wanted = [(quantity, env) for quantity in (_SUCCESS, _REWARD) for env in envs]
    wanted += [(diagnostic, "") for diagnostic in DIAGNOSTICS]
    return [chart for quantity, env in wanted if (chart := _chart(groups, *quantity, env)).lines]


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
    # A run without settings is a family of its own.
    return {name: value for name, value in flat.items() if name not in _OWN} or {"run": run.name}


def _title(runs: Sequence[RunData], telling: Mapping[str, str]) -> str:
    names = ", ".join(run.name for run in runs)
    settings = ", ".join(f"{name}={value}" for name, value in telling.items())
    return f"{settings} ({names})" if settings and len(settings) < 100 else names


def _points(run: RunData, key: str, env: str) -> dict[float, float]:
    if key != "success":
        return dict(series(run.steps, f"env/{env}/{key}" if env else key))
    # As in the overview of one run, of several splits the first is drawn.
    splits = [row.get("split") for row in run.evals[:1]]
    return dict(series([row for row in run.evals if row.get("split") in splits and env_of(row) == env], key))


def _chart(groups: Sequence[Family], key: str, title: str, what: str, env: str) -> Chart:
    lines, keys = list[Line](), list[tuple[str, str]]()
    for index, family in enumerate(groups):
        runs = [points for run in family.runs if (points := _points(run, key, env))]
        # Only steps that all seeds have: where one ended early, the mean would jump.
        shared = sorted(set(runs[0]).intersection(*runs[1:])) if runs else []
        values = {step: [points[step] for points in runs] for step in shared}
        mean = [(step, sum(values[step]) / len(runs)) for step in shared]
        band = [(step, min(values[step]), max(values[step])) for step in shared] if len(runs) > 1 else []
        if runs:
            style = f"run{index % STYLES}"
            lines.append(Line(style=style, name=family.title, points=mean, band=band))
            keys.append((style, f"{family.title}, {len(runs)} run{'s' if len(runs) > 1 else ''}"))
    suffix, of = (f"-{env}", f": {env}") if env else ("", "")
    return Chart(id=f"runs-{key}{suffix}", title=f"{title}{of}", what=what, keys=keys, lines=lines, size="middle")
