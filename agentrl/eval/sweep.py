"""``agentrl sweep``: train every combination of varied settings with several seeds, and compare the results.

The run folders are the state: the same command skips finished runs, resumes those that have begun, and begins the rest.
"""

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import chain, groupby, product
from pathlib import Path
from statistics import mean

from agentrl.config import Config, load_config
from agentrl.errors import ConfigError, Terminated, UsageError
from agentrl.eval.intervals import wilson
from agentrl.eval.pages import Section, markdown
from agentrl.processes.parent import start_python
from agentrl.runs.files import is_file, lock_folder, open_to_append, read, replace
from agentrl.runs.folder import read_jsonl
from agentrl.runs.settings import differing, read_config

_TOKENS = dict.fromkeys(("optim.steps", "optim.max_sampled_tokens"), "--tokens")
_OWN = {"run.name": "--vary", "run.dir": "--out", "run.seed": "--seeds", **_TOKENS}
"""Settings that the sweep sets itself, with the options to use instead."""
_BEGINNING = b'{\n "seeds": '
"""The beginning of every ``sweep.json``."""
_HEAD = ("all seeds (95% interval)", "before training", "sampled tokens a run", "minutes a run")
_NOTE = "Success on held-out tasks; the interval is Wilson's over the tasks of all seeds."


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRequest:
    """Arguments of ``agentrl sweep``."""

    preset: str | None
    """The preset that every run begins with."""
    config: Path | None
    """A TOML file laid over it."""
    overrides: Sequence[str]
    """``section.key=value`` each, for all runs."""
    vary: Sequence[str]
    """``section.key=value,value`` each, at least one. ``a.b+c.d=1+2,3+4`` varies two settings together."""
    seeds: Sequence[int]
    """Each combination of values is trained once for each seed."""
    tokens: int
    """Sampled tokens that end the training of a run."""
    out: Path
    """The folder of the sweep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRun:
    """One run of a sweep."""

    settings: Mapping[str, str]
    """The value of each varied setting."""
    words: tuple[str, ...]
    """The command line of agentrl that begins it."""
    config: Config
    """The settings of that command line."""

    @property
    def folder(self) -> Path:
        """The run folder, whose name is the run's."""
        return Path(self.config.run.dir) / self.config.run.name

    @property
    def has_begun(self) -> bool:
        """True if there is something to resume."""
        return (self.folder / "config.toml").is_file()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """The result of a finished run."""

    success: float
    """Share of its last evaluation's episodes that succeeded."""
    tasks: int
    """Number of tasks in that evaluation."""
    sampled_tokens: int
    """Tokens sampled in training."""
    minutes: float
    """Duration of the run, from its warm start to its last evaluation."""
    curve: tuple[tuple[int, float], ...]
    """Tokens sampled before each evaluation, and its success."""


def plan_runs(request: SweepRequest) -> list[SweepRun]:
    """Plan the runs, seed by seed, so that a stopped sweep has complete comparisons; nothing is written.

    Raises:
        ConfigError: a setting is unknown, invalid or set by the sweep.
    """
    rows = _varied(request.vary)
    for key in (*rows[0], *(override.partition("=")[0].strip() for override in request.overrides)):
        if key in _OWN:
            raise ConfigError(f"the sweep sets {key} itself: leave it out and use {_OWN[key]}")
    names = ["-".join(re.sub(r"[^A-Za-z0-9_]+", "-", value).strip("-") for value in row.values()) for row in rows]
    if len({*names}) < len(names) or not all(name[:1].isalnum() for name in names):
        names = [f"row{number}-{name}" for number, name in enumerate(names, start=1)]
    named = list(zip(names, rows, strict=True))
    return [_run(request, f"{name}-seed{seed}", seed, row) for seed in request.seeds for name, row in named]


def _varied(texts: Sequence[str]) -> list[dict[str, str]]:
    """Return each combination of values, by setting."""
    keys, choices = list[str](), list[list[list[str]]]()
    for text in texts:
        together, _, values = text.partition("=")
        names = [name.strip() for name in together.split("+")]
        # A comma before which a bracket is open belongs to a list, and the plus sign of 1e+4 to a value.
        listed = [value.strip() for value in re.split(r",(?![^\[{]*[\]}])", values)]
        parts = [value.split("+") if len(names) > 1 else [value] for value in listed]
        if not all(listed) or any(len(part) != len(names) for part in parts):
            raise ConfigError(f"--vary {text!r} lists no values: write a.b=1,2 or, for two together, a.b+c.d=1+2,3+4")
        keys += names
        choices.append(parts)
    rows = [tuple(chain(*row)) for row in product(*choices)]
    if len({*keys}) < len(keys) or len({*rows}) < len(rows):
        raise ConfigError(f"--vary {' --vary '.join(texts)} has a setting or a value for the second time: leave it out")
    return [dict(zip(keys, row, strict=True)) for row in rows]


def _run(request: SweepRequest, name: str, seed: int, settings: Mapping[str, str]) -> SweepRun:
    # Every step samples at least one token, so this number of steps never ends a run before its tokens do.
    budget = [f"optim.steps={request.tokens}", f"optim.max_sampled_tokens={request.tokens}"]
    own = [f"run.dir={json.dumps(str(request.out.resolve()))}", f"run.seed={seed}", *budget]
    overrides = ["eval.every=0", *request.overrides, *own, *map("=".join, settings.items())]
    source = ["--preset", request.preset] if request.preset else []
    source += [str(request.config)] if request.config else []
    words = ("train", *source, "--name", name, *chain(*(("--set", text) for text in overrides)))
    config = load_config(preset=request.preset, path=request.config, overrides=[*overrides, f'run.name="{name}"'])
    return SweepRun(settings=settings, words=words, config=config)


def check_folders(runs: Sequence[SweepRun], settled: Callable[[Config], Config]) -> None:
    """Check that a sweep replaces no file of others and resumes no run with other settings.

    Args:
        runs: the sweep's.
        settled: returns settings as a new run writes them into its folder.

    Raises:
        UsageError: its folder holds something else.
    """
    out = runs[0].folder.parent
    summary = out / "sweep.json"
    if os.path.lexists(summary) and not (is_file(summary) and read(summary).startswith(_BEGINNING)):
        raise UsageError(f"{str(out)!r} holds a sweep.json that no sweep wrote: choose another --out")
    for run in [run for run in runs if run.has_begun]:
        for key, saved, planned in differing(read_config(run.folder), settled(run.config)):
            different = f"{key} is {saved!r} there and {planned!r} here"
            raise UsageError(f"{str(run.folder)!r} holds a run with other settings ({different}): choose another --out")


def result_of(run: SweepRun) -> RunResult | None:
    """Return the result of a run that has sampled its tokens, was evaluated after its last step and has its report."""
    steps, evals = (read_jsonl(run.folder / name) for name in ("metrics.jsonl", "evals.jsonl"))
    sampled = sum(step["sampled_tokens"] for step in steps)
    last = [row for row in evals if row["step"] == (steps[-1]["step"] if steps else 0)]
    # A run is evaluated in one environment after the other, and may have been stopped between two of them.
    evaluated = {row.get("env", "") for row in last} == set(run.config.env.played)
    report, rows = run.folder / "report.html", run.folder / "evals.jsonl"
    # A run that was stopped, resumed and killed has the report of its stop.
    reported = evaluated and is_file(report) and report.stat().st_mtime_ns >= rows.stat().st_mtime_ns
    if sampled < run.config.optim.max_sampled_tokens or not reported:
        return None
    curve: list[tuple[int, float]] = []
    # The environments of a mix have a row each, and count alike.
    for number, group in groupby(evals, key=lambda row: row["step"]):
        spent = sum(step["sampled_tokens"] for step in steps if step["step"] <= number)
        curve.append((spent, mean(row["success"] for row in group)))
    tasks, minutes = sum(row["tasks"] for row in last), evals[-1]["seconds_run"] / 60
    return RunResult(success=curve[-1][1], tasks=tasks, sampled_tokens=sampled, minutes=minutes, curve=tuple(curve))


def sweep(runs: Sequence[SweepRun], jobs: int, say: Callable[[str], None]) -> tuple[str, int]:
    """Train the runs that are not done, each in a process of its own, and write ``sweep.json``.

    Args:
        runs: as planned.
        jobs: number of runs at a time.
        say: prints a line of progress.

    Returns:
        The table in Markdown, and the number of failed runs.

    Raises:
        UsageError: the folder can't be written, or another sweep is at work in it.
        KeyboardInterrupt: a person pressed Ctrl-C, or the sweep was terminated; the processes have ended.
    """
    out, errors = runs[0].folder.parent, dict[str, str]()
    with lock_folder(out, "sweep folder", "--out"):
        before = signal.signal(signal.SIGTERM, _terminate)
        try:
            _train_all(runs, jobs, say, errors)
        finally:
            signal.signal(signal.SIGTERM, before)
            table = _write(out, runs, errors)
    return table, len(errors)


def _terminate(*_: object) -> None:
    """Let SIGTERM stop the sweep as Ctrl-C does."""
    raise Terminated


def _train_all(runs: Sequence[SweepRun], jobs: int, say: Callable[[str], None], errors: dict[str, str]) -> None:
    waiting = [run for run in runs if result_of(run) is None]
    done = len(runs) - len(waiting)
    say(f"{len(waiting)} of {len(runs)} runs are to be trained")
    processes = _Processes()
    with ThreadPoolExecutor(jobs) as pool:
        try:
            futures = {pool.submit(_train, run, processes, say): run.folder.name for run in waiting}
            for number, future in enumerate(as_completed(futures), start=done + 1):
                name, error = futures[future], future.result()
                errors |= {name: error} if error else {}
                say(f"{name}: {f'failed: {error}' if error else 'done'} ({number} of {len(runs)})")
        except KeyboardInterrupt as error:
            say("stopping: each run saves what it has; Ctrl-C again ends them at once")
            with suppress(KeyboardInterrupt):
                processes.stop(signal.SIGINT)
                pool.shutdown(cancel_futures=True)
            processes.stop(signal.SIGKILL)
            raise type(error)("stopped; the same command resumes the sweep") from None


class _Processes:
    """The processes of a sweep."""

    def __init__(self) -> None:
        self._started, self._stopped = list[subprocess.Popen[bytes]](), False

    def add(self, process: subprocess.Popen[bytes]) -> None:
        """Add a process, and stop it where the others have been."""
        self._started.append(process)
        # It may get a second signal, which does no harm.
        if self._stopped:
            process.send_signal(signal.SIGINT)

    def stop(self, number: signal.Signals) -> None:
        """Send a signal to the processes that have not ended; those that are added later get SIGINT."""
        self._stopped = True
        for process in self._started:
            process.send_signal(number)


def _train(run: SweepRun, processes: _Processes, say: Callable[[str], None]) -> str:
    """Train a run to its end; return why it failed, in one sentence, or an empty text."""
    say(f"{run.folder.name}: {'resumes' if run.has_begun else 'begins'}")
    path = run.folder.with_name(f"{run.folder.name}.log")
    words = ("train", "--resume", str(run.folder)) if run.has_begun else run.words
    try:
        with open_to_append(path) as log:
            processes.add(process := start_python(("-m", "agentrl", *words), log))
            code = process.wait()
            log.seek(0)
            last = log.read().decode(errors="replace").strip().rpartition("\n")[2] or "it printed no reason"
    except OSError as error:
        return f"its process can't be started: {error}"
    if code < 0:  # strsignal: real-time signals have no name
        return f"ended by signal {-code} ({signal.strsignal(-code)})"
    if code == 0:
        return "" if result_of(run) else f"it ended without its last evaluation or its report (more in {path})"
    return f"{last.removeprefix('agentrl: ')} (exit code {code}; more in {path})"


def _write(out: Path, runs: Sequence[SweepRun], errors: Mapping[str, str]) -> str:
    """Write ``sweep.json``; return the table and the failures in Markdown."""
    results = [result_of(run) for run in runs]
    seeds = list(dict.fromkeys(run.config.run.seed for run in runs))
    about = [
        {"name": run.folder.name, "settings": run.settings, "seed": run.config.run.seed}
        | {"error": errors.get(run.folder.name, ""), "result": result and asdict(result)}
        for run, result in zip(runs, results, strict=True)
    ]
    data = {"seeds": seeds, "tokens": runs[0].config.optim.max_sampled_tokens, "runs": about}
    replace(out / "sweep.json", (json.dumps(data, indent=1) + "\n").encode())
    # The runs are planned seed by seed, and those of each seed in one order.
    each = len(runs) // len(seeds)
    rows = [_cells(runs[index].settings, results[index::each]) for index in range(each)]
    head = [*runs[0].settings, *(f"seed {seed}" for seed in seeds), *_HEAD]
    failures = [f"{name} failed: {error}" for name, error in errors.items()]
    return markdown(out.name, [Section(title="Success", head=head, rows=rows, text=[_NOTE, *failures])])


def _cells(settings: Mapping[str, str], results: Sequence[RunResult | None]) -> list[str]:
    seeds = ["not done" if result is None else f"{result.success:.1%}" for result in results]
    done = [result for result in results if result]
    if not done:
        return [*settings.values(), *seeds, *[""] * len(_HEAD)]
    # Several attempts at a task do not count as several tasks.
    tasks = sum(result.tasks for result in done)
    success = sum(result.success * result.tasks for result in done) / tasks
    pooled = "{:.1%} ({:.1%} to {:.1%})".format(success, *wilson(success, tasks))
    before, sampled = mean(result.curve[0][1] for result in done), mean(result.sampled_tokens for result in done)
    minutes = mean(result.minutes for result in done)
    return [*settings.values(), *seeds, pooled, f"{before:.1%}", f"{sampled:,.0f}", f"{minutes:.1f}"]
