"""Models made without their weights: what their files must hold, and what is refused. Ranks are tested in train."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from agentrl.errors import UsageError
from agentrl.models.load import cast_copy, load_skeleton
from agentrl.models.lora import add_adapters
from agentrl.runs.checkpoint import save_checkpoint

SIZES: dict[str, Any] = {
    **{"vocab_size": 300, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "pad_token_id": 0},
    **{"num_key_value_heads": 1, "head_dim": 8, "num_hidden_layers": 1},
}


def config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        settings = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(settings | changes))

    return change


def weights(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return rewrite


def experts(folder: Path) -> None:
    shape = hf.Qwen3MoeConfig(**SIZES, moe_intermediate_size=8, num_experts=2, num_experts_per_tok=1)
    hf.AutoModelForCausalLM.from_config(shape).save_pretrained(folder)


def cut(size: int | None) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:size])
        if size == 0:
            file.unlink()

    return change


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (cut(None), ""),
        (experts, "has weights that transformers converts as it loads them"),
        (config(quantization_config={"quant_method": "fp8"}), "has weights that transformers converts"),
        (weights(lambda tensors: tensors.pop("model.norm.weight")), "has no model.norm.weight in its files"),
        (config(hidden_size=8), "has another model.embed_tokens.weight in its files than config.json describes"),
        (cut(0), "has no safetensors files that can be read here"),
        (cut(9), "has no safetensors files that can be read here"),
    ],
)
def test_a_model_whose_files_cannot_be_read_by_shares_is_loaded_whole(
    tmp_path: Path, change: Callable[[Path], None], why: str
) -> None:
    hf.AutoModelForCausalLM.from_config(hf.Qwen3Config(**SIZES, tie_word_embeddings=True)).save_pretrained(tmp_path)
    change(tmp_path)
    skeleton, reason = load_skeleton(tmp_path)
    assert reason.startswith(why) and (skeleton is None) == bool(why)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("model.norm.weight", float("nan"), "the weights model.norm.weight of .* hold NaN or infinity"),
        ("lm_head.weight", 0.5, "ties lm_head.weight to model.embed_tokens.weight, and holds other weights for it"),
    ],
)
def test_weights_that_cannot_be_the_models_are_refused(tmp_path: Path, name: str, value: float, words: str) -> None:
    model = hf.AutoModelForCausalLM.from_config(hf.LlamaConfig(**SIZES, tie_word_embeddings=True))
    model.save_pretrained(tmp_path)
    # Many models on the hub hold tied weights twice.
    weights(lambda held: held.update({"lm_head.weight": held["model.embed_tokens.weight"].clone()}))(tmp_path)
    skeleton = load_skeleton(tmp_path)[0]
    assert skeleton and all(map(torch.equal, cast_copy(skeleton, torch.float32).parameters(), model.parameters()))
    weights(lambda held: held[name].view(-1)[3:4].fill_(value))(tmp_path)
    with pytest.raises(UsageError, match=words):
        cast_copy(skeleton, torch.bfloat16)


def test_adapters_are_merged_by_a_process_that_holds_the_model(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    own = copy.deepcopy(model)
    add_adapters(own, rank=2, alpha=2, targets=(), base="base", seed=0)
    save_checkpoint(tmp_path / "it", own, tokenizer, state={})
    assert load_skeleton(tmp_path / "it") == (None, "has adapters to be merged")
