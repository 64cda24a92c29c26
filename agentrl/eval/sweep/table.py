"""The results of a sweep's runs: a Markdown table, and the same as JSON."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby, pairwise
from statistics import mean
from typing import Any

from agentrl.eval.intervals import wilson
from agentrl.eval.pages import Section, body
from agentrl.eval.paired import bootstrap, bootstrap_ratio
from agentrl.eval.sweep.plan import SweepPlan, SweepRun
from agentrl.runs.files import replace
from agentrl.runs.folder import read_jsonl
from agentrl.runs.report.charts import PHASES, Chart, Line


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How a run ended."""

    exit_code: int
    """That of its process, a signal's number negative; 2 where it could not begin."""
    error: str = ""
    """Why it failed, in one sentence; empty where it did not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """The result of a run that is done."""

    success: float
    """Share of its last evaluation's episodes that succeeded."""
    tasks: int
    """How many tasks that evaluation had."""
    sampled_tokens: int
    """Tokens it sampled in training."""
    minutes: float
    """Time that its training steps took."""
    curve: tuple[tuple[float, float], ...] = ()
    """Tokens sampled before each of its evaluations, with that evaluation's success."""

    def tokens_to(self, target: float) -> float | None:
        """Interpolate the tokens at which success reaches ``target`` between evaluations; None where it never does."""
        for (start, less), (tokens, success) in pairwise([*self.curve[:1], *self.curve]):
            if success >= target:
                return start + (tokens - start) * ((target - less) / (success - less) if success > less else 1.0)
        return None


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
class Reached:
    """Sampled tokens that a setting's runs took to reach a success; one that did not counts with all of its tokens."""

    seeds: int
    """How many runs reached it."""
    tokens: float
    """Mean over seeds."""
    low: float
    """Lower end of its 95% interval, of a bootstrap over seeds."""
    high: float
    """Upper end of it."""
    ratio: tuple[float, float, float] | None
    """Tokens in units of those of the first setting with the same seeds, and the interval; None where it needs none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRow:
    """One line of the table: the runs of one setting."""

    values: tuple[str, ...] | None
    """The value of each varied setting; None for the warm starts."""
    results: tuple[RunResult | None, ...]
    """One for each seed; None where the run is not done."""

    @property
    def done(self) -> list[RunResult]:
        """The results of the runs that are done."""
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

    def taken(self, target: float) -> dict[int, float]:
        """Return the tokens to ``target`` by the seed's index, of the runs that are done."""
        done = [(index, result) for index, result in enumerate(self.results) if result is not None]
        needed = [(index, result, result.tokens_to(target)) for index, result in done]
        return {index: result.sampled_tokens if tokens is None else tokens for index, result, tokens in needed}

    def reached(self, target: float, baseline: "SweepRow") -> Reached | None:
        """Compute the tokens to ``target``, compared with the first setting's; None where no run is done."""
        mine, theirs = self.taken(target), baseline.taken(target)
        if not mine:
            return None
        both = [index for index in mine if index in theirs]
        a, b = [theirs[index] for index in both], [mine[index] for index in both]
        low, high = bootstrap(list(mine.values()))
        return Reached(
            seeds=sum(result.tokens_to(target) is not None for result in self.done),
            tokens=mean(mine.values()),
            low=low,
            high=high,
            ratio=(sum(b) / sum(a), *bootstrap_ratio(a, b)) if a and min(a) > 0 else None,
        )


def sampled_tokens(run: SweepRun) -> int:
    """Return how many tokens a run has sampled in training so far."""
    return sum(step["sampled_tokens"] for step in read_jsonl(run.folder / "metrics.jsonl"))


def result_of(run: SweepRun) -> RunResult | None:
    """Return the result of a run that has sampled all of its tokens and was evaluated after its last step."""
    steps, evals = read_jsonl(run.folder / "metrics.jsonl"), read_jsonl(run.folder / "evals.jsonl")
    last = steps[-1]["step"] if steps else 0
    sampled = sum(step["sampled_tokens"] for step in steps)
    trained = run.values is None or sampled >= run.config.optim.max_sampled_tokens
    # A run is evaluated in one environment after the other, and may have been stopped between two of them.
    evaluated = {row.get("env", "") for row in evals if row["step"] == last}
    if not trained or evaluated != set(run.config.env.played):
        return None
    seconds = sum(step.get(f"seconds_{phase}", 0.0) for step in steps for phase in PHASES)
    same = [row for row in evals if row.get("split") == evals[-1].get("split")]
    curve: list[tuple[int, float]] = []
    # The environments of a mix have a row each, and count alike.
    for number, rows in groupby(same, key=lambda row: row["step"]):
        spent = sum(step["sampled_tokens"] for step in steps if step["step"] <= number)
        curve.append((spent, mean(row["success"] for row in rows)))
    return RunResult(
        success=curve[-1][1],
        tasks=sum(row["tasks"] for row in same if row["step"] == evals[-1]["step"]),
        sampled_tokens=sampled,
        minutes=seconds / 60,
        curve=tuple(curve),
    )


def rows_of(plan: SweepPlan) -> list[SweepRow]:
    """Return the lines of the table; the first is that of the warm starts, where there are any."""
    results: dict[tuple[str, ...] | None, list[RunResult | None]] = {}
    for run in plan.runs:
        results.setdefault(run.values, []).append(result_of(run))
    return [SweepRow(values=values, results=tuple(by_seed)) for values, by_seed in results.items()]


def curves(plan: SweepPlan) -> list[Chart]:
    """Return a chart of held-out success over sampled tokens, a line for each run that is done; none where none is."""
    rows = [row for row in rows_of(plan) if row.values is not None and row.done]
    lines, keys = list[Line](), list[tuple[str, str]]()
    for number, row in enumerate(rows):
        # Neighbouring hues differ strongly, however many there are.
        name, hue = ", ".join(row.values or ()), f"hsl({137.5 * number % 360:.0f}, 65%, 45%)"
        keys.append((hue, name))
        for seed, run in zip(plan.seeds, row.results, strict=True):
            if run is None:
                continue
            titles = [f"{name}, seed {seed}: {success:.1%} after {tokens:,.0f} tokens" for tokens, success in run.curve]
            lines.append(Line(style=hue, name=name, points=run.curve, titles=titles))
    about = "Held-out success over sampled tokens"
    chart = Chart(id="curves", title=about, keys=keys, lines=lines, within=[1.0], size="wide", unit="tokens")
    return [chart] if rows else []


def table(plan: SweepPlan, ends: Mapping[str, End]) -> str:
    """Return the sweep as Markdown, with a sentence for each run that failed."""
    return "\n".join(line for section in sections(plan, ends) for line in ("", *body(section))).lstrip()


def sections(plan: SweepPlan, ends: Mapping[str, End]) -> list[Section]:
    """Return the sweep for people: the table, the tokens to the target where there is one, and the failures."""
    rows = rows_of(plan)
    heads = [*plan.keys, *(f"seed {seed}" for seed in plan.seeds), "all seeds (95% interval)"]
    about = (
        "Success on held-out tasks. The interval is Wilson's over the tasks of all seeds: it says how well these runs' "
        "success is known. The seeds' own columns show how much another seed would change it."
    )
    success = Section(
        title="Success",
        head=[*heads, "sampled tokens a run", "minutes of training"],
        rows=[_cells(plan, row) for row in rows],
        text=[about],
    )
    target = [] if plan.target is None else [_to_target(plan, plan.target, [row for row in rows if row.values])]
    failed = [f"- {name} failed: {end.error}" for name, end in ends.items() if end.exit_code]
    return [success, *target, *([Section(title="Failed", text=["\n".join(failed)])] if failed else [])]


def _to_target(plan: SweepPlan, target: float, rows: Sequence[SweepRow]) -> Section:
    about = (
        f"Sampled tokens until {target:.0%} of the held-out tasks are solved, interpolated between evaluations. A run "
        "that does not get there counts with all of its tokens, which is less than it would need. Intervals are of a "
        "bootstrap over seeds, paired by seed where two settings are compared, and too narrow with few seeds."
    )
    heads = [*plan.keys, "seeds that got there", "tokens (95% interval)", "tokens, first setting = 1 (95% interval)"]
    return Section(
        title="Tokens to the target", text=[about], head=heads, rows=[_reached(row, target, rows[0]) for row in rows]
    )


def _reached(row: SweepRow, target: float, baseline: SweepRow) -> list[str]:
    reached = row.reached(target, baseline)
    if reached is None:
        return [*(row.values or ()), "failed", "", ""]
    least = "" if reached.seeds == len(row.done) else "at least "
    tokens = f"{least}{reached.tokens:,.0f} ({reached.low:,.0f} to {reached.high:,.0f})"
    ratio = "" if reached.ratio is None else "{:.2f} ({:.2f} to {:.2f})".format(*reached.ratio)
    return [*(row.values or ()), f"{reached.seeds} of {len(row.results)}", tokens, ratio]


def write_summary(plan: SweepPlan, ends: Mapping[str, End]) -> None:
    """Write ``sweep.json`` atomically: the table in ``rows``, each run and how it ended in ``runs``."""
    table_rows = rows_of(plan)
    rows = [
        {
            "settings": _settings(plan, row.values),
            "success": [result and result.success for result in row.results],
            "pooled": row.pooled and asdict(row.pooled),
            "reached": _reached_data(plan, row, table_rows),
        }
        for row in table_rows
    ]
    runs = [_run_data(plan, run, ends) for run in plan.runs]
    data = {"seeds": plan.seeds, "tokens": plan.tokens, "target": plan.target, "rows": rows, "runs": runs}
    replace(plan.out / "sweep.json", (json.dumps(data, indent=1) + "\n").encode())


def _run_data(plan: SweepPlan, run: SweepRun, ends: Mapping[str, End]) -> dict[str, Any]:
    result = result_of(run)
    end = asdict(ends[run.name]) if run.name in ends else {"exit_code": None, "error": ""}
    about = {"name": run.name, "settings": _settings(plan, run.values), "seed": run.seed}
    return {**about, **end, "result": result and asdict(result)}


def _reached_data(plan: SweepPlan, row: SweepRow, rows: Sequence[SweepRow]) -> dict[str, Any] | None:
    baseline = next(row for row in rows if row.values is not None)
    reached = None if plan.target is None or row.values is None else row.reached(plan.target, baseline)
    return reached and asdict(reached)


def _settings(plan: SweepPlan, values: Sequence[str] | None) -> dict[str, str] | None:
    return None if values is None else dict(zip(plan.keys, values, strict=True))


def _cells(plan: SweepPlan, row: SweepRow) -> list[str]:
    names = row.values or ("warm start", *[""] * (len(plan.keys) - 1))
    seeds = ["failed" if result is None else f"{result.success:.1%}" for result in row.results]
    pooled = row.pooled
    if pooled is None:
        return [*names, *seeds, "", "", ""]
    success = f"{pooled.success:.1%} ({pooled.low:.1%} to {pooled.high:.1%})"
    if len(row.done) < len(row.results):
        success += f", {len(row.done)} of {len(row.results)} seeds"
    tokens = mean(result.sampled_tokens for result in row.done)
    minutes = mean(result.minutes for result in row.done)
    return [*names, *seeds, success, f"{tokens:,.0f}", f"{minutes:.1f}"]
