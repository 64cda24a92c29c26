"""Limits hold in every minute, and a cache answers what was asked before, from any process."""

import asyncio
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import InfrastructureError
from agentrl.judge import Judge
from agentrl.judge.cache import Cache
from agentrl.judge.limits import Meter

from ..engines.servers import Fake, Reply, spoken
from .conftest import Make


class Clock:
    """A clock that moves when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 100.0

    async def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 50)), max_size=40), st.integers(1, 5), st.integers(1, 100))
def test_no_minute_has_more_than_is_allowed(requests: list[tuple[int, int]], most: int, tokens: int) -> None:
    clock = Clock()
    meter = Meter(most, tokens, clock=lambda: clock.now, sleep=clock.sleep)

    async def send() -> list[tuple[float, float]]:
        sent = list[tuple[float, float]]()
        for estimate, counted in requests:
            use = await meter.admit(estimate)
            use.tokens = min(counted, estimate)
            sent.append((use.at, use.tokens))
        return sent

    sent = asyncio.run(send())
    for index, (start, _) in enumerate(sent):
        minute = [used for at, used in sent[index:] if at < start + 60]
        assert len(minute) <= most and (sum(minute) <= tokens or len(minute) == 1)
    if not any(counted for _, counted in requests) and len(requests) <= most and tokens >= 50:
        assert clock.now == 100.0, "what cost no tokens holds nobody back"


def test_retries_count_and_estimates_are_corrected(fake: Fake, judge: Make) -> None:
    fake.follow((503, {}), spoken("Score: 5"), spoken("Score: 5"))
    both = judge(requests_a_minute=50, tokens_a_minute=5000, max_tokens=2000), judge("Brief?", requests_a_minute=50,
                 tokens_a_minute=5000)  # fmt: skip
    for made in both:
        asyncio.run(made.score("Greet me.", "Hello"))
    meter = both[0].chat._connection._meter  # pyright: ignore[reportPrivateUsage]
    uses = [use.tokens for use in meter._uses]  # pyright: ignore[reportPrivateUsage]
    assert uses == [0.0, 14.0, 14.0], "judges of one server share their limits"
    assert both[1].chat.spent.requests == 3


def test_so_many_are_sent_at_once(fake: Fake, judge: Make) -> None:
    running, most, lock = 0, 0, threading.Lock()
    full = threading.Barrier(2)

    def answer(_path: str, _fields: dict[str, Any]) -> Reply:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        full.wait(60)
        with lock:
            running -= 1
        return spoken("Score: 5")

    async def six(judge: Judge) -> list[float]:
        return await asyncio.gather(*(judge.score("Greet me.", f"Hello {n}") for n in range(6)))

    fake.answer = answer
    assert asyncio.run(six(judge(at_once=2))) == [1.0] * 6 and most == 2


def test_the_cache_answers_what_was_asked_alike(fake: Fake, judge: Make, tmp_path: Path) -> None:
    fake.follow(spoken("?"), spoken("Score: 3"), *[spoken("Score: 5")] * 4)
    folder = str(tmp_path / "new" / "folder")

    def score(text: str = "Hello", **options: Any) -> float:
        return asyncio.run(judge(cache=folder, **options).score("Greet me.", text))

    assert score() == 0.5 and len(fake.asked) == 2
    asked_again = fake.asked[1][1]
    assert Cache(folder).get(asked_again) == "Score: 3" and Cache(folder).get(fake.asked[0][1]) is None, "unreadable"
    assert [score(), score("Hi"), score("Hi"), score("Hi", temperature=0.5)] == [1.0] * 4
    assert [score("Hi", scale=(5, 9))] == [0.0], "another question"
    assert len(fake.asked) == 6 and judge().chat.spent.cached == 1


WRITER = """
import sys
from agentrl.judge.cache import Cache
cache, start = Cache(sys.argv[1]), int(sys.argv[2])
for number in range(start, start + 20):
    cache.put({"n": number % 40}, f"answer {number % 40}")
"""


@pytest.mark.slow
def test_processes_share_a_cache(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", WRITER, str(tmp_path)]
    writers = [subprocess.Popen([*argv, str(10 * number)]) for number in range(3)]
    assert [writer.wait() for writer in writers] == [0] * 3
    assert [Cache(str(tmp_path)).get({"n": number}) for number in range(40)] == [f"answer {n}" for n in range(40)]


def test_a_cache_that_is_none_is_a_fault(tmp_path: Path) -> None:
    (tmp_path / "answers.sqlite3").write_text("something else that is no database at all")
    with pytest.raises(InfrastructureError, match="name another folder, or delete the file"):
        Cache(str(tmp_path)).get({})
    (tmp_path / "answers.sqlite3").unlink()
    sqlite3.connect(tmp_path / "answers.sqlite3").execute("CREATE TABLE answers (id)").connection.close()
    with pytest.raises(InfrastructureError, match="table answers has 1 columns"):
        Cache(str(tmp_path)).put({}, "x")
