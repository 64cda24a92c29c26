"""scripts/convert_gguf.py keeps the numbers and the tokenizer of a GGUF file."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from agentrl.models.tiny import END, PAD, START

from .conftest import load_script

script = load_script("convert_gguf")


@pytest.fixture
def written(require: Callable[[bool, str], None], tokenizer: Any, tmp_path: Path) -> tuple[Path, Any]:
    """Write a Llama of random weights, as llama.cpp lays them out; give the file and the model."""
    require(importlib.util.find_spec("gguf") is not None, "needs the package gguf")
    import gguf

    torch.manual_seed(0)
    size: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config: Any = LlamaConfig(**size, num_key_value_heads=2, vocab_size=len(tokenizer), tie_word_embeddings=True)
    model = LlamaForCausalLM(config).eval()
    writer: Any = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_block_count(2)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(len(tokenizer))
    fields = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in {PAD, START, END} else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in fields["merges"]])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_bos_token_id(tokenizer.convert_tokens_to_ids(START))
    writer.add_chat_template(tokenizer.chat_template)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    for name, weights in model.named_parameters():
        if heads := {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2]):
            # llama.cpp turns neighbouring numbers of a head, transformers those of its two halves.
            weights = weights.view(heads, 2, -1, 64).transpose(1, 2).reshape(weights.shape)
        writer.add_tensor(names.get_name(name, try_suffixes=[".weight"]), weights.detach().numpy().copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "model.gguf", model


@torch.no_grad()
def test_a_model_has_the_numbers_that_were_written(written: Any, tokenizer: Any, tmp_path: Path) -> None:
    file, model = written
    assert script.main([str(file), str(tmp_path / "made")]) == 0
    tokens, made = torch.arange(20)[None], LlamaForCausalLM.from_pretrained(tmp_path / "made")
    assert torch.allclose(made(tokens).logits, model(tokens).logits, atol=1e-5)
    saved_tokenizer = AutoTokenizer.from_pretrained(tmp_path / "made")
    assert saved_tokenizer("7 plus\n12").input_ids == tokenizer("7 plus\n12").input_ids
    assert saved_tokenizer.chat_template == tokenizer.chat_template and saved_tokenizer.eos_token == END


def test_what_cannot_be_read_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF and no more")
    assert script.main([str(tmp_path / "model.gguf"), str(tmp_path / "made")]) == 1
    assert "can't be converted: " in capsys.readouterr().err and not (tmp_path / "made").exists()
