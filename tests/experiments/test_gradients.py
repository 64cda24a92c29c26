"""Part B of the plan: gradients of tokens, what is made of them, and rows that outlive a kill."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from ..train.test_score import batch_of
from .conftest import load

gradients, rows = load("gradients"), load("rows")


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "attention_bias": True, "tie_word_embeddings": True}
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=260, **sizes, **heads)).eval()
    for weight in model.parameters():
        weight.data += 0.1 * torch.randn_like(weight)
    return model


@pytest.mark.parametrize("width, large", [(10**6, 100), (64, 10**6), (64, 100)])
def test_gradients_are_those_of_one_backward_pass_a_token(
    model: Any, width: int, large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["recorded_gradients"], "LARGE", large)
    parameters = list(model.parameters())
    tokens, sampled = torch.randint(0, 260, (30,)), torch.tensor([3, 4, 9, *range(12, 30)])
    projection = gradients.Projection(parameters, width, seed=1)
    projected = gradients.token_gradients(model, tokens, sampled, projection, 0.7)
    logp = torch.log_softmax(model(tokens[None]).logits[0] / 0.7, -1)
    wanted = [
        projection(torch.autograd.grad(logp[index - 1, tokens[index]], parameters, retain_graph=True))
        for index in sampled.tolist()
    ]
    torch.testing.assert_close(projected, torch.stack(wanted), atol=1e-4, rtol=1e-4)


def recorded_of(tasks: int, rows: int) -> Any:
    """Episodes of known gradients: each token's is its task's unit vector, times 3 for wins and −1 for losses."""
    batch = batch_of([[2, 3]] * tasks * rows)
    group = torch.arange(tasks).repeat_interleave(rows)
    won = (torch.arange(tasks * rows) % 4 == 0).long()
    rewards = torch.zeros(3 * tasks * rows)
    rewards[2::3] = won.float()
    batch = gradients.replace(batch, rewards=rewards, group=group)
    factor = torch.repeat_interleave(torch.where(won == 1, 3.0, -1.0), 3)
    vectors = torch.eye(tasks)[group.repeat_interleave(3)] * factor[:, None]
    ones = torch.ones(3 * tasks * rows)
    probability = torch.tensor([0.05, 0.5, 1.0]).repeat(tasks * rows)
    return gradients.Recorded(batch=batch, energy=ones, weights=ones, gradients=vectors, probability=probability)


@pytest.mark.slow
def test_shares_and_products_of_known_gradients() -> None:
    recorded = recorded_of(4, 64)
    # Every episode has the energy 3, so nothing varies with it.
    assert gradients.shares(recorded) == {"p": 0.25, "beta_W": 0.25, "beta_S": 0.75, "e": 27.0, "correlation": 0.0}
    loud = replace(recorded, energy=recorded.gradients.norm(dim=1))
    assert gradients.shares(loud)["correlation"] == pytest.approx(1.0)
    # A quarter of the tokens have a gradient of norm 3, the others of norm 1.
    assert gradients.by_probability(recorded) == [[low, 256.0, 1.5, 1.0] for low in (0.0, 0.5, 0.9)]
    compared = gradients.compare(recorded, 2, 60)
    # A task's true gradient is 9/4 along its unit vector, and no task's has anything in common with another's.
    for arm in ("none", "otb_pooled"):
        assert all(len(values) == 5 for values in compared[arm].values())
        assert compared[arm]["along"][0] == pytest.approx(4 * 2.25**2, rel=0.25), arm
        assert compared[arm]["along"][1] == pytest.approx(3 * 2.25**2, rel=0.25), arm
    # Without a baseline a row's gradient is 9 or 0, of variance 81·3/16, which two rows halve.
    assert compared["none"]["noise"][0] == pytest.approx(4 * 81 * 3 / 16 / 2, rel=0.35)
    losses = gradients.of_plus_and_minus_one(recorded).batch.rewards
    assert losses.reshape(-1, 3).tolist() == [[0, 0, 1], *[[0, 0, -1]] * 3] * 64


@pytest.mark.slow
def test_a_set_goes_on_where_it_was_killed(tmp_path: Path) -> None:
    recorded, path = recorded_of(3, 8), tmp_path / "rows" / "B.jsonl"
    gradients.run(recorded, "even", [1, 2], 2, rows.RowFile(path, "abc"))
    whole = path.read_text()
    made = [json.loads(line) for line in whole.splitlines()]
    assert [(row["unit"].get("rewards"), row["unit"].get("group_size")) for row in made] == [
        ("0/1", 1), ("0/1", 2), ("-1/1", 1), ("-1/1", 2), (None, None),
    ]  # fmt: skip
    assert {row["commit"] for row in made} == {"abc"} and set(made[0]["arms"]) == set(gradients.ARMS)
    path.write_text(whole[: len(whole) - 40])
    gradients.run(recorded, "even", [1, 2], 2, rows.RowFile(path, "abc"))
    again = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row | {"date": ""} for row in again] == [row | {"date": ""} for row in made], "no unit twice"


def test_rows_name_a_commit_that_has_the_code(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        command = ["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    git("init", "-q")
    (tmp_path / "code.py").write_text("a = 1\n")
    git("add", ".")
    git("commit", "-qm", "one")
    (tmp_path / "experiments" / "rows").mkdir(parents=True)
    (tmp_path / "experiments" / "rows" / "B.jsonl").write_text("{}\n")
    assert rows.commit_of(tmp_path) == git("rev-parse", "HEAD")
    (tmp_path / "code.py").write_text("a = 2\n")
    with pytest.raises(SystemExit, match="commit these first"):
        rows.commit_of(tmp_path)
