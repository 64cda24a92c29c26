"""The learner over several processes, the ranks: each holds a shard of every weight and of the optimizer (FSDP2).

Rank 0 runs all the rest of the program too: it plays, decides, and computes losses of the log-probs that all ranks
give it. The others follow: they wait for calls of the methods below, do their part of them, and know no algorithm.

Legend: W ranks, P of which share a pack's tokens; D = W/P packs are computed at a time.
"""

import copy
import gc
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import lru_cache, partial
from pathlib import Path
from types import MethodType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from agentrl.algos.head import TokenStats
from agentrl.batch import Batch
from agentrl.config import Config
from agentrl.errors import ConfigError, RunFolderError
from agentrl.models.lora import merged, without_adapters
from agentrl.models.ulysses import TokenShare
from agentrl.train.learner import Learner, LossOf
from agentrl.train.score import score_share

_Part = tuple[Tensor, TokenStats]
"""Which of a pack's sampled tokens a rank has, and their statistics, on the CPU."""
_TOGETHER = 2**26
"""Numbers of weights after which those that were made whole together are given away, before there are more."""


def new_learner(config: Config, model: PreTrainedModel, **options: Any) -> Learner:
    """Make the learner of ``model``, on all ranks where there are several.

    ``options`` are those of ``Learner`` that the settings do not say, or say otherwise.
    """
    optim = config.optim
    options = {
        "max_grad_norm": optim.max_grad_norm,
        "max_tokens": optim.max_tokens,
        "dtype": config.model.dtype,
        "gradient_checkpointing": optim.gradient_checkpointing,
        **options,
    }
    if not dist.is_initialized():
        return Learner(model, **options)
    return ShardedLearner(model, sequence_ranks=config.run.sequence_ranks, **options)


class ShardedLearner(Learner):
    """A learner whose weights, gradients and optimizer lie in shards on all ranks.

    Rank 0 calls the public methods, as it would those of ``Learner``; what each of them does on the other ranks has a
    name with an underscore. A process has one at a time: ``close`` comes before the next.

    Args:
        model: whole on rank 0, where it gives its weights away until ``close``; a skeleton on the others.
        sequence_ranks: ranks that share the tokens of a pack.
        device: type of device that the ranks compute on; that of ``model`` by default.
        options: those of ``Learner``.

    Raises:
        ConfigError: the model's heads can't be dealt to so many ranks, or it can't compute activations again.
    """

    def __init__(
        self, model: PreTrainedModel, *, sequence_ranks: int = 1, device: str | None = None, **options: Any
    ) -> None:
        device = device or model.device.type
        self._rank, self._world, self._share = dist.get_rank(), dist.get_world_size(), sequence_ranks
        self._kept: dict[str, list[Tensor]] = {}
        # Two threads of rank 0 may call: one that learns, and one that scores what was played meanwhile.
        self._calling = threading.RLock()
        self._losses: tuple[LossOf, int] | None = None
        self._whole, skeleton = model, model
        if self._rank == 0:
            heads = model.config.get_text_config().num_attention_heads
            if heads % sequence_ranks:
                raise ConfigError(
                    f"the {sequence_ranks} ranks of run.ranks that share tokens must divide {heads} heads"
                )
            how = {"sequence_ranks": sequence_ranks, "device": device, **options}
            skeleton, _ = _scatter([(_skeleton(model), how)] * self._world)
        _shard(skeleton, device, getattr(torch, options["dtype"]), sequence_ranks)
        super().__init__(skeleton, **options)
        self._all = list(skeleton.parameters())
        for place, weight in enumerate(model.parameters() if self._rank == 0 else ()):
            self._spread("", place, weight.detach())
            # Without a value that could be taken for one, and without memory.
            weight.data = weight.new_full((1,) * weight.ndim, torch.nan).expand(weight.shape)

    def packs(self, batch: Batch, rows: Sequence[int]) -> list[Batch]:
        """Cut rows of a batch into packs that fit into a rank's memory, in any order; one a rank or more."""
        return batch.balanced(self._room(batch, rows), rows)

    def keep_reference(self, model: PreTrainedModel | None = None) -> None:
        """Freeze a copy of the weights, those of ``model`` or else the policy's as they are now, as the reference."""
        self._everywhere("_keep", "reference")
        for place, weight in enumerate(model.parameters() if model else ()):
            self._spread("reference", place, weight.detach())

    def score_reference(self, batch: Batch) -> Tensor:
        """Compute the log-prob of every sampled token under the frozen reference [S], on the CPU."""
        return self._scored("reference", batch).logp

    def frozen(self) -> Callable[[Batch], TokenStats]:
        """Give what ``score`` is now, for later; it takes the place of the one that was given before."""
        self._everywhere("_keep", "frozen")
        return partial(self._scored, "frozen")

    def update(self, packs: Sequence[Batch], loss_of: LossOf, rate: float) -> float:
        """Take one step of the optimizer down the gradient of all packs' losses; see ``Learner``."""
        self._losses = loss_of, len(packs)
        return self._each("_descend", [(mine, rate) for mine in self._dealt(packs)])

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Give the named weights whole, some at a time."""
        self._everywhere("_begin_weights")
        while some := self._everywhere("_next_weights"):
            yield from some

    def state_dict(self) -> dict[str, Tensor]:
        """Give the model's trained weights and its buffers, whole and on the CPU."""
        return self._everywhere("_whole_model")

    def save(self, folder: Path) -> None:
        """Do what ``Learner`` does, each rank with its own shards."""
        self._everywhere("_reach", "save", folder.resolve())

    def load(self, folder: Path) -> None:
        """Do what ``Learner`` does, each rank with its own shards, whatever number of ranks has written them."""
        self._everywhere("_reach", "load", folder.resolve())

    def close(self) -> None:
        """Give the model its weights back on rank 0, and free all ranks of them."""
        for place, weight in enumerate(self._whole.parameters()):
            weight.data = self._everywhere("_weight", place)
        self._everywhere("_forget")

    def _swap(self) -> None:
        self._everywhere("_trade")

    def _score(self, model: PreTrainedModel, batch: Batch) -> TokenStats:
        return self._scored("", batch)

    def _scored(self, kept: str, batch: Batch) -> TokenStats:
        rows = batch.sampled_rows.tolist()
        packs = batch.split(self._room(batch, rows), rows)
        told = self._each("_forward", [(kept, mine) for mine in self._dealt(packs)])
        stats = [stats for turn in zip(*told, strict=True) for _, stats in self._joined(turn)][: len(packs)]
        return TokenStats(*(torch.cat(part) for part in zip(*stats, strict=True)))

    # From here on: what every rank does.

    def _forward(self, kept: str, packs: Sequence[Batch]) -> list[list[_Part]] | None:
        """Score this rank's packs, under weights that were kept or not; gives rank 0 the results of every rank."""
        others = self._kept.get(kept, [])
        with torch.no_grad(), without_adapters(self.model) if kept and not others else nullcontext():
            self._exchange(others)
            try:
                return self._gathered([_on_cpu(self._own(pack)) for pack in packs])
            finally:
                self._exchange(others)

    def _descend(self, packs: Sequence[Batch], rate: float) -> float:
        """Accumulate the gradient over this rank's packs, as many as any other rank has, and take a step."""
        for turn, pack in enumerate(packs):
            own = self._own(pack)
            told = self._gathered(_on_cpu(own))
            # The loss is computed on rank 0, from all ranks' log-probs; only its gradient by them comes back.
            gradients = _scatter(None if told is None else self._upstream(turn, told))
            given = [(part, one) for part, one in zip(own[1], gradients, strict=False) if one is not None]
            torch.autograd.backward([part for part, _ in given], [one.to(part.device) for part, one in given])
        return self._step(rate)

    def _upstream(self, turn: int, told: list[_Part]) -> list[tuple[Tensor, Tensor | None]]:
        """Compute the losses of a turn's packs, and for each rank their gradient by its log-probs and entropies."""
        assert self._losses is not None
        loss_of, count = self._losses
        answers: list[tuple[Tensor, Tensor | None]] = []
        for number, (owns, stats) in enumerate(self._joined(told)):
            place = turn * self._world // self._share + number
            logp, entropy = stats.logp.requires_grad_(), stats.entropy.requires_grad_()
            # The ranks need each other: one that goes without a pack computes another's, with a gradient of 0.
            if place < count:
                loss_of(place, stats).backward()
            by_logp = torch.zeros_like(logp) if logp.grad is None else logp.grad
            # The gradients' mean over the ranks is what comes out, and their sum is wanted.
            for own in owns:
                by_entropy = None if entropy.grad is None else self._world * entropy.grad[own]
                answers.append((self._world * by_logp[own], by_entropy))
        return answers

    def _begin_weights(self) -> None:
        self._merged = merged(self.model)

    def _next_weights(self) -> list[tuple[str, Tensor]]:
        some: list[tuple[str, Tensor]] = []
        for name, weight in self._merged:
            some.append((name, _whole(weight.detach())))
            if sum(one.numel() for _, one in some) > _TOGETHER:
                break
        return some

    def _weight(self, place: int) -> Tensor:
        return _whole(self._all[place].detach())

    def _whole_model(self) -> dict[str, Tensor]:
        held: dict[str, Tensor] = {}
        for name, one in self.model.state_dict().items():
            # Neither tied ones, which would be two tensors then, nor those that never change.
            if name in self._names or not isinstance(one, DTensor):
                whole = _whole(one) if isinstance(one, DTensor) else one
                # Rank 0 alone keeps them.
                held |= {name: whole.cpu()} if self._rank == 0 else {}
        return held

    def _reach(self, name: str, folder: Path) -> None:
        """Do this rank's part of saving or loading; rank 0 raises what went wrong on any of them."""
        fault: Exception | None = None
        try:
            if not folder.is_dir():
                raise RunFolderError(f"rank {self._rank} can't see {folder}: keep runs on a disk that all ranks share")
            getattr(super(), name)(folder)
        except Exception as error:
            fault = error
        for error in filter(None, self._gathered(fault) or ()):
            raise error

    def _keep(self, name: str) -> None:
        self._kept[name] = [weight.detach().clone() for weight in self.trained]

    def _trade(self) -> None:
        self._exchange(self._average)

    def _forget(self) -> None:
        super().close()
        # FSDP2's hooks refer to what they hang on.
        del self.model, self.optimizer, self.trained, self._all
        self._average, self._kept = [], {}
        gc.collect()

    @torch.no_grad()
    def _take(self, name: str, place: int, shard: Tensor) -> None:
        """Take this rank's shard of a weight, or of its value among those that are kept."""
        held: Any = (self._kept[name] if name else self._all)[place]
        held.to_local().copy_(shard)

    def _own(self, pack: Batch) -> _Part:
        model: Any = self.model
        return model.score_pack(pack.to(model.device), self._temperature)

    # From here on: how rank 0 has them do it.

    def _everywhere(self, name: str, *arguments: Any) -> Any:
        """Call a method on all ranks."""
        return self._each(name, [arguments] * self._world)

    def _each(self, name: str, arguments: Sequence[tuple[Any, ...]]) -> Any:
        """Call a method on all ranks, on each with arguments of its own; give the result of this one."""
        with self._calling:
            _scatter([(name, one) for one in arguments])
            return getattr(self, name)(*arguments[0])

    def _spread(self, name: str, place: int, tensor: Tensor) -> None:
        """Cut a weight into the ranks' shards, and have each rank take its own."""
        # The cut is that of FSDP2; where there are fewer rows than ranks, the last ranks have none.
        cuts = [*tensor.chunk(self._world), *[tensor[:0]] * self._world]
        # Copied, since what is sent of a view is all that it is a view of.
        self._each("_take", [(name, place, cut.cpu().clone()) for cut in cuts[: self._world]])

    def _room(self, batch: Batch, rows: Sequence[int]) -> int:
        """Tokens of a pack such that no rank goes without one for being one of many."""
        lengths = batch.row_starts.diff()[list(rows)]
        fair = -(-int(lengths.sum()) * self._share // self._world)
        return min(self._max_tokens, fair + int(lengths.max()))

    def _dealt(self, packs: Sequence[Batch]) -> list[list[Batch]]:
        """Deal packs to ranks in turns; in the last one, ranks that go without get the smallest."""
        each = self._world // self._share
        smallest = min(packs, key=lambda pack: len(pack.tokens))
        filled = [*packs, *[smallest] * (-len(packs) % each)]
        return [filled[rank // self._share :: each] for rank in range(self._world)]

    def _joined(self, parts: Sequence[_Part]) -> Iterator[tuple[list[Tensor], TokenStats]]:
        """Join the ranks' parts of each pack of a turn; gives which tokens each rank had, and the whole statistics."""
        for begin in range(0, self._world, self._share):
            owns, stats = zip(*parts[begin : begin + self._share], strict=True)
            order = torch.cat(owns).argsort()
            whole = (torch.cat(part)[order] for part in zip(*stats, strict=True))
            yield list(owns), TokenStats(*whole)

    def _gathered(self, mine: Any) -> list[Any] | None:
        """Gather the ranks' objects on rank 0."""
        parts = [None] * self._world if self._rank == 0 else None
        dist.gather_object(mine, parts)
        return parts


def serve() -> None:
    """Follow rank 0 until it dismisses this one."""
    learner: Any = None
    while (call := _scatter(None)) is not None:
        what, arguments = call
        if isinstance(what, str):
            getattr(learner, what)(*arguments)
        else:
            learner = ShardedLearner(what, **arguments)


def dismiss() -> None:
    """Tell the other ranks that there is nothing left to do."""
    _scatter([None] * dist.get_world_size())


def _scatter(objects: Sequence[Any] | None) -> Any:
    """Send each rank an object from rank 0; give this rank's."""
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, cast(Any, objects))
    return mine[0]


def _shard(model: Any, device: str, dtype: torch.dtype, sequence_ranks: int) -> None:
    """Shard a model over all ranks, and give it a method ``score_pack`` that works on the shards."""
    backend = "gloo"
    if device == "cuda":
        backend = "nccl"
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", dist.get_rank())))
    mesh = DeviceMesh.from_group(_everyone(dist.group.WORLD, backend), device)
    share = None
    if sequence_ranks > 1:
        group: Any = dist.new_subgroups(sequence_ranks, backend=backend)[0]
        share = TokenShare(group)
    # What is held, reduced and optimized is float32; only what is gathered to compute with is of the given type.
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in [*(one for one in model.modules() if isinstance(one, GradientCheckpointingLayer)), model]:
        _materialize(module, device, made)
        # The last one too: what it kept gathered after scoring would be old once weights are exchanged or loaded.
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)

    def score_pack(self: PreTrainedModel, pack: Batch, temperature: float) -> _Part:
        return score_share(self, pack, temperature=temperature, dtype=dtype, share=share)

    # Layers, embedding and head are gathered for a forward pass only, and scoring reads the head's weight itself: so
    # it must be a forward pass.
    model.score_pack = MethodType(score_pack, model)
    register_fsdp_forward_method(model, "score_pack")


@lru_cache(maxsize=1)
def _everyone(_world: Any, backend: str) -> Any:
    """Make the group of all ranks that weights and gradients go through, once in a world.

    That of the calls may wait for hours, while rank 0 plays. PyTorch remembers how it computed with an equal mesh, and
    in which group: with one group for each model, two ranks that remember different ones would wait for each other.
    """
    return dist.new_group(backend=backend)


def _skeleton(model: PreTrainedModel) -> PreTrainedModel:
    """Copy a model without its weights, to be sent."""
    memo: dict[int, Any] = {id(one): _fresh(one, "meta") for one in model.parameters()}
    memo |= {id(one): one.cpu() for one in model.buffers()}
    return copy.deepcopy(model, memo)


def _materialize(module: nn.Module, device: str, made: dict[nn.Parameter, nn.Parameter]) -> None:
    """Give a skeleton's module room for its weights; tied ones stay tied."""
    for part in module.modules():
        for name, weight in part.named_parameters(recurse=False):
            if weight.is_meta:
                part.register_parameter(name, made.setdefault(weight, _fresh(weight, device)))


def _fresh(weight: Tensor, device: str) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(weight, device=device), requires_grad=weight.requires_grad)


def _on_cpu(part: _Part) -> _Part:
    own, stats = part
    return own.cpu(), TokenStats(*(one.detach().cpu() for one in stats))


def _whole(tensor: Any) -> Tensor:
    return tensor.full_tensor()
