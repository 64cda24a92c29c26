"""What the scoring head costs beside whole logits: time forwards and backwards, memory, and the matrix rate of a GPU.

The rows take turns, so that whatever else the machine does meets all of them alike; a ratio is the median of the ratios
of each turn. Eager is what a trainer writes without a head of its own: float32 logits [S, V], their log_softmax, and
the token's entry. It needs more passes over [S, V] for entropy and Σπ², which have a row of their own.
"""

import argparse
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
from measures import Measure, Samples, command_line, measure_table, say, timed, write
from torch import Tensor
from torch.nn import functional

from agentrl.algos.head import token_stats
from agentrl.eval.pages import table

EXAMPLES = """examples:
  head.py                                  this machine's GPU, or else its CPU: some minutes
  head.py --quick                          does it still run? seconds
  head.py --threads 1 --tokens 512         steadier where others use the machine as well
  head.py --device cuda --width 4096 --tokens 16384 --peak 989 --json runs/head.json
"""
PRODUCTS = 4
"""Matrix products of 2·S·V·d operations each: the logits twice, the gradients by hidden states and by weights."""
EAGER, ALL_THREE, OURS = "eager log_softmax", "eager log_softmax, entropy and Σπ²", "ours"
LIGER = "liger fused linear cross-entropy"
Call = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """A batch of sampled tokens and the weights that score them."""

    hidden: Tensor
    """Hidden states [S, d], a leaf."""
    weight: Tensor
    """Output embedding [V, d], a leaf."""
    targets: Tensor
    """Sampled token ids [S]."""

    @property
    def operations(self) -> int:
        """Floating point operations of one matrix product."""
        return 2 * self.hidden.numel() * self.weight.shape[0]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print its table."""
    args = parsed(arguments)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    samples: Samples = {}
    # First, before timed calls leave memory behind that would hide the peak.
    measures = [memory(args)] if args.memory_tokens else []
    inputs = made(args, args.tokens)
    measures += times(inputs, args.rounds, samples)
    if args.device == "cuda":
        measures += rates(inputs, args, samples)
    print("\n\n".join((machine(args), seconds_table(samples), measure_table(measures))))
    if args.json is not None:
        write(args.json, machine(args), samples, measures)


def made(args: argparse.Namespace, tokens: int) -> Inputs:
    """Draw inputs whose logits have about the spread of a trained model's."""
    kind = {"dtype": args.dtype, "device": args.device}
    hidden = torch.randn(tokens, args.width, **kind)
    weight = torch.randn(args.vocabulary, args.width, **kind).mul_(2 / args.width**0.5)
    targets = torch.randint(0, args.vocabulary, (tokens,), device=args.device)
    return Inputs(hidden=hidden.requires_grad_(), weight=weight.requires_grad_(), targets=targets)


def eager(inputs: Inputs, *, all_three: bool) -> Tensor:
    """Compute log-probs [S] from whole logits, with or without the head's other two results."""
    log_probs = functional.linear(inputs.hidden, inputs.weight).float().log_softmax(1)
    if all_three:
        probs = log_probs.exp()
        (probs * log_probs).sum(1).neg(), probs.detach().square().sum(1)
    return log_probs.gather(1, inputs.targets[:, None])[:, 0]


def ours(inputs: Inputs) -> Tensor:
    """Compute log-probs [S] by the head, which also computes entropy and Σπ²."""
    return token_stats(inputs.hidden, inputs.weight, inputs.targets).logp


def backward(inputs: Inputs, score: Callable[[], Tensor]) -> Call:
    """Return a call that scores and computes the gradients by hidden states and weights."""
    return lambda: torch.autograd.grad(score().mean(), (inputs.hidden, inputs.weight))


def times(inputs: Inputs, rounds: int, samples: Samples) -> list[Measure]:
    """Compare with eager's time, forwards and with the gradients."""
    scores: dict[str, Callable[[], Tensor]] = {
        EAGER: lambda: eager(inputs, all_three=False),
        ALL_THREE: lambda: eager(inputs, all_three=True),
        OURS: lambda: ours(inputs),
    }
    ways = {f"{name}: forward": torch.no_grad()(score) for name, score in scores.items()}
    ways |= {f"{name}: forward + backward": backward(inputs, score) for name, score in scores.items()}
    if inputs.hidden.is_cuda and find_spec("liger_kernel") is not None:
        ways[f"{LIGER}: forward + backward"] = backward(inputs, liger(inputs))
    play(ways, rounds, samples)
    measured: list[Measure] = []
    for part, most in (("forward", 1.05), ("forward + backward", 1.45)):
        for other in (EAGER, ALL_THREE, LIGER):
            if f"{other}: {part}" in samples:
                taken = ratio(samples, f"{OURS}: {part}", f"{other}: {part}")
                target = most if other == EAGER else None
                measured.append(times_of(f"{part}, beside {other}", taken, target))
    return measured


def times_of(name: str, taken: float, most: float | None) -> Measure:
    """Format a ratio of times."""
    promised = {} if most is None else {"target": f"<= {most}", "met": taken <= most}
    return Measure(name=name, value=f"x {taken:.3f}", **promised)


def liger(inputs: Inputs) -> Callable[[], Tensor]:
    """Return a public fused kernel: the mean over tokens alone, whose gradients it computes in the forward pass."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss: Any = LigerFusedLinearCrossEntropyLoss()
    return lambda: loss(inputs.weight, inputs.hidden, inputs.targets)


def play(ways: dict[str, Call], rounds: int, samples: Samples) -> None:
    """Time each way in turn; the first turn is not counted."""
    for turn in range(rounds + 1):
        for name, call in ways.items():
            settle()
            taken = timed(lambda call=call: (call(), settle()))
            say(f"turn {turn}/{rounds}: {name} {taken:.3f} s")
            if turn:
                samples.setdefault(name, []).append(taken)


def settle() -> None:
    """Wait for the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def ratio(samples: Samples, name: str, other: str) -> float:
    """Return the median ratio of one way's time to another's, turn by turn."""
    return median(mine / theirs for mine, theirs in zip(samples[name], samples[other], strict=True))


def memory(args: argparse.Namespace) -> Measure:
    """Measure the head's extra peak memory, forwards and backwards, against the size of eager's logits alone."""
    inputs = made(args, args.memory_tokens)
    call = backward(inputs, lambda: ours(inputs))
    if args.device == "cpu":
        # Threads, libraries and their buffers come with the first call; they are not the head's.
        few = Inputs(hidden=inputs.hidden[:64], weight=inputs.weight, targets=inputs.targets[:64])
        backward(few, lambda: ours(few))()
    gradients = sum(tensor.numel() * tensor.element_size() for tensor in (inputs.hidden, inputs.weight))
    say(f"memory of {args.memory_tokens} tokens")
    extra = max(0, (peak_on_gpu if args.device == "cuda" else peak_on_cpu)(call) - gradients)
    logits = 4 * args.memory_tokens * args.vocabulary
    name = f"extra memory of {args.memory_tokens} tokens, beside eager's logits of {logits / 2**20:,.0f} MiB"
    value = f"{extra / 2**20:,.0f} MiB, 1/{logits / max(extra, 1):.1f}"
    return Measure(name=name, value=value, target="<= 1/20", met=extra <= logits / 20)


def peak_on_gpu(call: Call) -> int:
    """Measure the peak bytes of a call, its result included."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    torch.cuda.synchronize()
    del result
    return torch.cuda.max_memory_allocated() - before


def peak_on_cpu(call: Call) -> int:
    """Measure the peak bytes of a call, its result included, by Linux's high-water mark, which can be reset."""
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    result = call()
    del result
    return status("VmHWM") - before


def status(name: str) -> int:
    """Read one of Linux's sizes of this process [bytes]."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def rates(inputs: Inputs, args: argparse.Namespace, samples: Samples) -> list[Measure]:
    """Compare the matrix rate of the forward and backward pass, counting four products, with a plain product's."""
    size = 512 if args.quick else 8192
    left, right = (torch.randn(size, size, dtype=args.dtype, device=args.device) for _ in range(2))
    name = f"plain product of {size} x {size} matrices"
    play({name: lambda: left @ right}, 20, samples)
    plain = 2 * size**3 / median(samples[name]) / 1e12
    reached = PRODUCTS * inputs.operations / median(samples[f"{OURS}: forward + backward"]) / 1e12
    alone = inputs.operations / median(samples[f"{OURS}: forward"]) / 1e12
    measured = [
        Measure(name="matrix rate of a plain product", value=f"{plain:,.0f} TFLOP/s"),
        Measure(name="matrix rate of the forward pass", value=f"{alone:,.0f} TFLOP/s, {alone / plain:.0%} of plain"),
        share("matrix rate of forward + backward", reached, plain, "of plain"),
    ]
    return [*measured, *([share("the same", reached, args.peak, "of the GPU's own figure")] if args.peak else [])]


def share(name: str, reached: float, whole: float, of: str) -> Measure:
    """Format a share of a matrix rate."""
    value = f"{reached:,.0f} TFLOP/s, {reached / whole:.0%} {of}"
    return Measure(name=name, value=value, target=">= 60%", met=reached >= 0.6 * whole)


def machine(args: argparse.Namespace) -> str:
    """Describe the machine and the sizes."""
    where = f"{platform.machine()}, {torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}"
    if args.device == "cuda":
        where = torch.cuda.get_device_name()
    sizes = f"S = {args.tokens}, d = {args.width}, V = {args.vocabulary}, {args.dtype}"
    return f"{where}, PyTorch {torch.__version__}, {sizes}"


def seconds_table(samples: Samples) -> str:
    """Tabulate every row's median and range."""
    rows = ((name, len(taken), *(f"{f(taken):.4f}" for f in (median, min, max))) for name, taken in samples.items())
    return table(("row", "turns", "median s", "from", "to"), rows)


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; ``--quick`` makes the default sizes small."""
    parser = command_line(__doc__, EXAMPLES)
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: a GPU where there is one")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="default: bfloat16 on a GPU, float32 else")
    parser.add_argument("--tokens", type=int, help="sampled tokens S to time (default 2048)")
    parser.add_argument("--width", type=int, help="hidden size d (default 1024)")
    parser.add_argument("--vocabulary", type=int, help="vocabulary entries V (default 151936)")
    parser.add_argument("--memory-tokens", type=int, help="tokens to measure the memory of (default 16384; 0: not)")
    parser.add_argument("--rounds", type=int, help="turns of every row, after one that is not counted (default 5)")
    parser.add_argument("--threads", type=int, help="threads of PyTorch on a CPU (default: its own choice)")
    parser.add_argument("--peak", type=float, help="the GPU's matrix rate by its data sheet [TFLOP/s]")
    parser.add_argument("--quick", action="store_true", help="a test that all runs, no timing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample there")
    args = parser.parse_args(arguments)
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    args.dtype = getattr(torch, args.dtype or ("bfloat16" if args.device == "cuda" else "float32"))
    usual = {"tokens": 2048, "width": 1024, "vocabulary": 151_936, "memory_tokens": 16_384, "rounds": 5}
    quick = {"tokens": 64, "width": 32, "vocabulary": 1000, "memory_tokens": 256, "rounds": 2}
    for name, value in (quick if args.quick else usual).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


if __name__ == "__main__":
    main()
