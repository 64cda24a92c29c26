"""A model in a GGUF file: converted once, with the numbers that were written into it."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from agentrl.errors import UsageError
from agentrl.models.gguf import from_gguf
from agentrl.models.tiny import END, PAD, START


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of converted models."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def write(require: Callable[[bool, str], None], tokenizer: Any, tmp_path: Path) -> Callable[[str], tuple[Path, Any]]:
    """Write a Llama of random weights, as llama.cpp lays them out; give the file and the model."""
    require(importlib.util.find_spec("gguf") is not None, "needs the package gguf")
    import gguf

    def made(arch: str = "llama") -> tuple[Path, Any]:
        torch.manual_seed(0)
        size: dict[str, Any] = {
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        }
        config: Any = LlamaConfig(**size, num_key_value_heads=2, vocab_size=len(tokenizer), tie_word_embeddings=True)
        model = LlamaForCausalLM(config).eval()
        writer: Any = gguf.GGUFWriter(tmp_path / "model.gguf", arch)
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

    return made


@torch.no_grad()
def test_a_model_is_converted_once_with_the_numbers_that_were_written(write: Any, tokenizer: Any, cache: Path) -> None:
    file, model = write()
    messages: list[str] = []
    folder = from_gguf(str(file), messages.append)
    tokens = torch.arange(20)[None]
    assert torch.allclose(LlamaForCausalLM.from_pretrained(folder)(tokens).logits, model(tokens).logits, atol=1e-5)
    saved_tokenizer = AutoTokenizer.from_pretrained(folder)
    assert saved_tokenizer("7 plus\n12").input_ids == tokenizer("7 plus\n12").input_ids
    assert saved_tokenizer.chat_template == tokenizer.chat_template and saved_tokenizer.eos_token == END
    assert Path(folder).parent == cache / "agentrl" / "gguf" and len(messages) == 1
    # A folder that holds the file means it too, and nothing is made again.
    assert from_gguf(str(file.parent), messages.append) == folder and len(messages) == 1
    assert [path.name for path in Path(folder).parent.iterdir()] == [Path(folder).name]


def test_what_is_no_such_file_stays(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    (tmp_path / "a.gguf").touch()
    for path in ("", "Qwen/Qwen3-4B", str(tmp_path), "missing.gguf"):
        assert from_gguf(path, print) == path


def test_a_folder_of_several_asks_for_one(tmp_path: Path) -> None:
    for name in ("b.gguf", "a.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(UsageError, match=r"holds 2 GGUF files: name one of them, such as '.*a\.gguf'"):
        from_gguf(str(tmp_path), print)


def no_package(name: str) -> None:
    """Stand in for a search that finds no package."""


def test_what_cannot_be_read_is_one_sentence_and_leaves_nothing(
    write: Any, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, _ = write("rwkv7")
    with pytest.raises(UsageError, match="rwkv7"):
        from_gguf(str(file), print)
    file.write_bytes(b"GGUF and no more")
    with pytest.raises(UsageError, match=r"transformers can't read the model in '.*model\.gguf': "):
        from_gguf(str(file), print)
    monkeypatch.setattr(importlib.util, "find_spec", no_package)
    with pytest.raises(UsageError, match="pip install gguf"):
        from_gguf(str(file), print)
    assert not list(cache.rglob("*"))
