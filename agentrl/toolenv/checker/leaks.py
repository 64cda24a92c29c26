"""Checks for leaks: child processes, threads and open files that outlive ``close``.

Leaks are counted on fresh instances, after one was played and closed: whatever a process opens only once, such as the
sandbox that all Python tools share, is open by then and not counted. Children are counted where ``/proc`` lists them.
Not covered: what a child process of the environment leaves behind itself.
"""

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from agentrl.errors import InfrastructureError
from agentrl.toolenv.checker.report import Finding
from agentrl.toolenv.checker.subject import Subject, difference, shut
from agentrl.types import Task

PROC = Path("/proc/self")
_ROUNDS = 3
_PATIENCE_S = 2.0
"""Seconds that processes and threads have to end after ``close``."""


def _held() -> tuple[set[str], set[threading.Thread], int]:
    """Return what this process holds: its children's ids, its threads, and its number of open files and sockets."""
    return set(_children()), set(threading.enumerate()), len(os.listdir(PROC / "fd"))


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
    if not (PROC / "fd").is_dir() or not (PROC / "task").is_dir():
        subject.skipped.append("what is left running: this machine has no /proc.")
        return
    before = _held()
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


def _left(before: tuple[set[str], set[threading.Thread], int]) -> Iterator[Finding]:
    until = time.monotonic() + _PATIENCE_S
    while (left := list(_leaked(*before))) and time.monotonic() < until:
        time.sleep(0.02)
    yield from left


def _leaked(children: set[str], threads: set[threading.Thread], files: int) -> Iterator[Finding]:
    """Yield a finding for each kind of thing that is held beside these."""
    children_now, threads_now, files_now = _held()
    if left := children_now - children:
        yield Finding("ARL-P001", f"{len(left)} child processes run after {_ROUNDS} instances were closed.")
    if names := {thread.name for thread in threads_now - threads if thread.is_alive()}:
        yield Finding("ARL-P002", f"After {_ROUNDS} instances were closed threads run, such as {min(names)!r}.")
    # Fewer than one per instance are files that the process opens now and then.
    if (more := files_now - files) >= _ROUNDS:
        yield Finding("ARL-P003", f"{more} more files or sockets are open after {_ROUNDS} instances were closed.")
