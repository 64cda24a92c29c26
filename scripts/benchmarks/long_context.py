"""Time and memory of long rows, by length: an update, an update of rows that share most of their tokens, and a turn.

Each row of the table is measured in a process of its own. Memory is what the process takes at its peak beyond what it
held before; divided by the tokens it stays the same from length to length where it is linear in them.
"""

import argparse
import asyncio
import multiprocessing
import resource
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import psutil
import torch
from measures import command_line

from agentrl.batch import Batch, as_batch
from agentrl.config import OptimSettings
from agentrl.engines.base import Sampling
from agentrl.engines.transformers import TransformersEngine
from agentrl.models.tiny import make_model, make_tokenizer
from agentrl.train.learner import Learner
from agentrl.types import Group, Segment, Stop, Trajectory

EXAMPLES = """examples:
  long_context.py                                        1k to 8k tokens: less than a minute
  long_context.py --tokens 1024 4096 16384 65536         minutes
  long_context.py --window 1024                          every layer sees the last 1,024 tokens only
  long_context.py --hidden 256 --layers 4 --heads 8      a larger model
"""


class Cost(NamedTuple):
    """What a measurement took."""

    tokens: int
    """Tokens of all rows."""
    seconds: float
    """Wall time."""
    peak: int
    """Bytes at the peak beyond what was there before."""


def episodes(args: argparse.Namespace, tokens: int, rows: int, shared: int) -> Batch:
    """Rows of so many tokens, of which the last eighth was sampled and the first ``shared`` are the same."""
    draw = torch.Generator().manual_seed(0)

    def some(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, args.vocabulary, (count,), generator=draw).tolist())

    groups: list[Group] = []
    prompt, turn = some(shared), tokens // 8
    for number in range(rows):
        own, answer = some(tokens - turn - shared), some(turn)
        segments = (Segment("prompt", prompt + own), Segment("policy", answer, (-1.0,) * turn, 0))
        row = Trajectory(task_id=str(number), seed=0, segments=segments, rewards=(0.0,), stop=Stop.TERMINATED)
        groups.append(Group((row,)))
    return as_batch(groups)


def update(rows: int, share: float) -> Callable[[Any, argparse.Namespace, int], int]:
    """One gradient step on rows that have this share of their tokens in common."""

    def run(model: Any, args: argparse.Namespace, tokens: int) -> int:
        batch = episodes(args, tokens, rows, int(tokens * share))
        optim = OptimSettings(max_tokens=rows * tokens, gradient_checkpointing=args.gradient_checkpointing)
        learner = Learner(model, optim, temperature=1.0, dtype="float32")
        learner.update(learner.packs(batch, range(rows)), lambda _place, stats: stats.logp.mean(), 1e-6)
        return len(batch.tokens)

    return run


def turn(model: Any, args: argparse.Namespace, tokens: int) -> int:
    """A prompt that the engine computes, and 32 sampled tokens, while 63 short requests run beside it."""
    engine = TransformersEngine(model, slots=64, max_length=tokens + 32)

    async def play() -> None:
        lengths = [tokens, *[16] * 63]
        prompts = [tuple((7 * i + 13 * n) % 250 + 3 for i in range(length)) for n, length in enumerate(lengths)]
        await asyncio.gather(*(engine.generate(prompt, Sampling(max_tokens=32), seed=0) for prompt in prompts))

    asyncio.run(play())
    return engine.computed_tokens


KINDS = {
    "update": update(1, 0.0),
    "update of 4, nothing shared": update(4, 0.0),
    "update of 4, 7/8 shared": update(4, 7 / 8),
    "turn": turn,
}


def measure(kind: str, args: argparse.Namespace, tokens: int) -> Cost:
    """Run one kind of work; a first, small run makes what every process makes once."""
    torch.set_num_threads(args.threads)
    model: Any = make_model(
        make_tokenizer(["some text"]), hidden=args.hidden, layers=args.layers, heads=args.heads, seed=0
    )
    args.vocabulary = model.config.vocab_size
    for layer in model.model.layers:
        layer.self_attn.sliding_window = args.window
    KINDS[kind](model, args, 64)
    before, began = psutil.Process().memory_info().rss, time.perf_counter()
    computed = KINDS[kind](model, args, tokens)
    seconds = time.perf_counter() - began
    return Cost(computed, seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before)


def alone(kind: str, args: argparse.Namespace, tokens: int) -> Cost:
    """Measure in a process of its own, whose peak nothing else has raised."""
    # Forked before this one has used a thread of PyTorch's, or any of its own.
    assert threading.active_count() == 1
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as processes:
        return processes.submit(measure, kind, args, tokens).result()


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, a line as soon as it is measured."""
    parser = command_line(__doc__, EXAMPLES)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 4096, 8192], help="lengths of a row")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="what to measure")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--window", type=int, help="tokens that a token sees")
    parser.add_argument("--gradient-checkpointing", action="store_true", help="as of optim.gradient_checkpointing")
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch")
    args = parser.parse_args(arguments)
    print("| what | tokens a row | tokens | seconds | µs a token | peak MiB | KiB a token |")
    print("|---|---|---|---|---|---|---|")
    for kind in args.kinds:
        for tokens in args.tokens:
            cost = alone(kind, args, tokens)
            per = [1e6 * cost.seconds / cost.tokens, cost.peak / 2**20, cost.peak / 2**10 / cost.tokens]
            print(
                f"| {kind} | {tokens} | {cost.tokens} | {cost.seconds:.3g} | "
                + " | ".join(f"{x:.1f}" for x in per)
                + " |"
            )


if __name__ == "__main__":
    main()
