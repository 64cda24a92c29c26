"""The learner: only it owns the policy's weights in training, the optimizer and their device."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from agentrl.algos.head import TokenStats
from agentrl.batch import Batch
from agentrl.config import OptimSettings
from agentrl.errors import ConfigError
from agentrl.models.load import cast_copy
from agentrl.models.lora import is_adapted, merged, save_model, without_adapters
from agentrl.runs.shards import Shards, write_shards
from agentrl.train.score import computing_in, score

LossOf = Callable[[int, TokenStats], Tensor]
"""Maps a pack's number in the update and the statistics of its tokens to the pack's loss; an update's loss is the sum
over its packs."""
Gradients = tuple[Tensor, Tensor | None]
"""The gradient of a loss by log-probs, and that by entropies, where it uses them; [S] each."""
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")
"""Kinds of tensors that a checkpoint holds for each weight: AdamW's state."""


class Learner:
    """Trains ``model`` with AdamW, the gradient of each update accumulated over packs.

    Args:
        model: loaded by ``load_model``; its weights change.
        optim: AdamW's settings, and those of clipping, packs and checkpointing; the rate is an update's own.
        temperature: sampling temperature, at which log-probs are computed.
        dtype: of the computation, such as ``"bfloat16"``.

    Raises:
        ConfigError: the model can't compute activations again.
    """

    def __init__(self, model: PreTrainedModel, optim: OptimSettings, *, temperature: float, dtype: str) -> None:
        self.model = model
        named: dict[str, Tensor] = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        self._names, self.trained = list(named), list(named.values())
        """The weights that the optimizer moves, in order."""
        self._begin(optim, temperature)
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._reference: PreTrainedModel | None = None
        if optim.gradient_checkpointing:
            checkpoint_layers(model)

    def renew(self, optim: OptimSettings, temperature: float) -> None:
        """Begin with a fresh optimizer, and another temperature; checkpointing stays as it is."""
        # An optimizer refers to itself: its moments would stay until Python collects it.
        self.optimizer.state.clear()
        self._begin(optim, temperature)

    def _begin(self, optim: OptimSettings, temperature: float) -> None:
        # On a CPU a fused step is one pass over the weights instead of one per operation: three times as fast for large
        # models.
        fused = self.model.device.type == "cpu" or None
        betas, decay = optim.betas, optim.weight_decay
        self.optimizer = torch.optim.AdamW(self.trained, betas=betas, weight_decay=decay, fused=fused)
        self._optim, self._temperature = optim, temperature

    def packs(self, batch: Batch, episodes: Sequence[int]) -> list[Batch]:
        """Cut episodes of a batch into packs, in any order; only one of a single episode may have to be split again."""
        return batch.balanced(self._optim.max_tokens, episodes)

    def score(self, batch: Batch) -> TokenStats:
        """Score every sampled token under the policy as it is now; three tensors [S] on the CPU, without gradients."""
        return self._score(self.model, batch)

    def frozen(self) -> Callable[[Batch], TokenStats]:
        """Return a function that scores under a copy of the weights as they are now."""
        return partial(self._score, cast_copy(self.model, self._dtype))

    def keep_reference(self, model: PreTrainedModel | None = None) -> None:
        """Freeze a copy of the weights, those of ``model`` or else the policy's as they are now, as the reference.

        A policy with adapters needs none: without them it is the model that they were added to.
        """
        # No optimizer adds small steps to it, so the computation's type is precise enough.
        self._reference = cast_copy(model or self.model, self._dtype)

    def score_reference(self, batch: Batch) -> Tensor:
        """Compute the log-prob of every sampled token under the frozen reference [S], on the CPU."""
        if self._reference is not None:
            return self._score(self._reference, batch).logp
        assert is_adapted(self.model), "keep_reference comes first"
        with without_adapters(self.model):
            return self._score(self.model, batch).logp

    def _score(self, model: PreTrainedModel, batch: Batch) -> TokenStats:
        # An episode whose prompt left no room has nothing to score, however long that prompt is.
        rows = batch.sampled_rows.tolist()
        # Packs keep the order of the rows, so that their concatenated results are those of the batch.
        with torch.no_grad():
            stats = [self._stats(model, pack) for pack in batch.split(self._optim.max_tokens, rows)]
        return TokenStats(*(torch.cat(part) for part in zip(*stats, strict=True)))

    def update(self, packs: Sequence[Batch], loss_of: LossOf, rate: float) -> float:
        """Take one step of the optimizer down the gradient of all packs' losses.

        Args:
            packs: the update's episodes, as ``packs`` cuts them.
            loss_of: computes the loss of each pack; log-prob and entropy carry gradients.
            rate: the learning rate.

        Returns:
            The norm of the gradient before it was clipped; where that is not finite, no step was taken.
        """
        # backward at once, pack by pack: only one pack's activations are held at a time.
        for number, pack in enumerate(packs):
            computing_in(self._dtype, self.model, partial(self._accumulate, number, pack, loss_of))
        return self._step(rate)

    def _step(self, rate: float) -> float:
        """Take a step down the accumulated gradient, unless it is not finite; return its norm before it was clipped."""
        # The norm is that of the minibatch's gradient, so it can be clipped only after the last pack. All ranks compute
        # the same norm, and so agree on whether there is a step.
        norm = float(torch.nn.utils.clip_grad_norm_(self.trained, self._optim.max_grad_norm))
        if math.isfinite(norm):
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
        # None instead of zeros: the memory of the gradients is free while the engine generates.
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the named weights, adapters added. The others are not copied: read them before the next update."""
        return merged(self.model)

    def write(self, folder: Path) -> None:
        """Write the model, or its adapters alone, into a folder as ``from_pretrained`` loads it.

        Raises:
            OSError, SafetensorError: it can't be written.
        """
        save_model(self.model, folder)

    def save(self, folder: Path) -> None:
        """Write the optimizer's state into a folder.

        Raises:
            OSError, SafetensorError: it can't be written.
        """
        moments = zip(self._names, (self.optimizer.state.get(weight, {}) for weight in self.trained), strict=True)
        tensors = {f"{name}.{kind}": moment for name, state in moments for kind, moment in state.items()}
        write_shards(folder, tensors)

    def load(self, folder: Path) -> None:
        """Restore what ``save`` has written.

        Raises:
            ValueError: it belongs to another model, or is incomplete.
            OSError, SafetensorError: it can't be read.
        """
        saved, weights = Shards(folder), dict(zip(self._names, self.trained, strict=True))
        for full in saved.names:
            name, _, kind = full.rpartition(".")
            if name not in weights or kind not in _MOMENTS:
                raise ValueError("it belongs to another model")
            held = torch.zeros(()) if kind == "step" else torch.zeros_like(weights[name])
            saved.fill(full, held)
            self.optimizer.state[weights[name]][kind] = held
        if any(len(state) < len(_MOMENTS) for state in self.optimizer.state.values()):
            raise ValueError("a part of it is missing")

    def close(self) -> None:
        """End training: the model keeps its weights, and another learner may train it."""
        self.optimizer.state.clear()

    def _accumulate(self, number: int, pack: Batch, loss_of: LossOf) -> None:
        parts = self._parts(pack)
        if len(parts) == 1:
            loss_of(number, self._stats(self.model, pack)).backward()
            return
        # The loss of an episode depends on all of its tokens, but only one part's activations fit into memory. So the
        # parts are scored first, and computed again for the gradients that the loss has by each one's tokens.
        with torch.no_grad():
            scored = [self._stats(self.model, part) for part in parts]
        for part, gradients in zip(parts, loss_gradients(loss_of, number, scored), strict=True):
            descend(self._stats(self.model, part), gradients)

    def _parts(self, pack: Batch) -> list[Batch]:
        """Split an update's pack where the rows of its one episode are too long together."""
        limit = self._optim.max_tokens
        return [pack] if len(pack.tokens) <= limit else pack.split(limit)

    def _stats(self, model: PreTrainedModel, pack: Batch) -> TokenStats:
        """Score a pack on the model's device, and bring the result to the CPU, where the algorithms work."""
        stats = score(model, pack.to(model.device), temperature=self._temperature, dtype=self._dtype)
        return TokenStats(*(part.cpu() for part in stats))


def loss_gradients(loss_of: LossOf, number: int, parts: Sequence[TokenStats]) -> list[Gradients]:
    """Compute the gradients of a pack's loss by the log-probs and entropies of each of its parts."""
    stats = TokenStats(*(torch.cat(part) for part in zip(*parts, strict=True)))
    logp, entropy = stats.logp.requires_grad_(), stats.entropy.requires_grad_()
    loss_of(number, stats).backward()
    by_logp = torch.zeros_like(logp) if logp.grad is None else logp.grad
    sizes = [len(part.logp) for part in parts]
    # There is none by the entropy unless the loss uses it, and never one by Σπ².
    by_entropy = [None] * len(parts) if entropy.grad is None else entropy.grad.split(sizes)
    return list(zip(by_logp.split(sizes), by_entropy, strict=True))


def descend(stats: TokenStats, gradients: Gradients) -> None:
    """Accumulate the weights' gradient from that of the loss by ``stats``."""
    pairs = [(out, by.to(out.device)) for out, by in zip(stats, gradients, strict=False) if by is not None]
    torch.autograd.backward([out for out, _ in pairs], [by for _, by in pairs])


def checkpoint_layers(model: PreTrainedModel) -> None:
    """Make each layer keep its input only and compute its activations again in the backward pass (arXiv 1604.06174).

    Raises:
        ConfigError: the model's layers can't.
    """
    try:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    except ValueError as error:
        raise ConfigError(f"optim.gradient_checkpointing must be false for {type(model).__name__}: {error}") from error
    # Checkpointing asks the layer's own flag. Modules in it stay in evaluation mode: dropout would change log-probs.
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True
