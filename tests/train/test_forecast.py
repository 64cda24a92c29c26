"""Seconds that a data sheet gives, against those that were measured, and by hand."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from agentrl.config import load_config
from agentrl.errors import ConfigError, UnknownNameError
from agentrl.models.shapes import published_shape
from agentrl.train.forecast import CARDS, card_of, forecast, run_seconds

CARD_SAYS = {
    "Qwen/Qwen3-0.6B": (0.6, 0.44), "Qwen/Qwen3-1.7B-Base": (1.7, 1.4), "Qwen/Qwen3-4B": (4.0, 3.6),
    "Qwen/Qwen3-8B-Base": (8.2, 6.95), "Qwen/Qwen3-14B": (14.8, 13.2), "Qwen/Qwen3-32B": (32.8, 31.2),
}  # fmt: skip
"""Weights by the models' cards, in all and without embeddings, in billions."""


def seconds(preset: str, tokens: int, *overrides: str, card: str = "h100") -> Mapping[str, float]:
    shape: Any = published_shape("Qwen/Qwen3-4B-Base")
    return forecast(load_config(preset=preset, overrides=overrides), shape, CARDS[card], tokens)


@pytest.mark.parametrize("name", CARD_SAYS)
def test_a_shape_has_the_weights_that_its_card_says(name: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(published_shape(name))
    sizes = {weight: weight.numel() / 1e9 for weight in model.parameters()}
    rest = sum(size for weight, size in sizes.items() if weight.shape[0] != 151936)
    assert (sum(sizes.values()), rest) == pytest.approx(CARD_SAYS[name], rel=0.02)


def test_other_models_have_no_known_shape() -> None:
    assert not any(map(published_shape, ("", "Qwen/Qwen3-4", "Qwen/Qwen3-30B-A3B", "me/Qwen3-4B", "runs/first")))


@pytest.mark.parametrize(("tokens", "measured"), [(4096, 0.42), (16_384, 1.9), (65_536, 15.0)])
def test_an_update_takes_what_was_measured(tokens: int, measured: float) -> None:
    # docs/gpu.md: Qwen3-4B on an H200, adapters, one row; half of its tokens were sampled, and here all are.
    few = ("lora.rank=16", "rollout.tasks=1", "rollout.group_size=1", "optim.minibatches=1")
    assert seconds("qwen3-4b-tir", tokens, *few, card="h200")["update"] == pytest.approx(measured, rel=0.15)


def test_sampling_by_hand() -> None:
    # Weights have 8.04 GB, and keys and values of a row of 4,512 tokens 0.665. Beside the weights half of 79.2 GiB
    # holds 51 of them, so 512 episodes are played in 11 waves.
    step = (8.04e9 + 51 * 0.6653e9) / (0.5 * 3.35e12)
    alone = seconds("qwen3-4b-one-gpu", 9024)
    assert alone["generate"] == pytest.approx(11 * 9024 * step, rel=0.01)
    fleet = seconds("qwen3-4b-eight-gpus", 9024)
    assert fleet["generate"] == alone["generate"] and fleet["score"] == pytest.approx(alone["score"])
    assert 1.2 < fleet["update"] / alone["update"] < 1.5, "the gradients of all weights too, but of no more attention"
    with pytest.raises(ConfigError, match=r"fleet\.options\.actors is 0: give their number, from 1"):
        seconds("qwen3-4b-eight-gpus", 9024, "fleet.options.actors=0")
    embedded = seconds("qwen3-4b-one-gpu", 9024, "engine.name=transformers")["generate"]
    assert embedded > 20 * alone["generate"], "docs/gpu.md: the embedded engine wastes a GPU"


def test_a_run_is_its_steps_and_evaluations() -> None:
    config = load_config(overrides=["optim.steps=7", "eval.every=3", "eval.tasks=32", "eval.attempts=4"])
    phases = {"generate": 10.0, "score": 1.0, "update": 4.0}
    # Evaluations before the first step, after the third, sixth and last, of twice as many episodes as a step.
    assert run_seconds(config, phases) == 7 * 15 + 4 * 20
    lag = config.rollout.overlap.model_copy(update={"mode": "lag"})
    assert run_seconds(config.updated(rollout={"overlap": lag}, eval={"every": 0}), phases) == 7 * 10 + 2 * 20


@pytest.mark.parametrize(
    ("device", "here", "name", "wanted"),
    [
        ("cpu", "", "", None), ("cpu", "", "H200", "H200"), ("cuda", "", "", "H100"), ("cuda", "", "a100", "A100"),
        ("cuda", "NVIDIA H200", "", "H200"), ("cuda", "NVIDIA H100 PCIe", "", None), ("cuda", "NVIDIA L4", "", None),
    ],
)  # fmt: skip
def test_which_card_is_planned_for(device: str, here: str, name: str, wanted: str | None, monkeypatch: Any) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(here))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: here)
    card = card_of(load_config(overrides=[f"model.device={device}"]), name)
    assert (card and card.name) == wanted
    with pytest.raises(UnknownNameError, match=r"no card is called 'h10'; did you mean 'h100'\?"):
        card_of(load_config(), "h10")
