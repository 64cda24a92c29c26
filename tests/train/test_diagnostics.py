import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.algos import loss
from agentrl.train import diagnostics as d

ROWS = st.lists(st.lists(st.floats(-4, 4, width=32), max_size=40), min_size=1, max_size=6)


def laid_out(rows: list[list[float]]) -> tuple[torch.Tensor, torch.Tensor]:
    starts = torch.tensor([0, *(len(row) for row in rows)]).cumsum(0)
    return torch.tensor([value for row in rows for value in row], dtype=torch.float32), starts


def by_bin(rows: list[list[float]]) -> dict[int, list[float]]:
    """The values of each bin by its lower edge."""
    by_edge: dict[int, list[float]] = {}
    for row in rows:
        for t, value in enumerate(row, start=1):
            by_edge.setdefault(2 ** (t.bit_length() - 1), []).append(value)
    return by_edge


def test_effective_sample_size():
    assert d.effective_sample_size(torch.tensor([2.0, 2.0, 2.0])) == pytest.approx(1.0)
    assert d.effective_sample_size(torch.tensor([1.0, 0.0, 0.0, 0.0])) == 0.25
    assert d.effective_sample_size(torch.tensor([1.0, 2.0, 3.0])) == pytest.approx(36 / 14 / 3)
    assert d.effective_sample_size(torch.tensor([3e38, 3e38])) == pytest.approx(1.0), "squares of it overflow"
    assert d.effective_sample_size(torch.zeros(3)) == 0.0
    for wrong in (torch.zeros(0), torch.tensor([-1.0]), torch.tensor([math.nan])):
        with pytest.raises(ValueError, match="weights"):
            d.effective_sample_size(wrong)


EPISODES = st.lists(
    st.lists(st.tuples(st.sampled_from([-1.0, 0.0, 0.5, 1.0]), st.floats(0.0, 2.0, width=16)), max_size=4),
    min_size=1,
    max_size=8,
)


@given(EPISODES, st.integers(1, 3))
def test_noise_of_baselines_is_the_slow_loop(episodes: list[list[tuple[float, float]]], environments: int):
    rewards, starts = laid_out([[reward for reward, _ in episode] for episode in episodes])
    energy, _ = laid_out([[weight for _, weight in episode] for episode in episodes])
    made = d.baseline_noise(rewards, energy, starts, torch.arange(len(episodes)) % environments)
    pairs: dict[int, list[tuple[float, float]]] = {}
    for number, episode in enumerate(episodes):
        if episode:
            pair = sum(r for r, _ in episode), sum(w for _, w in episode)
            pairs.setdefault(number % environments, []).append(pair)
    weights = {name: sum(weight for _, weight in of) for name, of in pairs.items()}
    if not sum(weights.values()):
        assert made == {}
        return

    def moment(baselines: dict[int, float]) -> float:
        return sum(weight * (ret - baselines[name]) ** 2 for name, of in pairs.items() for ret, weight in of)

    best = {
        name: sum(weight * ret for ret, weight in of) / weights[name] if weights[name] else 0.0
        for name, of in pairs.items()
    }
    if len(pairs) == 1:
        assert made["baseline_best"] == pytest.approx(*best.values(), abs=1e-9)
    differing = any(len({ret for ret, _ in of}) > 1 for of in pairs.values())
    if differing and moment(best) > 1e-12:
        means = {name: sum(ret for ret, _ in of) / len(of) for name, of in pairs.items()}
        noise = {"noise_none": moment(dict.fromkeys(best, 0.0)), "noise_mean": moment(means)}
        assert {name: made[name] for name in noise} == pytest.approx(
            {name: value / moment(best) for name, value in noise.items()}, rel=1e-6
        )
    assert differing or not made.keys() & {"noise_none", "noise_mean"}
    assert ("baseline_best" in made) == (len(pairs) == 1)


def test_noise_follows_from_success_and_the_share_of_energy():
    # Three of four episodes succeed, and the failure carries 9/10 of the energy: p = 3/4, β = 1/10.
    rewards, energy = torch.tensor([0.0, 1.0, 1.0, 1.0, 0.0]), torch.tensor([0.1, 0.1, 0.1, 0.1, 3.6])
    made = d.baseline_noise(rewards, energy, torch.tensor([0, 2, 3, 4, 5]), torch.zeros(4))
    assert made == pytest.approx({"baseline_best": 0.1, "noise_none": 1 / 0.9, "noise_mean": 1 + 0.65**2 / 0.09})
    same = torch.full((3,), 0.1), torch.rand(3) + 0.1, torch.arange(4)
    assert d.baseline_noise(*same, torch.zeros(3)).keys() == {"baseline_best"}, "equal returns have no noise"


@given(ROWS)
def test_positions_are_the_slow_loop(rows: list[list[float]]):
    values, starts = laid_out(rows)
    moments = d.position_moments(values, starts)
    expected = by_bin(rows)
    means, stds = d.position_means("x", moments), d.position_stds("x", moments)
    assert list(means) == list(stds) == [f"x_t{edge}" for edge in sorted(expected)]
    for edge, members in expected.items():
        assert means[f"x_t{edge}"] == pytest.approx(statistics.fmean(members), abs=1e-9)
        assert stds[f"x_t{edge}"] == pytest.approx(statistics.pstdev(members), abs=1e-6)


def test_bins_hold_the_powers_of_two_exactly():
    length = 2**17
    moments = d.position_moments(torch.ones(length), torch.tensor([0, length]))
    assert moments.shape == (d.BINS, 3)
    assert moments[:, 0].tolist() == [2.0**k for k in range(17)] + [1.0] + [0.0] * (d.BINS - 18)


def test_moments_of_booleans_of_none_and_of_nan():
    truths = d.position_moments(torch.tensor([True, True, False]), torch.tensor([0, 3]))
    assert d.position_means("b", truths) == {"b_t1": 1.0, "b_t2": 0.5}
    assert d.position_means("a", d.position_moments(torch.zeros(0), torch.tensor([0, 0]))) == {}
    with pytest.raises(ValueError, match="values"):
        d.position_moments(torch.tensor([math.nan]), torch.tensor([0, 1]))


def drift_of(rows: list[list[float]], credits: list[list[float]]) -> dict[str, float]:
    """Of log ratios and advantages, row by row."""
    (logp, starts), (advantages, _), old = laid_out(rows), laid_out(credits), torch.zeros(sum(map(len, rows)))
    logp.requires_grad_()
    out, drift = loss("ppo_clip", logp, old, advantages, starts), d.Drift()
    out.loss.backward()
    drift.add(out, logp, old, advantages, starts)
    return drift.metrics()


def test_what_has_no_advantage_is_not_clipped():
    metrics = drift_of([[0.0, 3.0], [0.1, 0.0], [-2.0]], [[0.0, 1.0], [1.0, 1.0], [1.0]])
    assert (metrics["clip_fraction"], metrics["clip_fraction_t1"], metrics["clip_fraction_t2"]) == (1 / 4, 0.0, 0.5)
    assert metrics["log_ratio_abs_max"] == 3.0
    metrics = drift_of([[3.0, -3.0]], [[0.0, 0.0]])
    assert metrics["clip_fraction"] == 0 and not [name for name in metrics if name.startswith("clip_fraction_t")]
