"""Peak memory of every rank as a run of several loads a model, publishes its weights, saves them and trains them.

The model is a Llama of random weights. The table has two ways: each rank reads and writes its share, or rank 0 holds
the complete model, as it does for models whose weights transformers converts. Both must give equal bytes.
The last row is what ``agentrl plan`` expects of the update, in which each rank has two packs of ``--tokens``.
"""

import argparse
import asyncio
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import torch
from measures import command_line, say
from safetensors import safe_open
from transformers import AutoModelForCausalLM, LlamaConfig

from agentrl.config import Config, load_config
from agentrl.engines.transformers import TransformersEngine
from agentrl.eval.pages import table
from agentrl.models.load import cast_copy, load_model
from agentrl.runs.assemble import load_policy
from agentrl.runs.checkpoint import save_checkpoint
from agentrl.train.costs import batch_of
from agentrl.train.memory import needs
from agentrl.train.ranks import ranks
from agentrl.train.sharded import make_learner

EXAMPLES = """examples:
  ranks_memory.py                                300 million weights on four processes: some minutes, 10 GiB
  ranks_memory.py --layers 2 --hidden 64         a small model
  ranks_memory.py --dtype bfloat16               the engine's copy and the gathered weights have 16 bits
"""
PHASES = ("start", "load", "publish", "save", "update")


class Peaks:
    """Peaks of the memory of this process and those that it has started, phase by phase, in MiB."""

    def __init__(self) -> None:
        self.phases: dict[str, list[int]] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Note each process's peak within the block."""
        processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
        for process in processes:
            Path(f"/proc/{process.pid}/clear_refs").write_text("5")
        yield
        lines = [Path(f"/proc/{process.pid}/status").read_text().partition("VmHWM:")[2] for process in processes]
        self.phases[name] = [int(line.split()[0]) // 1024 for line in lines]


def settings(args: argparse.Namespace, folder: Path) -> Config:
    """Return the settings of the run whose ranks are measured."""
    overrides = (f"model.path={folder}", f"run.ranks={args.ranks}", f"model.dtype={args.dtype}", "run.threads=1")
    return load_config(overrides=[*overrides, f"optim.max_tokens={args.tokens}"])


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Do the work of a run's ranks; return the peaks and hashes of what was published and saved."""
    config, peaks, published = settings(args, folder), Peaks(), hashlib.sha256()
    with ExitStack() as stack:
        if args.whole:
            stack.enter_context(mock.patch("agentrl.train.sharded.is_converted", return_value=True))
        stack.enter_context(ranks(config))
        with peaks.phase("start"):
            pass
        with peaks.phase("load"):
            model = load_model(folder) if args.whole else load_policy(config, tokenizer=mock.Mock()).model
            engine = TransformersEngine(cast_copy(model, getattr(torch, args.dtype)))
            learner = make_learner(config, model)

        def passing() -> Iterator[tuple[str, torch.Tensor]]:
            for name, weight in learner.weights():
                published.update(weight.detach().numpy())
                yield name, weight

        with peaks.phase("publish"):
            asyncio.run(engine.load_weights(passing(), 1))
        with peaks.phase("save"):
            saved = folder / f"saved-{args.whole}"
            save_checkpoint(saved, model, mock.Mock(), weights=learner.write, state={"step": 0, "updates": 0})
        with peaks.phase("update"):
            # The first makes the moments; the gradient is there when a rank begins its second pack.
            batch = batch_of(2 * args.ranks, args.tokens, args.tokens - 1)
            for _ in range(2):
                packs = learner.packs(batch, range(2 * args.ranks))
                learner.update(packs, lambda _, stats: stats.logp.mean(), 1e-6)
    return {"peaks": peaks.phases, "published": published.hexdigest(), "saved": digest(saved)}


def forecast(args: argparse.Namespace, folder: Path) -> list[int]:
    """Return what ``agentrl plan`` expects of rank 0, without a cache of the engine's, and of another rank, in MiB."""
    parts = dict(needs(settings(args, folder), shape_of(args)).memory)
    other = parts.pop("other ranks") // (args.ranks - 1)
    return [(sum(parts.values()) - parts["engine's cache"]) >> 20, *[other >> 20] * (args.ranks - 1)]


def digest(folder: Path) -> str:
    """Hash the tensors of a model's files by name, whatever files they lie in."""
    files = {name: file for file in folder.glob("*.safetensors") for name in safe_open(file, "pt").keys()}  # noqa: SIM118
    total = hashlib.sha256()
    for name in sorted(files):
        with safe_open(files[name], "pt") as opened:
            total.update(name.encode() + opened.get_tensor(name).numpy().tobytes())
    return total.hexdigest()


def shape_of(args: argparse.Namespace) -> LlamaConfig:
    """Return the configuration of the model."""
    return LlamaConfig(
        vocab_size=args.vocabulary, hidden_size=args.hidden, intermediate_size=int(2.75 * args.hidden),
        num_hidden_layers=args.layers, num_attention_heads=args.hidden // 64, num_key_value_heads=args.hidden // 64,
    )  # fmt: skip


def make_model(args: argparse.Namespace, folder: Path) -> None:
    """Write a Llama of random weights."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(shape_of(args))
    say(f"{model.num_parameters() / 1e6:.0f} million weights, {args.ranks} ranks, {args.dtype}")
    model.save_pretrained(folder)


def main() -> None:
    """Run the command line."""
    parser = command_line(__doc__, EXAMPLES)
    for name, default in {"ranks": 4, "hidden": 1024, "layers": 19, "vocabulary": 32000, "tokens": 256}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
    parser.add_argument("--dtype", default="float32", help="of the computation (default: float32)")
    parser.add_argument("--step", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--whole", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.step:
        print(json.dumps(measure(args, args.step)))
        return
    ways: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="agentrl-ranks-memory-") as folder:
        planned = forecast(args, Path(folder))
        make_model(args, Path(folder))
        # Each in a process of its own. Freed memory goes back at once, so that peaks are of what is in use.
        env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"}
        for name, more in {"rank 0 holds all": ["--whole"], "shares": []}.items():
            words = [sys.executable, *sys.argv, "--step", folder, *more]
            ways[name] = json.loads(subprocess.run(words, check=True, stdout=subprocess.PIPE, env=env).stdout)
    rows = [
        (phase, name, *way["peaks"][phase], sum(way["peaks"][phase])) for phase in PHASES for name, way in ways.items()
    ]
    rows.append(("update", "as planned", *planned, sum(planned)))
    print(table(("peak, MiB", "way", *(f"rank {rank}" for rank in range(args.ranks)), "sum"), rows))
    whole, shares = ways.values()
    equal = all(whole[what] == shares[what] for what in ("published", "saved"))
    print(f"published and saved bytes are equal: {whole['saved'][:12]}" if equal else "BYTES DIFFER")
    sys.exit(not equal)


if __name__ == "__main__":
    main()
