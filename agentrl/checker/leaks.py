"""What an environment leaves behind: child processes, threads and open files after ``close``.

Looked at on fresh instances, after one of them was played and closed: whatever a process opens once for all, such as
the sandbox that all Python tools share, is open by then and is not counted. Children are counted where ``/proc`` names
them. Not covered: what a child process of the environment leaves behind itself.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from agentrl.checker.play import Subject, alike, parting, play, scripts, shut
from agentrl.checker.report import Finding
from agentrl.env import ToolEnv
from agentrl.errors import InfrastructureError
from agentrl.types import Task

PROC = Path("/proc/self")
_ROUNDS = 3
_PATIENCE_S = 2.0
"""How long what was told to end may take to do so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """What this process holds at a moment."""

    children: frozenset[str]
    """The ids of its children; grandchildren are theirs to end."""
    threads: frozenset[threading.Thread]
    """Its threads that are alive."""
    files: int
    """How many files and sockets are open."""


def can_look() -> bool:
    """Whether this machine names a process's children and open files."""
    return (PROC / "fd").is_dir() and (PROC / "task").is_dir()


def look() -> Open:
    """What this process holds now."""
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
    if subject.again is None:
        return
    if error := shut(subject.again()):
        yield Finding(code="ARL-P004", message=f"The close of an instance that never played raised {error}.")
    task, actions = subject.tasks[0], scripts(subject.env, subject.tasks[0])[1]
    yield from _lived(subject.again, task, actions)
    if not can_look():
        return
    before = look()
    # Kept until the end: what the garbage collector would close was not closed by close.
    closed = [subject.again() for _ in range(_ROUNDS)]
    for env in closed:
        list(play(env, task, actions))
        # In the middle of an episode: that is where an interrupted run closes it.
        list(play(env, task, actions[:1]))
        shut(env)
    yield from _left(before)


def _lived(again: Callable[[], ToolEnv], task: Task, actions: list[str]) -> Iterator[Finding]:
    env = again()
    turns = [list(play(env, task, actions)) for _ in range(2)]
    for number in ("first", "second"):
        if error := shut(env):
            yield Finding(code="ARL-P004", message=f"The {number} close raised {error}.")
    try:
        after = list(play(env, task, actions))
    except InfrastructureError:
        raise
    except Exception as error:  # an environment under check may raise anything
        yield Finding(code="ARL-P005", message=f"After close an episode raised {error!r}.")
        return
    # What differs without a close as well is ARL-E007.
    if alike(turns[0], turns[1]) and not alike(turns[1], after):
        message = f"Before and after close an episode gave {parting(turns[1], after)}."
        yield Finding(code="ARL-P005", message=message)
    shut(env)


def _left(before: Open) -> Iterator[Finding]:
    until = time.monotonic() + _PATIENCE_S
    while (left := _difference(before, look())) and time.monotonic() < until:
        time.sleep(0.02)
    yield from left


def _difference(before: Open, now: Open) -> list[Finding]:
    found: list[Finding] = []
    if children := now.children - before.children:
        message = f"{len(children)} child processes run after {_ROUNDS} instances were closed."
        found.append(Finding(code="ARL-P001", message=message))
    if threads := {thread.name for thread in now.threads - before.threads if thread.is_alive()}:
        message = f"After {_ROUNDS} instances were closed threads run, such as {min(threads)!r}."
        found.append(Finding(code="ARL-P002", message=message))
    # Less than one for each instance is something that the process opens now and then.
    if (files := now.files - before.files) >= _ROUNDS:
        message = f"{files} more files or sockets are open after {_ROUNDS} instances were closed."
        found.append(Finding(code="ARL-P003", message=message))
    return found
