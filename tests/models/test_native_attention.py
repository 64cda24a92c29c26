"""Attention in C: forward and gradients are those of an explicit softmax in float64, on any number of threads."""

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from agentrl.models import native
from agentrl.models.attention import BucketedRows, How, PackedRows
from agentrl.models.native import NativeRows
from agentrl.native import build

from .test_attention import attend_densely

pytestmark = pytest.mark.usefixtures("compiler", "one_thread")
SIZES = (8, 14, 16, 24, 32, 40, 64, 128)


def packed(draw: random.Random) -> tuple[Tensor, Tensor]:
    """Rows of random lengths, many of which begin as another does: their offsets, and the token at each place."""
    most, share = draw.choice((5, 40, 200)), draw.choice((0.0, 0.5, 1.0))
    rows: list[list[int]] = []
    count = 0
    for _ in range(draw.randint(1, 10)):
        length = draw.randint(1, most)
        old: list[int] = []
        if rows and draw.random() < share:
            other = draw.choice(rows)
            old = other[: draw.randint(1, len(other))][:length]
        rows.append([*old, *range(count, count + length - len(old))])
        count += length - len(old)
    return torch.tensor([0, *map(len, rows)]).cumsum(0), torch.tensor([token for row in rows for token in row])


def tensors(count: int, heads: int, kheads: int, size: int, seed: int = 0) -> list[Tensor]:
    """Query, key, value, and a gradient of the result."""
    random = torch.Generator().manual_seed(seed)
    return [
        torch.randn(count, number, size, generator=random, dtype=torch.float64).requires_grad_()
        for number in (heads, kheads, kheads, heads)
    ]


def results(plan: Any, inputs: list[Tensor], how: How) -> list[Tensor]:
    """The result and its gradients by query, key and value."""
    out = plan.attend(0, *inputs[:3], how)
    return [out.detach(), *torch.autograd.grad((out * inputs[3]).sum(), inputs[:3])]


@pytest.mark.parametrize("case", range(60))
def test_it_computes_what_an_explicit_softmax_does_on_any_number_of_threads(case: int) -> None:
    draw = random.Random(case)
    starts, source = packed(draw)
    (kheads, shares), size = draw.choice(((1, 1), (3, 1), (3, 2), (2, 3), (1, 5), (1, 40))), SIZES[case % len(SIZES)]
    window, softcap = draw.choice((None, 1, 7, 50, 150)), draw.choice((None, 0.7, 20.0))
    how = How(scale=draw.choice((1, 3)) * size**-0.5, window=window, softcap=softcap)
    exact = tensors(int(source.max()) + 1, kheads * shares, kheads, size, case)
    slow = attend_densely(starts, source, *exact[:3], how)
    expected = [slow, *torch.autograd.grad((slow * exact[3]).sum(), exact[:3])]
    inputs, bits = [part.detach().float().requires_grad_() for part in exact], list[list[Tensor]]()
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        bits.append(results(PackedRows(starts, source), inputs, how))
    for ours, theirs in zip(bits[0], expected, strict=True):
        # With a window of one key the scores' gradient is 0 but for rounding.
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm() + 2e-6 * theirs.numel() ** 0.5
    for others in bits[1:]:
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(bits[0], others, strict=True))


def long_rows(threads: int) -> tuple[PackedRows, list[Tensor], How]:
    """Rows whose work is enough for several threads, in three trees."""
    torch.set_num_threads(threads)
    starts = torch.tensor([0, 300, 700, 900, 1100])
    source = torch.cat((torch.arange(300), torch.arange(200), torch.arange(300, 500), torch.arange(500, 900)))
    inputs = [part.detach().float().requires_grad_() for part in tensors(900, 6, 3, 40)]
    return PackedRows(starts, source), inputs, How(scale=0.2)


def test_threads_that_share_the_work_change_no_bit() -> None:
    alone, *others = (results(*long_rows(threads)) for threads in (1, 2, 5, 2))
    for other in others:
        assert all(torch.equal(*pair) for pair in zip(alone, other, strict=True))


def test_activations_are_computed_again_to_the_same_bits_and_kept_only_for_a_gradient() -> None:
    plan, inputs, how = long_rows(1)
    plain = results(plan, inputs, how)
    out = checkpoint(lambda *parts: plan.attend(0, *parts, how), *inputs[:3], use_reentrant=False)
    again = torch.autograd.grad((out * inputs[3]).sum(), inputs[:3])
    assert all(torch.equal(*pair) for pair in zip(plain[1:], again, strict=True))
    for without in (torch.no_grad, torch.inference_mode):
        with without():
            quiet = plan.attend(0, *inputs[:3], how)
        assert quiet.grad_fn is None and torch.equal(quiet, plain[0])


def test_memory_grows_as_the_tokens_do() -> None:
    """The peak of forward and backward pass beyond what was there: a square would have another sixteenfold."""

    def peak(count: int) -> int:
        plan, inputs = PackedRows(torch.tensor([0, count])), [torch.zeros(count, 1, 8).requires_grad_()] * 3
        Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
        before = memory("VmHWM")
        plan.attend(0, *inputs, How(scale=0.3, window=64)).sum().backward()
        return memory("VmHWM") - before

    peak(64)
    # Memory that the smaller pass finds freed does not count towards its peak.
    assert peak(32768) < 20 * max(peak(2048), 1 << 20) < 50 << 20


def memory(name: str) -> int:
    """Bytes that this process has, or had at its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def test_where_memory_is_short_it_says_so() -> None:
    rows = NativeRows(torch.tensor([0, 4]), torch.arange(4))
    inputs = [part.detach().float().requires_grad_() for part in tensors(4, 2, 1, 16)]

    def attend() -> Tensor:
        return rows.attend(*inputs[:3], scale=0.3, window=None, softcap=None)

    out = attend()
    _, _, end, shared, _ = rows._places
    end[0], shared[0] = 2**41, 2**41 - 1  # a row for whose scratch memory there are not enough addresses
    for work in (attend, out.sum().backward):
        with pytest.raises(MemoryError, match="no memory for attention"):
            work()


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_what_is_not_finite_is_passed_on_within_its_row(softcap: float | None) -> None:
    starts, how = torch.tensor([0, 40, 80]), How(scale=0.3, softcap=softcap)
    for number, wrong in itertools.product(range(3), (torch.nan, torch.inf)):
        inputs = [part.detach().float() for part in tensors(80, 2, 1, 16)]
        inputs[number][50] = wrong
        finite = PackedRows(starts).attend(0, *inputs[:3], how).isfinite().all(-1).all(-1)
        seeing = slice(50, 51) if number == 0 else slice(50, 80)
        assert not finite[seeing].any() and finite[:40].all()


def test_without_a_compiler_pytorch_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, inputs, how = long_rows(1)
    compiled = results(plan, inputs, how)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    for cached in (build.library, native.compiled):
        cached.cache_clear()
    try:
        assert native.name_of(torch.device("cpu"), torch.float32) == "PyTorch"
        plain = results(plan, inputs, how)
    finally:
        native.compiled.cache_clear()
    assert not torch.equal(plain[0], compiled[0])
    expected = results(BucketedRows(*plan._rows), inputs, how)
    assert all(torch.equal(*pair) for pair in zip(plain, expected, strict=True))
