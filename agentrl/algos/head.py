"""The scoring head: log-prob, entropy and Σπ² of sampled tokens, straight from hidden states.

Shapes: ``S`` sampled tokens, ``V`` vocabulary, ``d`` hidden size. Logits exist one block at a time, never ``[S, V]``:
the vocabulary is walked in tiles with a running maximum m and three running sums per token,

    S1 = Σ e^(z−m),   S2 = Σ e^(2(z−m)),   S3 = Σ (z−m)·e^(z−m),

rescaled when m moves. Then logZ = m + ln S1, Σπ² = S2/S1², H = ln S1 − S3/S1. The backward pass makes the blocks again.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from agentrl.linear import linear

_BLOCK_ELEMENTS = {"cpu": 2**22, "cuda": 2**26}
"""Logits held at a time: 16 MiB on a CPU, and on a GPU 256 MiB, to keep it busy."""
_TILE = {"cpu": 2**13, "cuda": 2**15}
"""Vocabulary entries of one tile: a vocabulary below that is one tile, and no sum is ever rescaled."""


class TokenStats(NamedTuple):
    """What the estimators need to know of the distribution that each token was sampled from."""

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
) -> TokenStats:
    """Score sampled tokens under π = softmax(cap(hidden·weightᵀ + bias) / temperature).

    Args:
        hidden: Last hidden state before each token [S, d].
        weight: Output embedding [V, d].
        targets: The sampled token ids [S].
        temperature: The sampling temperature.
        bias: Bias of the logits [V].
        softcap: Logits z become softcap·tanh(z/softcap), before the temperature, for models that do so.

    Returns:
        Three vectors [S]: float32, or float64 where the inputs are. Gradients reach hidden, weight and bias; there is
        no second derivative.

    Raises:
        ValueError: shapes that do not fit, a target outside the vocabulary, a temperature or softcap not above 0.
    """
    _check(hidden, weight, targets, bias)
    for name, value in (("temperature", temperature), ("softcap", softcap)):
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"{name} must be a positive number, not {value}")
    form = _Form(temperature=temperature, softcap=softcap)
    return TokenStats(*cast(tuple[Tensor, Tensor, Tensor], _Score.apply(hidden, weight, bias, targets.long(), form)))


def token_energy(logp: Tensor, sum_sq: Tensor) -> Tensor:
    """Token energy w = ‖onehot(y) − π‖² = (1 − π_y)² + Σ_{v≠y} π_v², in [0, 2).

    The second sum is Σπ² − π_y², held between 0 and (1 − π_y)², where it must lie: so rounding in ``sum_sq`` can make
    no energy negative, nor swamp the small energy of a token that was nearly certain.

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
    missed = torch.expm1(exact).square()
    others = torch.minimum((sum_sq.detach().double() - (2 * exact).exp()).clamp_min(0.0), missed)
    return (missed + others).to(torch.promote_types(logp.dtype, torch.float32))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """How products become logits."""

    temperature: float
    """The sampling temperature."""
    softcap: float | None
    """The bound of the logits before the temperature, or None."""

    def logits(self, products: Tensor) -> Tensor:
        """Turn hidden·weightᵀ + bias into logits, in place."""
        if self.softcap is not None:
            products.div_(self.softcap).tanh_().mul_(self.softcap)
        return products if self.temperature == 1.0 else products.div_(self.temperature)

    def chain(self, grad: Tensor, logits: Tensor) -> Tensor:
        """Turn the gradient by the logits into the gradient by the products, in place; uses up ``logits``."""
        if self.softcap is not None:
            grad.mul_(logits.mul_(self.temperature / self.softcap).square_().neg_().add_(1.0))
        return grad if self.temperature == 1.0 else grad.div_(self.temperature)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """One walk over the blocks of [S, V]: tiles of the vocabulary outside, chunks of tokens inside.

    In this order a tile of narrow weights is widened once, and its gradient is finished before the next tile's begins.
    """

    hidden: Tensor
    """Hidden states [S, d]."""
    weight: Tensor
    """Output embedding [V, d]."""
    bias: Tensor | None
    """Bias of the logits [V], or None."""
    targets: Tensor
    """Sampled token ids [S], int64."""
    form: _Form
    """How products become logits."""

    @property
    def dtype(self) -> torch.dtype:
        """The type of logits and sums."""
        return torch.promote_types(torch.promote_types(self.hidden.dtype, self.weight.dtype), torch.float32)

    @property
    def factor_dtype(self) -> torch.dtype:
        """The type of the factors in products: a GPU multiplies bf16 with float32 sums, elsewhere they are widened."""
        narrow = self.hidden.is_cuda and self.hidden.dtype == self.weight.dtype
        return self.hidden.dtype if narrow else self.dtype

    def tiles(self) -> Iterator[tuple[slice, Tensor]]:
        """Each tile of the vocabulary, with its weights as a factor [tile, d]."""
        size = _TILE[self.hidden.device.type]
        for begin in range(0, self.weight.shape[0], size):
            tile = slice(begin, min(begin + size, self.weight.shape[0]))
            yield tile, self.weight[tile].to(self.factor_dtype)

    def chunks(self) -> Iterator[slice]:
        """Runs of tokens, as many as make a block with one tile."""
        device = self.hidden.device.type
        size = max(1, _BLOCK_ELEMENTS[device] // min(self.weight.shape[0], _TILE[device]))
        for begin in range(0, self.hidden.shape[0], size):
            yield slice(begin, begin + size)

    def logits(self, chunk: slice, tile: slice, weight: Tensor) -> Tensor:
        """One block of logits [chunk, tile]."""
        products = self.product(self.hidden[chunk].to(self.factor_dtype), weight.T)
        return self.form.logits(products if self.bias is None else products.add_(self.bias[tile]))

    def product(self, left: Tensor, right: Tensor) -> Tensor:
        """Matrix product with sums and result in ``dtype``."""
        if left.dtype == self.dtype:
            return linear(left, right.T)
        return torch.mm(left, right, out_dtype=self.dtype)

    def in_tile(self, chunk: slice, tile: slice) -> tuple[Tensor, Tensor]:
        """Where in the tile each token's target is [chunk, 1], and whether it is there at all [chunk]."""
        place = self.targets[chunk] - tile.start
        return place.clamp(0, tile.stop - tile.start - 1)[:, None], (place >= 0) & (place < tile.stop - tile.start)

    def sums(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The maximum m, S1, S2, S3 and the target's logit of each token, 5 × [S]."""
        shape = self.hidden.shape[:1]
        highest, s1, s2, s3, picked = (self.hidden.new_zeros(shape, dtype=self.dtype) for _ in range(5))
        for tile, weight in self.tiles():
            for chunk in self.chunks():
                block = self.logits(chunk, tile, weight)
                place, inside = self.in_tile(chunk, tile)
                picked[chunk] += torch.where(inside, block.gather(1, place)[:, 0], 0.0)
                top = block.amax(1)
                # m has no value before the first tile, and e^Δ, Δ·S1 would be NaN there.
                top = top if tile.start == 0 else torch.maximum(top, highest[chunk])
                moved = torch.zeros_like(top) if tile.start == 0 else highest[chunk] - top
                shrink = moved.exp()
                powers = block.sub_(top[:, None]).exp()
                s3[chunk] = (s3[chunk] + moved * s1[chunk]) * shrink + block.mul_(powers).sum(1)
                s1[chunk] = s1[chunk] * shrink + powers.sum(1)
                s2[chunk] = s2[chunk] * shrink.square() + powers.square_().sum(1)
                highest[chunk] = top
        return highest, s1, s2, s3, picked

    def logit_gradient(self, chunk: slice, tile: slice, weight: Tensor, upstream: "_Upstream") -> Tensor:
        """Gradient by hidden·weightᵀ + bias of one block [chunk, tile]."""
        block = self.logits(chunk, tile, weight)
        log_p = block - upstream.log_z[chunk, None]
        probs = log_p.exp()
        by_logp = upstream.by_logp[chunk]
        if upstream.by_entropy is None:
            grad = probs.mul_(-by_logp[:, None])
        else:
            # ∂H/∂z = −π(ln π + H), beside ∂ln π_y/∂z = onehot(y) − π.
            log_p.add_(upstream.entropy[chunk, None]).mul_(upstream.by_entropy[chunk, None]).add_(by_logp[:, None])
            grad = probs.mul_(log_p).neg_()
        place, inside = self.in_tile(chunk, tile)
        grad.scatter_add_(1, place, torch.where(inside, by_logp, 0.0)[:, None])
        return self.form.chain(grad, block)

    def gradients(self, upstream: "_Upstream", wanted: tuple[bool, ...]) -> list[Tensor | None]:
        """Gradients by hidden, weight and bias, each where wanted and in its own type."""
        by_hidden = torch.zeros_like(self.hidden, dtype=self.dtype) if wanted[0] else None
        by_weight = torch.empty_like(self.weight) if wanted[1] else None
        by_bias = torch.empty_like(self.bias) if self.bias is not None and wanted[2] else None
        for tile, weight in self.tiles():
            tile_weight = torch.zeros_like(weight, dtype=self.dtype)
            tile_bias = tile_weight.new_zeros(tile.stop - tile.start)
            for chunk in self.chunks():
                grad = self.logit_gradient(chunk, tile, weight, upstream)
                if by_bias is not None:
                    tile_bias += grad.sum(0)
                factor = grad.to(self.factor_dtype)
                if by_hidden is not None:
                    by_hidden[chunk] += self.product(factor, weight)
                if by_weight is not None:
                    tile_weight += self.product(factor.T, self.hidden[chunk].to(self.factor_dtype))
            if by_weight is not None:
                by_weight[tile] = tile_weight
            if by_bias is not None:
                by_bias[tile] = tile_bias
        return [None if by_hidden is None else by_hidden.to(self.hidden.dtype), by_weight, by_bias]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Upstream:
    """What the backward pass starts from, 4 × [S]."""

    log_z: Tensor
    """Log of the normaliser."""
    entropy: Tensor
    """Entropy."""
    by_logp: Tensor
    """Gradient of the loss by the log-prob."""
    by_entropy: Tensor | None
    """Gradient of the loss by the entropy; None where the loss has no use for it."""


class _Score(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, form: _Form
    ) -> tuple[Tensor, Tensor, Tensor]:
        run = _Run(hidden=hidden, weight=weight, bias=bias, targets=targets, form=form)
        with torch.autocast(hidden.device.type, enabled=False):
            highest, s1, s2, s3, picked = run.sums()
        log_s1 = s1.log()
        entropy = (log_s1 - s3 / s1).clamp_min(0.0)
        sum_sq = (s2 / s1.square()).clamp_max(1.0)
        ctx.save_for_backward(hidden, weight, bias, targets, highest + log_s1, entropy)
        ctx.mark_non_differentiable(sum_sq)
        ctx.set_materialize_grads(False)
        ctx.form = form
        return (picked - highest - log_s1).clamp_max(0.0), entropy, sum_sq

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # torch's decorator has no types
        ctx: Any, *grad_outputs: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        by_logp, by_entropy, _ = grad_outputs
        hidden, weight, bias, targets, log_z, entropy = ctx.saved_tensors
        if by_logp is None and by_entropy is None:
            return None, None, None, None, None
        by_logp = torch.zeros_like(log_z) if by_logp is None else by_logp
        upstream = _Upstream(log_z=log_z, entropy=entropy, by_logp=by_logp, by_entropy=by_entropy)
        run = _Run(hidden=hidden, weight=weight, bias=bias, targets=targets, form=ctx.form)
        with torch.autocast(hidden.device.type, enabled=False):
            return *run.gradients(upstream, ctx.needs_input_grad), None, None


def _check(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None) -> None:
    """Insist on [S, d], [V, d], [S] and [V]."""
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1] or weight.shape[0] == 0:
        raise ValueError(f"hidden [S, d] and weight [V, d] do not fit: {list(hidden.shape)}, {list(weight.shape)}")
    if not (hidden.is_floating_point() and weight.is_floating_point()):
        raise ValueError(f"hidden and weight must be floating point, not {hidden.dtype} and {weight.dtype}")
    if targets.shape != hidden.shape[:1] or targets.is_floating_point():
        raise ValueError(f"targets must be one token id per hidden state, [{hidden.shape[0]}], "
                         f"not {targets.dtype} {list(targets.shape)}")  # fmt: skip
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must be one number per vocabulary entry, [{weight.shape[0]}], not {list(bias.shape)}")
    if targets.numel():
        low, high = (int(bound) for bound in torch.aminmax(targets))
        if low < 0 or high >= weight.shape[0]:
            raise ValueError(f"targets reach from {low} to {high}, outside the vocabulary of {weight.shape[0]}")
