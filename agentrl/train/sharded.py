"""The learner over several processes, the ranks: each holds a shard of every weight and of the optimizer (FSDP2).

Rank 0 runs all the rest of the program too: it plays, decides, and computes losses of the log-probs that all ranks
give it. The others follow: they wait for calls of the methods below, do their part of them, and know no algorithm.

Legend: W ranks, P of which share a pack's tokens; D = W/P packs are computed at a time.
"""

import copy
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from types import MethodType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as trees
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from agentrl.algos.head import TokenStats
from agentrl.batch import Batch
from agentrl.config import Config
from agentrl.errors import ConfigError
from agentrl.models.ulysses import TokenShare
from agentrl.train.learner import Learner, LossOf
from agentrl.train.score import score_share

_Part = tuple[Tensor, TokenStats]
"""Which of a pack's sampled tokens a rank has, and their statistics, on the CPU."""
_TOGETHER = 2**26
"""Numbers of weights after which those that were made whole together are given away, before there are more."""
_numbers = itertools.count()


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
    name with an underscore.

    Args:
        model: whole on rank 0, where it becomes a sharded one; or sharded by an earlier learner.
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
        self._number = next(_numbers)
        self._frozen: list[Tensor] = []
        self._losses: tuple[LossOf, int] | None = None
        new = not isinstance(model, FSDPModule)
        weights: list[Tensor] = []
        if self._rank == 0:
            heads = model.config.get_text_config().num_attention_heads
            if heads % sequence_ranks:
                raise ConfigError(
                    f"the {sequence_ranks} ranks of run.ranks that share tokens must divide {heads} heads"
                )
            weights = [weight.detach() for weight in model.parameters()] if new else []
            how = {"sequence_ranks": sequence_ranks, "device": device, **options}
            _scatter([("make", self._number, (_skeleton(model) if new else None, how))] * self._world)
        if new:
            _shard(model, device, getattr(torch, options["dtype"]), sequence_ranks)
        super().__init__(model, **options)
        for place, weight in enumerate(weights):
            self._spread(place, {"weight": weight})

    def packs(self, batch: Batch, rows: Sequence[int]) -> list[Batch]:
        """Cut rows of a batch into packs that fit into a rank's memory, in any order; one a rank or more."""
        return batch.balanced(self._room(batch, rows), rows)

    def keep_reference(self, model: PreTrainedModel | None = None) -> None:
        """Freeze a copy of the weights, those of ``model`` or else the policy's as they are now, as the reference."""
        self._everywhere("_freeze")
        for place, weight in enumerate(model.parameters() if model else ()):
            self._spread(place, {"reference": weight.detach()})

    def score_reference(self, batch: Batch) -> Tensor:
        """Compute the log-prob of every sampled token under the frozen reference [S], on the CPU."""
        self._everywhere("_trade", "_frozen")
        logp = self.score(batch).logp
        self._everywhere("_trade", "_frozen")
        return logp

    def update(self, packs: Sequence[Batch], loss_of: LossOf, rate: float) -> float:
        """Take one step of the optimizer down the gradient of all packs' losses; see ``Learner``."""
        self._losses = loss_of, len(packs)
        return self._each("_descend", [(mine, rate) for mine in self._dealt(packs)])

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Give the named weights whole, some at a time."""
        names = [name for name, _ in self.model.named_parameters()]
        begin = 0
        for end in range(1, len(names) + 1):
            if end == len(names) or sum(one.numel() for one in self.trained[begin:end]) > _TOGETHER:
                yield from zip(names[begin:end], self._everywhere("_weights", begin, end), strict=True)
                begin = end

    def state_dict(self) -> dict[str, Tensor]:
        """Give the model's weights and buffers, whole and on the CPU."""
        return self._everywhere("_whole_model")

    def state(self) -> dict[str, Any]:
        """Give what ``Learner`` gives, whole and on the CPU, so that any number of ranks can load it."""
        return self._everywhere("_whole_state")

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state`` gave, on any number of ranks.

        Raises:
            ValueError: it belongs to another model.
        """
        moments, trained = state["state"], state.get("trained", [])
        shapes = [tensor.shape for one in moments.values() for tensor in one.values() if tensor.ndim]
        if moments and shapes != [weight.shape for weight in self.trained for _ in range(2)]:
            raise ValueError("it belongs to another model")
        if trained:
            self._everywhere("_begin_average")
        for place in range(len(self.trained)):
            held = {**moments.get(place, {}), **({"weight": trained[place]} if trained else {})}
            self._spread(place, held)

    def close(self) -> None:
        """Free the optimizer's state on all ranks."""
        self._everywhere("_forget")

    def _swap(self) -> None:
        self._everywhere("_trade", "_average")

    def _score(self, model: PreTrainedModel, batch: Batch) -> TokenStats:
        rows = batch.sampled_rows.tolist()
        packs = batch.split(self._room(batch, rows), rows)
        told = self._each("_forward", [(mine,) for mine in self._dealt(packs)])
        stats = [stats for turn in zip(*told, strict=True) for _, stats in self._joined(turn)][: len(packs)]
        return TokenStats(*(torch.cat(part) for part in zip(*stats, strict=True)))

    # From here on: what every rank does.

    def _forward(self, packs: Sequence[Batch]) -> list[list[_Part]] | None:
        """Score this rank's packs; gives rank 0 the results of every rank."""
        with torch.no_grad():
            return self._gathered([_on_cpu(self._own(pack)) for pack in packs])

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

    def _weights(self, begin: int, end: int) -> list[Tensor]:
        return [_whole(weight.detach()) for weight in self.trained[begin:end]]

    def _whole_model(self) -> dict[str, Tensor]:
        own = dict(self.model.named_parameters())  # tied weights once: whole, they would be two tensors
        held = self.model.state_dict().items()
        return self._kept({name: one for name, one in held if name in own or not isinstance(one, DTensor)})

    def _whole_state(self) -> dict[str, Any]:
        return self._kept(super().state())

    def _kept(self, tree: Any) -> Any:
        """Make tensors whole; rank 0 alone keeps them."""

        def kept(tensor: Tensor) -> Tensor | None:
            whole = _whole(tensor.detach())
            return whole.cpu() if self._rank == 0 else None

        return trees.tree_map_only(DTensor, kept, tree)

    def _freeze(self) -> None:
        self._frozen = [weight.detach().clone() for weight in self.trained]

    def _begin_average(self) -> None:
        self._average = [weight.detach().clone() for weight in self.trained]

    def _trade(self, name: str) -> None:
        self._exchange(getattr(self, name))

    def _forget(self) -> None:
        super().close()

    @torch.no_grad()
    def _take(self, place: int, shards: Mapping[str, Tensor]) -> None:
        """Take this rank's shards of tensors that belong to a weight: its own, its reference's, the optimizer's."""
        weight = self.trained[place]
        for name, shard in shards.items():
            if not shard.ndim:
                self.optimizer.state[weight][name] = shard
                continue
            if name in ("weight", "reference"):
                held = weight if name == "weight" else self._frozen[place]
            else:
                held = self.optimizer.state[weight][name] = torch.zeros_like(weight)
            _local(held).copy_(shard)

    def _own(self, pack: Batch) -> _Part:
        model: Any = self.model
        return model.score_pack(pack.to(model.device), self._temperature)

    # From here on: how rank 0 has them do it.

    def _everywhere(self, name: str, *arguments: Any) -> Any:
        """Call a method on all ranks."""
        return self._each(name, [arguments] * self._world)

    def _each(self, name: str, arguments: Sequence[tuple[Any, ...]]) -> Any:
        """Call a method on all ranks, on each with arguments of its own; give the result of this one."""
        _scatter([(name, self._number, one) for one in arguments])
        return getattr(self, name)(*arguments[0])

    def _spread(self, place: int, tensors: Mapping[str, Tensor]) -> None:
        """Cut tensors that belong to a weight into the ranks' shards, and have each rank take its own."""
        shards: list[dict[str, Tensor]] = [{} for _ in range(self._world)]
        for name, tensor in tensors.items():
            # The cut is that of FSDP2; where there are fewer rows than ranks, the last ranks have none.
            cuts = tensor.chunk(self._world) if tensor.ndim else [tensor] * self._world
            for rank, shard in enumerate(shards):
                # Copied, since what is sent of a view is all that it is a view of.
                shard[name] = cuts[rank].cpu().clone() if rank < len(cuts) else tensor[:0].cpu().clone()
        self._each("_take", [(place, shard) for shard in shards])

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
    learners: dict[int, ShardedLearner] = {}
    model: PreTrainedModel | None = None
    while (call := _scatter(None)) is not None:
        name, number, arguments = call
        if name == "make":
            skeleton, how = arguments
            model = skeleton or model
            learners[number] = ShardedLearner(cast(PreTrainedModel, model), **how)
        else:
            getattr(learners[number], name)(*arguments)


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
    # A group of its own: that of the calls may wait for hours, while rank 0 plays.
    everyone: Any = dist.new_group(backend=backend)
    mesh = DeviceMesh.from_group(everyone, device)
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


def _skeleton(model: PreTrainedModel) -> PreTrainedModel:
    """Copy a model without its weights, to be sent."""
    memo: dict[int, Any] = {id(one): nn.Parameter(torch.empty_like(one, device="meta")) for one in model.parameters()}
    memo |= {id(one): one.cpu() for one in model.buffers()}
    return copy.deepcopy(model, memo)


def _materialize(module: nn.Module, device: str, made: dict[nn.Parameter, nn.Parameter]) -> None:
    """Give a skeleton's module room for its weights; tied ones stay tied."""
    for part in module.modules():
        for name, weight in part.named_parameters(recurse=False):
            if weight.is_meta:
                fresh = made.setdefault(weight, nn.Parameter(torch.empty_like(weight, device=device)))
                part.register_parameter(name, fresh)


def _on_cpu(part: _Part) -> _Part:
    own, stats = part
    return own.cpu(), TokenStats(*(one.detach().cpu() for one in stats))


def _whole(tensor: Any) -> Tensor:
    return tensor.full_tensor()


def _local(tensor: Any) -> Tensor:
    return tensor.to_local()
