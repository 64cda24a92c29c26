"""Train a sweep's runs, each in a process of its own; their folders hold all that the same command needs to resume."""

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

from agentrl.errors import Terminated
from agentrl.eval.sweep.plan import SweepPlan, SweepRun
from agentrl.eval.sweep.table import End, result_of, sampled_tokens, write_summary
from agentrl.processes.parent import end_with_parent
from agentrl.runs.files import lock_folder, open_file, open_to_append
from agentrl.runs.progress import time_left

_POLL_S = 0.1
_REPORT_S = 30.0
_PATIENCE_S = 120.0
"""How long a process of a sweep that was killed may take to save its run."""
Start = Callable[[Sequence[str], IO[bytes]], subprocess.Popen[bytes]]
"""Starts agentrl with the given words; the process writes its output to the open file."""


def start_process(words: Sequence[str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start ``agentrl`` with ``words`` by this Python; its output is appended to ``log``."""
    return subprocess.Popen(
        [sys.executable, "-m", "agentrl", *words],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,  # a terminal's Ctrl-C is for the sweep, which passes it on
        preexec_fn=partial(end_with_parent, os.getpid()),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """A run whose process is at work."""

    run: SweepRun
    process: subprocess.Popen[bytes]
    log: Path
    offset: int
    """Bytes of the log before this process wrote to it."""


class Sweep:
    """Trains the runs of a plan.

    Args:
        plan: the runs.
        jobs: how many at a time.
        say: prints a line of progress.
        start: starts a process of agentrl.
    """

    def __init__(self, plan: SweepPlan, jobs: int, say: Callable[[str], None], start: Start) -> None:
        self.plan = plan
        self.ends = {run.name: End(exit_code=0) for run in plan.runs if result_of(run) is not None}
        """How each run ended, by its name; those that are still to be trained are not in it."""
        self._jobs, self._say, self._start = jobs, say, start
        self._running: dict[str, _Job] = {}
        self._began = self._reported = time.monotonic()
        self._share_before = sum(self._shares().values())

    def state(self, run: SweepRun) -> str:
        """Return ``done``, ``resumes`` where the run has a folder, or ``new``."""
        if run.name in self.ends:
            return "done"
        return "resumes" if (run.folder / "config.toml").is_file() else "new"

    def work(self) -> None:
        """Train all runs that are not done.

        Raises:
            RunFolderError: the folder can't be written, or another sweep is at work in it.
            KeyboardInterrupt: someone pressed Ctrl-C, or the sweep was terminated; the processes have ended.
        """
        with lock_folder(self.plan.out, "sweep folder", "--out"), _terminable():
            (self.plan.out / "logs").mkdir(exist_ok=True)
            if self.ends:
                self._say(f"{len(self.ends)} of {len(self.plan.runs)} runs are done already")
            try:
                self._train([run for run in self.plan.runs if run.name not in self.ends])
            except KeyboardInterrupt as error:
                self._stop()
                raise type(error)("stopped; the same command resumes the sweep") from None
            finally:
                write_summary(self.plan, self.ends)

    def _train(self, waiting: list[SweepRun]) -> None:
        while waiting or self._running:
            for run in list(waiting):
                ready = not run.after or run.after in self.ends
                if ready and len(self._running) < self._jobs and self._begin(run):
                    waiting.remove(run)
            # Polled, not waited for: Ctrl-C must reach this process at any moment.
            time.sleep(_POLL_S)
            for job in list(self._running.values()):
                code = job.process.poll()
                if code is not None:
                    del self._running[job.run.name]
                    self._end(job.run, _end_of(job, code))
            self._report()

    def _begin(self, run: SweepRun) -> bool:
        """Start a run, or note why it can't start; return False where it has to wait for an older process."""
        if run.after and self.ends[run.after].exit_code:
            self._end(run, End(exit_code=2, error=f"its warm start {run.after} failed"))
            return True
        log = _locked(self.plan.out / "logs" / f"{run.name}.log")
        if log is None:
            if time.monotonic() - self._began < _PATIENCE_S:
                return False
            self._end(run, End(exit_code=2, error="a process of a sweep that was killed does not let go of it"))
            return True
        with log:
            resumes = self.state(run) == "resumes"
            self._say(f"{self._title(run)}: {'resumes' if resumes else 'begins'}{self._left()}")
            offset, words = log.tell(), ("train", "--resume", str(run.folder)) if resumes else run.words
            process = self._start(words, log)
        self._running[run.name] = _Job(run=run, process=process, log=Path(log.name), offset=offset)
        return True

    def _end(self, run: SweepRun, end: End) -> None:
        self.ends[run.name] = end
        write_summary(self.plan, self.ends)
        result = result_of(run)
        outcome = f"failed: {end.error}" if end.exit_code or result is None else f"success {result.success:.1%}"
        self._say(f"{self._title(run)}: {outcome}{self._left()}")

    def _report(self) -> None:
        if time.monotonic() - self._reported < _REPORT_S:
            return
        self._reported = time.monotonic()
        for run in (job.run for job in self._running.values()):
            done = f"{sampled_tokens(run):,} of {self.plan.tokens:,} tokens" if run.values else "at work"
            self._say(f"{self._title(run)}: {done}{self._left()}")

    def _title(self, run: SweepRun) -> str:
        return f"[{self.plan.runs.index(run) + 1}/{len(self.plan.runs)}] {run.name}"

    def _shares(self) -> dict[str, float]:
        """Return how much of each run's training is done, by its name."""
        runs = (run for run in self.plan.runs if run.values is not None)
        return {run.name: min(1.0, sampled_tokens(run) / self.plan.tokens) for run in runs}

    def _left(self) -> str:
        """Return half a sentence: the time left at the pace since this command began; empty before it has one."""
        shares = self._shares()
        done = sum(shares.values()) - self._share_before
        if done <= 0:
            return ""
        # What a failed run lacks is not trained any more.
        missing = sum(1 - shares[name] for name in shares.keys() - self.ends.keys())
        return f", {time_left((time.monotonic() - self._began) / done, missing)}"

    def _stop(self) -> None:
        """End the processes; a second Ctrl-C kills them."""
        self._say("stopping: each run saves what it has; Ctrl-C again ends them at once")
        processes = [job.process for job in self._running.values()]
        for sig in (signal.SIGINT, signal.SIGKILL):
            try:
                for process in processes:
                    process.send_signal(sig)
                while any(process.poll() is None for process in processes):
                    time.sleep(_POLL_S)
                return
            except KeyboardInterrupt:
                continue


@contextmanager
def _terminable() -> Generator[None]:
    """Let SIGTERM stop the sweep as Ctrl-C does."""

    def stop(*_: object) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _locked(path: Path) -> IO[bytes] | None:
    """Open and lock a run's log; return None while a process holds it.

    A process inherits the lock with its output, and so holds the run from its first instant to its last. The lock of
    the run's own folder comes later: when PyTorch is loaded and the folder made.
    """
    log = open_to_append(path)
    try:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        log.close()
        return None
    return log


def _end_of(job: _Job, code: int) -> End:
    """Return how a run ended whose process did, with the sentence that agentrl ends with where it failed."""
    if code == 0 and result_of(job.run) is not None:
        return End(exit_code=0)
    if code == 0:
        return End(exit_code=1, error=f"it ended without an evaluation after its last step (more in {job.log})")
    if code < 0:  # strsignal: real-time signals have no name
        return End(exit_code=code, error=f"ended by signal {-code} ({signal.strsignal(-code)})")
    with open_file(job.log) as stream:
        stream.seek(job.offset)
        lines = stream.read().decode(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "no reason was printed")
    return End(exit_code=code, error=f"{last.removeprefix('agentrl: ')} (exit code {code}; more in {job.log})")
