"""The learner over several processes, the ranks: each holds a shard of every weight and of the optimizer (FSDP2).

Rank 0 runs all the rest of the program too: it plays, decides, and computes losses of the log-probs of all ranks. The
others follow: they wait for calls of the methods below, do their part of each, and know no algorithm.

Legend: W ranks, each with a pack at a time.
"""

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, TypeVarTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from agentrl.algos.head import TokenStats
from agentrl.batch import Batch
from agentrl.config import Config, OptimSettings
from agentrl.errors import RunFolderError, UsageError
from agentrl.models.load import empty_copy
from agentrl.models.lora import is_adapted, merged, save_model, without_adapters
from agentrl.models.slices import Slices, is_converted, path_of
from agentrl.runs.shards import plan_files, write_file
from agentrl.train.fsdp import full, shard
from agentrl.train.learner import Gradients, Learner, LossOf, descend, loss_gradients

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")
_TOGETHER = 2**24
"""Numbers of weights after which the weights that were gathered so far are handed over, before more are gathered."""


class _Call(NamedTuple):
    """Rank 0's order to call a method of the learner; pickle sends the method as its name."""

    method: Callable[..., Any]
    """A method of ``ShardedLearner``, not bound to an object."""
    arguments: tuple[Any, ...]
    """Its arguments for this rank, the learner not among them."""


def make_learner(config: Config, model: PreTrainedModel) -> Learner:
    """Make the learner of ``model``, on all ranks where there are several, to train the rollouts' policy."""
    optim, temperature = config.optim, config.rollout.temperature
    if not dist.is_initialized():
        return Learner(model, optim, temperature=temperature, dtype=config.model.dtype)
    device = torch.device(config.model.device).type
    return ShardedLearner(model, optim, device=device, temperature=temperature, dtype=config.model.dtype)


class ShardedLearner(Learner):
    """A learner whose weights, gradients and optimizer lie in shards on all ranks.

    Rank 0 calls the public methods, as it would those of ``Learner``. They have all ranks call a private method, with
    ``_on_all`` or ``_on_each``. A process has one such learner at a time: ``close`` comes before the next.

    Args:
        model: on rank 0 a skeleton whose weights all ranks read, or a complete one, which loses its weights; on others
            a copy without weights.
        optim: as of ``Learner``.
        device: type of device that the ranks compute on.
        how: temperature and dtype, as of ``Learner``.

    Raises:
        ConfigError: the model can't compute activations again.
    """

    def __init__(self, model: PreTrainedModel, optim: OptimSettings, *, device: str, **how: Any) -> None:
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._copies: dict[str, list[Tensor]] = {}
        """Shards of frozen copies of the trained weights, by the copy's name."""
        # Two threads of rank 0 may call: one that learns, and one that scores what was played meanwhile.
        self._calling = threading.RLock()
        self._losses: tuple[LossOf, Sequence[Batch]] | None = None
        self._full, skeleton = model, model
        if self._rank == 0:
            order = partial(ShardedLearner, empty_copy(model, "meta"), optim, device=device, **how)
            (skeleton, _) = _scatter([order] * self._world).args
        shard(skeleton, device, getattr(torch, how["dtype"]))
        super().__init__(skeleton, optim, **how)
        self._all = list(skeleton.parameters())
        if self._rank == 0:
            self._send("", model)
            # From here on the shards are the weights. What stays here has no memory, and NaN shows where it is read.
            for weight in model.parameters():
                weight.data = weight.new_full((1,) * weight.ndim, torch.nan).expand(weight.shape)

    def packs(self, batch: Batch, episodes: Sequence[int]) -> list[Batch]:
        """Cut episodes of a batch into packs, in any order; one a rank or more. See ``Learner``."""
        chosen, of_row = set(episodes), batch.episode.tolist()
        rows = [row for row in batch.sampled_rows.tolist() if of_row[row] in chosen]
        return batch.balanced(self._room(batch, rows), episodes)

    def keep_reference(self, model: PreTrainedModel | None = None) -> None:
        """Freeze a copy of the weights, those of ``model`` or else the policy's as they are now, as the reference."""
        self._on_all(ShardedLearner._copy, "reference")
        if model:
            self._send("reference", model)

    def score_reference(self, batch: Batch) -> Tensor:
        """Compute the log-prob of every sampled token under the frozen reference [S], on the CPU."""
        return self._scored("reference", batch).logp

    def frozen(self) -> Callable[[Batch], TokenStats]:
        """Return ``score`` under a copy of the weights, which replaces the copy of an earlier call."""
        self._on_all(ShardedLearner._copy, "frozen")
        return partial(self._scored, "frozen")

    def update(self, packs: Sequence[Batch], loss_of: LossOf, rate: float) -> float:
        """Take one step of the optimizer down the gradient of all packs' losses; see ``Learner``."""
        self._losses = loss_of, packs
        dealt = self._dealt(packs)
        counts = [max(len(self._parts(pack)) for pack in turn) for turn in zip(*dealt, strict=True)]
        return self._on_each(ShardedLearner._descend, [(own, counts, rate) for own in dealt])

    def renew(self, optim: OptimSettings, temperature: float) -> None:
        """Do what ``Learner`` does, on all ranks."""
        self._on_all(Learner.renew, optim, temperature)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the named weights in full; ranks gather some at a time."""
        self._on_all(ShardedLearner._begin_weights)
        while gathered := self._on_all(ShardedLearner._next_weights):
            # Each is free before the next ones are gathered.
            while gathered:
                yield gathered.pop(0)

    def write(self, folder: Path) -> None:
        """Do what ``Learner`` does; each rank writes some of the files, unless transformers converts the weights."""
        if is_adapted(self._full) or is_converted(self._full):
            save_model(self._full, folder, self._on_all(ShardedLearner._full_state))
            return
        # Without weights it writes all other files.
        self._full.save_pretrained(folder, state_dict={})
        self._together(ShardedLearner._check_sees, folder := folder.resolve())
        files = plan_files(folder, self._held(), self._world)
        for start in range(0, len(files), self._world):
            self._together(ShardedLearner._write_files, files[start : start + self._world])

    def save(self, folder: Path) -> None:
        """Do what ``Learner`` does, each rank with its own shards."""
        self._together(ShardedLearner._check_sees, folder := folder.resolve())
        self._together(Learner.save, folder)

    def load(self, folder: Path) -> None:
        """Do what ``Learner`` does, each rank with its own shards, whatever number of ranks has written them."""
        self._together(ShardedLearner._check_sees, folder := folder.resolve())
        self._together(Learner.load, folder)

    def close(self) -> None:
        """Free the weights on all ranks: the model that they were trained from has none any more."""
        self._on_all(ShardedLearner._free)

    def _score(self, model: PreTrainedModel, batch: Batch) -> TokenStats:
        return self._scored("", batch)

    def _scored(self, copy: str, batch: Batch) -> TokenStats:
        rows = batch.sampled_rows.tolist()
        packs = batch.split(self._room(batch, rows), rows)
        results = self._on_each(ShardedLearner._forward, [(copy, own) for own in self._dealt(packs)])
        assert results is not None, "rank 0 gets those of all ranks"
        stats = [stats for turn in zip(*results, strict=True) for stats in turn][: len(packs)]
        return TokenStats(*(torch.cat(part) for part in zip(*stats, strict=True)))

    # The methods from here on run on every rank.

    def _forward(self, copy: str, packs: Sequence[Batch]) -> list[list[TokenStats]] | None:
        """Score this rank's packs under a copy of the weights, or without one; returns all ranks' results on rank 0."""
        others = self._copies.get(copy, [])
        # Where adapters are trained, the frozen model without them is the reference, of which there is no copy.
        with torch.no_grad(), without_adapters(self.model) if copy and not others else nullcontext():
            self._exchange(others)
            try:
                return self._gathered([self._stats(self.model, pack) for pack in packs])
            finally:
                self._exchange(others)

    def _descend(self, packs: Sequence[Batch], counts: Sequence[int], rate: float) -> float:
        """Accumulate the gradient over this rank's packs, as many as any other rank has, and take a step.

        Args:
            packs: one a turn.
            counts: most parts that a rank's pack of the turn has. All ranks compute so many, since they gather weights.
            rate: the learning rate.
        """
        for turn, (pack, count) in enumerate(zip(packs, counts, strict=True)):
            parts = self._parts(pack)
            parts += [parts[-1]] * (count - len(parts))
            # Activations of a single part are kept. Several would not fit into memory, and are computed again.
            with nullcontext() if count == 1 else torch.no_grad():
                scored = [self._stats(self.model, part) for part in parts]
            # The loss is computed on rank 0, from all ranks' log-probs; only its gradient by them comes back.
            gathered = self._gathered([TokenStats(*(tensor.detach() for tensor in stats)) for stats in scored])
            gradients = _scatter(None if gathered is None else self._upstream(turn, gathered))
            for part, stats, by in zip(parts, scored, gradients, strict=True):
                descend(stats if count == 1 else self._stats(self.model, part), by)
        return self._step(rate)

    def _upstream(self, turn: int, scored: Sequence[Sequence[TokenStats]]) -> list[list[Gradients]]:
        """Compute the losses of a turn's packs, and for each rank and part their gradients by its tokens."""
        assert self._losses is not None
        loss_of, packs = self._losses
        answers: list[list[Gradients]] = []
        for number, parts in enumerate(scored, turn * self._world):
            # All ranks must take part in a turn: a rank without a pack computes another's, and one with fewer parts its
            # last one again, with a gradient of 0.
            real = len(self._parts(packs[number])) if number < len(packs) else 0
            gradients = loss_gradients(loss_of, number, parts[:real]) if real else []
            # FSDP2 takes the mean of the ranks' gradients, and the loss needs their sum: hence the factor W.
            answer: list[Gradients] = [
                (self._world * by_logp, None if by_entropy is None else self._world * by_entropy)
                for by_logp, by_entropy in gradients
            ]
            answers.append(answer + [(torch.zeros_like(part.logp), None) for part in parts[real:]])
        return answers

    def _begin_weights(self) -> None:
        self._merged = merged(self.model)

    def _next_weights(self) -> list[tuple[str, Tensor]]:
        gathered: list[tuple[str, Tensor]] = []
        for name, weight in self._merged:
            gathered.append((name, full(weight.detach())))
            if sum(tensor.numel() for _, tensor in gathered) > _TOGETHER:
                break
        return gathered

    def _full_state(self) -> dict[str, Tensor]:
        """Gather the trained weights and the buffers on rank 0's CPU."""
        state: dict[str, Tensor] = {}
        for name, tensor in self._held().items():
            if name in self._names or not isinstance(tensor, DTensor):
                gathered = full(tensor) if isinstance(tensor, DTensor) else tensor
                # Rank 0 alone needs them.
                state |= {name: gathered.cpu()} if self._rank == 0 else {}
        return state

    def _held(self) -> dict[str, Tensor]:
        """Return the model's weights and buffers by the names of its files; tied weights have one."""
        tensors: dict[int, tuple[str, Tensor]] = {}
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            tensors.setdefault(id(tensor), (name, tensor))
        return dict(tensors.values())

    def _write_files(self, files: Sequence[tuple[Path, Sequence[str]]]) -> None:
        """Gather the tensors of some files, at most one file a rank, and write this rank's file."""
        held, own = self._held(), dict[str, Tensor]()
        for rank, (_, names) in enumerate(files):
            for name in names:
                tensor = full(held[name].detach())
                own |= {name: tensor.cpu()} if rank == self._rank else {}
        if own:
            write_file(files[self._rank][0], own)

    def _check_sees(self, folder: Path) -> None:
        if not folder.is_dir():
            raise RunFolderError(f"rank {self._rank} can't see {folder}: keep runs on a disk that all ranks share")

    def _read(self, copy: str, path: str) -> None:
        """Set this rank's shards of the weights, or of a copy of the trained ones, to those in a model's files."""
        try:
            slices = Slices(path)
        except OSError as error:
            raise UsageError(
                f"rank {self._rank} can't read {path}: keep models on a disk that all ranks share"
            ) from error
        if copy:
            slices.fill(dict(zip(self._names, self._copies[copy], strict=True)))
        else:
            slices.fill_model(self.model)

    def _agreeing(self, work: Callable[["ShardedLearner", *_Ts], None], *arguments: *_Ts) -> None:
        """Do this rank's part of a work; rank 0 raises the error of any rank."""
        fault: Exception | None = None
        try:
            work(self, *arguments)
        except Exception as error:
            fault = error
        for error in filter(None, self._gathered(fault) or ()):
            raise error

    def _copy(self, name: str) -> None:
        self._copies[name] = [weight.detach().clone() for weight in self.trained]

    @torch.no_grad()
    def _exchange(self, others: Sequence[Tensor]) -> None:
        """Exchange the values of the trained weights with ``others``, where there are any, one tensor at a time."""
        for weight, other in zip(self.trained, others, strict=False):
            before = weight.clone()
            weight.copy_(other)
            other.copy_(before)

    def _free(self) -> None:
        super().close()
        # FSDP2's hooks refer to the modules that they hang on.
        del self.model, self.optimizer, self.trained, self._all
        self._copies = {}
        gc.collect()

    @torch.no_grad()
    def _take(self, copy: str, index: int, values: Tensor) -> None:
        """Set this rank's shard of a weight, or of the weight in a copy."""
        weight: Any = (self._copies[copy] if copy else self._all)[index]
        weight.to_local().copy_(values)

    def _stats(self, model: PreTrainedModel, pack: Batch) -> TokenStats:
        sharded: Any = model
        stats: TokenStats = sharded.score_pack(pack.to(model.device), self._temperature)
        return TokenStats(*(part.cpu() for part in stats))

    # The methods from here on let rank 0 call the others.

    def _on_all(self, method: Callable[["ShardedLearner", *_Ts], _T], *arguments: *_Ts) -> _T:
        """Call a method on all ranks, and return this rank's result."""
        return self._on_each(method, [arguments] * self._world)

    def _on_each(self, method: Callable[["ShardedLearner", *_Ts], _T], arguments: Sequence[tuple[*_Ts]]) -> _T:
        """Call a method on all ranks, on each with its own arguments, and return this rank's result."""
        with self._calling:
            _scatter([_Call(method, own) for own in arguments])
            return method(self, *arguments[0])

    def _together(self, work: Callable[["ShardedLearner", *_Ts], None], *arguments: *_Ts) -> None:
        """Do a work on all ranks; raise the error of any of them."""
        self._on_all(ShardedLearner._agreeing, work, *arguments)

    def _send(self, copy: str, model: PreTrainedModel) -> None:
        """Set the shards of the weights, or of a copy, to a model's: its files', or those that it holds here."""
        if path := path_of(model):
            self._together(ShardedLearner._read, copy, path)
        for index, weight in enumerate(model.parameters()):
            if not weight.is_meta:
                self._spread(copy, index, weight.detach())

    def _spread(self, copy: str, index: int, tensor: Tensor) -> None:
        """Cut a weight into the ranks' shards, and have each rank take its own."""
        # The cut is that of FSDP2; where there are fewer rows than ranks, the last ranks have none.
        cuts = [*tensor.chunk(self._world), *[tensor[:0]] * self._world]
        # Cloned, since pickle would send all that a view is a view of.
        self._on_each(ShardedLearner._take, [(copy, index, cut.cpu().clone()) for cut in cuts[: self._world]])

    def _room(self, batch: Batch, rows: Sequence[int]) -> int:
        """Compute the tokens of a pack such that there are packs for all ranks."""
        lengths = batch.row_starts.diff()[list(rows)]
        fair = -(-int(lengths.sum()) // self._world)
        return min(self._optim.max_tokens, fair + int(lengths.max()))

    def _dealt(self, packs: Sequence[Batch]) -> list[list[Batch]]:
        """Deal packs to ranks in turns; in the last turn, ranks that are left without a pack get the smallest."""
        smallest = min(packs, key=lambda pack: len(pack.tokens))
        filled = [*packs, *[smallest] * (-len(packs) % self._world)]
        return [filled[rank :: self._world] for rank in range(self._world)]

    def _gathered(self, own: _T) -> list[_T] | None:
        """Gather the ranks' objects on rank 0; None on the others."""
        gathered: Any = [None] * self._world if self._rank == 0 else None
        dist.gather_object(own, gathered)
        return gathered


def serve() -> None:
    """Follow rank 0's orders until it dismisses this rank."""
    learner: ShardedLearner | None = None
    while (order := _scatter(None)) is not None:
        if isinstance(order, _Call):
            order.method(learner, *order.arguments)
        else:
            learner = order()


def dismiss() -> None:
    """End the other ranks' service."""
    _scatter([None] * dist.get_world_size())


def _scatter(objects: Sequence[Any] | None) -> Any:
    """Send each rank an object from rank 0, and return this rank's."""
    own: list[Any] = [None]
    dist.scatter_object_list(own, cast(Any, objects))
    return own[0]
