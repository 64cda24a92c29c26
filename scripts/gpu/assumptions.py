"""The piece that asks whether what the code takes for granted holds on the device: each row has what was expected."""

import asyncio
import copy
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import closing
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from agentrl.algos.head import token_stats
from agentrl.batch import Batch
from agentrl.engines import make_engine
from agentrl.engines.base import Completion, Sampling
from agentrl.engines.eager import EagerStep
from agentrl.engines.rng import uniforms
from agentrl.models.attention import (
    BucketedRows,
    How,
    PackedRows,
    VarlenRows,
    additive_mask,
    attends_at_once,
    masked,
    same_heads,
)
from agentrl.models.cache import key_sizes, query_multiple
from agentrl.models.load import ROUNDING, cast_copy, load_model, make_repeatable
from agentrl.models.lora import add_adapters, merged
from agentrl.models.tiny import make_model, make_tokenizer
from agentrl.rollout.ray_actor import broadcast, dist
from agentrl.train.learner import Learner
from agentrl.train.metrics import peak_flops

from .bench import GIB, Bench, Row, batch_of, halved, learner_of, texts

Answer = tuple[object, bool | None]
"""What was seen, and whether it is as expected; None for a question without an expected answer."""
BACKENDS = (
    SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH
)  # fmt: skip


def assumptions(bench: Bench) -> None:
    """Check one assumption a row."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # as a run with run.deterministic has it
    bench.card()
    for name, (expected, ask) in QUESTIONS.items():

        def row(expected: str = expected, ask: Callable[[Bench], Answer] = ask) -> Row:
            seen, holds = ask(bench)
            return {"expected": expected, "seen": seen, "holds": holds}

        bench.measure(name, row)


def tiny(device: str, **sizes: int) -> Any:
    """Make a small float32 model, the same on every device."""
    sizes = {"hidden": 64, "layers": 2, "heads": 4, "seed": 0, **sizes}
    return make_model(make_tokenizer(["some text"]), **sizes).to(device)  # pyright: ignore[reportArgumentType]


def mixed_rows(bench: Bench) -> Batch:
    """Draw rows of all kinds: short and long ones, ones that begin alike, and a long one that forks from another."""
    length = 130 if bench.quick else 1300
    (long,), short = texts(1, length, 200), texts(4, 60, 200, 1)
    return halved([long, long[: length * 4 // 5] + short[0], *short, short[0][:30] + short[1][:20], short[2][:7]])


def updated(bench: Bench, learner: Learner, times: int = 2) -> float:
    """Update some times, and return the norm of the last gradient."""
    return [learner.update([mixed_rows(bench)], lambda _, stats: -stats.logp.mean(), 1e-3) for _ in range(times)][-1]


def weights_of(learner: Learner) -> Tensor:
    """Copy all weights into one tensor on the CPU."""
    return torch.cat([weight.detach().flatten().cpu() for weight in learner.model.parameters()])


def scores(bench: Bench) -> Answer:
    """Score the same rows on the device and on the CPU, in float32."""
    on_gpu, on_cpu = (
        learner_of(tiny(device), 9999, "float32").score(mixed_rows(bench)) for device in (bench.device, "cpu")
    )
    far = [float((a - b).abs().max()) for a, b in zip(on_gpu, on_cpu, strict=True)]
    return {"logp, entropy, sum_sq: largest difference": far}, max(far) < 1e-4


def norms(bench: Bench) -> Answer:
    """Compare the gradient's norm with the CPU's."""
    on_gpu, on_cpu = (updated(bench, learner_of(tiny(device), 9999, "float32"), 1) for device in (bench.device, "cpu"))
    return [on_gpu, on_cpu], abs(on_gpu / on_cpu - 1) < 1e-3


def loaded(bench: Bench) -> Answer:
    """Write a model and load it onto the device, with the checks that ``load_model`` makes there."""
    with tempfile.TemporaryDirectory() as folder:
        tiny("cpu").save_pretrained(folder)
        model = load_model(folder, device=bench.device)
    return str(model.device), model.device.type == torch.device(bench.device).type


def restored(bench: Bench) -> Answer:
    """Go on from a saved optimizer: the next update must be that of the learner that was not interrupted."""
    learner = learner_of(tiny(bench.device), 9999, "float32")
    updated(bench, learner)
    with tempfile.TemporaryDirectory() as folder:
        learner.save(Path(folder))
        other = learner_of(copy.deepcopy(learner.model), 9999, "float32")
        other.load(Path(folder))
    for each in (learner, other):
        updated(bench, each, 1)
    far = float((weights_of(learner) - weights_of(other)).abs().max())
    return {"largest difference": far}, far < 1e-5


def repeatable(bench: Bench, deterministic: bool) -> Answer:
    """Do the same updates in bfloat16 twice, and list the operations that have no repeatable kernel."""
    make_repeatable(deterministic)
    try:
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            before, again = (learner_of(tiny(bench.device), 9999) for _ in range(2))
            for learner in (before, again):
                updated(bench, learner)
    finally:
        make_repeatable(False)
    same = torch.equal(weights_of(before), weights_of(again))
    messages = sorted({str(warning.message)[:90] for warning in heard if "determinis" in str(warning.message)})
    return {"same bits": same, "warnings": messages}, same if deterministic else None


def sampler(bench: Bench) -> Answer:
    """Sample from the same hidden states on both, with a large vocabulary: where the sums round, tokens may differ."""
    entries = 512 if bench.quick else 151_936
    hidden, head = torch.randn(64, 64), torch.nn.Linear(64, entries, bias=False)
    drawn: list[list[int]] = []
    for device in (bench.device, "cpu"):
        model = copy.deepcopy(tiny("cpu")).to(device)
        model.get_output_embeddings = partial(copy.deepcopy, head.to(device))  # a vocabulary larger than its own
        step = EagerStep(model, 1)
        drawn.append(step.sample(hidden.to(device), [1.0] * 64, list(range(64)), [5] * 64)[0])
    same = sum(a == b for a, b in zip(*drawn, strict=True))
    return f"{same} of 64 tokens", same >= 62


def forms(bench: Bench) -> Answer:
    """Score in bfloat16 by both forms, beside whole float64 logits."""
    hidden, weight = torch.randn(96, 128, device=bench.device), torch.randn(1000, 128, device=bench.device) / 8
    hidden, weight = hidden.bfloat16(), weight.bfloat16()
    targets = torch.randint(0, 1000, (96,), device=bench.device)
    true = (hidden.double() @ weight.double().T).log_softmax(1).gather(1, targets[:, None])[:, 0]
    logp_by_form = {form: token_stats(hidden, weight, targets, form=form).logp for form in ("torch", "auto")}
    far = {form: float((logp - true).abs().max()) for form, logp in logp_by_form.items()}
    return far, max(far.values()) < 1e-3


def triton_chosen(bench: Bench) -> Answer:
    """Compare the form ``auto`` with the Triton form, bit by bit."""
    if not bench.cuda:
        return "no GPU", None
    hidden, weight = torch.randn(50, 64, device=bench.device), torch.randn(300, 64, device=bench.device)
    targets = torch.randint(0, 300, (50,), device=bench.device)
    auto, triton = (token_stats(hidden, weight, targets, form=form) for form in ("auto", "triton"))
    same = all(torch.equal(a, b) for a, b in zip(auto, triton, strict=True))
    return same, same


def backends(bench: Bench) -> Answer:
    """List the kernels that take each kind of attention; with the slow one alone, memory grows with the square."""
    rows = 64 if bench.quick else 2048

    def over(dtype: torch.dtype, shape: tuple[int, ...], keys: int, mask: tuple[int, ...]) -> object:
        query, key, value = (
            torch.randn(*shape[:2], count, 128, dtype=dtype, device=bench.device) for count in (shape[2], keys, keys)
        )
        return masked(query, key, value, torch.randn(*mask, dtype=dtype, device=bench.device), How(scale=0.1))

    kinds: dict[str, Callable[[torch.dtype], object]] = {
        "causal, grouped": partial(causal, bench, rows, grouped=True),
        "causal, keys repeated": partial(causal, bench, rows, grouped=False),
        "one token with a mask": partial(over, shape=(4, 8, 4), keys=512, mask=(4, 1, 1, 512)),
        "a chunk with a mask": partial(over, shape=(1, 8, 256), keys=603, mask=(256, 603)),
    }
    kernels = {
        f"{kind}, {str(dtype)[6:]}": [backend.name for backend in BACKENDS if runs(backend, partial(call, dtype))]
        for kind, call in kinds.items()
        for dtype in (torch.bfloat16, torch.float32)
    }
    # The one that no code takes has none.
    used = (names for kind, names in kernels.items() if kind != "causal, grouped, float32")
    return kernels, all(names[:1] not in ([], ["MATH"]) for names in used)


def causal(bench: Bench, rows: int, dtype: torch.dtype, *, grouped: bool) -> object:
    """Attend and go backwards as ``PackedRows`` does in training."""
    query, key, value = (
        torch.randn(1, heads, rows, 128, dtype=dtype, device=bench.device, requires_grad=True) for heads in (16, 8, 8)
    )
    q, k, v = (query, key, value) if grouped else same_heads(query, key, value)
    scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped).float().sum().backward()
    return query.grad


def runs(backend: SDPBackend, call: Callable[[], object]) -> bool:
    """Return True if a kernel takes a call."""
    try:
        with sdpa_kernel(backend), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call()
    except RuntimeError:
        return False
    return True


def odd_masks(bench: Bench) -> Answer:
    """Attend with masks of odd lengths, which are parts of larger ones, beside the same in float64."""
    worst = 0.0
    for count, length in ((1, 17), (3, 513), (7, 515), (100, 777)):
        query, key, value = (torch.randn(1, 4, n, 64, device=bench.device) for n in (count, length, length))
        wide = additive_mask(torch.arange(length - count, length, device=bench.device), 0, length + 9, None, query)
        mask = wide[:, :length]
        true = masked(query.double(), key.double(), value.double(), mask.double(), How(scale=0.125))
        for dtype in (torch.bfloat16, torch.float32):
            seen = masked(query.to(dtype), key.to(dtype), value.to(dtype), mask.to(dtype), How(scale=0.125))
            worst = max(worst, float((seen - true).abs().max()) * (1000 if dtype == torch.float32 else 1))
    return {"largest difference, that of float32 times 1000": worst}, worst < 0.05


def rows_at_once(bench: Bench) -> Answer:
    """Attend over rows that share tokens, all at once in bfloat16, beside one by one in float64; gradients too."""
    # A long row, one that begins it, a short row, and one that forks from the first.
    tokens = (range(1300), range(200), range(1300, 1307), [*range(900), *range(1307, 1407)])
    starts = torch.tensor([0, *map(len, tokens)]).cumsum(0)
    source = torch.tensor([token for row in tokens for token in row])
    draws = [torch.randn(1407, heads, 64) for heads in (8, 2, 2)]
    far: dict[str, float] = {}
    for window in (None, 100):
        results: list[list[Tensor]] = []
        for dtype, kind in ((torch.bfloat16, VarlenRows), (torch.float64, BucketedRows)):
            inputs = [part.to(bench.device).bfloat16().to(dtype).requires_grad_() for part in draws]
            plan: Any = kind(starts.to(bench.device), source.to(bench.device))
            how = How(scale=0.125, window=window)
            if not attends_at_once(inputs[0].bfloat16(), how):
                return "not here", None
            out = plan.attend(*inputs, how) if kind is VarlenRows else plan.attend(0, *inputs, how)
            results.append([out, *torch.autograd.grad(out.double().sin().sum(), inputs)])
        far[f"window {window}"] = max(
            float((mine.double() - true).norm() / true.norm()) for mine, true in zip(*results, strict=True)
        )
    return far, max(far.values()) < 0.02


def adapters(bench: Bench) -> Answer:
    """Train adapters that were added to a model on the device, and merge them."""
    if find_spec("peft") is None:
        return "peft is not installed", None
    model = tiny(bench.device)
    add_adapters(model, rank=4, alpha=8.0, targets=(), base="", seed=0)
    norm = updated(bench, learner_of(model, 9999))
    kinds = {weight.device.type for _, weight in merged(model)}
    return {"norm": norm, "devices": sorted(kinds)}, norm > 0 and kinds == {torch.device(bench.device).type}


def buffers(bench: Bench) -> Answer:
    """Look at the copy that an engine gets."""
    copied = cast_copy(tiny(bench.device), torch.bfloat16)
    kinds = sorted({str(buffer.dtype) for buffer in copied.buffers()})
    return [str(copied.dtype), *kinds], copied.dtype == torch.bfloat16 and kinds == ["torch.float32"]


def native(bench: Bench) -> Answer:
    """Request the steps in C, which a GPU has none of."""
    engine: Any = make_engine("transformers", cast_copy(tiny(bench.device), torch.bfloat16), {"native": True})
    return engine.step, engine.step.startswith("PyTorch")


def published(bench: Bench, wanted: str, **options: Any) -> Answer:
    """Publish weights to a vLLM, and compare 32 tokens that it samples with the trainer's log-probs of them."""
    if not bench.cuda or find_spec("vllm") is None:
        return "no GPU" if not bench.cuda else "vLLM is not installed", None
    if (needed := 1 + max(options.get("device_ids", [0]))) > torch.cuda.device_count():
        return f"{torch.cuda.device_count()} of {needed} GPUs", None
    # Heads of 64 numbers, which vLLM has kernels for.
    old, new = (tiny("cuda:0", hidden=256, seed=seed) for seed in range(2))
    engine: Any = make_engine("vllm", cast_copy(old, torch.bfloat16), {"memory": 0.3, "max_length": 128, **options})

    async def publish() -> tuple[int, Completion]:
        free, _ = torch.cuda.mem_get_info()
        await engine.sleep()  # frees nothing without engine.options.sleep
        freed = torch.cuda.mem_get_info()[0] - free
        await engine.load_weights(new.named_parameters(), 1)
        return freed, await engine.generate((5, 6, 7), Sampling(max_tokens=32), seed=0)

    with closing(engine):
        freed, done = asyncio.run(publish())
        way = engine.backend
    logp = learner_of(new, 9999).score(batch_of([(5, 6, 7)], [done])).logp
    far = float((logp - torch.tensor(done.logprobs)).abs().max())
    holds = way == wanted and far < ROUNDING[torch.bfloat16] and (freed > GIB) == bool(options.get("sleep"))
    return {"way": way, "largest difference": far, "GiB freed in sleep": freed / GIB}, holds


def to_actors(bench: Bench) -> Answer:
    """Send weights to the actors of a fleet that has none: the group is of one process."""
    sent = torch.randn(1000, device=bench.device)
    seen, store = sent.clone(), dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    broadcast(store, 0, 1, [sent])
    same = torch.equal(seen, sent)
    return same, same


def shared_tokens(bench: Bench) -> Answer:
    """Plan rows on the device, which asks it for numbers many times: how long a pack's plan takes."""
    starts = torch.arange(0, 16 * 1024 + 1, 1024, device=bench.device)
    return {"seconds of a plan of 16 x 1024": bench.seconds(lambda: PackedRows(starts))}, None


def cpu_trials(_: Bench) -> Answer:
    """Time what the cache tries on the CPU once, whatever the device."""
    began = time.monotonic()
    sizes, multiple = key_sizes(), query_multiple(128)
    return {"key sizes": sizes, "queries": multiple, "seconds": time.monotonic() - began}, None


def noise(bench: Bench) -> Answer:
    """Compare the sampling noise, bit by bit."""
    seeds, counters = torch.arange(10_000) * 922_337_203_685_477, torch.arange(10_000) % 777
    same = torch.equal(uniforms(seeds.to(bench.device), counters.to(bench.device)).cpu(), uniforms(seeds, counters))
    return same, same


def products(_: Bench) -> Answer:
    """Read how PyTorch multiplies by default."""
    how = torch.backends.cuda.matmul
    return {"tf32": how.allow_tf32, "bf16 sums": how.allow_bf16_reduced_precision_reduction}, not how.allow_tf32


def sheet(bench: Bench) -> Answer:
    """Look the card up."""
    if not bench.cuda:
        return "no GPU", None
    device = torch.cuda.get_device_properties(bench.device)
    flops = peak_flops(torch.device(bench.device), "bfloat16")
    memory, free = device.total_memory / 2**30, torch.cuda.mem_get_info()[0] / 2**30
    card = {"name": device.name, "gib": memory, "free_gib": free, "processors": device.multi_processor_count}
    return card, bool(flops)


QUESTIONS: dict[str, tuple[str, Callable[[Bench], Answer]]] = {
    "the card is known": ("its FLOP/s are in the table of metrics.py", sheet),
    "float32 products": ("no TF32", products),
    "noise": ("the CPU's bits", noise),
    "tokens": ("the CPU's, but for rounding", sampler),
    "scores of packed rows": ("the CPU's within 1e-4", scores),
    "norm of a gradient": ("the CPU's within 0.1%", norms),
    "load_model": ("loads onto the device", loaded),
    "a saved optimizer goes on": ("as if never interrupted", restored),
    "forms of the head, bfloat16": ("within 1e-3 of float64", forms),
    "auto is Triton on a GPU": ("the same bits", triton_chosen),
    "attention's kernels": ("never the slow one alone", backends),
    "odd masks": ("right in both types", odd_masks),
    "rows at once": ("within 2% of float64, as bfloat16 rounds", rows_at_once),
    "adapters": ("on the device", adapters),
    "the engine's copy": ("bfloat16, its buffers float32", buffers),
    "steps in C": ("refused, and PyTorch's taken", native),
    "weights to vLLM on the same GPU": ("CUDA IPC, the trainer's log-probs", partial(published, wanted="ipc")),
    "weights to vLLM on another GPU": (
        "NCCL, the trainer's log-probs",
        partial(published, wanted="nccl", device_ids=[1]),
    ),
    "vLLM sleeps and wakes": ("over a GiB freed, the new weights", partial(published, wanted="ipc", sleep=True)),
    "weights to actors": ("NCCL, the same bits", to_actors),
    "updates twice, run.deterministic": ("the same bits", partial(repeatable, deterministic=True)),
    "updates twice, by default": ("a question", partial(repeatable, deterministic=False)),
    "a pack's plan": ("a question", shared_tokens),
    "trials on the CPU": ("a question", cpu_trials),
}
