import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl import algos
from agentrl.algos.advantages import otb
from agentrl.errors import ConfigError, UnknownNameError

from . import reference

PER_ROW = ("group_mean", "grpo", "rloo", "opo", "ogb", "reinforce_pp")


def tensors(rows, group):
    lengths = torch.tensor([len(row) for row in rows])
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return torch.tensor([value for row in rows for value in row]), starts, torch.tensor(group)


@st.composite
def batches(draw):
    """Ragged rows in interleaved groups: (rewards, energy, weights, group), the first three as lists of rows."""
    lengths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=9))
    group = [draw(st.sampled_from([3, -1, 40])) for _ in lengths]
    number = st.sampled_from([0.0, 0.0, 1.0, -0.5, 0.25])
    energy = st.sampled_from([0.0, 1e-3, 0.02, 0.4, 0.9, 1.9])
    weight = st.sampled_from([0.0, 0.5, 1.0, 1.5])
    rows = [[draw(st.tuples(number, energy, weight)) for _ in range(length)] for length in lengths]
    return *([[token[k] for token in row] for row in rows] for k in range(3)), group


@pytest.mark.parametrize(
    ("options", "last"),
    [({}, 1.0), ({"tail": "zero"}, 1.0), ({"tail": "own"}, 0.0), ({"tail": "carry"}, 1.0 - 0.48 / (0.48 + 0.92))],
)
def test_hand_worked_ragged_tail(options, last):
    rewards, starts, group = tensors([[0.0, 0.0, 1.0], [0.0, 0.0]], [5, 5])
    energy = torch.tensor([0.02, 0.40, 0.06, 0.24, 0.68])
    expected = torch.tensor([0.923077, 0.686567, last, -0.076923, -0.313433])
    torch.testing.assert_close(otb(rewards, energy, starts, group, **options), expected, atol=1e-6, rtol=0)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    batches(),
    st.sampled_from(["cumulative", "instantaneous", "uniform", "episode"]),
    st.booleans(),
    st.fixed_dictionaries({
        "leave_one_out": st.booleans(),
        "tail": st.sampled_from(["zero", "own", "carry"]),
        "pool": st.sampled_from([0.0, 0.5, 1, 4.0, math.inf]),
    }),
)  # fmt: skip
def test_otb_is_the_slow_loop(batch, kind, weighted, options):
    rewards, energy, weights, group = batch
    (flat_rewards, starts, groups), flat_energy = tensors(rewards, group), tensors(energy, group)[0]
    flat_weights = tensors(weights, group)[0] if weighted else None
    got = otb(flat_rewards, flat_energy, starts, groups, energy_kind=kind, weights=flat_weights, **options)
    expected = reference.otb(rewards, energy, group, kind=kind, weights=weights if weighted else None, **options)
    torch.testing.assert_close(got, torch.tensor(reference.flat(expected)), atol=1e-5, rtol=1e-5)


@settings(max_examples=80, deadline=None)
@given(batches(), st.sampled_from([*PER_ROW, "none"]))
def test_other_estimators_are_the_slow_loop(batch, name):
    rewards, energy, _, group = batch
    flat_rewards, starts, groups = tensors(rewards, group)
    got = algos.advantage(name, flat_rewards, tensors(energy, group)[0], starts, groups)
    expected = torch.tensor(reference.flat(reference.per_row(name, rewards, energy, group)))
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def random_batch(lengths, group):
    """Rewards, energies, starts and groups in float64, so that invariants show to the last digits."""
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), torch.tensor(lengths).cumsum(0)])
    rewards = torch.zeros(sum(lengths), dtype=torch.float64)
    for end, length in zip(starts[1:].tolist(), lengths, strict=True):
        if length:
            rewards[end - 1] = torch.randn(())
            rewards[end - 1 - length // 2] += torch.randn(())
    energy = 0.05 + torch.rand(sum(lengths), dtype=torch.float64)
    return rewards, energy, starts, torch.tensor(group)


RAGGED = ([5, 3, 0, 4, 5, 1, 6, 2], [0, 1, 0, 0, 1, 0, 1, 2])


def test_no_tokens_at_all():
    rewards, starts, group = tensors([[], []], [0, 0])
    for name in algos.ADVANTAGES:
        assert algos.advantage(name, rewards, rewards, starts, group).shape == (0,)


def test_an_energy_near_zero_survives_a_huge_batch_before_it():
    long = torch.full((200_000,), 1.9)
    energy = torch.cat([long, torch.tensor([1e-6, 3e-6])])
    starts = torch.tensor([0, 200_000, 200_001, 200_002])
    rewards = torch.cat([torch.zeros(200_000), torch.tensor([1.0, 0.0])])
    baseline = 1e-6 / (4e-6 + 1e-8)
    got = otb(rewards, energy, starts, torch.tensor([0, 1, 1]))[-2:]
    torch.testing.assert_close(got, torch.tensor([1 - baseline, -baseline]), atol=1e-6, rtol=0)


def test_float32_is_as_good_as_float64_over_long_rows():
    lengths = [8000, 7000, 0, 6000, 8000]
    rewards, energy, starts, group = random_batch(lengths, [0] * 5)
    single = otb(rewards.float(), energy.float(), starts, group)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), otb(rewards, energy, starts, group), atol=1e-5, rtol=1e-6)


def test_bfloat16_rewards_come_back_as_float32():
    rewards, starts, group = tensors([[0.0, 1.0], [0.0]], [0, 0])
    assert otb(rewards.bfloat16(), torch.ones(3), starts, group).dtype == torch.float32


@pytest.mark.parametrize(
    "change",
    [
        *({"starts": torch.tensor([0, 2])}, {"starts": torch.tensor([1, 2, 4])}, {"starts": torch.tensor([0, 5, 4])}),
        *({"starts": torch.tensor([0.0, 2.0, 4.0])}, {"starts": torch.tensor([0, 3, 1, 4])}),
        *({"starts": torch.empty(0, dtype=torch.int64)}, {"starts": torch.tensor([[0, 2, 4]])}),
        *({"group": torch.tensor([0])}, {"group": torch.tensor([0.0, 1.0])}, {"energy": torch.ones(3)}),
        *({"energy": -torch.ones(4)}, {"energy": torch.ones(4, dtype=torch.int64)}),
        {"energy": torch.tensor([1.0, float("nan"), 1.0, 1.0])},
        *({"rewards": torch.tensor([1.0, bad, 1.0, 1.0])} for bad in (math.nan, math.inf, -math.inf)),
        *({"rewards": torch.full((4,), bad)} for bad in (math.nan, math.inf, -math.inf)),
        *({"weights": torch.tensor([1.0, 1.0, -1.0, 1.0])}, {"weights": torch.ones(2, 2)}),
    ],
)
def test_wrong_inputs_are_refused(change):
    good = {
        "rewards": torch.zeros(4),
        "energy": torch.ones(4),
        "starts": torch.tensor([0, 2, 4]),
        "group": torch.tensor([0, 0]),
    }
    otb(**good)
    with pytest.raises(ValueError, match=next(iter(change))):
        otb(**good | change)


def test_unknown_kinds_are_named():
    args = (torch.zeros(1), torch.ones(1), torch.tensor([0, 1]), torch.tensor([0]))
    with pytest.raises(UnknownNameError, match="cumulative"):
        otb(*args, energy_kind="cumulativ")
    with pytest.raises(UnknownNameError, match="zero"):
        otb(*args, tail="zer")


def test_the_table_of_advantages():
    rewards, energy, starts, group = random_batch(*RAGGED)
    assert set(algos.ADVANTAGES) == {"otb", "otb_loo", "otb_pooled", "otb_episode", "none", *PER_ROW}
    torch.testing.assert_close(
        algos.advantage("otb_loo", rewards, energy, starts, group),
        otb(rewards, energy, starts, group, leave_one_out=True),
    )
    torch.testing.assert_close(
        algos.advantage("otb_pooled", rewards, energy, starts, group),
        otb(rewards, energy, starts, group, pool=math.inf, tail="carry"),
    )
    reading = ["otb", "otb_loo", "otb_pooled", "otb_episode", "ogb"]
    assert [name for name, algorithm in algos.ADVANTAGES.items() if "energy" in algorithm.inputs] == reading
    algos.advantage("grpo", rewards, None, starts, group)
    with pytest.raises(ValueError, match="needs the energy"):
        algos.advantage("otb", rewards, None, starts, group)
    with pytest.raises(UnknownNameError, match="did you mean 'otb'"):
        algos.advantage("otbb", rewards, energy, starts, group)
    with pytest.raises(ConfigError, match="did you mean 'tail'"):
        algos.advantage("otb", rewards, energy, starts, group, tial="own")
