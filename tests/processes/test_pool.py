"""Worker processes: what a request may cost, how a worker dies, and that none is left behind."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from agentrl.processes.pool import WorkerPool, _Worker  # pyright: ignore[reportPrivateUsage]

ENDLESS = "sum(iter(int, 1))"


def make_pool(size: int = 2, module: str = "evaluating") -> WorkerPool:
    return WorkerPool(module, size, name="testing", failure=RuntimeError)


@pytest.fixture(autouse=True, scope="module")
def _path() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parent)
        yield


@pytest.fixture(scope="module")
def pool(_path: None) -> Iterator[WorkerPool]:
    made = make_pool()
    yield made
    made.close()


def ask(pool: WorkerPool, code: str, seconds: float = 2.0) -> Any:
    return pool.ask({"code": code}, seconds=seconds)


def zygotes() -> list[psutil.Process]:
    """The living zygotes of this process, those that start as well."""
    alive = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    return [child for child in alive if "evaluating" in child.cmdline()]


def workers() -> list[psutil.Process]:
    """The children of all zygotes of this process."""
    return [worker for zygote in zygotes() for worker in zygote.children()]


def wait_for(processes_of: Callable[[], list[psutil.Process]]) -> list[psutil.Process]:
    """Wait until there are such processes."""
    while not (processes := processes_of()):
        time.sleep(0.01)
    return processes


def test_time_is_up_and_the_next_one_is_answered(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Mock(side_effect=_Worker.ask)
    monkeypatch.setattr(_Worker, "ask", lambda *arguments: asked(*arguments))
    began = time.process_time()
    assert ask(pool, ENDLESS, 0.3) is None
    assert time.process_time() - began < 0.2  # it is not this process that computes
    # Nothing is gained from using up the same time twice.
    assert [call.args[1] for call in asked.call_args_list] == [{"code": ENDLESS}, None]
    assert ask(pool, "[1, 'a', None]") == [1, "a", None]


@pytest.mark.parametrize(("harm", "answered"), [(psutil.Process.suspend, False), (psutil.Process.kill, True)])
def test_a_worker_stopped_is_given_up_and_one_killed_costs_nothing(
    pool: WorkerPool, harm: Callable[[psutil.Process], None], answered: bool
) -> None:
    assert ask(pool, "1") == 1
    for process in workers():
        harm(process)
    assert ask(pool, "2", 2.0 if answered else 0.2) == (2 if answered else None)
    assert ask(pool, "3") == 3


def test_memory_and_files_are_bounded(pool: WorkerPool, tmp_path: Path) -> None:
    assert ask(pool, "len(bytearray(1 << 20))") == 1 << 20
    assert ask(pool, "len(bytearray(3 << 30))") is None
    assert ask(pool, f"Path({str(tmp_path / 'x')!r}).write_text('x')") is None


def test_what_kills_every_worker_is_given_up_and_tried_three_times(pool: WorkerPool, tmp_path: Path) -> None:
    assert ask(pool, f"die({str(tmp_path)!r})") is None
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("from evaluating import *\nMAX_BYTES = 'many'", "every testing process dies"),
        ("raise ModuleNotFoundError('No module named x')", "testing process does not start: .*No module named"),
    ],
)
def test_the_machine_is_to_blame(module: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RuntimeError, match=message), closing(make_pool(module="broken")) as made:
        ask(made, "1")


def test_a_zygote_killed_from_outside_is_replaced(pool: WorkerPool) -> None:
    assert ask(pool, "1") == 1
    for zygote in zygotes():
        os.killpg(zygote.pid, signal.SIGKILL)
    wait_for(lambda: [child for child in psutil.Process().children() if child.status() == psutil.STATUS_ZOMBIE])
    # A new zygote imports first, which a busy machine takes its time for.
    assert ask(pool, "2", 30.0) == 2


def test_workers_are_kept_and_replaced_now_and_then(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.processes.pool._REQUESTS", 3)
    pids = [ask(pool, "os.getpid()") for _ in range(7)]
    assert 2 < len(set(pids)) < 7


def test_threads_do_not_wait_for_each_other(pool: WorkerPool) -> None:
    with ThreadPoolExecutor(1) as threads:
        slow = threads.submit(ask, pool, ENDLESS, 0.9)
        for number in range(3):
            assert ask(pool, str(number)) == number
        assert not slow.done()
    assert slow.result() is None


def test_many_threads_get_their_own_replies(pool: WorkerPool) -> None:
    with ThreadPoolExecutor(20) as threads:
        assert list(threads.map(lambda number: ask(pool, str(number)), range(20))) == list(range(20))


def test_closing_ends_the_workers_of_a_dead_zygote() -> None:
    others = set(workers())
    made = make_pool(1)
    with ThreadPoolExecutor(1) as threads:
        asking = threads.submit(ask, made, ENDLESS, 60.0)
        (worker,) = wait_for(lambda: list(set(workers()) - others))
        worker.parent().kill()  # pyright: ignore[reportOptionalMemberAccess]
        made.close()
    assert isinstance(asking.exception(), RuntimeError)
    assert not psutil.wait_procs([worker], timeout=5)[1]


def test_a_pool_can_be_closed_while_its_zygote_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    others = set(zygotes())
    made = make_pool(1)
    (zygote,) = set(zygotes()) - others
    os.killpg(zygote.pid, signal.SIGKILL)
    wait_for(lambda: [zygote] if zygote.status() == psutil.STATUS_ZOMBIE else [])
    (tmp_path / "evaluating.py").write_text("import time\ntime.sleep(100)")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    began = time.monotonic()
    with ThreadPoolExecutor(1) as threads:
        asking = threads.submit(ask, made, ENDLESS, 60.0)
        wait_for(lambda: list(set(zygotes()) - others))
        made.close()
    assert isinstance(asking.exception(), RuntimeError)
    assert time.monotonic() - began < 20 and set(zygotes()) == others


def test_another_interpreter_has_its_own_modules_and_its_prints_meet_nobody(tmp_path: Path) -> None:
    # Like an interpreter of other packages, it finds nothing of ours; what it prints must not meet the replies.
    python, workers_file = tmp_path / "python", tmp_path / "evaluating_there.py"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    python.chmod(0o755)
    lines = (
        "import dataclasses, importlib.util, os, sys",
        "MAX_BYTES, CONTROL, WORDS = 2 << 30, {'name': 'sys'}, []",
        "def warm(*words):",
        "    print('loud', flush=True)",
        "    WORDS.extend(words)",
        "def reply(*, name):",
        "    os.write(1, b'loud\\n')",
        "    return [importlib.util.find_spec(name) is not None, *WORDS]",
    )
    workers_file.write_text("\n".join(lines))
    pool = WorkerPool(str(workers_file), 1, name="their", failure=RuntimeError, python=str(python), words=["a", "b"])
    with closing(pool):
        assert pool.ask({"name": "agentrl"}, seconds=5.0) == [False, "a", "b"]
        assert pool.ask({"name": "json"}, seconds=5.0) == [True, "a", "b"]
