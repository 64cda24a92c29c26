"""Sampled tokens per second of episodes of several turns with tool text between them: our engines and others.

All sides sample from one model, at temperature 1 until a stop token, the same number of episodes that begin with the
same prompts; their lengths are random, of one distribution. They take turns, so that whatever else the machine does
meets all alike. ``generate`` and ``generate_batch`` are transformers' own: they have no memory, so each turn computes
its whole history again, and all episodes wait for the longest turn.
"""

import argparse
import asyncio
import copy
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from measures import command_line, say
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from agentrl.engines import ENGINES, make_engine
from agentrl.engines.base import Engine, Sampling
from agentrl.engines.rng import derive_seed
from agentrl.errors import ConfigError
from agentrl.eval.pages import table
from agentrl.models.load import load_model
from agentrl.models.tiny import make_model, make_tokenizer

EXAMPLES = """examples:
  engines.py                          64 episodes of 6 turns
  engines.py --prompt 2000            with a long history
  engines.py --engines vllm           another engine than the embedded one, if it is installed
  engines.py --engines transformers pytorch   with the native step, and without it
  engines.py --model models/smollm2-135m --episodes 16 --turns 2 --turn 64
  engines.py --quick                  does it still run? seconds
"""
_EAGER = "pytorch"
Episodes = list[list[int]]
Side = Callable[[argparse.Namespace, int], int]
"""Plays one round of episodes with a seed; returns the sampled tokens."""


def save_model(folder: Path) -> tuple[int, ...]:
    """Save a tiny model with random weights; give the tokens that end a turn.

    Each of about 300 tokens is about equally likely: with four that stop, the lengths of turns are about geometric.
    """
    tokenizer = make_tokenizer(["Write what comes to mind."])
    make_model(tokenizer, hidden=128, layers=4, heads=4, seed=0).save_pretrained(folder)
    return tuple(range(len(tokenizer) - 4, len(tokenizer)))


def prompts(args: argparse.Namespace, seed: int) -> Episodes:
    """The tokens that a round's episodes begin with: others than the last one's, which an engine may still have."""
    draw = random.Random(seed)
    return [[draw.randrange(3, 250) for _ in range(args.prompt)] for _ in range(args.episodes)]


def tool_answer(args: argparse.Namespace, seed: int, episode: int, turn: int) -> list[int]:
    """What a tool says after a turn: up to twice ``--tool`` tokens."""
    draw = random.Random(derive_seed(seed, episode, turn))
    return [draw.randrange(3, 250) for _ in range(draw.randrange(1, 2 * args.tool))]


def by_engine(engine: Engine, stop_ids: tuple[int, ...]) -> Side:
    """Each episode continues as soon as its own turn is done."""

    async def episode(args: argparse.Namespace, seed: int, number: int, tokens: list[int]) -> int:
        sampling, sampled = Sampling(max_tokens=args.turn, stop_ids=stop_ids), 0
        for turn in range(args.turns):
            completion = await engine.generate(tuple(tokens), sampling, seed=derive_seed(seed, number, turn))
            sampled += len(completion.token_ids)
            tokens += [*completion.token_ids, *tool_answer(args, seed, number, turn)]
        return sampled

    async def play(args: argparse.Namespace, seed: int) -> int:
        return sum(await asyncio.gather(*(episode(args, seed, *pair) for pair in enumerate(prompts(args, seed)))))

    runner = asyncio.Runner()
    return lambda args, seed: runner.run(play(args, seed))


def in_rounds(turn_of: Callable[[Episodes, int], Episodes]) -> Side:
    """All episodes take a turn, then all tools answer."""

    def play(args: argparse.Namespace, seed: int) -> int:
        torch.manual_seed(seed)
        episodes, sampled = prompts(args, seed), 0
        for turn in range(args.turns):
            answers = turn_of(episodes, args.turn)
            sampled += sum(map(len, answers))
            for number, (tokens, answer) in enumerate(zip(episodes, answers, strict=True)):
                tokens += [*answer, *tool_answer(args, seed, number, turn)]
        return sampled

    return play


def sampled(most: int, stop_ids: tuple[int, ...]) -> GenerationConfig:
    """How transformers samples a turn."""
    return GenerationConfig(do_sample=True, top_k=0, max_new_tokens=most, eos_token_id=[*stop_ids], pad_token_id=0)


def by_generate(model: Any, stop_ids: tuple[int, ...]) -> Side:
    """Transformers' ``generate``: one batch, padded on the left."""

    def turn_of(episodes: Episodes, most: int) -> Episodes:
        longest = max(map(len, episodes))
        padded = torch.tensor([[0] * (longest - len(tokens)) + tokens for tokens in episodes])
        mask = torch.tensor([[0] * (longest - len(tokens)) + [1] * len(tokens) for tokens in episodes])
        config = sampled(most, stop_ids)
        out = model.generate(padded, attention_mask=mask, generation_config=config)[:, longest:].tolist()
        return [answer[: next((i + 1 for i, token in enumerate(answer) if token in stop_ids), most)] for answer in out]

    return in_rounds(turn_of)


def by_generate_batch(model: Any, stop_ids: tuple[int, ...]) -> Side:
    """Transformers' continuous batching."""

    def turn_of(episodes: Episodes, most: int) -> Episodes:
        # What it would choose by the memory of a GPU, and on a CPU takes minutes to fill.
        blocks = sum(1 + (len(tokens) + most) // 256 for tokens in episodes)
        room = ContinuousBatchingConfig(num_blocks=blocks, max_batch_tokens=1024)
        done = model.generate_batch(
            inputs=episodes, generation_config=sampled(most, stop_ids), continuous_batching_config=room
        )
        return [done[name].generated_tokens for name in sorted(done, key=lambda name: int(name.rpartition("_")[2]))]

    return in_rounds(turn_of)


def sides(args: argparse.Namespace, folder: Path) -> dict[str, Side]:
    """Load a model for each side."""
    folder, stop_ids = (Path(args.model), ()) if args.model else (folder, save_model(folder))
    model = load_model(folder)
    options = {"slots": args.episodes, "max_length": args.prompt + args.turns * (args.turn + 2 * args.tool)}
    made: dict[str, Side] = {}
    for name in args.engines:
        try:
            engine, own = (name, options) if name != _EAGER else ("transformers", {**options, "native": False})
            made[name] = by_engine(make_engine(engine, copy.deepcopy(model), own), stop_ids)
        except ConfigError as error:
            say(f"left out: {error}")
    theirs = {"generate": by_generate, "generate_batch": by_generate_batch}
    for name in args.against:
        made[name] = theirs[name](AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa"), stop_ids)
    return made


def speeds(rates: dict[str, list[float]]) -> str:
    """Tabulate tokens per second, and how much faster the first side is: by the median of the rounds' ratios."""
    (engine, ours), *_ = rates.items()
    rows: list[tuple[str, ...]] = []
    for name, row in rates.items():
        ratio = median(mine / other for mine, other in zip(ours, row, strict=True))
        rows.append((name, *(f"{rate:.0f}" for rate in (median(row), min(row), max(row))), f"{ratio:.2f}"))
    return table(("side", "tokens/s (median)", "lowest", "highest", f"{engine} is as fast, times"), rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    parser = command_line(__doc__, EXAMPLES)
    parser.add_argument("--episodes", type=int, default=64, help="that run side by side (default 64)")
    parser.add_argument("--turns", type=int, default=6, help="of each episode (default 6)")
    parser.add_argument("--prompt", type=int, default=100, help="tokens that an episode begins with (default 100)")
    parser.add_argument("--turn", type=int, default=128, help="most tokens of a turn; a stop token ends most before")
    parser.add_argument("--tool", type=int, default=40, help="mean tokens of a tool's answer (default 40)")
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds of each side, after one that is not")
    parser.add_argument("--engines", nargs="+", choices=[*ENGINES, _EAGER], default=["transformers"])
    parser.add_argument(
        "--against", nargs="*", choices=["generate", "generate_batch"], default=["generate", "generate_batch"]
    )
    parser.add_argument("--model", help="its folder; all turns are --turn long (default: a tiny one)")
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch")
    parser.add_argument("--quick", action="store_true", help="few and short episodes: a test that all runs, no timing")
    args = parser.parse_args(arguments)
    if args.quick:
        args.episodes, args.turns, args.turn, args.prompt, args.tool, args.rounds = 3, 2, 6, 9, 3, 1
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        made = sides(args, Path(folder))
        rates: dict[str, list[float]] = {name: [] for name in made}
        for number in range(args.rounds + 1):
            for name, side in made.items():
                began = time.perf_counter()
                rate = side(args, number) / (time.perf_counter() - began)
                say(f"round {number} {name}: {rate:.0f} tokens/s")
                rates[name] += [rate] if number else []
        print(speeds(rates))


if __name__ == "__main__":
    main()
