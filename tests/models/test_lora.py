"""LoRA: fresh adapters change nothing, merged weights compute what the adapters do, and files are peft's own."""

import asyncio
import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from peft import LoraConfig, PeftModel, inject_adapter_in_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from agentrl.engines.transformers import TransformersEngine
from agentrl.errors import ConfigError, UsageError
from agentrl.models.adapter import LeanAdapter, use_lean_adapters
from agentrl.models.attention import PackedRows
from agentrl.models.load import cast_copy, load_model
from agentrl.models.lora import add_adapters, base_of, fingerprint, is_adapted, merge, merged, save_model
from agentrl.models.tiny import make_model

from ..engines.asking import PROMPT, ask, expected_logprobs

pytestmark = pytest.mark.usefixtures("one_thread")
TOKENS, ROW = torch.arange(3, 40)[None], torch.tensor([0, 37])


@pytest.fixture(scope="module")
def model(tokenizer: Any) -> Any:
    """A model as it is initialised: sums of the shared one, which has large weights, round by more than 1e-6."""
    return make_model(tokenizer, hidden=32, layers=2, heads=4, seed=0).eval()


def adapted(model: Any, base: str = "base", **options: Any) -> Any:
    """A copy with adapters that do something."""
    made = copy.deepcopy(model)
    add_adapters(made, **{"rank": 3, "alpha": 6.0, "targets": (), "base": base, "seed": 1, **options})
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if "lora_B" in name:
                weight.copy_(torch.randn(weight.shape, generator=generator) / 5)
    return made


def logp(model: Any) -> Tensor:
    with torch.no_grad():
        # transformers' own attention leaves the plan unread.
        return torch.log_softmax(model(TOKENS, use_cache=False, agentrl_plan=PackedRows(ROW)).logits, -1)


@pytest.fixture
def saved(model: Any, tmp_path: Path) -> tuple[Any, Path]:
    """A model with adapters, and the folder that they are saved in, beside their base."""
    model.save_pretrained(tmp_path / "base")
    made = adapted(model, str(tmp_path / "base"))
    (tmp_path / "adapters").mkdir()
    save_model(made, tmp_path / "adapters")
    return made, tmp_path / "adapters"


def test_fresh_adapters_change_nothing_and_are_all_that_is_trained(model: Any) -> None:
    made, same, other = copy.deepcopy(model), copy.deepcopy(model), copy.deepcopy(model)
    before = torch.get_rng_state()
    for adapted, seed in ((made, 5), (same, 5), (other, 6)):
        add_adapters(adapted, rank=4, alpha=8.0, targets=(), base="base", seed=seed)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(logp(made), logp(model))
    trained = {name: weight for name, weight in made.named_parameters() if weight.requires_grad}
    # Seven linear layers in each of two layers; the embedding, which is the head too, has none.
    assert len(trained) == 2 * 7 * 2 and all(".lora_" in name for name in trained)
    assert all(4 in weight.shape for weight in trained.values())
    assert all(torch.equal(dict(same.named_parameters())[name], weight) for name, weight in trained.items())
    assert any(not torch.equal(dict(other.named_parameters())[name], weight) for name, weight in trained.items())


def test_merged_weights_compute_what_the_adapters_do(model: Any) -> None:
    made, plain = adapted(model), copy.deepcopy(model)
    weights = dict(merged(made))
    assert list(weights) == [name for name, _ in model.named_parameters()]
    plain.load_state_dict(weights, strict=False)
    assert float((logp(made) - logp(model)).abs().max()) > 0.1
    assert float((logp(made) - logp(plain)).abs().max()) < 1e-6
    # Against the formula: W + (alpha / rank)·B·A.
    layer = made.model.layers[1].mlp.up_proj
    product = layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    weight = weights["model.layers.1.mlp.up_proj.weight"]
    torch.testing.assert_close(weight, layer.base_layer.weight + 6 / 3 * product, atol=1e-6, rtol=1e-6)
    assert dict(merged(model)).keys() == weights.keys()
    assert all(weight is dict(model.named_parameters())[name] for name, weight in merged(model))


@pytest.mark.parametrize("plain", [True, False])
def test_gradients_are_those_of_pefts_own_layers(model: Any, plain: bool) -> None:
    """Dropout, which an adapter of others may have, is peft's to compute; here it drops nothing."""
    made, theirs = adapted(model), copy.deepcopy(model)
    config = LoraConfig(r=3, lora_alpha=6, target_modules="all-linear", lora_dropout=0.0 if plain else 1e-9)
    inject_adapter_in_model(config, theirs)
    theirs.load_state_dict(made.state_dict())
    if not plain:
        made = copy.deepcopy(theirs)
        use_lean_adapters(made)
    assert (type(made.model.layers[0].mlp.up_proj) is LeanAdapter) == plain
    for layered in (made, theirs):
        logits = layered(TOKENS, use_cache=False, agentrl_plan=PackedRows(ROW)).logits
        (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)).mean().backward()
    wanted = {name: weight.grad for name, weight in theirs.named_parameters() if ".lora_" in name}
    for name, weight in made.named_parameters():
        if ".lora_" in name:
            torch.testing.assert_close(weight.grad, wanted[name], rtol=1e-4, atol=1e-7)


def test_engine_samples_from_the_merged_weights(model: Any) -> None:
    made = adapted(model)
    engine = TransformersEngine(cast_copy(model, torch.float32), slots=2, max_length=128)
    asyncio.run(engine.load_weights(merged(made), 1))
    done = ask(engine)
    made.set_attn_implementation("eager")
    assert done.logprobs == pytest.approx(expected_logprobs(made, PROMPT, done, 1.0), abs=1e-5)


def test_peft_loads_what_is_saved(saved: tuple[Any, Path]) -> None:
    made, folder = saved
    base = AutoModelForCausalLM.from_pretrained(folder.parent / "base")
    assert float((logp(PeftModel.from_pretrained(base, folder)) - logp(made)).abs().max()) < 1e-6
    # transformers finds the base by itself, by the name in adapter_config.json.
    assert float((logp(AutoModelForCausalLM.from_pretrained(folder)) - logp(made)).abs().max()) < 1e-6


def test_a_folder_of_adapters_loads_as_a_plain_model(saved: tuple[Any, Path], tmp_path: Path) -> None:
    made, folder = saved
    loaded = load_model(folder)
    assert not is_adapted(loaded) and float((logp(loaded) - logp(made)).abs().max()) < 1e-6
    assert all(weight.requires_grad for weight in loaded.parameters())
    # It is one like any other: it can be saved, and get adapters of its own.
    loaded.save_pretrained(tmp_path / "whole")
    again = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "whole").named_parameters())
    assert all(torch.equal(weight, again[name]) for name, weight in loaded.named_parameters())
    add_adapters(loaded, rank=2, alpha=2.0, targets=["q_proj"], base="x", seed=0)
    merge(loaded)
    assert fingerprint(loaded) != fingerprint(made)


def test_a_folder_that_was_moved_finds_its_base_beside_it(saved: tuple[Any, Path], tmp_path: Path) -> None:
    made, folder = saved
    assert base_of(folder) == str(tmp_path / "base") and base_of(tmp_path / "base") is None
    (tmp_path / "there").mkdir()
    for name in ("base", "adapters"):
        (tmp_path / name).rename(tmp_path / "there" / name)
    assert base_of(tmp_path / "there" / "adapters") == str(tmp_path / "there" / "base")
    assert float((logp(load_model(tmp_path / "there" / "adapters")) - logp(made)).abs().max()) < 1e-6


def other_base(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder.parent / "base")
    model.model.layers[1].mlp.up_proj.weight.data *= 1.001
    model.save_pretrained(folder.parent / "base")


def other_config(**changes: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return change


def fewer_weights(folder: Path) -> None:
    tensors = safetensors.torch.load_file(folder / "adapter_model.safetensors")
    tensors.popitem()
    safetensors.torch.save_file(tensors, folder / "adapter_model.safetensors")


def dora(folder: Path) -> None:
    base = str(folder.parent / "base")
    model = AutoModelForCausalLM.from_pretrained(base)
    config = LoraConfig(r=2, target_modules=["q_proj"], use_dora=True, base_model_name_or_path=base)
    inject_adapter_in_model(config, model)
    config.use_dora = False  # the file says nothing of it, but its tensors do
    model.peft_config = {"default": config}
    model.base_fingerprint = fingerprint(model)
    save_model(model, folder)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (other_base, "trained beside other weights"),
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), "can't be used"),
        (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"x" * 64), "can't be used"),
        (lambda folder: (folder / "adapter_config.json").write_text("[]"), "does not name the model"),
        (lambda folder: (folder / "adapter_config.json").write_text("{"), "does not name the model"),
        (other_config(r=2), "do not fit the model"),
        (other_config(target_modules=["q_proj"]), "do not fit the model"),
        (other_config(peft_type="IA3"), "can't be used"),
        (fewer_weights, "do not fit the model"),
        (lambda folder: other_config(base_model_name_or_path=str(folder))(folder), "holds adapters and no model"),
        (other_config(base_model_name_or_path="adapters"), "no model can be loaded from 'adapters'"),
        (dora, "of a kind that agentrl can't load"),
    ],
)
def test_adapters_that_do_not_fit_are_refused(saved: tuple[Any, Path], spoil: Any, words: str) -> None:
    spoil(saved[1])
    with pytest.raises(UsageError, match=words) as caught:
        load_model(saved[1])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("target", "words"), [("q_prj", "did you mean 'q_proj'"), ("embed_tokens", "no linear"), ("lm_head", "no linear")]
)
def test_targets_are_linear_layers(model: Any, target: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        adapted(model, targets=[target])
    made = adapted(model, targets=["q_proj", "down_proj"])
    layers = {name.split(".lora_")[0].rpartition(".")[2] for name, _ in made.named_parameters() if ".lora_" in name}
    assert layers == {"q_proj", "down_proj"}
