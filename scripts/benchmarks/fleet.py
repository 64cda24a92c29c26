"""A fleet on Ray: how much faster 2 and 4 actors play than 1, what that costs the driver, and how weights travel.

The actors are on nodes of a cluster that this script starts on this machine. Their engines sleep instead of computing,
and so do their tools, as long: what is measured is the fleet and not a processor that all actors share here. Episodes
are as large as real ones. Then steps of larger fleets are simulated with the driver's time that was seen.
"""

import argparse
import asyncio
import heapq
import math
import os
import random
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

os.environ |= {
    "RAY_agent_register_timeout_ms": "300000",
    "RAY_worker_niceness": "0",
    "RAY_memory_monitor_refresh_ms": "0",  # it would kill actors where others fill the memory
}
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import gymnasium
import torch
from ray.cluster_utils import Cluster

from agentrl.config import load_config
from agentrl.engines.base import Completion, Sampling
from agentrl.engines.scripted import ScriptedEngine
from agentrl.models.tiny import make_tokenizer
from agentrl.render.renderer import Renderer
from agentrl.rollout import ray_fleet
from agentrl.rollout.collector import Collector
from agentrl.rollout.plan import EpisodeSpec
from agentrl.rollout.player import EpisodeLimits
from agentrl.toolenv.base import Episode, ToolEnv
from agentrl.toolenv.tasks import TaskList
from agentrl.types import Task

EXAMPLES = """examples:
  fleet.py                                 1, 2 and 4 actors, 500 MB of weights, and the simulation
  fleet.py --quick                         does it still run? a minute
  fleet.py --simulate --gigabytes 16 --hop-seconds 1.6 --train-tokens 20000
"""


class Slow(ToolEnv):
    """Takes its time over each of four turns."""

    def __init__(self, *, seconds: float, split: str = "train") -> None:
        super().__init__(split=split, max_turns=4)
        self.seconds = seconds

    def tasks(self, split: str) -> TaskList:
        """One task."""
        return TaskList([Task(id="0", prompt="Go on.", answer="")])

    def reward(self, episode: Episode) -> dict[str, float]:
        """Nothing counts."""
        return {"correct": 0.0}

    def step(self, action: str) -> Any:
        """Sleep, then continue."""
        time.sleep(self.seconds)
        return super().step(action)


class SleepingEngine(ScriptedEngine):
    """Samples the same token again and again."""

    def __init__(self, seconds: float) -> None:
        super().__init__([])
        self._seconds = seconds

    async def generate(self, prompt_ids: tuple[int, ...], sampling: Sampling, *, seed: int) -> Completion:
        """Sleep, then give as many tokens as may be."""
        await asyncio.sleep(self._seconds)
        tokens = (prompt_ids[-1],) * sampling.max_tokens
        return Completion(token_ids=tokens, logprobs=(-1.5,) * len(tokens), finish="length", version=self._version)

    async def load_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Copy the weights, as an engine does."""
        self._weights = [tensor.clone() for _, tensor in named_tensors]
        await super().load_weights((), version)


class SleepingActor(ray_fleet.Actor):
    """An actor with that engine."""

    async def start(self, config: Any, model: Any, options: Any) -> tuple[bool, float]:
        """Register the environment too: this script is no module that an actor could import."""
        gymnasium.register("benchmark/Slow-v0", entry_point=lambda **arguments: Slow(**arguments))
        self._engine = SleepingEngine(options["seconds"])
        self._collectors = {}
        return True, 0.0


class NoModel:
    """Stands for a model that no engine needs."""

    dtype = torch.float32

    def cpu(self) -> "NoModel":
        """Return itself."""
        return self


async def played(fleet: ray_fleet.RayFleet, collector: Collector, args: argparse.Namespace, groups: int) -> None:
    """Play groups of four."""
    specs = [[EpisodeSpec(task_id="0", seed=4 * group + member) for member in range(4)] for group in range(groups)]
    collected = await collector.collect(specs, fleet, Sampling(max_tokens=args.tokens // 4))
    assert len(collected.groups) == groups


async def measured(fleet: ray_fleet.RayFleet, actors: int, args: argparse.Namespace) -> dict[str, float]:
    """Measure one fleet."""
    tokenizer: Any = make_tokenizer(["system user assistant tool Go on."] * 8, vocab_size=300)
    collector = Collector(
        {"": ("benchmark/Slow-v0", {"seconds": args.seconds})},
        Renderer(tokenizer),
        limits=EpisodeLimits(episode_tokens=2 * args.tokens + 2000, cut_turns="continue"),
    )
    row = dict[str, float]()
    await played(fleet, collector, args, actors)  # all begin with environments
    began, cpu = time.perf_counter(), time.process_time()
    await played(fleet, collector, args, args.groups)
    row["seconds"] = time.perf_counter() - began
    row["driver ms/episode"] = (time.process_time() - cpu) / args.groups / 4 * 1000
    if actors == 2:
        weights = [(f"layer{layer}", torch.randn(args.megabytes * 250_000 // 10)) for layer in range(10)]
        began = time.perf_counter()
        for version in (1, 2):
            await fleet.load_weights(weights, version)
        row["weights s"] = (time.perf_counter() - began) / 2
    return row


def measure(args: argparse.Namespace) -> dict[int, dict[str, float]]:
    """Measure fleets of 1, 2 and 4 actors, each on a node of its own."""
    gymnasium.register("benchmark/Slow-v0", entry_point=lambda **arguments: Slow(**arguments))
    ray_fleet.Actor = SleepingActor
    cluster, rows = Cluster(), dict[int, dict[str, float]]()
    store = (3 * args.megabytes + 100) << 20
    for node in range(1 + max(args.actors)):
        cluster.add_node(num_cpus=min(node, 1), object_store_memory=store, include_dashboard=False)
    try:
        for actors in args.actors:
            config = load_config(overrides=["rollout.concurrency=8"])
            model: Any = NoModel()
            options = {"seconds": args.seconds}
            fleet = ray_fleet.RayFleet(config, model, options, actors=actors, address=str(cluster.address))
            try:
                rows[actors] = asyncio.run(measured(fleet, actors, args))
            finally:
                fleet.close()
            print(f"{actors} actors: {rows[actors]}", file=sys.stderr)
    finally:
        cluster.shutdown()
    return rows


def step_seconds(actors: int, args: argparse.Namespace, driver: float) -> dict[str, float]:
    """Play one step of a fleet that has as many groups of 4 as its places hold, twice over; what its parts take [s].

    The driver sends and takes groups one at a time; an episode's time is exponential around its mean, and a group takes
    as long as its longest. New weights go from node to node along a tree.
    """
    noise, groups = random.Random(0), 2 * actors * args.places // 4
    free = [(0.0, actor) for actor in range(actors) for _ in range(args.places // 4)]
    heapq.heapify(free)
    clock, ended = 0.0, list[float]()
    for _ in range(groups):
        ready, actor = heapq.heappop(free)
        clock = max(clock, ready) + 4 * driver
        end = clock + max(noise.expovariate(1 / args.episode_seconds) for _ in range(4))
        heapq.heappush(free, (end, actor))
        ended.append(end)
    return {
        "play": max(ended),
        "driver": 4 * driver * groups,
        "train": groups * 4 * args.tokens / args.train_tokens,
        "weights": args.gigabytes * args.put_seconds + args.hop_seconds * math.ceil(math.log2(actors + 1)),
    }


def simulate(args: argparse.Namespace, driver: float) -> None:
    """Print the seconds of a step for larger and larger fleets, and what each is limited by."""
    print(
        f"\nSimulated: {args.episode_seconds:g} s and {args.tokens} tokens an episode, {args.places} at a time on an "
        f"actor, driver {driver * 1000:.2g} ms an episode, {args.gigabytes:g} GB of weights, {args.train_tokens:g} "
        "tokens trained a second"
    )
    print("| actors | play s | of it driver s | train s | weights s | step s (lag) | episodes/s | limit |")
    print("|---|---|---|---|---|---|---|---|")
    for actors in (1, 4, 16, 64, 250, 1000):
        parts = step_seconds(actors, args, driver)
        step = max(parts["play"], parts["train"]) + parts["weights"]
        episodes = 2 * actors * (args.places // 4) * 4
        busy = {**parts, "play": parts["play"] - parts["driver"]}
        words = {"play": "actors", "driver": "driver", "train": "trainer", "weights": "object store"}
        cells = [parts["play"], parts["driver"], parts["train"], parts["weights"], step, episodes / step]
        limit = words[max(busy, key=lambda name: busy[name])]
        print(f"| {actors} | " + " | ".join(f"{cell:.3g}" for cell in cells) + f" | {limit} |")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--actors", type=int, nargs="+", default=[1, 2, 4], help="of each fleet (default 1 2 4)")
    parser.add_argument("--groups", type=int, default=32, help="of four episodes, in all (default 32)")
    parser.add_argument("--seconds", type=float, default=0.5, help="of a turn's tokens, and of its tool (default 0.5)")
    parser.add_argument("--tokens", type=int, default=2000, help="sampled in an episode (default 2000)")
    parser.add_argument("--megabytes", type=int, default=500, help="of weights (default 500)")
    parser.add_argument("--quick", action="store_true", help="few and short episodes: a test that all runs, no timing")
    parser.add_argument("--simulate", action="store_true", help="measure nothing, only simulate")
    parser.add_argument("--places", type=int, default=64, help="episodes at a time on a simulated actor (default 64)")
    parser.add_argument("--episode-seconds", type=float, default=60, help="mean of a simulated episode (default 60)")
    parser.add_argument(
        "--gigabytes", type=float, default=16, help="of simulated weights (default 16: 8 B in bfloat16)"
    )
    parser.add_argument("--put-seconds", type=float, default=0.8, help="to put a gigabyte (default 0.8)")
    parser.add_argument("--hop-seconds", type=float, default=13, help="from node to node (default 13: 10 Gbit/s)")
    parser.add_argument("--driver-ms", type=float, default=1.0, help="of the driver for an episode, else as measured")
    parser.add_argument("--train-tokens", type=float, default=1e5, help="sampled tokens trained on in a second")
    args = parser.parse_args(arguments)
    if args.quick:
        args.actors, args.groups, args.seconds, args.tokens, args.megabytes = [1, 2], 4, 0.01, 40, 1
    driver = args.driver_ms / 1000
    if not args.simulate:
        rows = measure(args)
        print("| actors | seconds | times as fast as 1 | driver CPU ms per episode | weights to its nodes, s |")
        print("|---|---|---|---|---|")
        for actors, row in rows.items():
            faster, weights = rows[args.actors[0]]["seconds"] / row["seconds"], row.get("weights s")
            publishing = "" if weights is None else f"{weights:.2f}"
            print(f"| {actors} | {row['seconds']:.1f} | {faster:.2f} | {row['driver ms/episode']:.2f} | {publishing} |")
        driver = rows[args.actors[-1]]["driver ms/episode"] / 1000  # of a longer time more is Ray's own, at rest
    simulate(args, driver)


if __name__ == "__main__":
    main()
