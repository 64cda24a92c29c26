"""One object per process: among threads, after a fork, and at the end of Python."""

import textwrap
import threading
import time

import pytest

from agentrl.processes.per_process import PerProcess

from ..conftest import python


def run(script: str) -> list[str]:
    """What a program prints; it must end by itself, without an error."""
    script = "import os, sys, threading\nfrom agentrl.processes.per_process import PerProcess\n" + textwrap.dedent(
        script
    )
    # From Python 3.12 on, a fork beside another thread warns; just that is what some of these scripts are about.
    done = python("-W", "ignore:This process:DeprecationWarning", "-c", script)
    assert not done.stderr
    return done.stdout.split()


def test_threads_share_one_that_is_made_at_its_first_use() -> None:
    made: list[object] = []

    def make() -> object:
        time.sleep(0.05)  # so that all of them ask while it is made
        made.append(object())
        return made[-1]

    shared, got = PerProcess(make), list[object]()
    assert not made and not shared.existing()
    threads = [threading.Thread(target=lambda: got.append(shared.get())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == made * 8 and shared.existing() == made


def test_each_key_has_its_own_and_the_last_one_is_closed_first() -> None:
    closed: list[str] = []
    words: PerProcess[str, str, int] = PerProcess(lambda word, times: word * times, close=closed.append)
    assert words.get("a", 2) is words.get("a", 2) and words.get("b", 1) == "b"
    assert words.existing() == ["aa", "b"]
    words.close()
    words.close()
    assert closed == ["b", "aa"] and not words.existing()
    assert words.get("a", 2) == "aa"
    words.close()


def test_one_that_is_dropped_is_not_closed_and_another_is_made() -> None:
    closed: list[object] = []
    shared = PerProcess(object, close=closed.append)
    dropped = shared.get()
    shared.drop(dropped)
    shared.drop(dropped)
    remade = shared.get()
    assert remade is not dropped
    shared.drop(dropped)
    assert shared.get() is remade
    shared.close()
    assert closed == [remade]


def test_what_can_not_be_made_is_tried_again() -> None:
    answers = iter([0, 1])
    failing = PerProcess(lambda: 1 // next(answers))
    with pytest.raises(ZeroDivisionError):
        failing.get()
    assert failing.get() == 1


def test_python_closes_at_its_end_what_was_made_and_the_last_one_first() -> None:
    printed = run("""
        inner, outer, unused = (PerProcess(str.title, close=print) for _ in range(3))
        PerProcess(lambda: inner.get("inner") and outer.get("outer"), close=lambda _: print("Both")).get()
    """)
    assert printed == ["Both", "Outer", "Inner"]


def test_a_forked_child_makes_and_closes_its_own() -> None:
    printed = run("""
        own = PerProcess(os.getpid, close=lambda pid: print("close", pid == os.getpid(), flush=True),
                         forget=lambda pid: print("forget", pid == os.getppid(), flush=True))
        idle = PerProcess(os.getpid, close=lambda _: print("idle", flush=True))
        parent, _ = own.get(), idle.get()
        if not (child := os.fork()):
            assert not own.existing() and not idle.existing() and own.get() == os.getpid()
            sys.exit()
        assert os.waitpid(child, 0)[1] == 0 and own.get() == parent
        idle.drop(idle.get())
    """)
    assert printed == ["forget", "True", "close", "True", "close", "True"]


def test_a_fork_while_another_thread_makes_blocks_nobody() -> None:
    printed = run("""
        begun, go_on = threading.Event(), threading.Event()
        def make():
            if threading.current_thread() is not threading.main_thread():
                begun.set()
                go_on.wait()
            return os.getpid()
        own = PerProcess(make)
        maker = threading.Thread(target=own.get)
        maker.start()
        begun.wait()
        if not (child := os.fork()):
            os._exit(own.get() != os.getpid())
        assert os.waitpid(child, 0)[1] == 0
        go_on.set()
        maker.join()
        print(own.existing() == [os.getpid()])
    """)
    assert printed == ["True"]
