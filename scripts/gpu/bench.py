"""What the pieces share: their rows on disk, times and memory, and models and batches of the sizes that matter."""

import asyncio
import gc
import json
import resource
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from agentrl.batch import Batch, as_batch
from agentrl.config import OptimSettings
from agentrl.engines.base import Completion, Sampling
from agentrl.models.attention import NAME
from agentrl.models.linear import use_fast_linear
from agentrl.models.shapes import published_shape
from agentrl.train.learner import Learner
from agentrl.train.metrics import peak_flops
from agentrl.types import Group, Segment, Stop, Trajectory

_TINY = {
    **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64},
    **{"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512, "tie_word_embeddings": True},
}
GIB, SEED = 1 << 30, 0
Row = dict[str, Any]


@dataclass
class Bench:
    """A piece under way: what it measures on, and the rows it has."""

    name: str
    path: Path
    device: str
    quick: bool
    ends: float = 0.0
    """When its time is over, by ``time.monotonic``."""
    content: dict[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        self.content = {"piece": self.name, "ended": "", "device": "", "rows": {}}
        if self.path.exists():
            self.content = json.loads(self.path.read_text())

    @property
    def cuda(self) -> bool:
        """True where it measures on a GPU."""
        return self.device.startswith("cuda")

    def add(self, name: str, row: Row) -> None:
        """Put a row on disk, and say it."""
        self.content["rows"][name] = row
        self.write()
        say(f"  {self.name}: {name}: {words(row)}")

    def write(self, **changes: str) -> None:
        """Rewrite the file at once: whoever is killed here leaves the old one."""
        self.content |= changes
        fresh = self.path.with_suffix(".new")
        fresh.write_text(json.dumps(self.content, indent=1) + "\n")
        fresh.replace(self.path)

    def measure(self, name: str, work: Callable[[], Row]) -> None:
        """Add the row that ``work`` gives, unless it is there; what it raises becomes the row."""
        if "error" not in self.content["rows"].get(name, {"error": ""}):
            return
        self.clear()
        began = time.monotonic()
        try:
            row = work()
        except torch.OutOfMemoryError as error:
            row = {"result": "does not fit", "why": str(error)[:300]}
        except Exception as error:
            row = {"error": repr(error)[:500], "trace": traceback.format_exc()[-3000:]}
        self.add(name, {**row, "row_seconds": round(time.monotonic() - began, 2)})

    def clear(self) -> None:
        """Free what earlier rows have left on the GPU, and begin its peak anew."""
        gc.collect()
        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        """Return the most bytes of tensors since the row began, on a CPU of the process since ever."""
        return (
            torch.cuda.max_memory_allocated() if self.cuda else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        )

    def seconds(self, call: Callable[[], object], *, turns: int = 5, warm: bool = True) -> float:
        """Return the median seconds of a call, after one that is not counted."""
        taken: list[float] = []
        for turn in range(turns + warm):
            if self.cuda:
                torch.cuda.synchronize()
            began = time.perf_counter()
            call()
            if self.cuda:
                torch.cuda.synchronize()
            if turn >= warm:
                taken.append(time.perf_counter() - began)
        return median(taken)

    def card(self) -> Row:
        """Measure what the card itself can do: a large product's FLOP/s, and the bytes a second that a copy moves."""
        if "card" not in self.content["rows"]:
            size, numbers = (64, 1 << 16) if self.quick else (8192, 1 << 30)
            left, right = (torch.randn(size, size, device=self.device).bfloat16() for _ in range(2))
            source = torch.randint(0, 99, (numbers,), dtype=torch.uint8, device=self.device)
            target = torch.empty_like(source)
            product = self.seconds(lambda: [left @ right for _ in range(10)]) / 10
            copy = self.seconds(lambda: [target.copy_(source) for _ in range(10)]) / 10
            sheet = peak_flops(torch.device(self.device), "bfloat16")
            rates = {"tflops": 2 * size**3 / product / 1e12, "copy_gb_per_s": 2 * numbers / copy / 1e9}
            self.add("card", {**rates, "sheet_tflops": (sheet or 0.0) / 1e12})
        return self.content["rows"]["card"]


def usable(device: str) -> bool:
    """Return True if this process can use a device; a fork can't use a GPU that was touched before it."""
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError):  # the second where PyTorch was built without it
        return False
    return True


def say(text: str) -> None:
    """Print progress to stderr: stdout holds the table alone."""
    print(text, file=sys.stderr, flush=True)


def words(row: Row) -> str:
    """Return a row on one line, its numbers short."""
    shown = {name: f"{value:.4g}" if isinstance(value, float) else str(value) for name, value in row.items()}
    return ", ".join(f"{name} {value[:160]}" for name, value in shown.items() if name not in ("trace", "row_seconds"))


def shape_of(bench: Bench, shape: str) -> Qwen3Config:
    """Return the configuration of one of Qwen3's sizes, a tiny one where all is to be quick."""
    made = Qwen3Config(**_TINY) if bench.quick else published_shape(f"Qwen/Qwen3-{shape}")  # pyright: ignore[reportArgumentType]
    assert made is not None, shape
    made.max_position_embeddings = 2**17
    return made


def policy(bench: Bench, shape: str) -> Any:
    """Make a model with random float32 weights on the device, as ``load_model`` would load it."""
    torch.manual_seed(SEED)
    with torch.device(bench.device):
        model: Any = AutoModelForCausalLM.from_config(
            shape_of(bench, shape), dtype=torch.float32, attn_implementation=NAME
        )
    use_fast_linear(model)
    with torch.no_grad():
        model.model.norm.weight.fill_(3.0)  # logits with about the spread of a trained model's
    return model


def learner_of(model: Any, tokens: int, dtype: str = "bfloat16") -> Learner:
    """Make a learner whose packs hold so many tokens."""
    return Learner(model, OptimSettings(max_tokens=tokens), temperature=1.0, dtype=dtype)


def batch_of(prompts: Sequence[tuple[int, ...]], turns: Sequence[Completion]) -> Batch:
    """Put prompts and what was sampled after them into one batch, a row each."""
    rows: list[Group] = []
    for prompt, turn in zip(prompts, turns, strict=True):
        segments = Segment("prompt", prompt), Segment("policy", turn.token_ids, turn.logprobs, 0)
        row = Trajectory(task_id="row", seed=0, segments=segments, rewards=(0.0,), stop=Stop.TERMINATED)
        rows.append(Group((row,)))
    return as_batch(rows)


def texts(count: int, length: int, vocabulary: int, seed: int = SEED) -> list[tuple[int, ...]]:
    """Draw rows of random tokens."""
    draw = torch.Generator().manual_seed(seed)
    return [tuple(row) for row in torch.randint(3, vocabulary, (count, length), generator=draw).tolist()]


def random_batch(count: int, length: int, vocabulary: int) -> Batch:
    """Draw rows of random tokens whose second half counts as sampled."""
    return halved(texts(count, length, vocabulary))


def halved(rows: Sequence[tuple[int, ...]]) -> Batch:
    """Put rows of tokens into one batch; the second half of each counts as sampled."""
    prompts = [row[: len(row) // 2] for row in rows]
    sampled_halves = [row[len(row) // 2 :] for row in rows]
    turns = [
        Completion(token_ids=half, logprobs=(-1.0,) * len(half), finish="length", version=0) for half in sampled_halves
    ]
    return batch_of(prompts, turns)


def sampled(engine: Any, prompts: Sequence[tuple[int, ...]], tokens: int) -> list[Completion]:
    """Sample so many tokens after each prompt, side by side; a row's seed is its place."""

    async def ask() -> list[Completion]:
        how = Sampling(temperature=1.0, max_tokens=tokens)
        return await asyncio.gather(*(engine.generate(prompt, how, seed=row) for row, prompt in enumerate(prompts)))

    return asyncio.run(ask())
