"""The sharded learner: what two processes compute is what one does, and what they save any number of them can load.

The slow reference of all of it is ``Learner`` itself, whose own tests compare it with formulas.
"""

import copy
import gc
import math
import os
import random
import re
import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from agentrl.algos.head import TokenStats
from agentrl.batch import Batch, as_batch
from agentrl.config import Config, parse_config
from agentrl.errors import RunFolderError
from agentrl.models.attention import NAME
from agentrl.models.load import cast_copy, load_model, load_skeleton
from agentrl.models.lora import add_adapters, fingerprint, is_adapted
from agentrl.models.tiny import tiny_config
from agentrl.train import sharded
from agentrl.train.learner import Learner
from agentrl.train.sharded import dismiss, make_learner
from agentrl.types import Group, Segment

from ..forked import Server
from .test_forests import forest
from .test_score import OPTIM, batch_of

pytestmark = pytest.mark.usefixtures("one_thread")
SHAPES = [[3, 4], [7, 2, 3, 5, 1], [2, 30, 8, 1], [5, 9], [4, 3]]
PACKS = batch_of(SHAPES).split(45)
FORESTS = [forest(random.Random(seed), Segment("prompt", (5, 7)), rows) for seed, rows in enumerate((6, 2, 5, 1, 2))]


@contextmanager
def ranks(server: Server, world: int) -> Generator[None]:
    """This process is rank 0 of so many. The others are forked by the server, whose autograd has not run yet."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        store, patience = f"file://{folder}/store", timedelta(minutes=10)
        for name, value in {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}.items():
            patch.setenv(name, value)
        env = {**os.environ, "AGENTRL_RANKS": store, "WORLD_SIZE": str(world)}
        code = "from agentrl.train.ranks import follow; follow()"
        each = ({**env, "RANK": str(rank)} for rank in range(1, world))
        followers = [server.begin("-c", code, cwd=Path(folder), env=variables) for variables in each]
        # A world that could not be joined, in another test, has used up a number that the followers still have.
        dist.distributed_c10d._world.group_count = 0  # pyright: ignore[reportPrivateUsage]
        dist.init_process_group("gloo", init_method=store, rank=0, world_size=world, timeout=patience)
        try:
            yield
        finally:
            dismiss()
            for follower in followers:
                follower.done()
            dist.destroy_process_group()
            gc.collect()


def on(world: int, work: Callable[[], Any]) -> Any:
    """What ``work`` gives on the ranks that there are, or for a world of 1 as if this process were alone."""
    with pytest.MonkeyPatch.context() as patch:
        if world == 1:
            patch.setattr(dist, "is_initialized", lambda: False)
        return work()


def tiny(tokenizer: Any, **shape: Any) -> Any:
    """A model of the tiny architecture, not trained, with other settings of its config."""
    config = tiny_config(tokenizer, hidden=32, layers=2, heads=4)
    config.update(shape)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=NAME)


def config_of(*, dtype: str = "float32", **options: Any) -> Config:
    """The settings of a learner."""
    config = parse_config({"run": {"ranks": 2}, "model": {"dtype": dtype}, "rollout": {"temperature": 0.7}})
    return config.model_copy(update={"optim": OPTIM.model_copy(update={"weight_decay": 0.1, **options})})


def make(model: Any, *, lora: int = 0, saved: Path | None = None, **options: Any) -> Learner:
    """A learner of a copy, of adapters if these have a rank; it goes on from what was saved, if anything was."""
    own = copy.deepcopy(model)
    if lora:
        add_adapters(own, rank=lora, alpha=8.0, targets=(), base="base", seed=3)
        for weight in own.parameters():
            if weight.requires_grad:  # fresh ones do nothing
                weight.data = torch.linspace(-0.1, 0.1, weight.numel()).view_as(weight)
    if saved:
        own.load_state_dict(weights_in(saved / "model"), strict=False)
    learner = make_learner(config_of(**options), own)
    if saved:
        learner.load(saved / "optimizer")
    return learner


def update(learner: Learner, packs: Sequence[Batch] = PACKS) -> float:
    def loss_of(number: int, stats: TokenStats) -> Tensor:
        # Each token's slope depends on all others before it in time, as in the losses of algos.
        so_far = packs[number].in_time(stats.logp).cumsum(0) / 10
        return (so_far.cos() * torch.linspace(-1, 2, len(so_far))).sum() - 0.1 * (number + 1) * stats.entropy.sum()

    return learner.update(list(packs), loss_of, 1e-3)


def save(learner: Learner, folder: Path) -> dict[str, Tensor]:
    """Save what a checkpoint holds; give the trained weights and all that safetensors finds, ranks' rows end to end."""
    for name in ("model", "optimizer"):
        (folder / name).mkdir(parents=True)
    learner.write(folder / "model")
    learner.save(folder / "optimizer")
    weights = weights_in(folder / "model")
    files = [load_file(file) for file in sorted((folder / "optimizer").iterdir())]
    rows = {name: [file[name] for file in files] for name in files[0]}
    held = {name: torch.cat(parts) if parts[0].ndim else parts[0] for name, parts in rows.items()}
    return held | {name: weight for name, weight in weights.items() if f"{name}.step" in held}


def weights_in(folder: Path) -> dict[str, Tensor]:
    """The weights in a model's files, or its adapters', by the model's names."""
    files = [load_file(file) for file in folder.glob("*.safetensors")]
    named = {name: weight for file in files for name, weight in file.items()}
    names = {name: name.removeprefix("base_model.model.") for name in named}
    return {re.sub(r"(?<=lora_[AB])(?=\.)", ".default", names[name]): weight for name, weight in sorted(named.items())}


def held_by(learner: Learner) -> dict[str, Tensor]:
    with tempfile.TemporaryDirectory() as folder:
        return save(learner, Path(folder))


def gradients(learner: Learner) -> list[Tensor]:
    """Those of the first update, which are the optimizer's first moments but for a factor."""
    return [moment for name, moment in sorted(held_by(learner).items()) if name.endswith(".exp_avg")]


def told_by(learner: Learner, packs: Sequence[Batch], batch: Batch) -> dict[str, Any]:
    """What a trainer asks of a learner."""
    if not is_adapted(learner.model):
        learner.keep_reference()
    results: dict[str, Any] = {"before": list(learner.score(batch)), "norm": update(learner, packs)}
    results["gradients"] = gradients(learner)
    frozen = learner.frozen()
    update(learner, packs)
    results |= {"reference": learner.score_reference(batch), "after": list(learner.score(batch))}
    results["frozen"] = frozen(batch)
    results["weights"] = {name: weight.detach().clone() for name, weight in learner.weights()}
    return results


def apart(left: Any, right: Any) -> float:
    """Largest distance of two trees of tensors, in parts of the largest number."""
    trees = ([leaf for leaf in tree_leaves(tree) if leaf is not None] for tree in (left, right))
    got, wanted = ([torch.as_tensor(leaf).detach().double() for leaf in tree] for tree in trees)
    off = max(float((a - b).abs().max()) for a, b in zip(got, wanted, strict=True))
    return off / max(float(leaf.abs().max()) for leaf in wanted)


def begin(model: Any, lora: int, folder: Path) -> Any:
    """What a learner holds when it saves after its first update, and what after the second."""
    learner = make(model, lora=lora)
    update(learner)
    saved = save(learner, folder)
    update(learner)
    return saved, held_by(learner)


@pytest.fixture(scope="module")
def three(server: Server, model: Any, one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """What three ranks save, and what they hold."""
    folder = tmp_path_factory.mktemp("three") / "saved"
    with ranks(server, 3):
        return folder, begin(model, 3, folder)


@pytest.fixture(scope="module")
def two(server: Server, three: Any) -> Generator[None]:
    """This process is rank 0 of two, as long as this file's tests run: each new process would find its way anew."""
    with ranks(server, 2):
        yield


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "options", "packs"),
    [
        ({}, {}, 3),
        ({}, {}, 1),
        ({"tie_word_embeddings": False}, {"gradient_checkpointing": True}, 3),
        ({}, {"lora": 3}, 3),
        ({"tie_word_embeddings": False}, {"lora": 1, "gradient_checkpointing": True}, 1),
    ],
)
def test_two_ranks_learn_what_one_does(tokenizer: Any, two: None, shape: Any, options: Any, packs: int) -> None:
    model = tiny(tokenizer, **shape)
    cut = PACKS if packs > 1 else batch_of(SHAPES).split(99)
    assert len(cut) == packs
    agree(model, cut, batch_of(SHAPES), options)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True}, {"lora": 3}])
def test_two_ranks_learn_from_episodes_of_several_rows_what_one_does(model: Any, two: None, options: Any) -> None:
    batch = as_batch([Group((episode,)) for episode in FORESTS])
    long, longer, *short = batch.balanced(OPTIM.max_tokens, range(len(FORESTS)))
    packs = [long, short[0], longer, *short[1:]]
    # A rank computes parts of an episode while the other has a single one, or another rank's pack once more.
    assert [len(pack.split(OPTIM.max_tokens)) for pack in packs] == [2, 1, 2, 1, 1]
    agree(model, packs, batch, options)
    # In one pack each episode is whole.
    whole, cut = (gradients_of(make(model, **options, max_tokens=limit), packs) for limit in (1000, 45))
    assert apart(whole, cut) < 1e-5


def gradients_of(learner: Learner, packs: Sequence[Batch]) -> list[Tensor]:
    update(learner, packs)
    return gradients(learner)


def agree(model: Any, packs: Sequence[Batch], batch: Batch, options: Any, whole: Any = None) -> None:
    """Two ranks learn from ``model`` what one does, which has ``whole`` where that is a skeleton."""
    both = told_by(make(model, **options), packs, batch)
    alone = on(1, lambda: told_by(make(whole or model, **options), packs, batch))
    assert both.keys() == alone.keys()
    # Adam takes the sign of a gradient that is nearly 0, and so makes more of rounding.
    for name, wanted in alone.items():
        most = 1e-5 if name in ("before", "norm", "gradients", "reference") else 1e-4
        assert apart(both[name], wanted) < most, name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "lora", "dtype"),
    [
        ({}, 0, torch.float32),
        ({"tie_word_embeddings": False}, 0, torch.bfloat16),
        ({}, 2, torch.float32),
    ],
)
def test_ranks_read_a_share_each_of_a_model(
    tokenizer: Any, two: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: Any, lora: int, dtype: Any
) -> None:
    tiny(tokenizer, **shape).to(dtype).save_pretrained(tmp_path, max_shard_size="20KB")
    skeleton, whole = load_skeleton(tmp_path)[0], load_model(tmp_path)
    assert skeleton and len(list(tmp_path.glob("*.safetensors"))) > 2
    assert all(weight.is_meta for weight in skeleton.parameters())
    assert {name: str(buffer) for name, buffer in skeleton.named_buffers()} == {
        name: str(buffer) for name, buffer in whole.named_buffers()
    }
    assert [type(module) for module in skeleton.modules()] == [type(module) for module in whole.modules()]
    # An engine's copy, and what the ranks hold.
    sampled = cast_copy(skeleton, torch.float32)
    learner = make(skeleton, lora=lora)
    if lora:
        assert learner.model.base_fingerprint == fingerprint(whole)  # pyright: ignore[reportArgumentType]
    for weights in (sampled.named_parameters(), () if lora else learner.weights()):
        assert all(torch.equal(weight, whole.get_parameter(name)) for name, weight in weights)
    agree(skeleton, PACKS, batch_of(SHAPES), {"lora": lora}, whole)
    # What they write is read as what one process writes, its other files to the byte.
    learner = make(skeleton, lora=lora)
    folders = tmp_path / "ranks", tmp_path / "one"
    for folder, write in zip(folders, (learner.write, lambda folder: whole.save_pretrained(folder)), strict=True):
        folder.mkdir()
        write(folder)
    if not lora:
        learner.keep_reference(load_skeleton(tmp_path / "ranks")[0])
        update(learner)
        assert apart(learner.score_reference(batch_of(SHAPES)), make(skeleton).score(batch_of(SHAPES)).logp) == 0
        ours, theirs = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in folders)
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
        names = {file.name for file in folders[1].iterdir()} - {"model.safetensors"}
        assert names and all((folders[0] / name).read_bytes() == (folders[1] / name).read_bytes() for name in names)
        assert len(list(folders[0].glob("model-0000?-of-0000?.safetensors"))) > 1
        # Rank 0 writes what transformers converts as it writes.
        monkeypatch.setattr(sharded, "is_converted", bool)
        learner = make(skeleton)
        learner.write(tmp_path)
        assert (tmp_path / "model.safetensors").read_bytes() == (folders[1] / "model.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("lora", [0, 2])
def test_weights_and_moments_stay_float32(model: Any, two: None, lora: int) -> None:
    def work() -> Any:
        learner = make(model, dtype="bfloat16", lora=lora)
        before = copy.deepcopy(dict(learner.weights()))
        update(learner)
        return before, gradients(learner), dict(learner.weights()), held_by(learner)

    both, alone = work(), on(1, work)
    assert {leaf.dtype for leaf in tree_leaves(both) if isinstance(leaf, Tensor)} == {torch.float32}
    assert apart(both[0], alone[0]) <= (1e-6 if lora else 0) and apart(both[1], alone[1]) < 1e-2
    # Changes that bfloat16 could not hold, and no weight that moves is one of its numbers.
    moved = [weight for name, weight in both[2].items() if not torch.equal(weight, model.get_parameter(name))]
    assert moved and all(float((weight == weight.bfloat16()).float().mean()) < 0.1 for weight in moved)


@pytest.mark.slow
# Three rows on two ranks are two and one.
@pytest.mark.parametrize(("before", "after", "lora"), [(1, 1, 2), (2, 2, 0), (2, 1, 2), (1, 2, 0), (3, 2, 3)])
def test_what_some_ranks_save_others_load(
    model: Any, two: None, three: tuple[Path, Any], tmp_path: Path, before: int, after: int, lora: int
) -> None:
    def go_on(saved: Path, again: Path) -> Any:
        learner = make(model, lora=lora, saved=saved)
        held = save(learner, again)
        update(learner)
        return held, held_by(learner)

    folder = three[0] if before == 3 else tmp_path / "saved"
    saved, wanted = three[1] if before == 3 else on(before, lambda: begin(model, lora, folder))
    files = {file.name: file.read_bytes() for file in (folder / "optimizer").iterdir()}
    assert len(files) == before
    held, later = on(after, lambda: go_on(folder, tmp_path / "again"))
    assert apart(held, saved) == 0 < apart(later, saved)
    assert apart(later, wanted) <= (0 if before == after else 1e-5)
    # To the last bit the step that these ranks take from what they have saved themselves.
    assert apart(on(after, lambda: go_on(tmp_path / "again", tmp_path / "third")), (held, later)) == 0
    if before == after:
        assert {file.name: file.read_bytes() for file in (tmp_path / "again" / "optimizer").iterdir()} == files


def test_what_one_rank_cannot_do_is_told_on_rank_0_and_all_go_on(model: Any, two: None, tmp_path: Path) -> None:
    (tmp_path / "taken" / "00002-of-00002.safetensors").mkdir(parents=True)
    (tmp_path / "saved").mkdir()
    learner = make(model)
    update(learner)
    with pytest.raises((OSError, SafetensorError), match="directory"):
        learner.save(tmp_path / "taken")
    with pytest.raises(RunFolderError, match=r"rank 0 can't see .*nowhere: keep runs on a disk that all ranks share"):
        learner.save(tmp_path / "nowhere")
    learner.save(tmp_path / "saved")
    (tmp_path / "saved" / "00002-of-00002.safetensors").write_bytes(b"x")
    with pytest.raises(SafetensorError):
        learner.load(tmp_path / "saved")
    assert update(learner) > 0


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_a_gradient_that_is_not_finite_on_one_rank_moves_nothing_on_any(model: Any, two: None, world: int) -> None:
    def work() -> list[Any]:
        learner = make(model)
        update(learner)
        results: list[Any] = [held_by(learner)]
        take = learner._step  # pyright: ignore

        def poisoned(rate: float) -> float:
            gradient: Any = learner.trained[3].grad
            (gradient.to_local() if world > 1 else gradient).flatten()[0] = float("inf")
            return take(rate)

        learner._step = poisoned  # pyright: ignore
        results += [update(learner), held_by(learner)]
        learner._step = take  # pyright: ignore
        update(learner)
        return [*results, held_by(learner)]

    before, norm, after, later = on(world, work)
    assert not math.isfinite(norm) and apart(after, before) == 0 < apart(later, after)
