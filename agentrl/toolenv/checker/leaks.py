"""Checks for leaks: child processes, threads and open files that outlive ``close``.

Leaks are counted on fresh instances, after one was played and closed: whatever a process opens only once, such as the
sandbox that all Python tools share, is open by then and not counted. Children are counted where ``/proc`` lists them.
Not covered: what a child process of the environment leaves behind itself.
"""

import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from agentrl.errors import InfrastructureError
from agentrl.toolenv.checker.report import Finding
from agentrl.toolenv.checker.subject import Subject, difference, shut
from agentrl.types import Task

PROC = Path("/proc/self")
_ROUNDS = 3
_PATIENCE_S = 2.0
"""Seconds that processes and threads have to end after ``close``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """This process's children, threads and open files at a moment."""

    children: frozenset[str]
    """The ids of its children; grandchildren are theirs to end."""
    threads: frozenset[threading.Thread]
    """Its threads that are alive."""
    files: int
    """How many files and sockets are open."""


def can_look() -> bool:
    """Return True if this machine's ``/proc`` lists a process's children and open files."""
    return (PROC / "fd").is_dir() and (PROC / "task").is_dir()


def look() -> Open:
    """Count what this process holds now."""
    return Open(
        children=frozenset(_children()), threads=frozenset(threading.enumerate()), files=len(os.listdir(PROC / "fd"))
    )


def _children() -> Iterator[str]:
    for task in os.listdir(PROC / "task"):
        try:
            yield from (PROC / "task" / task / "children").read_text(encoding="ascii").split()
        except (FileNotFoundError, ProcessLookupError):  # that thread has just ended
            continue


def check_leaks(subject: Subject) -> Iterator[Finding]:
    """ARL-P001 to P005: ``close`` gives everything back, may be called twice, and another episode may follow."""
    if subject.env.spec is None:
        return
    if error := shut(subject.another().env):
        yield Finding("ARL-P004", f"The close of an instance that never played raised {error}.")
    task, actions = subject.tasks[0], subject.scripts(subject.tasks[0])[1]
    yield from _lived(subject.another(), task, actions)
    if not can_look():
        subject.skipped.append("what is left running: this machine has no /proc.")
        return
    before = look()
    # Kept alive until the count: what only the garbage collector closes is a leak too.
    closed = [subject.another() for _ in range(_ROUNDS)]
    for other in closed:
        list(other.turns(task, actions))
        # An interrupted run closes its environments in the middle of an episode.
        list(other.turns(task, actions[:1]))
        shut(other.env)
    yield from _left(before)


def _lived(other: Subject, task: Task, actions: list[str]) -> Iterator[Finding]:
    turns = [list(other.turns(task, actions)) for _ in range(2)]
    for number in ("first", "second"):
        if error := shut(other.env):
            yield Finding("ARL-P004", f"The {number} close raised {error}.")
    try:
        after = list(other.turns(task, actions))
    except InfrastructureError:
        raise
    except Exception as error:  # an environment under check may raise anything
        yield Finding("ARL-P005", f"After close an episode raised {error!r}.")
        return
    # A difference without a close between is ARL-E007.
    if not difference(*turns) and (differ := difference(turns[1], after)):
        yield Finding("ARL-P005", f"Before and after close an episode gave {differ}.")
    shut(other.env)


def _left(before: Open) -> Iterator[Finding]:
    until = time.monotonic() + _PATIENCE_S
    while (left := list(_leaked(before, look()))) and time.monotonic() < until:
        time.sleep(0.02)
    yield from left


def _leaked(before: Open, now: Open) -> Iterator[Finding]:
    if children := now.children - before.children:
        yield Finding("ARL-P001", f"{len(children)} child processes run after {_ROUNDS} instances were closed.")
    if threads := {thread.name for thread in now.threads - before.threads if thread.is_alive()}:
        yield Finding("ARL-P002", f"After {_ROUNDS} instances were closed threads run, such as {min(threads)!r}.")
    # Fewer than one per instance are files that the process opens now and then.
    if (files := now.files - before.files) >= _ROUNDS:
        yield Finding("ARL-P003", f"{files} more files or sockets are open after {_ROUNDS} instances were closed.")
