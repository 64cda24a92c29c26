#!/usr/bin/env python3
"""The soak of ``soak.py`` on Ray: two actors play, in which all of its faults strike, and which are killed themselves.

Each is on a node of a cluster that this script starts on this machine. What is held is that of all their processes.
"""

import argparse
import json
import os
import random
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

os.environ |= {
    "RAY_agent_register_timeout_ms": "300000",
    "RAY_worker_niceness": "0",
    "RAY_memory_monitor_refresh_ms": "0",  # it would kill actors where others fill the memory
    "RAY_USAGE_STATS_ENABLED": "0",
}

import gymnasium
import psutil
import soak
from chaos_sandboxes import Record, kill_at_random
from ray.cluster_utils import Cluster

from agentrl.config import Config
from agentrl.errors import InvariantError
from agentrl.rollout import ray_fleet
from agentrl.rollout.mix import TaskMix
from agentrl.runs.assemble import Parts, assemble

EXAMPLES = """examples:
  soak_fleet.py                     1024 episodes
  soak_fleet.py --episodes 192      minutes
"""


class SoakActor(ray_fleet.Actor):
    """Has the environment, an engine that fails, and a thread that kills its sandbox's processes."""

    async def start(self, config: Any, model: Any, options: Any) -> tuple[bool, float]:
        """Make them, in the actor's process."""
        gymnasium.register("soak/Soak-v0", entry_point=lambda **arguments: soak.Soak(**arguments))
        started = await super().start(config, model, options)
        self._engine = soak.Failing(model, **options)
        args = argparse.Namespace(backend="local", seed=os.getpid(), kill_every=2.0)
        killer = threading.Thread(target=kill_at_random, args=(soak.record, args, threading.Event()), daemon=True)
        killer.start()
        return started

    async def play(self, collector: Any, group: Any, sampling: Any, version: Any) -> Any:
        """Play a group, and stop the run where something went wrong."""
        played = await super().play(collector, group, sampling, version)
        if soak.record.violations:
            raise InvariantError(soak.record.violations[0])
        return played


def both(*, playing: bool) -> list[psutil.Process]:
    """Find the two actors, or none unless both are there, and have a sandbox if they are to be ``playing``."""
    try:
        every = psutil.Process().children(recursive=True)
        actors = [
            process
            for process in every
            if process.name().startswith("ray::SoakActor") and (process.children() or not playing)
        ]
    except psutil.NoSuchProcess:  # meanwhile
        return []
    return actors if len(actors) == 2 else []


def kill_actors(record: Record, args: argparse.Namespace, stop: threading.Event) -> None:
    """Kill one of the two actors now and then, while both are there."""
    rng = random.Random(args.seed)
    while not stop.wait(rng.expovariate(1 / args.kill_every)):
        if actors := both(playing=True):
            rng.choice(actors).kill()
            record.counts["killed actors"] += 1


def held() -> dict[str, int]:
    """Count what the driver and the two actors hold, once both are there."""
    while True:
        with suppress(psutil.NoSuchProcess):
            if actors := both(playing=False):
                sizes = {f"MiB of actor {number}": actor.memory_info().rss >> 20 for number, actor in enumerate(actors)}
                return soak.held() | sizes | {"descriptors of actors": sum(actor.num_fds() for actor in actors)}
        time.sleep(0.1)


def on_ray(config: Config, mix: TaskMix) -> tuple[Parts, Any]:
    """Make the parts of a run that plays on actors."""
    ray_fleet.Actor = SoakActor
    parts = assemble(config, mix, fleet=True)
    return parts, parts.engine


def main(arguments: Sequence[str] | None = None) -> int:
    """Soak, print what happened as JSON, and give the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--episodes", type=int, default=1024, help="in all (default 1024)")
    parser.add_argument("--kill-every", type=float, default=15.0, metavar="S", help="mean seconds (default 15)")
    args = parser.parse_args(arguments)
    args.seed = 0
    gymnasium.register("soak/Soak-v0", entry_point=lambda **options: soak.Soak(**options))
    began, cluster, before = time.monotonic(), Cluster(), psutil.Process().children(recursive=True)
    try:
        for node in range(3):
            cluster.add_node(num_cpus=min(node, 1), object_store_memory=100 << 20, include_dashboard=False)
        settings = ["fleet.name=ray", f"fleet.options={{actors = 2, address = '{cluster.address}'}}"]
        figures = soak.train(args, [*soak.SETTINGS, *settings], on_ray, kill_actors, held)
    finally:
        cluster.shutdown()
    left = psutil.wait_procs(set(psutil.Process().children(recursive=True)) - set(before), timeout=60)[1]
    violations = [*soak.record.violations, *(f"{process} was left behind" for process in left)]
    seconds = round(time.monotonic() - began, 1)
    report = {"seconds": seconds, "counts": dict(soak.record.counts), "first, last": figures, "violations": violations}
    print(json.dumps(report, indent=1))
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
