"""How much faster a group's episodes are sampled and learned from because their prompt is computed once.

The same episodes are measured twice by turns: once the members of a group have one prompt, once the first token of
each is another, so that nothing is shared. Prompts and turns are random tokens; turns have equal lengths.
"""

import argparse
import asyncio
import copy
import random
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from engines import save_model
from measures import command_line, say

from agentrl.batch import as_batch
from agentrl.engines import make_engine
from agentrl.engines.base import Engine, Sampling
from agentrl.eval.pages import table
from agentrl.models.load import load_model
from agentrl.train.score import score
from agentrl.types import Group, Segment, Stop, Trajectory

EXAMPLES = """examples:
  shared_prompt.py --model models/smollm2-135m --threads 2
  shared_prompt.py --prompt 1000 --turn 60
  shared_prompt.py --quick                  does it still run? seconds
"""
PHASES = ("sample", "score", "update")


def prompts(args: argparse.Namespace, seed: int, *, shared: bool) -> list[list[tuple[int, ...]]]:
    """The prompts of each group's members; without sharing, the first token is another one for each."""
    draw = random.Random(seed)
    groups = [[draw.randrange(3, 250) for _ in range(args.prompt)] for _ in range(args.groups)]
    return [[(3 if shared else 3 + member, *prompt[1:]) for member in range(args.members)] for prompt in groups]


def episodes(args: argparse.Namespace, seed: int, *, shared: bool) -> list[Group]:
    """Groups of one where nothing is shared: the members of a group must begin alike."""
    draw, groups = random.Random(seed + 1), list[Group]()
    for number, members in enumerate(prompts(args, seed, shared=shared)):
        played = list[Trajectory]()
        for prompt in members:
            turn = tuple(draw.randrange(3, 250) for _ in range(args.turn))
            sampled = Segment(source="policy", token_ids=turn, logprobs=(-5.0,) * len(turn), version=0)
            segments = (Segment(source="prompt", token_ids=prompt), sampled)
            played.append(
                Trajectory(task_id=str(number), seed=0, segments=segments, rewards=(1.0,), stop=Stop.TERMINATED)
            )
        groups += [Group(tuple(played))] if shared else [Group((episode,)) for episode in played]
    return groups


async def sample(args: argparse.Namespace, engine: Engine, seed: int, *, shared: bool) -> None:
    """Sample a turn of each episode, all at once."""
    asked = [prompt for members in prompts(args, seed, shared=shared) for prompt in members]
    sampling = Sampling(max_tokens=args.turn, stop_ids=())
    await asyncio.gather(*(engine.generate(prompt, sampling, seed=number) for number, prompt in enumerate(asked)))


def learn(args: argparse.Namespace, model: Any, seed: int, *, shared: bool) -> list[float]:
    """Score the episodes, and compute a gradient; return when each began and ended."""
    batch = as_batch(episodes(args, seed, shared=shared))
    began = [time.perf_counter()]
    with torch.no_grad():
        score(model, batch, temperature=1.0)
    began.append(time.perf_counter())
    score(model, batch, temperature=1.0).logp.mean().backward()
    began.append(time.perf_counter())
    model.zero_grad()
    return began


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    parser = command_line(__doc__, EXAMPLES)
    parser.add_argument("--groups", type=int, default=8, help="tasks (default 8)")
    parser.add_argument("--members", type=int, default=4, help="episodes of each (default 4)")
    parser.add_argument("--prompt", type=int, default=100, help="tokens of a prompt (default 100)")
    parser.add_argument("--turn", type=int, default=60, help="sampled tokens of an episode (default 60)")
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds, after one that is not")
    parser.add_argument("--model", help="its folder (default: a tiny one)")
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch")
    parser.add_argument("--quick", action="store_true", help="few and short episodes: a test that all runs, no timing")
    args = parser.parse_args(arguments)
    if args.quick:
        args.groups, args.members, args.prompt, args.turn, args.rounds = 2, 2, 9, 5, 1
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as made, asyncio.Runner() as runner:
        if not args.model:
            save_model(Path(made))
        model = load_model(args.model or made)
        slots = {"slots": args.groups * args.members, "max_length": args.prompt + args.turn}
        engine = make_engine("transformers", copy.deepcopy(model), slots)
        seconds: dict[bool, list[list[float]]] = {True: [], False: []}
        for number in range(args.rounds + 1):
            for shared, rows in seconds.items():
                began = time.perf_counter()
                runner.run(sample(args, engine, 2 * number + shared, shared=shared))
                sampled = time.perf_counter() - began
                ends = learn(args, model, 2 * number + shared, shared=shared)
                row = [sampled, *(after - before for before, after in pairwise(ends))]
                say(f"round {number}, {'shared' if shared else 'apart'}: " + ", ".join(f"{s:.2f} s" for s in row))
                rows += [row] if number else []
    shared, apart = ([median(column) for column in zip(*seconds[kind], strict=True)] for kind in (True, False))
    rows = [
        (*row[:1], *(f"{s:.2f}" for s in row[1:]), f"{row[2] / row[1]:.2f}")
        for row in zip(PHASES, shared, apart, strict=True)
    ]
    print(table(("seconds (median) to", "one prompt for a group", "a prompt for each", "times"), rows))


if __name__ == "__main__":
    main()
