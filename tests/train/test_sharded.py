"""The sharded learner: what two processes compute is what one does, and what they save any number of them can load.

The slow reference of all of it is ``Learner`` itself, whose own tests compare it with formulas.
"""

import copy
import math
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from agentrl.algos.head import TokenStats
from agentrl.batch import Batch
from agentrl.config import parse_config
from agentrl.errors import ConfigError, InfrastructureError
from agentrl.models.attention import NAME
from agentrl.models.tiny import tiny_config
from agentrl.train.learner import Learner
from agentrl.train.ranks import check_ranks, is_follower, ranks
from agentrl.train.sharded import dismiss, new_learner, serve

from .conftest import ARITHMETIC, TOY, Command, Server, is_alive, rows_of, setting, weights_of
from .test_score import batch_of

pytestmark = pytest.mark.usefixtures("one_thread")
SHAPES = [[3, 4], [7, 2, 3, 5, 1], [2, 30, 8, 1], [5, 9], [4, 3]]


def join(folder: str, rank: int, world: int) -> None:
    # The first to ask for torch's threads after a fork makes their pool anew; were it autograd's threads, two at once
    # would race for it ("Invalid thread pool!").
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)


def on_ranks(world: int, work: Callable[[], Any]) -> Any:
    """What ``work`` gives on rank 0 of so many processes; they are forked, so that nothing is imported again."""
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:

        def lead() -> None:
            join(folder, 0, world)
            torch.save(work(), Path(folder, "result"))
            dismiss()

        def follow(rank: int) -> None:
            join(folder, rank, world)
            serve()

        ranks = [fork.Process(target=lead), *(fork.Process(target=follow, args=(rank,)) for rank in range(1, world))]
        for one in ranks:
            one.start()
        for one in ranks:
            one.join()
        assert not any(one.exitcode for one in ranks)
        return torch.load(Path(folder, "result"), weights_only=False)


def tiny(tokenizer: Any, **shape: Any) -> Any:
    """A model of the tiny architecture, not trained, with other settings of its config."""
    config = tiny_config(tokenizer, hidden=32, layers=2, heads=4)
    config.update(shape)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=NAME)


def make(model: Any, *, sequence_ranks: int = 1, **options: Any) -> Learner:
    how = {"betas": (0.9, 0.95), "weight_decay": 0.1, "max_grad_norm": 1e9, "max_tokens": 45, "temperature": 0.7}
    config = parse_config({"run": {"ranks": [2, sequence_ranks]}})
    return new_learner(config, copy.deepcopy(model), **{"dtype": "float32", **how, **options})


def update(learner: Learner, packs: list[Batch]) -> float:
    def loss_of(place: int, stats: TokenStats) -> Tensor:
        return -(stats.logp * torch.linspace(-1, 2, len(stats.logp))).sum() - 0.1 * (place + 1) * stats.entropy.sum()

    return learner.update(packs, loss_of, 1e-3)


def gradients(learner: Learner) -> Tensor:
    """Those of the first update, which are the optimizer's first moments but for a factor."""
    return torch.cat([one["exp_avg"].flatten() for one in learner.state()["state"].values()])


def told_by(learner: Learner, packs: list[Batch]) -> dict[str, Any]:
    """What a trainer asks of a learner."""
    batch = batch_of(SHAPES)
    learner.keep_reference()
    told: dict[str, Any] = {"before": list(learner.score(batch)), "norm": update(learner, packs)}
    told["gradients"] = gradients(learner)
    update(learner, packs)
    told |= {"reference": learner.score_reference(batch), "after": list(learner.score(batch))}
    with learner.averaged():
        told["average"] = {name: one.detach().clone() for name, one in learner.weights()}
    return told


def apart(one: Any, other: Any) -> float:
    """Largest distance of two trees of tensors, in parts of the largest number."""
    leaves = [
        [torch.as_tensor(leaf).detach().double() for leaf in tree_leaves(tree) if leaf is not None]
        for tree in (one, other)
    ]
    pairs = list(zip(*leaves, strict=True))
    return max(float((got - wanted).abs().max()) for got, wanted in pairs) / max(
        float(one.abs().max()) for one in leaves[1]
    )


@pytest.mark.parametrize(
    ("shape", "options", "packs"),
    [
        ({}, {}, 3),
        ({}, {}, 1),
        ({}, {"sequence_ranks": 2}, 3),
        ({"tie_word_embeddings": False}, {"gradient_checkpointing": True}, 3),
        ({"tie_word_embeddings": False, "num_key_value_heads": 1}, {"sequence_ranks": 2}, 1),
        ({"num_key_value_heads": 1}, {"sequence_ranks": 2, "gradient_checkpointing": True}, 1),
    ],
)
def test_two_ranks_learn_what_one_does(
    tokenizer: Any, shape: dict[str, Any], options: dict[str, Any], packs: int
) -> None:
    model = tiny(tokenizer, **shape)
    cut = batch_of(SHAPES).split(45 if packs > 1 else 99)
    assert len(cut) == packs

    def work() -> Any:
        return told_by(make(model, average=0.8, **options), cut)

    two, one = on_ranks(2, work), work()
    assert two.keys() == one.keys()
    # Adam takes the sign of a gradient that is nearly 0, and so makes more of rounding.
    for name, wanted in one.items():
        assert apart(two[name], wanted) < (1e-6 if name in ("before", "norm", "gradients", "reference") else 1e-4), name


def test_weights_and_moments_stay_float32(model: Any) -> None:
    packs = batch_of(SHAPES).split(45)

    def work() -> Any:
        learner = make(model, dtype="bfloat16")
        before = copy.deepcopy(dict(learner.weights()))
        update(learner, packs)
        return before, gradients(learner), dict(learner.weights()), learner.state()

    two, one = on_ranks(2, work), work()
    assert {leaf.dtype for leaf in tree_leaves(two) if isinstance(leaf, Tensor)} == {torch.float32}
    assert apart(two[0], one[0]) == 0 and apart(two[1], one[1]) < 1e-2
    # Changes that bfloat16 could not hold, and no weight is one of its numbers.
    assert all(float((two[2][name] == weight.bfloat16()).float().mean()) < 0.1 for name, weight in two[2].items())


def loaded(model: Any, saved: Any) -> Learner:
    own = copy.deepcopy(model)
    own.load_state_dict(saved["model"], strict=False)
    learner = make(own, average=0.8)
    learner.load_state(copy.deepcopy(saved["state"]))
    return learner


def saved_by(learner: Learner) -> dict[str, Any]:
    state = copy.deepcopy(learner.state())
    with learner.averaged():
        return {"state": state, "model": {name: one.detach().clone() for name, one in learner.weights()}}


def test_what_one_rank_saves_two_load_and_back(model: Any) -> None:
    packs = batch_of(SHAPES).split(45)

    def go_on(saved: Any) -> Any:
        learner = loaded(model, saved)
        again = saved_by(learner)
        if dist.is_initialized():
            with pytest.raises(ValueError, match="another model"):
                learner.load_state({"state": {0: saved["state"]["state"][1]}})
        update(learner, packs)
        return again, saved_by(learner)

    learner = make(model, average=0.8)
    update(learner, packs)
    one = saved_by(learner)
    again, two = on_ranks(2, lambda: go_on(one))
    assert apart(again, one) == 0 < apart(two, one)
    back, three = go_on(two)
    assert apart(back, two) == 0
    assert apart(on_ranks(2, lambda: go_on(two))[1], three) < 1e-5


@pytest.mark.parametrize("world", [1, 2])
def test_a_gradient_that_is_not_finite_on_one_rank_moves_nothing_on_any(model: Any, world: int) -> None:
    packs = batch_of(SHAPES).split(45)

    def work() -> list[Any]:
        learner = make(model, average=0.8)
        update(learner, packs)
        told: list[Any] = [saved_by(learner)]
        take = learner._step  # pyright: ignore

        def poisoned(rate: float) -> float:
            gradient: Any = learner.trained[3].grad
            (gradient.to_local() if world > 1 else gradient).flatten()[0] = float("inf")
            return take(rate)

        learner._step = poisoned  # pyright: ignore
        told.append(update(learner, packs))
        told.append(saved_by(learner))
        learner._step = take  # pyright: ignore
        update(learner, packs)
        return [*told, saved_by(learner)]

    before, norm, after, later = work() if world == 1 else on_ranks(world, work)
    assert not math.isfinite(norm) and apart(after, before) == 0 < apart(later, after)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"run": {"ranks": [4, 3]}}, r"run.ranks=\[4, 3\]: the second must divide the first"),
        ({"run": {"ranks": 2}, "lora": {"rank": 8}}, "lora.rank must be 0 where run.ranks is above 1"),
        ({"run": {"ranks": 2}, "model": {"device": "cuda:1"}}, "set model.device='cuda', not 'cuda:1'"),
    ],
)
def test_settings_that_ranks_cannot_follow(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_ranks(parse_config(settings))


def test_other_processes_than_the_run_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "3")
    assert is_follower()
    with pytest.raises(ConfigError, match=r"4 processes were started together, .*: set run.ranks=4"):
        check_ranks(parse_config({}))


def test_heads_that_cannot_be_dealt(model: Any) -> None:
    def work() -> str:
        with pytest.raises(ConfigError) as caught:
            make(model, sequence_ranks=3)
        return str(caught.value)

    assert on_ranks(1, work) == "the 3 ranks of run.ranks that share tokens must divide 4 heads"


def test_rank_that_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    words = "rank 1 has ended: it said nothing; the run goes on from its last checkpoint"
    with pytest.raises(InfrastructureError, match=words), ranks(parse_config({"run": {"ranks": 2}})):
        pass


@pytest.fixture
def start(server: Server, tmp_path: Path) -> Callable[..., Command]:
    """Start ``agentrl train`` with a toy environment: ``start("name", "run.ranks=2")``."""
    (tmp_path / "toy.py").write_text(TOY)
    (tmp_path / "run.toml").write_text(ARITHMETIC)
    settings = ("env.id='toy:test/Toy-v0'", "sft.steps=2", "sft.tasks=8", "optim.average=0.5", "algo.kl_coef=0.1")

    def begin(name: str, *overrides: str) -> Command:
        return server.start(tmp_path, "train", "run.toml", "--name", name, *setting(*settings, *overrides))

    return begin


@pytest.mark.slow
def test_whole_run_on_two_ranks_is_that_on_one(start: Callable[..., Command], server: Server, tmp_path: Path) -> None:
    start("one", "optim.steps=3").done()
    command = start("two", "optim.steps=2", "run.ranks=2").done()
    assert command.out == "runs/two\n" and command.err.count("step 0 (") == 1
    server.start(tmp_path, "train", "--resume", "runs/two", *setting("optim.steps=3", "run.ranks=1")).done()
    one, two = (rows_of(tmp_path / "runs" / name) for name in ("one", "two"))
    assert len(one) == len(two) == 3 and all(row["grad_norm"] > 0 for row in one)
    for mine, wanted in zip(two, one, strict=True):
        # What rows share is computed once in a pack, and two ranks have other packs.
        assert mine.pop("update_flops") > 0 < wanted.pop("update_flops")
        assert mine == pytest.approx(wanted, rel=1e-3, abs=1e-5)
    weights = [weights_of(tmp_path / "runs" / name) for name in ("one", "two")]
    assert weights[0].keys() == weights[1].keys() and apart(weights[1], weights[0]) < 1e-3


@pytest.mark.slow
def test_two_ranks_play_ahead_as_one_does(start: Callable[..., Command], tmp_path: Path) -> None:
    short = ("optim.steps=3", "eval.tasks=1", "eval.every=0", "save.every=0")
    start("one", *short, "rollout.overlap=lag").done()
    start("two", *short, "rollout.overlap=lag", "run.ranks=2").done()
    start("flying", *short, "optim.average=0", "rollout.overlap=inflight", "run.ranks=2").done()
    one, two, flying = (rows_of(tmp_path / "runs" / name) for name in ("one", "two", "flying"))
    assert [[row["staleness_max"] for row in rows] for rows in (one, two)] == [[0, 1, 1]] * 2
    assert [row["reward_mean"] for row in two] == [row["reward_mean"] for row in one]
    assert [row["grad_norm"] for row in two] == pytest.approx([row["grad_norm"] for row in one], rel=1e-3)
    assert len(flying) == 3 and max(row["staleness_max"] for row in flying) <= 1


@pytest.mark.slow
def test_rank_that_is_killed_ends_the_run_which_goes_on_later(
    start: Callable[..., Command], server: Server, tmp_path: Path
) -> None:
    command = start("it", "optim.steps=100000", "run.ranks=3", "eval.every=0")
    metrics = tmp_path / "runs" / "it" / "metrics.jsonl"
    command.until(lambda: metrics.exists() and metrics.read_text().count("\n") >= 2)
    ranks = [pid for pid in command.descendants() if b"train.ranks" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert len(ranks) == 2
    os.kill(max(ranks), signal.SIGKILL)
    assert command.wait() == 1 and not any(map(is_alive, ranks))
    assert "rank 2 was killed by SIGKILL; the run goes on from its last checkpoint" in command.err.splitlines()[-1]
    server.start(tmp_path, "train", "--resume", "runs/it", *setting("optim.steps=2", "run.ranks=1")).done()
