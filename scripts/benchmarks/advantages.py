"""How long OTB takes on a step of four million sampled tokens, beside the plain mean of the group.

Example:
    python scripts/benchmarks/advantages.py --tokens 4000000 --rows 4096
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from agentrl.algos.advantages import group_mean, otb


def main() -> None:
    """Time both in turn and print their medians and ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4_000_000, help="sampled tokens in all")
    parser.add_argument("--rows", type=int, default=4096, help="episodes they fall into")
    parser.add_argument("--runs", type=int, default=7, help="runs of each, after one that is not counted")
    arguments = parser.parse_args()
    cuts = torch.randint(0, arguments.tokens + 1, (arguments.rows - 1,)).sort().values
    starts = torch.cat([torch.tensor([0]), cuts, torch.tensor([arguments.tokens])])
    rewards, energy = torch.zeros(arguments.tokens), torch.rand(arguments.tokens)
    group = torch.arange(arguments.rows) // 8
    seconds: dict[str, list[float]] = {"otb": [], "group_mean": []}
    for run in range(arguments.runs + 1):
        both = {
            "otb": timed(lambda: otb(rewards, energy, starts, group)),
            "group_mean": timed(lambda: group_mean(rewards, starts, group)),
        }
        if run:
            for name, value in both.items():
                seconds[name].append(value)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, values in seconds.items():
        print(f"{name}: median {medians[name]:.3f} s, from {min(values):.3f} to {max(values):.3f} s")
    print(f"otb takes {medians['otb'] / medians['group_mean']:.2f} times as long as group_mean")


def timed(function: Callable[[], Tensor]) -> float:
    """Seconds that one call takes."""
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
