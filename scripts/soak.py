#!/usr/bin/env python3
"""Train on thousands of episodes in flight while sandboxes are killed, tools hang and the engine fails; nothing grows.

Every episode runs a program whose output is known: another output, or a reward for a fault, is a violation. So is
a process, descriptor, thread, or file that is left behind, and memory that grows.
"""

import argparse
import asyncio
import copy
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any

import gymnasium
from chaos_sandboxes import Record, belongings, kill_at_random, leftovers, resident_bytes

from agentrl.config import Config, load_config
from agentrl.engines.base import Engine
from agentrl.engines.transformers import TransformersEngine
from agentrl.errors import InfrastructureError
from agentrl.rollout.mix import TaskMix
from agentrl.runs.assemble import Parts, assemble, make_collector, task_mix
from agentrl.toolenv.base import Episode, ToolEnv
from agentrl.toolenv.tasks import TaskList
from agentrl.toolenv.tools.function import tool
from agentrl.toolenv.tools.python import PythonTool, close_shared_sandbox
from agentrl.train.overlap import make_source
from agentrl.train.sharded import make_learner
from agentrl.train.step import Trainer
from agentrl.types import Task

EXAMPLES = """examples:
  soak.py                     10000 episodes
  soak.py --episodes 640      minutes
"""
SETTINGS = (
    *(
        "env.id=soak/Soak-v0",
        "run.threads=1",
        "model.tiny.hidden=16",
        "model.tiny.layers=2",
        "model.tiny.heads=2",
        "optim.lr=1e-4",
    ),
    *("rollout.tasks=8", "rollout.group_size=8", "rollout.turn_tokens=6", "rollout.truncated.turn=answer"),
    *("rollout.overlap=inflight", "rollout.concurrency=16", "rollout.max_fault_rate=0.9"),
)
STEP = 64
"""Episodes of a step."""
HANGS, GRADER_FAULTS, ENGINE_FAULTS = 0.005, 0.005, 0.01
"""Shares of tool calls that hang, of episodes that lose their grader, and of the engine's steps that fail."""
GROWTH_BYTES = 64 << 20
record, rng = Record(), random.Random(0)
Held = Callable[[], dict[str, int]]


def count(name: str) -> None:
    """Count one, from any thread."""
    with record.lock:
        record.counts[name] += 1


@tool(timeout=0.2)
def hang() -> str:
    """Take longer than anybody waits."""
    time.sleep(2.0)
    return "too late"


class Soak(ToolEnv):
    """Runs a program, or calls a tool that hangs, in the first turn, whatever the agent says."""

    def __init__(self, *, split: str = "train") -> None:
        super().__init__(split=split, max_turns=2)
        self.tools = (PythonTool(), hang)

    def tasks(self, split: str) -> TaskList:
        """Return 64 sums."""
        return TaskList([Task(id=f"{split}:{n}", prompt=f"{n}?", answer=str(n * 10**6 + 1)) for n in range(64)])

    def step(self, action: str) -> Any:
        """Play a turn, during which at most one kill strikes."""
        if self.episode.turns == 0:
            code = f"{self.episode.task.id.partition(':')[2]} * 10**6 + 1"
            hangs = rng.random() < HANGS
            action = self.dialect.render(*(("hang", {}) if hangs else ("python", {"code": code})))
        with record.run():
            return super().step(action)

    def reward(self, episode: Episode) -> dict[str, float]:
        """Judge the program's output, and give a number that differs between texts."""
        if rng.random() < GRADER_FAULTS:
            count("grader faults")
            raise InfrastructureError("the grader is down")
        answers = [message["content"] for message in episode.messages if message["role"] == "tool"]
        hung = [run.name for run in episode.tool_runs] == ["hang"]
        count("hung" if hung else "ran")
        if not hung and episode.task.answer not in "".join(answers):
            with record.lock:
                record.violate(f"expected {episode.task.answer}, not {answers}")
        return {"correct": sum(map(ord, episode.final)) % 5 / 4}

    def gold(self, task: Task) -> list[str]:
        """Answer with the number: the tiny model's vocabulary comes from here."""
        return [str(task.answer)]


class Failing(TransformersEngine):
    """Fails now and then, as one does that is out of memory."""

    calm = 0

    def _step(self) -> None:
        self.calm -= 1
        if self.calm < 0 and rng.random() < ENGINE_FAULTS:
            self.calm = 100  # a request that fails twice in a row ends the run, as it should
            count("engine failures")
            raise RuntimeError("out of memory")
        super()._step()


def held() -> dict[str, int]:
    """Count what this process holds."""
    return belongings("local") | {"files in /dev/shm": len(os.listdir("/dev/shm")), "MiB": resident_bytes() >> 20}


async def soak(trainer: Trainer, steps: int, held: Held) -> list[dict[str, int]]:
    """Train, and give what was held after a tenth of the steps, and in the end."""
    await trainer.sync(0)
    seen: list[dict[str, int]] = []
    for number in range(1, steps + 1):
        metrics = (await trainer.step(number)).metrics
        for name in ("faults", "groups_lost", "episodes", "sandbox_reruns"):
            record.counts[name] += int(metrics.get(name, 0))
        now = await asyncio.to_thread(held)
        if number in (max(1, steps // 10), steps):
            seen.append(now)
        print(f"step {number} of {steps}: {json.dumps(dict(record.counts))} {now}", file=sys.stderr, flush=True)
    return seen


def failing(config: Config, mix: TaskMix) -> tuple[Parts, Engine]:
    """Make the parts of a run whose engine fails."""
    parts = assemble(config, mix)
    return parts, Failing(copy.deepcopy(parts.model), slots=16, max_length=4096)


def train(
    args: argparse.Namespace,
    settings: Sequence[str] = SETTINGS,
    make: Callable[[Config, TaskMix], tuple[Parts, Engine]] = failing,
    kill: Callable[[Record, argparse.Namespace, threading.Event], None] = kill_at_random,
    held: Held = held,
) -> Mapping[str, Sequence[int]]:
    """Make the parts of a run, and train while a thread kills; give first and last of what was held."""
    steps = max(1, args.episodes // STEP)
    config = load_config(overrides=[*settings, f"optim.steps={steps}"])
    mix = task_mix(config, "train")
    parts, engine = make(config, mix)
    stop = threading.Event()
    killer = threading.Thread(target=kill, args=(record, args, stop))
    with closing(make_collector(config, parts.renderer, split="train")) as collector:
        trainer = Trainer(config, make_learner(config, parts.model), make_source(config, mix, collector, engine))
        killer.start()
        try:
            start, end = asyncio.run(soak(trainer, steps, held)) * (1 if steps > 1 else 2)
        finally:
            stop.set()
            killer.join()
            engine.close()
    close_shared_sandbox()
    if end["MiB"] - start["MiB"] > GROWTH_BYTES >> 20:
        record.violations.append(f"memory grew from {start['MiB']} to {end['MiB']} MiB")
    return {name: (start[name], end[name]) for name in start}


def main(arguments: Sequence[str] | None = None) -> int:
    """Soak, print what happened as JSON, and give the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--episodes", type=int, default=10_000, help="in all (default 10000)")
    parser.add_argument("--kill-every", type=float, default=1.0, metavar="S", help="mean seconds to a kill (default 1)")
    args = parser.parse_args(arguments)
    args.backend, args.seed = "local", 0
    gymnasium.register("soak/Soak-v0", entry_point=lambda **options: Soak(**options))
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="soak-") as scratch:
        tempfile.tempdir = scratch
        before = belongings("local")
        before["threads"] += 1  # one of PyTorch's, which Python knows once it has run a hook
        figures = train(args)
        record.violations += leftovers(before, "local")
    seconds = round(time.monotonic() - began, 1)
    facts = {"seconds": seconds, "counts": dict(record.counts), "first, last": figures, "violations": record.violations}
    print(json.dumps(facts, indent=1))
    return 1 if record.violations else 0


if __name__ == "__main__":
    sys.exit(main())
