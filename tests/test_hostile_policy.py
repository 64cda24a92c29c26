"""A policy that finds every known way to hurt its sandbox trains on: what a program does is no infrastructure fault."""

import asyncio
import contextlib
import itertools
from typing import Any

import pytest

from agentrl.engines.base import Sampling
from agentrl.engines.scripted import ScriptedEngine
from agentrl.render.renderer import Renderer
from agentrl.rollout.collector import Collector
from agentrl.rollout.plan import EpisodeSpec, TaskSource
from agentrl.rollout.player import EpisodeLimits

KILLERS = (
    "import resource as r; r.prlimit(1, r.RLIMIT_NOFILE, (0, 0))",
    "import resource as r; r.prlimit(1, r.RLIMIT_NPROC, (0, 0)); import os; os._exit(1)",
    "import os, signal\nfor n in range(1, 65): os.kill(1, n)",
    "import os; os.kill(-1, 9)",
    "import os; open('/proc/1/mem', 'wb')",
    "import socket; s = socket.socket(fileno=128); s.shutdown(socket.SHUT_RDWR)",
    "import os; os.closerange(3, 200); os._exit(0)",
    "import os; os.write(128, b'\\xff' * 4096)",
    "import os\nfor n in range(200): os.open('/dev/null', os.O_RDONLY)",
    "raise SystemExit(type('I', (int,), {'__and__': lambda a, b: 0})(3))",
    "raise type('M', (type,), {'__name__': property(lambda self: 1 / 0)})('E', (Exception,), {})()",
    "import os, ctypes; ctypes.CDLL(None).sched_setscheduler(1, 5, b'\\0' * 8); os.abort()",
    "import os, signal as s; s.setitimer(s.ITIMER_REAL, 0.01, 0.01); s.signal(s.SIGALRM, lambda *_: os.fork())",
    "import os\nfor _ in range(500): os.fork()",
)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("count", [2 * len(KILLERS), pytest.param(200, marks=[pytest.mark.ci, pytest.mark.slow])])
def test_hostile_episodes_are_all_played(tokenizer: Any, count: int) -> None:
    renderer = Renderer(tokenizer)
    limits = EpisodeLimits(episode_tokens=4000, cut_turns="end")
    env = ("agentrl/Arithmetic-v0", {"level": 1, "max_turns": 4, "timeout": 0.5})
    collector = Collector({"": env}, renderer, limits=limits, max_fault_rate=0.0, concurrency=4)
    programs = itertools.cycle(KILLERS)

    dialect = TaskSource(*env, "train").dialect

    def hostile() -> tuple[tuple[int, ...], ...]:
        calls = [dialect.render("python", {"code": code}) for code in (next(programs), "print(6 * 7)")]
        return tuple(tuple(renderer.turn(turn)) for turn in (*calls, r"\boxed{0}"))

    with contextlib.closing(collector):
        specs = [[EpisodeSpec(task_id=f"train-1:{number}", seed=number, script=hostile())] for number in range(count)]
        collected = asyncio.run(collector.collect(specs, ScriptedEngine(()), Sampling(max_tokens=2000)))
    assert (len(collected.groups), collected.faults, collected.lost) == (count, 0, 0)
    for (trajectory,) in collected.groups:
        answers = [tokenizer.decode(segment.token_ids) for segment in trajectory.segments if segment.source == "tool"]
        assert "42" in answers[-1], "the next program of the same episode runs as ever"
