"""Does a sweep's runs, each in a process of its own, so that it can be stopped at any moment and go on later."""

import ctypes
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Protocol

from agentrl.errors import Terminated
from agentrl.eval.sweep.plan import Run, SweepPlan
from agentrl.eval.sweep.table import End, read_ends, result_of, sampled_tokens, write_summary
from agentrl.runs.files import lock_folder, open_file, open_to_append
from agentrl.runs.progress import time_left

_POLL_S = 0.1
_TELL_S = 30.0
_PATIENCE_S = 120.0
"""How long a process of a sweep that was killed may take to save its run."""
_PR_SET_PDEATHSIG = 1
_STILLBORN = {".lock", "episodes", ".config.toml.tmp"}
"""All there can be in the folder of a run that was killed before it had a config."""


class Process(Protocol):
    """What a sweep needs of a process."""

    def poll(self) -> int | None:
        """Its exit code, a signal's number negative; None while it runs."""
        ...

    def send_signal(self, sig: int, /) -> None:
        """Send a signal."""
        ...


Start = Callable[[Sequence[str], IO[bytes]], Process]
"""Starts agentrl with the given words; the process has the open file for its output."""


def start_process(words: Sequence[str], log: IO[bytes]) -> Process:
    """Start ``agentrl`` with ``words`` by this Python; what it says is added to ``log``."""
    return subprocess.Popen(
        [sys.executable, "-m", "agentrl", *words],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,  # a terminal's Ctrl-C is for the sweep, which passes it on
        preexec_fn=partial(follow, os.getpid()),
    )


def follow(parent: int, number: int = signal.SIGINT) -> None:
    """Have this process interrupted, and so save its run, or sent another signal, when its parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs ignore it
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


@dataclass(slots=True, kw_only=True)
class _Job:
    """A run at work."""

    run: Run
    process: Process
    log: Path
    heard: int
    """Bytes of the log that were there before."""


class Sweep:
    """The runs of a plan, and how far they are.

    Args:
        plan: the runs.
        jobs: how many at a time.
        say: tells a person how it goes on, a line each.
        start: starts a process of agentrl.
    """

    def __init__(self, plan: SweepPlan, jobs: int, say: Callable[[str], None], start: Start) -> None:
        self.plan, self.ends = plan, read_ends(plan)
        self._jobs, self._say, self._start = jobs, say, start
        self._waiting: list[Run] = []
        self._running: list[_Job] = []
        self._held_since: dict[str, float] = {}
        self._told = time.monotonic()
        self._busy_s = 0.0
        """Time with a run in training."""
        self._had: dict[str, float] = {}
        """Share of each run that was done when it was started."""

    def state(self, run: Run) -> str:
        """Whether a run is ``done``, ``goes on`` or is ``new``."""
        if result_of(run, self.ends) is not None:
            return "done"
        return "goes on" if (run.folder / "config.toml").is_file() else "new"

    def work(self) -> None:
        """Do all runs that are not done.

        Raises:
            RunFolderError: the folder can't be written, or another sweep is at work in it.
            KeyboardInterrupt: someone pressed Ctrl-C, or the sweep was terminated; the processes have ended.
        """
        with lock_folder(self.plan.out, "sweep folder", "--out"), _terminable():
            (self.plan.out / "logs").mkdir(exist_ok=True)
            self._waiting = [run for run in self.plan.runs if self.state(run) != "done"]
            for run in self._waiting:
                self.ends.pop(run.name, None)
            if len(self._waiting) < len(self.plan.runs):
                self._say(f"{len(self.plan.runs) - len(self._waiting)} of {len(self.plan.runs)} runs are done already")
            try:
                while self._waiting or self._running:
                    self._begin()
                    began = time.monotonic()
                    time.sleep(_POLL_S)
                    self._look()
                    if any(job.run.values is not None for job in self._running):
                        self._busy_s += time.monotonic() - began
                    self._tell()
            except KeyboardInterrupt as error:
                self._stop()
                raise type(error)("stopped; the same command goes on") from None
            finally:
                write_summary(self.plan, self.ends)

    def _begin(self) -> None:
        """Start what may be started."""
        for run in list(self._waiting):
            if len(self._running) == self._jobs:
                return
            if run.after and run.after not in self.ends:
                continue
            if run.after and self.ends[run.after].exit_code:
                self._end(run, End(exit_code=2, error=f"its warm start {run.after} failed"))
            elif log := _taken(self.plan.out / "logs" / f"{run.name}.log"):
                with log:
                    self._waiting.remove(run)
                    self._running.append(self._started(run, log))
            elif time.monotonic() - self._held_since.setdefault(run.name, time.monotonic()) > _PATIENCE_S:
                self._end(run, End(exit_code=2, error="a process of a sweep that was killed does not let go of it"))

    def _started(self, run: Run, log: IO[bytes]) -> _Job:
        state = self.state(run)
        if state == "new" and {path.name for path in run.folder.rglob("*")} <= _STILLBORN:
            shutil.rmtree(run.folder, ignore_errors=True)
        words = ["train", "--resume", str(run.folder)] if state == "goes on" else run.words
        if run.values is not None:
            self._had[run.name] = self._share(run)
        self._say(f"{self._place(run)}: {'begins' if state == 'new' else 'goes on'}{self._left()}")
        heard = log.tell()
        return _Job(run=run, process=self._start(words, log), log=Path(log.name), heard=heard)

    def _look(self) -> None:
        """See which runs have ended."""
        for job in list(self._running):
            code = job.process.poll()
            if code is not None:
                self._running.remove(job)
                self._end(job.run, _end_of(job, code))

    def _end(self, run: Run, end: End) -> None:
        if run in self._waiting:
            self._waiting.remove(run)
        self.ends[run.name] = end
        write_summary(self.plan, self.ends)
        result = result_of(run, self.ends)
        came = f"failed: {end.error}" if result is None else f"success {result.success:.1%}"
        self._say(f"{self._place(run)}: {came}{self._left()}")

    def _tell(self) -> None:
        if time.monotonic() - self._told < _TELL_S:
            return
        self._told = time.monotonic()
        for job in self._running:
            done = f"{sampled_tokens(job.run):,} of {self.plan.tokens:,} tokens" if job.run.values else "at work"
            self._say(f"{self._place(job.run)}: {done}{self._left()}")

    def _place(self, run: Run) -> str:
        return f"[{self.plan.runs.index(run) + 1}/{len(self.plan.runs)}] {run.name}"

    def _share(self, run: Run) -> float:
        """How much of a run's training is done."""
        return min(1.0, sampled_tokens(run) / self.plan.tokens)

    def _left(self) -> str:
        """Half a sentence: the time left at the pace of this sweep since it was started; empty before it has one."""
        shares = {run.name: self._share(run) for run in self.plan.runs if run.values is not None}
        done = sum(shares[name] - had for name, had in self._had.items())
        if done <= 0:
            return ""
        # What a failed run lacks is not done any more, but nor was it trained.
        return f", {time_left(self._busy_s / done, sum(1 - shares[name] for name in shares.keys() - self.ends.keys()))}"

    def _stop(self) -> None:
        """End the processes; a second Ctrl-C kills them."""
        self._say("stopping: each run saves what it has; Ctrl-C again ends them at once")
        for sig in (signal.SIGINT, signal.SIGKILL):
            try:
                for job in self._running:
                    job.process.send_signal(sig)
                while any(job.process.poll() is None for job in self._running):
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


def _taken(path: Path) -> IO[bytes] | None:
    """Open and lock a run's log; None while a process has it.

    A process inherits the lock with its output and so has the run from its first instant to its last: a run's own
    folder is locked only once PyTorch is loaded and the folder made.
    """
    log = open_to_append(path)
    try:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        log.close()
        return None
    return log


def _end_of(job: _Job, code: int) -> End:
    if code:
        return End(exit_code=code, error=_reason(job, code))
    end = End(exit_code=0)
    if result_of(job.run, {job.run.name: end}) is None:
        return End(exit_code=1, error=f"it ended without an evaluation after its last step (more in {job.log})")
    return end


def _reason(job: _Job, code: int) -> str:
    """Why a run failed: the sentence that agentrl ends with, or as much as can be said."""
    if code < 0:
        return f"ended by signal {-code} ({signal.strsignal(-code)})"  # real-time signals have no name
    with open_file(job.log) as stream:
        stream.seek(job.heard)
        lines = stream.read().decode(errors="replace").split("\n")
    said = [line.strip() for line in lines if line.strip()]
    reason = said[-1].removeprefix("agentrl: ") if said else "it said nothing"
    return f"{reason} (exit code {code}; more in {job.log})"
