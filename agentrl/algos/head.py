"""The scoring head: log-prob, entropy and Σπ² of sampled tokens, straight from hidden states.

Shapes: ``S`` sampled tokens, ``V`` vocabulary, ``d`` hidden size. ``[S, V]`` logits are never held: from one walk over
the vocabulary come the maximum m of each token's logits z and three sums,

    S1 = Σ e^(z−m),   S2 = Σ e^(2(z−m)),   S3 = Σ (z−m)·e^(z−m),

and then ln π_y = z_y − m − ln S1, Σπ² = S2/S1², H = ln S1 − S3/S1. The walk has two forms: ``blocks.py`` in PyTorch
for any device, ``launch.py`` with Triton's ``kernels.py`` for a GPU.
"""

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any, Literal, NamedTuple, cast, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from agentrl.algos import blocks
from agentrl.algos.blocks import HeadProblem, Upstream
from agentrl.errors import UsageError

Form = Literal["auto", "torch", "triton"]
"""Implementation: PyTorch, Triton, or Triton exactly where the inputs are on a GPU and float32 or bfloat16."""


class TokenStats(NamedTuple):
    """Statistics of the distribution that each token was sampled from."""

    logp: Tensor
    """Log-prob of the token, at most 0 [S], in nats; differentiable."""
    entropy: Tensor
    """Entropy of the distribution [S], in nats; differentiable."""
    sum_sq: Tensor
    """Σ_v π(v)², in (0, 1] [S]; no gradient."""


def token_stats(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    softcap: float | None = None,
    form: Form = "auto",
) -> TokenStats:
    """Score sampled tokens under π = softmax(cap(hidden·weightᵀ + bias) / temperature).

    Args:
        hidden: Last hidden state before each token [S, d].
        weight: Output embedding [V, d].
        targets: The sampled token ids [S].
        temperature: The sampling temperature.
        bias: Bias of the logits [V].
        softcap: Logits z become softcap·tanh(z/softcap), before the temperature, for models that do so.
        form: ``"torch"`` runs everywhere; ``"triton"`` is the one for GPUs, and takes float32 and bfloat16;
            ``"auto"`` is Triton for float32 and bfloat16 on a GPU, and PyTorch for all else.

    Returns:
        Three vectors [S]: float32, or float64 where the inputs are. Gradients reach hidden, weight and bias; there is
        no second derivative.

    Raises:
        ValueError: shapes or devices that do not fit, a target outside the vocabulary, a temperature or softcap not
            above 0, or inputs that the Triton form does not take.
        UsageError: Triton is to be used and is not installed.
    """
    _check(hidden, weight, targets, bias)
    for name, value in (("temperature", temperature), ("softcap", softcap)):
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"{name} must be a positive number, not {value}")
    problem_of = partial(HeadProblem, temperature=temperature, softcap=softcap)
    stats = _Score.apply(hidden, weight, bias, targets.long(), problem_of, _walk(form, hidden, weight))
    return TokenStats(*cast(tuple[Tensor, Tensor, Tensor], stats))


def token_energy(logp: Tensor, sum_sq: Tensor) -> Tensor:
    """Compute the token energy w = ‖onehot(y) − π‖² = (1 − π_y)² + Σ_{v≠y} π_v², in [0, 2).

    The second sum is Σπ² − π_y², clamped to [0, (1 − π_y)²], where it must lie: so rounding in ``sum_sq`` makes no
    energy negative, nor swamps the small energy of a token that was nearly certain.

    Args:
        logp: Log-prob of each token [S], in nats.
        sum_sq: Σ_v π(v)² of each token's distribution [S].

    Returns:
        Detached energy of each token [S], at least float32.

    Raises:
        ValueError: the two shapes differ, or a log-prob is above 0.

    Source: arXiv 2602.07078, the Logit-Gradient Proxy.
    """
    if logp.shape != sum_sq.shape:
        raise ValueError(f"logp {list(logp.shape)} and sum_sq {list(sum_sq.shape)} must have one shape")
    exact = logp.detach().double()
    if bool((exact > 0).any()):
        raise ValueError(f"a log-prob is at most 0, not {float(exact.max())}")
    # expm1 keeps every digit of 1 − π_y where π_y is near 1.
    missed = torch.expm1(exact).square()
    others = torch.minimum((sum_sq.detach().double() - (2 * exact).exp()).clamp_min(0.0), missed)
    return (missed + others).to(torch.promote_types(logp.dtype, torch.float32))


def _walk(form: Form, hidden: Tensor, weight: Tensor) -> ModuleType:
    """Choose the implementation of the walk over the vocabulary: a module that has ``sums`` and ``gradients``."""
    if form not in get_args(Form):
        raise ValueError(f"form must be one of {', '.join(get_args(Form))}, not {form!r}")
    taken = {hidden.dtype, weight.dtype} <= {torch.float32, torch.bfloat16}
    if form == "torch" or (form == "auto" and not (hidden.is_cuda and taken)):
        return blocks
    if not taken:
        raise ValueError(f"the Triton form takes float32 and bfloat16, not {hidden.dtype} and {weight.dtype}: "
                         "convert them, or pass form='torch'")  # fmt: skip
    try:
        # Imported here since Triton is optional.
        from agentrl.algos import launch
    except ModuleNotFoundError as error:
        # A missing module inside Triton is a broken installation, which `pip install triton` would not mend.
        if error.name != "triton":
            raise
        raise UsageError("scoring on a GPU needs Triton: pip install triton, or pass form='torch'") from error
    if not (hidden.is_cuda or launch.INTERPRETED):
        raise ValueError(f"the Triton form needs a GPU, and hidden is on {hidden.device}: pass form='torch' there")
    return launch


class _Score(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        problem_of: Callable[..., HeadProblem],
        walk: ModuleType,
    ) -> tuple[Tensor, Tensor, Tensor]:
        problem = problem_of(hidden=hidden, weight=weight, bias=bias, targets=targets)
        with torch.autocast(hidden.device.type, enabled=False):
            # Autocast would compute the products in half precision; the problem has a type of its own.
            highest, s1, s2, s3, picked = walk.sums(problem)
        log_s1 = s1.log()
        # Rounding must not leave the range that the results promise: H ≥ 0, Σπ² ≤ 1, ln π ≤ 0.
        entropy = (log_s1 - s3 / s1).clamp_min(0.0)
        sum_sq = (s2 / s1.square()).clamp_max(1.0)
        ctx.save_for_backward(hidden, weight, bias, targets, highest, s1, entropy)
        ctx.mark_non_differentiable(sum_sq)
        # None for an unused output, rather than zeros, lets the backward pass skip the entropy's terms.
        ctx.set_materialize_grads(False)
        ctx.problem_of, ctx.walk = problem_of, walk
        return (picked - highest - log_s1).clamp_max(0.0), entropy, sum_sq

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # torch's decorator has no types
        ctx: Any, *grad_outputs: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        by_logp, by_entropy, _ = grad_outputs
        hidden, weight, bias, targets, highest, s1, entropy = ctx.saved_tensors
        if by_logp is None and by_entropy is None:
            return (None,) * 6
        by_logp = torch.zeros_like(s1) if by_logp is None else by_logp
        upstream = Upstream(
            highest=highest,
            by_logp=by_logp,
            level=by_logp / s1,
            slope=None if by_entropy is None else by_entropy / s1,
            shift=entropy - s1.log(),
        )
        problem = ctx.problem_of(hidden=hidden, weight=weight, bias=bias, targets=targets)
        with torch.autocast(hidden.device.type, enabled=False):
            return *ctx.walk.gradients(problem, upstream, ctx.needs_input_grad), None, None, None


def _check(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None) -> None:
    """Check that the shapes are [S, d], [V, d], [S] and [V]."""
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1] or weight.shape[0] == 0:
        raise ValueError(f"hidden [S, d] and weight [V, d] do not fit: {list(hidden.shape)}, {list(weight.shape)}")
    if not (hidden.is_floating_point() and weight.is_floating_point()):
        raise ValueError(f"hidden and weight must be floating point, not {hidden.dtype} and {weight.dtype}")
    if targets.shape != hidden.shape[:1] or targets.is_floating_point():
        raise ValueError(f"targets must be one token id per hidden state, [{hidden.shape[0]}], "
                         f"not {targets.dtype} {list(targets.shape)}")  # fmt: skip
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must be one number per vocabulary entry, [{weight.shape[0]}], not {list(bias.shape)}")
    devices = {tensor.device for tensor in (hidden, weight, targets, bias) if tensor is not None}
    if len(devices) > 1:
        raise ValueError(f"all inputs must be on one device, not on {', '.join(sorted(map(str, devices)))}")
    if targets.numel():
        low, high = (int(bound) for bound in torch.aminmax(targets))
        if low < 0 or high >= weight.shape[0]:
            raise ValueError(f"targets reach from {low} to {high}, outside the vocabulary of {weight.shape[0]}")
