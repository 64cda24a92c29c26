import pytest
import torch

from agentrl import algos
from agentrl.algos.aggregate import AGGREGATES, pack_shares
from agentrl.algos.losses import ctpo
from agentrl.errors import ConfigError, UnknownNameError

from .cases import LOSSES, case, gradient, random_case


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_shares_of_packs_add_up_to_the_minibatch(loss, aggregate):
    lengths = [3, 0, 5, 1, 0, 7, 2]
    logp, old, advantages, starts = case(*random_case(lengths))
    options = {"aggregate": aggregate, "max_tokens": 10}
    whole = loss(logp, old, advantages, starts, **options)
    packs = [(0, 2), (2, 4), (4, 5), (5, 7)]
    offsets = [starts[a : b + 1] - starts[a] for a, b in packs]
    shares = pack_shares(aggregate, offsets)
    assert sum(shares) == pytest.approx(1.0)
    assert shares[2] == 0.0
    total = logp.new_zeros(())
    for (a, b), offset, share in zip(packs, offsets, shares, strict=True):
        part = slice(int(starts[a]), int(starts[b]))
        total = total + share * loss(logp[part], old[part], advantages[part], offset, **options).loss
    torch.testing.assert_close(total, whole.loss)
    torch.testing.assert_close(torch.autograd.grad(total, logp)[0], gradient(whole, logp))


@pytest.mark.parametrize("loss", LOSSES)
def test_aggregations_by_hand(loss):
    logp, old, advantages, starts = case([[0.0, 0.0, 0.0], [], [0.0]], [[1.0, 2.0, 3.0], [], [10.0]])
    expected = {"seq_mean_token_mean": 6.0, "token_mean": 4.0, "seq_mean_token_sum": 8.0, "token_sum_const": 0.8}
    for aggregate, value in expected.items():
        out = loss(logp, old, advantages, starts, aggregate=aggregate, max_tokens=10)
        assert gradient(out, logp).sum().item() == pytest.approx(-value)


def test_aggregation_is_checked():
    args = case([[0.0]], [[1.0]])
    with pytest.raises(UnknownNameError, match="token_mean"):
        ctpo(*args, aggregate="token_meen")
    with pytest.raises(ConfigError, match="max_tokens"):
        ctpo(*args, aggregate="token_sum_const")


def test_packs_without_a_sampled_token_count_for_nothing():
    assert pack_shares("token_mean", [torch.tensor([0, 0]), torch.tensor([0])]) == [0.0, 0.0]


@pytest.mark.parametrize("loss", LOSSES)
def test_no_tokens_is_a_loss_of_zero_that_can_be_differentiated(loss):
    logp, old, advantages, starts = case([[], []], [[], []])
    out = loss(logp, old, advantages, starts)
    assert out.loss.item() == 0.0
    assert out.metrics == {}
    assert gradient(out, logp).shape == (0,)


def test_the_table_says_which_aggregation_a_loss_will_use():
    assert algos.aggregation("ctpo", {}) == "seq_mean_token_mean"
    assert algos.aggregation("dapo", {}) == "token_mean"
    assert algos.aggregation("dapo", {"aggregate": "seq_mean_token_sum"}) == "seq_mean_token_sum"
    with pytest.raises(UnknownNameError, match="token_mean"):
        algos.aggregation("ctpo", {"aggregate": "token_men"})
    with pytest.raises(ConfigError, match="did you mean 'aggregate'"):
        algos.aggregation("ctpo", {"agregate": "token_mean"})
