"""The pieces that measure: each adds rows to its bench, small sizes before large ones."""

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from agentrl.algos.head import token_stats
from agentrl.batch import Batch
from agentrl.config import load_config
from agentrl.engines import make_engine
from agentrl.models import attention
from agentrl.models.load import cast_copy
from agentrl.models.lora import add_adapters
from agentrl.train.learner import Learner, checkpoint_layers
from agentrl.train.memory import needs
from agentrl.train.metrics import pass_flops

from .bench import GIB, SEED, Bench, Row, batch_of, learner_of, policy, random_batch, sampled, shape_of, texts

ROOT = Path(__file__).resolve().parents[2]
UPDATES = {
    "0.6B": [
        (1, 4096, False), (16, 1024, False), (64, 256, False), (1, 16_384, False), (1, 16_384, True), (1, 65_536, True),
        (1, 131_072, True),
    ],
    "4B": [(1, 4096, True), (16, 1024, True), (1, 16_384, True), (1, 65_536, True)],
}  # fmt: skip
"""Rows, tokens of each, and whether activations are computed again; what keeps them comes first."""


def agreement(bench: Bench) -> None:
    """Compare the engine with the trainer, and a row sampled alone with the same one in company."""
    rows, long = (3, 40) if bench.quick else (16, 1024)
    model = policy(bench, "0.6B")
    for tokens in (long // 4, long):
        for dtype in ("bfloat16", "float32"):
            bench.measure(f"{dtype}, {rows} rows of {tokens}", partial(apart, bench, model, dtype, rows, tokens))


def apart(bench: Bench, model: Any, dtype: str, rows: int, tokens: int) -> Row:
    """Sample rows, score them, and measure how far the two differ in nats a token."""
    prompt = tokens // 8
    prompts = texts(rows, prompt, model.config.vocab_size)
    options = {"slots": rows, "max_length": tokens}
    own = cast_copy(model, getattr(torch, dtype))
    began = time.monotonic()
    turns = sampled(make_engine("transformers", own, options), prompts, tokens - prompt)
    took = time.monotonic() - began
    few = min(tokens - prompt, 224)
    (alone,) = sampled(make_engine("transformers", own, options), prompts[:1], few)
    batch, learner = batch_of(prompts, turns), learner_of(model, rows * tokens, dtype)
    scored = learner.score(batch).logp
    diff = (scored - batch.sampler_logp).double()
    pairs = list(zip(alone.token_ids, turns[0].token_ids, strict=False))
    same = next((index for index, (mine, other) in enumerate(pairs) if mine != other), len(pairs))
    # Up to the first other token both rows have the same tokens behind them.
    nats = [abs(mine - other) for mine, other in zip(alone.logprobs[:same], turns[0].logprobs, strict=False)]
    lonely = learner.score(batch.split(rows * tokens, [0])[0]).logp
    return {
        "mean": float(diff.mean()),
        "std": float(diff.std()),
        "max": float(diff.abs().max()),
        "beyond_0.1": float((diff.abs() > 0.1).double().mean()),
        "row_std": float(torch.stack([part.sum() for part in diff.split(tokens - prompt)]).std()),
        "mean_logp": float(scored.mean()),
        "engine_alone_same_bits": alone.logprobs == turns[0].logprobs[:few] and same == few,
        "engine_alone_same_tokens": same,
        "engine_alone_max": max(nats, default=0.0),
        "trainer_again_same_bits": torch.equal(scored, learner.score(batch).logp),
        "trainer_alone_max": float((lonely - scored[: len(lonely)]).abs().max()),
        "sample_seconds": took,
    }


def update(bench: Bench) -> None:
    """Time updates of whole weights and of adapters, from small packs to large ones."""
    bench.card()
    for shape, cases in UPDATES.items():
        if shape == "4B" and find_spec("peft") is None:
            bench.measure("4B, adapters", lambda: {"result": "left out: peft is not installed"})
            continue
        bench.clear()
        model = policy(bench, shape)
        if shape == "4B":
            add_adapters(model, rank=16, alpha=32.0, targets=(), base="", seed=SEED)
        learner = learner_of(model, 1 << 17)
        for rows, length, again in cases:
            if again:
                checkpoint_layers(model)
            size = max(8, length // 256) if bench.quick else length
            what = f"{shape}{', adapters' if shape == '4B' else ''}, {rows} x {size}{', recomputed' if again else ''}"
            batch = random_batch(rows, size, model.config.vocab_size)
            bench.measure(what, partial(one_update, bench, learner, batch))
            if rows > 1 and not again:
                bench.measure(f"{what}, in buckets", partial(in_buckets, partial(one_update, bench, learner, batch)))
        del model, learner


def in_buckets(work: Callable[[], Row]) -> Row:
    """Do without the kernel that takes rows of different length at once."""
    kernel, attention.varlen_attn = attention.varlen_attn, None
    try:
        return work()
    finally:
        attention.varlen_attn = kernel


def one_update(bench: Bench, learner: Learner, batch: Batch) -> Row:
    """Update on one pack; what recomputing costs is no operation that counts."""
    tokens = len(batch.tokens)
    long = tokens > 1 << 15

    def call() -> float:
        return learner.update([batch], lambda _, stats: -stats.logp.mean(), 1e-6)

    try:
        took = bench.seconds(call, turns=1 if long else 3, warm=not long)
    finally:
        learner.optimizer.zero_grad(set_to_none=True)
    rate, card = pass_flops(learner.model, batch) / took / 1e12, bench.card()
    return {
        "seconds": took,
        "tokens_per_s": tokens / took,
        "peak_gib": bench.peak() / GIB,
        "tflops": rate,
        "mfu_of_card": rate / card["tflops"],
        "mfu_of_sheet": rate / (card["sheet_tflops"] or 989.0),
    }


def decode(bench: Bench) -> None:
    """Time the embedded engine's steps beside the time that reading weights and cache takes."""
    bench.card()
    model = cast_copy(policy(bench, "0.6B"), torch.bfloat16)
    cases = ((2, 16, 4), (3, 32, 4)) if bench.quick else ((1, 512, 64), (16, 512, 64), (64, 128, 128), (64, 512, 64))
    for rows, prompt, new in cases:
        bench.measure(f"{rows} rows, {prompt} + {new}", partial(steps, bench, model, rows, prompt, new))
    bench.measure("kernels of a step of 16 rows", partial(kernels_of_a_step, bench, model, cases[1][1]))


def steps(bench: Bench, model: Any, rows: int, prompt: int, new: int) -> Row:
    """Sample with prompts that no slot has seen, once a single token and once many: the rest are steps alone."""
    engine = make_engine("transformers", model, {"slots": rows, "max_length": prompt + new})
    draws = [texts(rows, prompt, model.config.vocab_size, seed) for seed in range(3)]
    sampled(engine, draws[0], 2)
    prefill = bench.seconds(lambda: sampled(engine, draws[1], 1), turns=1, warm=False)
    whole_turn = bench.seconds(lambda: sampled(engine, draws[2], new), turns=1, warm=False)
    step = (whole_turn - prefill) / (new - 1)
    text = model.config
    weights = sum(weight.numel() for weight in model.parameters())
    cached = rows * (prompt + new / 2) * text.num_hidden_layers * 2 * text.num_key_value_heads * text.head_dim
    size = 2 * (weights + cached)
    roof = size / (bench.card()["copy_gb_per_s"] * 1e9)
    return {
        "tokens_per_s": rows * new / whole_turn,
        "prompt_seconds": prefill,
        "step_ms": 1e3 * step,
        "step_tokens_per_s": rows / step,
        "step_gb": size / 1e9,
        "roof_ms": 1e3 * roof,
        "share_of_roof": roof / step,
        "peak_gib": bench.peak() / GIB,
    }


def kernels_of_a_step(bench: Bench, model: Any, prompt: int) -> Row:
    """Count the kernels of some steps, and the share of the time in which the GPU runs one."""
    engine = make_engine("transformers", model, {"slots": 16, "max_length": prompt + 12})
    prompts = texts(16, prompt, model.config.vocab_size, 7)
    sampled(engine, prompts, 2)
    activities = [torch.profiler.ProfilerActivity.CUDA if bench.cuda else torch.profiler.ProfilerActivity.CPU]
    began = time.perf_counter()
    with torch.profiler.profile(activities=activities) as profile:
        # The prompts are cached: these are their last tokens, and steps.
        sampled(engine, prompts, 10)
        if bench.cuda:
            torch.cuda.synchronize()
        took = time.perf_counter() - began
    events: Any = profile.key_averages()
    busy = sum(event.self_device_time_total for event in events) / 1e6
    return {"kernels_per_step": sum(event.count for event in events) / 10, "gpu_busy_share": busy / took}


def kernels(bench: Bench) -> None:
    """Time the head beside whole logits and measure its memory, then check the Triton kernels on the card."""
    bench.card()
    tokens, vocabulary = (32, 512) if bench.quick else (8192, 151_936)
    for width in (16, 32) if bench.quick else (1024, 4096):
        for way in ("auto", "eager", "torch", *(["liger"] if find_spec("liger_kernel") and bench.cuda else [])):
            bench.measure(f"d={width}, {way}", partial(head_way, bench, way, tokens, vocabulary, width))
    if not bench.quick:
        # Many small kernels are compiled for these: they get what is left.
        bench.measure("checks", partial(checks, bench.ends - time.monotonic() - 3))


def checks(seconds: float) -> Row:
    """Run the kernels' tests on the card, and name those that fail."""
    spread = ["-n", "8"] if find_spec("xdist") else []
    # The tests' own conftest.py wants what is not everywhere; a test of kernels needs none of it.
    command = [sys.executable, "-m", "pytest", "-q", "-rf", "--tb=short", "-p", "no:cacheprovider", *spread]
    command += ["--confcutdir", "tests/algos", "-W", "default", "tests/algos/check_kernels.py"]
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=os.environ | {"TRITON_INTERPRET": "0", "COLUMNS": "300"},
            capture_output=True,
            text=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired as error:
        out = error.stdout or b""
        return {
            "result": f"not done in {seconds:.0f} s",
            "output": (out if isinstance(out, str) else out.decode())[-2000:],
        }
    counts = {name: int(number) for number, name in re.findall(r"(\d+) (passed|failed|error)", done.stdout)}
    failed = [line[:300] for line in done.stdout.splitlines() if line.startswith("FAILED")]
    output = {} if done.returncode == 0 else {"failures": failed, "output": (done.stdout + done.stderr)[-6000:]}
    return {"code": done.returncode, **counts, **output}


def head_way(bench: Bench, way: str, tokens: int, vocabulary: int, width: int) -> Row:
    """Time one way to score tokens, forwards and with the gradients, by the operations of four products."""
    sys.path.append(str(ROOT / "scripts" / "benchmarks"))
    head: Any = import_module("head")
    torch.manual_seed(SEED)
    sizes = {"width": width, "vocabulary": vocabulary, "dtype": torch.bfloat16, "device": bench.device}
    inputs = head.made(argparse.Namespace(**sizes), tokens)

    def score() -> torch.Tensor:
        if way == "eager":
            return head.eager(inputs, all_three=False)
        if way == "liger":
            return -head.liger(inputs)()  # the mean of log-probs alone
        form: Any = way
        return token_stats(inputs.hidden, inputs.weight, inputs.targets, form=form).logp

    with torch.no_grad():
        forward = bench.seconds(score, turns=3)
    both: Any = head.backward(inputs, score)
    took = bench.seconds(both, turns=5)
    held = sum(part.numel() * part.element_size() for part in (inputs.hidden, inputs.weight))
    extra = head.peak_on_gpu(both) - held if bench.cuda else 0
    rate = head.PRODUCTS * inputs.operations / took / 1e12
    return {
        "forward_ms": 1e3 * forward,
        "both_ms": 1e3 * took,
        "tflops": rate,
        "share_of_card": rate / bench.card()["tflops"],
        "extra_mib": extra / 2**20,
    }


def memory(bench: Bench) -> None:
    """Compare the forecast of ``agentrl plan`` with the peak of an update that it is for."""
    for rows, length, again in ((16, 1024, False), (1, 16_384, False), (1, 16_384, True)):
        size = max(32, length // 128) if bench.quick else length
        what = f"0.6B, {rows} x {size}{', recomputed' if again else ''}"
        bench.measure(what, partial(forecast, bench, rows, size, again))


def forecast(bench: Bench, rows: int, length: int, again: bool) -> Row:
    """Compute the forecast of one update on such rows, then measure the second of two."""
    settings = {
        **{"model.device": bench.device, "model.dtype": "bfloat16", "rollout.tasks": rows, "rollout.group_size": 1},
        **{"rollout.episode_tokens": length, "rollout.turn_tokens": length // 2, "optim.max_tokens": rows * length},
        **{"optim.minibatches": 1, "optim.gradient_checkpointing": str(again).lower()},
    }
    shape = shape_of(bench, "0.6B")
    estimate = needs(load_config(overrides=[f"{name}={value}" for name, value in settings.items()]), shape)
    bench.clear()
    model = policy(bench, "0.6B")
    learner = learner_of(model, rows * length)
    if again:
        checkpoint_layers(model)
    batch = random_batch(rows, length, shape.vocab_size)
    took = bench.seconds(lambda: learner.update([batch], lambda _, stats: -stats.logp.mean(), 1e-6), turns=1)
    # The engine is not here, and the process's own share is no tensor.
    parts = {name: size / GIB for name, size in estimate.memory.items() if not name.startswith(("engine", "process"))}
    peak, total = bench.peak() / GIB, sum(parts.values())
    return {
        "forecast_gib": total,
        "peak_gib": peak,
        "peak_over_forecast": peak / total,
        "reserved_gib": torch.cuda.max_memory_reserved() / GIB if bench.cuda else 0.0,
        "seconds": took,
        "parts": {name: round(size, 3) for name, size in parts.items() if size},
    }
