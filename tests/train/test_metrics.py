"""A step's metrics and what it records of each token, against its episodes, loops and its model's own operations."""

import copy
import re
from dataclasses import replace
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, Qwen3Config

from agentrl.batch import as_batch
from agentrl.config import AlgoSettings
from agentrl.errors import TrajectoryError
from agentrl.models.lora import add_adapters
from agentrl.runs.records import TRAINING, read_episodes, write_episodes
from agentrl.runs.report.charts import DIAGNOSTICS
from agentrl.train import loop, metrics
from agentrl.train.credit import Scored, pool_metrics
from agentrl.train.metrics import pass_flops, peak_flops, rates
from agentrl.types import Exchange, Group, Segment, Trajectory

from ..runs.origins import ORIGIN, Signs
from .conftest import Make, energy_of, logp_of, rewards_in_time, step, trainer_of, trajectory, turn
from .test_options import ALL
from .test_score import batch_of

pytestmark = pytest.mark.usefixtures("one_thread")
DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_parts_and_lengths_are_those_of_the_episodes(small: Make) -> None:
    result = step(trainer_of(small("rollout.group_size=9", "rollout.truncated.turn=end"))[0])
    row, episodes = result.metrics, result.trajectories
    parts = [episode.parts.get("correct", 0.0) for episode in episodes]
    assert row["reward/correct"] == pytest.approx(sum(parts) / 27) == pytest.approx(row["reward_mean"])
    lengths = [len(episode.token_ids) for episode in episodes]
    made = [(metrics._lengths(list(range(n, 0, -1))), range(1, n + 1)) for n in (1, 2, 150)]
    for computed, these in ((row, lengths), *made):
        assert computed["episode_tokens_mean"] == pytest.approx(sum(these) / len(these))
        for percent in (50, 99):
            enough = percent * len(these)
            within = [length for length in these if 100 * sum(other <= length for other in these) >= enough]
            assert computed[f"episode_tokens_p{percent}"] == min(within)
    assert row["trained_tokens"] == sum(lengths)
    for name, of, phase in (("sampled", "sampled_tokens", "generate"), ("trained", "trained_tokens", "update")):
        assert row[f"{name}_tokens_per_second"] * row[f"seconds_{phase}"] == pytest.approx(row[of])


def test_noise_of_baselines_is_that_of_the_episodes(small: Make) -> None:
    trainer = trainer_of(small("rollout.group_size=9", "rollout.temperature=0.7", "optim.max_tokens=64"))[0]
    before = copy.deepcopy(trainer.learner.model)
    before.set_attn_implementation("sdpa")
    result = step(trainer)
    energies = [float(energy_of(before, episode, 0.7).sum()) for episode in result.trajectories]
    returns = [episode.ret for episode in result.trajectories]
    assert len({*returns}) > 1, "or nothing is tested"

    def moment(baseline: float) -> float:
        return sum(energy * (ret - baseline) ** 2 for energy, ret in zip(energies, returns, strict=True))

    best = sum(energy * ret for energy, ret in zip(energies, returns, strict=True)) / sum(energies)
    noise = {"noise_none": moment(0.0) / moment(best), "noise_mean": moment(sum(returns) / 27) / moment(best)}
    wanted = {"baseline_best": best, **noise}
    assert {name: result.metrics[name] for name in wanted} == pytest.approx(wanted, rel=1e-4)
    note = "a group mean 4 times as noisy as OTB"
    assert note in loop._note({**result.metrics, "noise_mean": 4.2}) and note not in loop._note(result.metrics)


@pytest.mark.parametrize("overrides", [(), ALL, ("algo.advantage=otb_pooled",), ("rollout.plan.name=success",)])
def test_every_metric_is_in_the_documentation(small: Make, overrides: tuple[str, ...]) -> None:
    row = step(trainer_of(small(*overrides))[0]).metrics
    names = re.findall(r"`([^` ]+)`", DOCS.read_text(encoding="utf-8"))
    names_in_docs = "|".join(re.sub("<[a-z0-9]+>", ".+", re.sub(r"([.])", r"\\\1", name)) for name in names)
    assert not [name for name in row if not re.fullmatch(names_in_docs, name)]
    assert {key for key, *_ in DIAGNOSTICS} <= row.keys(), "each small chart has its metric"


@pytest.mark.parametrize(
    ("algo", "shapes", "environment", "unpooled"),
    [
        ({"advantage": "otb_pooled"}, [[3, 4], [5, 2]], [0, 0], 0),
        ({"advantage": "otb_pooled"}, [[3, 4]], [0], 1),
        # A group without a sampled token is no pool.
        ({"advantage": "otb_pooled"}, [[3, 4], [5]], [0, 0], 1),
        # Nor is a group of another environment.
        ({"advantage": "otb_pooled"}, [[3, 4], [5, 2], [4, 1]], [0, 1, 0], 1),
        ({"advantage": "otb_pooled"}, [[3, 4], [5, 2], [4, 1]], [2, 1, 0], 3),
        ({"advantage": "ogb", "advantage_options": {"pool": inf}}, [[3, 4]], [0], 1),
        ({"advantage": "otb_pooled", "advantage_options": {"pool": 0}}, [[3, 4]], [0], None),
        ({"advantage": "otb"}, [[3, 4]], [0], None),
    ],
)
def test_a_group_without_a_pool_is_told(
    algo: Any, shapes: list[list[int]], environment: list[int], unpooled: int | None
) -> None:
    batch, numbers = batch_of(shapes), torch.tensor(environment)
    scored = SimpleNamespace(batch=batch, starts=batch.episode_starts, environment=numbers)
    assert pool_metrics(AlgoSettings(**algo), cast(Scored, scored)).get("groups_unpooled") == unpooled


def episode(**parts: float) -> Trajectory:
    return trajectory(Segment("prompt", (1, 2)), turn((3,)), parts=parts)


def test_names_of_parts_stay_distinct_and_break_nothing() -> None:
    names = ["a b", "a\nb", "a/b", "a%2Fb", "\x1b[31m", "\ud800", ""]
    row = metrics._reward_parts([episode(**{name: 2.0 * index for index, name in enumerate(names)}), episode()])
    assert sorted(row.values()) == [float(index) for index in range(len(names))]
    assert all(re.fullmatch(r"reward/[A-Za-z0-9 %._~-]*", name) for name in row)
    for parts in ({"x" * 65: 1.0}, {"x": float("nan")}, {f"{n}": 1.0 for n in range(65)}):
        with pytest.raises(TrajectoryError, match="has more than 64 parts of a reward"):
            episode(**parts)


def test_what_judges_cost_is_counted() -> None:
    exchange = Exchange(model="m", messages=(), answer="Score: 1", usage=(11, 3))
    asked = replace(episode(), exchanges=(exchange, replace(exchange, usage=None)))
    assert metrics._exchanges([asked, episode(), asked]) == {"exchanges": 4, "exchange_tokens": 28}
    assert metrics._exchanges([episode()]) == {}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("rank", [0, 2])
def test_operations_are_those_that_torch_counts(tied: bool, rank: int) -> None:
    config = Qwen3Config(
        vocab_size=257, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=2, head_dim=16, tie_word_embeddings=tied,
    )  # fmt: skip
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    if rank:
        add_adapters(model, rank=rank, alpha=1, targets=(), base="base", seed=0)
        # So that torch computes the gradient of the first layer's input too.
        model.get_input_embeddings().register_forward_hook(lambda *seen: seen[2].requires_grad_())
    batch = batch_of([[30, 25]])
    length = len(batch.tokens)
    with FlopCounterMode(display=False) as counter:
        hidden = model.base_model(batch.tokens[None]).last_hidden_state[0]
        model.get_output_embeddings()(hidden[batch.sampled - 1]).sum().backward()
    counted = counter.get_flop_counts()["Global"]
    attention = counted.pop(torch.ops.aten.bmm)
    # Eagerly each token attends to all others, and not to those before it only.
    expected = sum(counted.values()) + attention * (length + 1) / (2 * length)
    assert pass_flops(model, batch) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("window", [None, 5])
def test_shared_tokens_are_computed_once(model: Any, window: int | None) -> None:
    rows = [(1, 2, 3, 4, 5, 6, 7), (1, 2, 3, 9), (1, 2, 3), (1, 2, 3, 4, 5, 8), (2, 2), (1, 2, 3, 9)]
    batch = as_batch([Group((trajectory(Segment("prompt", row[:1]), turn(row[1:])),)) for row in rows])
    copied = copy.deepcopy(model)
    text = copied.config
    text.layer_types, text.sliding_window = ["sliding_attention" if window else "full_attention"] * 2, window
    prefixes = {row[: end + 1] for row in rows for end in range(len(row))}
    pairs = sum(min(len(prefix), window or 99) for prefix in prefixes)
    named = dict(model.named_parameters()).items()
    weights = sum(weight.numel() for name, weight in named if weight.ndim > 1 and "embed" not in name)
    head = model.get_output_embeddings().weight.numel()
    expected = 6 * weights * len(prefixes) + 6 * head * sum(len(row) - 1 for row in rows) + 2 * 12 * 32 * pairs
    assert pass_flops(copied, batch) == expected
    copied.config.num_experts_per_tok = 2
    assert pass_flops(copied, batch) == 0.0


def test_share_of_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"sampled_tokens": 30, "seconds_generate": 2.0, "seconds_update": 4.0, "trained_tokens": 80}
    assert rates(row, 1e12) == {"sampled_tokens_per_second": 15, "trained_tokens_per_second": 20}
    assert rates({**row, "update_flops": 2e12}, 1e12)["mfu"] == 0.5
    assert "mfu" not in rates({**row, "update_flops": 2e12}, None)
    names = {"NVIDIA A100-SXM4-80GB": 312e12, "NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H100 PCIe": 756e12,
             "NVIDIA H200 NVL": 835e12, "NVIDIA A10G": None, "NVIDIA L40S": 362e12, "Tesla T4": None}  # fmt: skip
    for name, peak in names.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, name=name: name)
        assert peak_flops(torch.device("cuda"), "bfloat16") == peak, name
    assert peak_flops(torch.device("cuda"), "float32") is None is peak_flops(torch.device("cpu"), "bfloat16")


MANY = ("optim.minibatches=2", "optim.epochs=2", "optim.lr=3e-3", "algo.loss=ctpo")


def near(values: Any, wanted: Tensor, atol: float = 1e-4) -> None:
    torch.testing.assert_close(torch.tensor(values, dtype=torch.float32), wanted.detach().float(), rtol=1e-3, atol=atol)


def test_each_token_s_numbers_are_those_of_its_first_pass(small: Make, reference: Any, tmp_path: Path) -> None:
    run = small("algo.advantage=otb", *MANY)
    trainer, _ = trainer_of(run)
    after: list[dict[str, Tensor]] = []
    trainer.learner.optimizer.register_step_post_hook(lambda *_: after.append(run.weights()))
    result = step(trainer)
    path = tmp_path / "e.jsonl"
    write_episodes(path, result.trajectories, Signs(), ORIGIN, result.advantages, result.record.by_episode())
    moved = copy.deepcopy(reference)
    moved.load_state_dict(after[0], strict=False)
    seen, clipped = {"first": 0, "second": 0}, 0
    for record in read_episodes(path):
        recorded, episode = record.training, record.trajectory
        assert set(recorded) == set(TRAINING) and record.advantages is not None
        old = logp_of(reference, episode)
        near(recorded["old_logp"], old)
        # A row of the first minibatch met the policy as it was; one of the second met it after one update.
        ratio = logp_of(moved, episode) - old
        is_first = max(map(abs, recorded["log_ratio"])) < 1e-5
        seen["first" if is_first else "second"] += 1
        near(recorded["log_ratio"], torch.zeros_like(ratio) if is_first else ratio)
        total = torch.tensor(recorded["log_ratio"]).cumsum(0)
        near(recorded["cumulative_log_ratio"], total)
        near(recorded["realized_energy"], energy_of(reference, episode).cumsum(0), 1e-3)
        to_go = torch.tensor(rewards_in_time(episode)).flip(0).cumsum(0).flip(0)
        near([b + a for b, a in zip(recorded["baseline"], record.advantages, strict=True)], to_go)
        tokens = zip(total, recorded["clipped"], record.advantages, strict=True)
        for t, (shift, cut, credit) in enumerate(tokens, start=1):
            low, high, dual = (width * t**0.5 for width in (-0.025, 0.05, 0.05))
            out = float(shift) > high if credit > 0 else not low <= float(shift) <= dual
            assert cut == (out and credit != 0) or abs(float(shift) - (low if shift < 0 else high)) < 1e-4
            clipped += int(cut)
    assert all(seen.values()) and clipped


def test_rows_that_are_not_trained_on_lack_what_updates_tell(small: Make) -> None:
    rejecting = ('algo.rejection={"token"=[0.0,1e-9]}', "optim.minibatches=1", "algo.advantage=group_mean")
    recorded = step(trainer_of(small(*rejecting))[0]).record.by_episode()
    assert recorded and all(set(columns) == {"old_logp", "entropy"} for columns in recorded)
