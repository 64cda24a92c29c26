"""What came of a grid's runs: a Markdown table, and the same as JSON."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import mean
from typing import Any

from grid_plan import Plan, Run

from agentrl.errors import UsageError
from agentrl.evaluate import wilson
from agentrl.runfolder import read_jsonl
from agentrl.viewer.charts import PHASES


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How a run ended."""

    exit_code: int
    """That of its process, a signal's number negative; 2 where it could not begin."""
    error: str = ""
    """Why it failed, in one sentence; empty where it did not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a run that is done came to."""

    success: float
    """Share of its last evaluation's episodes that succeeded."""
    tasks: int
    """How many tasks that evaluation had."""
    sampled_tokens: int
    """Tokens it sampled in training."""
    minutes: float
    """Time that its training steps took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooled:
    """Several runs taken together."""

    success: float
    """Share of all their tasks that were solved."""
    low: float
    """Lower end of its 95% interval: Wilson's over the tasks of all runs."""
    high: float
    """Upper end of it."""
    tasks: int
    """How many tasks that is; several attempts at one do not count as several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table: the runs of one setting."""

    values: tuple[str, ...] | None
    """The value of each varied setting; None for the warm starts."""
    results: tuple[Result | None, ...]
    """One for each seed; None where the run is not done."""

    @property
    def done(self) -> list[Result]:
        """The results there are."""
        return [result for result in self.results if result is not None]

    @property
    def pooled(self) -> Pooled | None:
        """All seeds that are done, taken together."""
        tasks = sum(result.tasks for result in self.done)
        if tasks == 0:
            return None
        success = sum(result.success * result.tasks for result in self.done) / tasks
        low, high = wilson(success, tasks)
        return Pooled(success=success, low=low, high=high, tasks=tasks)


def sampled_tokens(run: Run) -> int:
    """How many tokens a run has sampled in training so far."""
    return sum(step["sampled_tokens"] for step in read_jsonl(run.folder / "metrics.jsonl"))


def result_of(run: Run, ends: Mapping[str, End]) -> Result | None:
    """The result of a run that ended well and was evaluated after its last step; otherwise None."""
    if run.name not in ends or ends[run.name].exit_code != 0:
        return None
    steps, evals = read_jsonl(run.folder / "metrics.jsonl"), read_jsonl(run.folder / "evals.jsonl")
    if not evals or evals[-1]["step"] != (steps[-1]["step"] if steps else 0):
        return None
    seconds = sum(step.get(f"seconds_{phase}", 0.0) for step in steps for phase in PHASES)
    last = evals[-1]
    return Result(
        success=last["success"], tasks=last["tasks"], sampled_tokens=sampled_tokens(run), minutes=seconds / 60
    )


def rows_of(plan: Plan, ends: Mapping[str, End]) -> list[Row]:
    """The lines of the table; the first is that of the warm starts, where there are any."""
    found: dict[tuple[str, ...] | None, list[Result | None]] = {}
    for run in plan.runs:
        found.setdefault(run.values, []).append(result_of(run, ends))
    return [Row(values=values, results=tuple(results)) for values, results in found.items()]


def table(plan: Plan, ends: Mapping[str, End]) -> str:
    """The grid as Markdown, with a sentence for each run that failed."""
    heads = [*plan.keys, *(f"seed {seed}" for seed in plan.seeds), "all seeds (95% interval)"]
    lines = [_line([*heads, "sampled tokens a run", "minutes of training"]), _line(["---"] * (len(heads) + 2))]
    lines += [_row_line(plan, row) for row in rows_of(plan, ends)]
    lines += [
        "",
        "Success on held-out tasks. The interval is Wilson's over the tasks of all seeds: it says how well these runs' "
        "success is known; how much another seed would change it, the seeds' own columns show.",
    ]
    failed = [f"- {run.name} failed: {ends[run.name].error}" for run in plan.runs if _failed(run, ends)]
    return "\n".join([*lines, *([""] if failed else []), *failed])


def write_summary(plan: Plan, ends: Mapping[str, End]) -> None:
    """Write ``grid.json``, whole at any instant: the table in ``rows``, each run and how it ended in ``runs``."""
    rows = [
        {
            "settings": None if row.values is None else _settings(plan, row.values),
            "success": [result and result.success for result in row.results],
            "pooled": row.pooled and asdict(row.pooled),
        }
        for row in rows_of(plan, ends)
    ]
    runs = [_run_data(plan, run, ends) for run in plan.runs]
    data = {"seeds": plan.seeds, "tokens": plan.tokens, "rows": rows, "runs": runs}
    temporary = plan.out / ".grid.json.tmp"
    temporary.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    temporary.replace(plan.out / "grid.json")


def read_ends(plan: Plan) -> dict[str, End]:
    """How the runs ended that ``grid.json`` knows of; none where there is no such file.

    Raises:
        UsageError: the file is not a grid's.
    """
    path = plan.out / "grid.json"
    if not path.exists():
        return {}
    try:
        runs = json.loads(path.read_text(encoding="utf-8"))["runs"]
        ended = [run for run in runs if run["exit_code"] is not None]
        return {run["name"]: End(exit_code=run["exit_code"], error=run["error"]) for run in ended}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{str(path)!r} is no file of a grid: choose another --out, or move it away") from error


def _run_data(plan: Plan, run: Run, ends: Mapping[str, End]) -> dict[str, Any]:
    result = result_of(run, ends)
    end = asdict(ends[run.name]) if run.name in ends else {"exit_code": None, "error": ""}
    settings = None if run.values is None else _settings(plan, run.values)
    return {
        "name": run.name,
        "settings": settings,
        "seed": run.seed,
        **end,
        "result": result and asdict(result),
    }


def _settings(plan: Plan, values: Sequence[str]) -> dict[str, str]:
    return dict(zip(plan.keys, values, strict=True))


def _failed(run: Run, ends: Mapping[str, End]) -> bool:
    return run.name in ends and ends[run.name].exit_code != 0


def _row_line(plan: Plan, row: Row) -> str:
    names = row.values or ("warm start", *[""] * (len(plan.keys) - 1))
    seeds = ["failed" if result is None else f"{result.success:.1%}" for result in row.results]
    pooled = row.pooled
    if pooled is None:
        return _line([*names, *seeds, "", "", ""])
    success = f"{pooled.success:.1%} ({pooled.low:.1%} to {pooled.high:.1%})"
    if len(row.done) < len(row.results):
        success += f", {len(row.done)} of {len(row.results)} seeds"
    tokens = mean(result.sampled_tokens for result in row.done)
    minutes = mean(result.minutes for result in row.done)
    return _line([*names, *seeds, success, f"{tokens:,.0f}", f"{minutes:.1f}"])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
