"""The script that compares estimators on a recorded step."""

import argparse
import itertools
import math
import random
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.config import Config, parse_config
from agentrl.errors import UsageError
from agentrl.runs.progress import Display
from agentrl.runs.records import write_episodes
from agentrl.types import Group, Segment, flatten

from ..conftest import load_script
from ..forests import forest
from ..runs.origins import ORIGIN, Signs
from .conftest import Make, Train, logp_of, step, trainer_of
from .test_forests import TEMPERATURE, groups_of

script = load_script("estimator_report")
OPTIONS = argparse.Namespace(group_size=2, draws=3, width=10**6, seed=0, aggregate="seq_mean_token_sum")


@pytest.fixture
def played(small: Make, tmp_path: Path) -> tuple[list[Group], Path]:
    """Groups of four episodes, and a checkpoint of the weights that played them."""
    run = small("optim.lr=1e-30")
    run.parts.model.save_pretrained(tmp_path / "model")
    episodes = step(trainer_of(run)[0]).trajectories
    by_task = itertools.groupby(episodes, key=lambda episode: episode.task_id)
    return [Group(tuple(rows)) for _, rows in by_task], tmp_path / "model"


def test_gradients_are_those_of_backward_on_each_row(played: Any, reference: Any) -> None:
    groups, weights = played
    recorded = script.measure(groups, weights, Config(), OPTIONS, Display())
    rows = torch.tensor([0, 2, 4, 5, 9, 11])
    gradients = script.gradients_of(recorded, rows, {"rloo": ("rloo", {})}, "seq_mean_token_sum")[0]
    parameters = list(reference.parameters())
    episodes = flatten(groups)
    for task, pair in enumerate(rows.reshape(3, 2).tolist()):
        returns = [episodes[row].ret for row in pair]
        credit = zip(pair, returns, reversed(returns), strict=True)
        loss = sum((mine - other) * logp_of(reference, episodes[row]).sum() / 2 for row, mine, other in credit)
        wanted = torch.cat([gradient.flatten() for gradient in torch.autograd.grad(loss, parameters)])
        assert float(gradients[task].norm()) == pytest.approx(float(wanted.norm()), rel=1e-3, abs=1e-5)
        torch.testing.assert_close(gradients[task].float(), wanted, rtol=1e-2, atol=1e-4 * float(wanted.norm()) + 1e-6)


def test_an_episode_of_several_rows_has_one_gradient(reference: Any, tmp_path: Path) -> None:
    reference.save_pretrained(tmp_path)
    groups = groups_of(reference, 3)
    config = parse_config({"rollout": {"temperature": TEMPERATURE}})
    recorded = script.measure(groups, tmp_path, config, OPTIONS, Display())
    gradients = script.gradients_of(recorded, torch.arange(6), {"rloo": ("rloo", {})}, "seq_mean_token_sum")[0]
    for group, gradient in zip(groups, gradients, strict=True):
        loss, returns = torch.zeros(()), [episode.ret for episode in group]
        for episode in group:
            logp = logp_of(reference, episode, TEMPERATURE)
            ratio = float(logp.detach().sum()) - sum(lp for part in episode.sampled for lp in part.logprobs or ())
            others = (sum(returns) - episode.ret) / 2
            loss = loss + min(math.exp(ratio), 5.0) * (episode.ret - others) * logp.sum() / 3
        wanted = torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(reference.parameters()))])
        torch.testing.assert_close(gradient.float(), wanted.float(), rtol=1e-2, atol=1e-4 * float(wanted.norm()))


@pytest.mark.parametrize("large", [10**6, 1000])
def test_projection_keeps_inner_products(large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["recorded_gradients"], "LARGE", large)
    parameters = [torch.zeros(100, 300), torch.zeros(500)]
    generator = torch.Generator().manual_seed(0)
    left, right = ([torch.randn(p.shape, generator=generator) + 0.5 for p in parameters] for _ in range(2))
    true = sum(float((a * b).sum()) for a, b in zip(left, right, strict=True))
    norms = [sum(float((part * part).sum()) for part in vector) ** 0.5 for vector in (left, right)]
    products: list[float] = []
    for seed in range(20):
        projection = script.Projection(parameters, 8192, seed=seed)
        products.append(float(projection(left) @ projection(right)))
    # Their means are most of them, which makes them all but outer products: off by the most that is promised.
    off = norms[0] * norms[1] * (8192**-0.5 if large > 30_000 else (4 / 8192**0.5) ** 0.5)
    assert sum(products) / 20 == pytest.approx(true, abs=3 * off / 20**0.5)
    assert all(product == pytest.approx(true, abs=4 * off) for product in products)
    exact = script.Projection(parameters, 10**6, seed=0)
    assert float(exact(left) @ exact(right)) == pytest.approx(true, rel=1e-4)


def test_measures_are_right_for_gradients_of_known_noise() -> None:
    # Every task's gradient is one vector of norm 2 and noise of variance 30·.01 per group.
    generator = torch.Generator().manual_seed(0)
    tasks, noise = 400, 0.1
    signal = torch.zeros(30, dtype=torch.float64)
    signal[0] = 2.0
    drawn = signal + noise * torch.randn(4, 1, tasks, 30, generator=generator, dtype=torch.float64)
    measures = script.measures(script.products(drawn[:2], drawn[2:]))
    measured = {name: (float(value), float(error)) for name, (value, error) in measures.items()}
    value, error = measured["variance"]
    assert abs(value - 30 * noise**2 / tasks) < 4 * error and 0 < error < value
    assert measured["norm"][0] == pytest.approx(2.0, rel=0.01)
    assert measured["halves"][0] == pytest.approx(1.0, abs=0.01) == measured["reference"][0]


def test_groups_of_a_draw_share_no_row() -> None:
    group = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1, 1])
    parts = script.drawn(group, 2, torch.Generator().manual_seed(0))
    assert [group[part].bincount().tolist() for part in parts] == [[2, 2], [2, 2], [1]]
    assert sorted(torch.cat(parts).tolist()) == list(range(9))


REFUSED = [
    (("runs/two",), "there is no run in 'runs/two'; did you mean 'runs/one'?"),
    (("runs/one", "--step", "9"), "has no episodes of step 9; it has those of [1, 2]"),
    (("runs/one", "--group-size", "3"), "lower --group-size, or play more with: agentrl eval runs/one"),
    (("runs/one", "--episodes", "none.jsonl"), "there is no file 'none.jsonl'"),
    (("runs/one", "--episodes", "run.toml"), "line 1 of run.toml is no episode"),
    (("runs/one", "--checkpoint", "none"), "no model can be loaded from 'none'"),
]


@pytest.mark.slow
@pytest.mark.ci
def test_report_of_a_run(train: Train, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train("one", "optim.steps=2", "rollout.group_size=4", "eval.every=0", "save.every=0").done()
    assert script.main(["runs/one", "--draws", "4", "--width", "1024"]) == 0
    shown = capsys.readouterr().out
    assert "8 episodes of 2 tasks" in shown and "ESS of the ratio to those that played: 1.000" in shown
    assert "from `step-000001.jsonl.zst` at the weights `step-000000`" in shown
    assert re.search(r"by the energy W .* squared norm of its gradient\. Their correlation is 0?\.?-?\d", shown)
    names = re.findall(r"^\| ([\w ]+?) \| -?[\d.na]", shown, flags=re.MULTILINE)
    assert {"otb", "otb_loo", "rloo", "none", "otb instantaneous"} <= set(names)
    assert script.main(["runs/one", "--step", "2", "--draws", "1", "--width", "64"]) == 0
    assert "at the weights `step-000000`" in capsys.readouterr().out
    for arguments, wanted in REFUSED:
        assert script.main(arguments) == 2
        output = capsys.readouterr()
        assert wanted in output.err and len(output.err.splitlines()) == 1 and not output.out


def test_episodes_of_several_rows_are_refused(tmp_path: Path) -> None:
    write_episodes(tmp_path / "e.jsonl", [forest(random.Random(0), Segment("prompt", (5,)), 2)], Signs(), ORIGIN)
    with pytest.raises(UsageError, match="has episodes of several rows, and estimators are compared"):
        script.groups_of(tmp_path / "e.jsonl", 1)


def test_a_group_of_no_rows_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        script.main(["runs/one", "--group-size", "0"])
    assert caught.value.code == 2 and "'0' is no whole number above 0" in capsys.readouterr().err
