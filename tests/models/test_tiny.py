"""The tiny model and tokenizer: every text can be written, numbers are cut evenly, and the weights are repeatable."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import ConfigError
from agentrl.models.attention import NAME
from agentrl.models.load import load_model
from agentrl.models.tiny import END, PAD, START, make_model, make_tokenizer


@given(st.text(max_size=20))
def test_every_text_can_be_written(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids
    assert tokenizer.decode(ids) == text


@pytest.fixture(scope="module")
def taught() -> Any:
    """A tokenizer with room for words, taught by an iterator that can be read once."""
    return make_tokenizer(iter(["print(answer)", "what is 7 + 12?"] * 20), vocab_size=420)


@pytest.mark.parametrize("number", ["12345678", "00", "90909091"])
def test_numbers_are_cut_evenly_wherever_they_stand(taught: Any, number: str) -> None:
    for text in (number, f"x{number}", f"{number}.", f"({number}"):
        pieces = [taught.decode([token]) for token in taught(text, add_special_tokens=False).input_ids]
        digits = [piece for piece in pieces if any(map(str.isdigit, piece))]
        assert "".join(digits) == number and len({len(piece) for piece in digits}) == 1 and len(digits[0]) <= 2


def test_frequent_words_become_tokens_and_rare_ones_stay_writable(taught: Any) -> None:
    assert len(taught("print", add_special_tokens=False).input_ids) < len("print")
    assert len(taught("qqq", add_special_tokens=False).input_ids) == 3
    assert len(taught) <= 420


def test_control_tokens_are_single_and_end_a_turn(tokenizer: Any) -> None:
    names = [PAD, START, END]
    ids = tokenizer("".join(names), add_special_tokens=False).input_ids
    assert ids == tokenizer.convert_tokens_to_ids(names) and len(set(ids)) == 3
    assert set(ids) == set(tokenizer.all_special_ids)
    assert (tokenizer.pad_token, tokenizer.eos_token) == (PAD, END)


def weights(model: Any) -> list[Any]:
    return [parameter.tolist() for parameter in model.parameters()]


def test_weights_follow_from_the_seed_alone(tokenizer: Any) -> None:
    sizes = {"hidden": 16, "layers": 1, "heads": 2}
    torch.manual_seed(5)
    before = torch.get_rng_state()
    original = make_model(tokenizer, **sizes, seed=1)
    assert torch.equal(torch.get_rng_state(), before), "making a model draws nothing from the caller's generator"
    torch.rand(3)
    assert weights(make_model(tokenizer, **sizes, seed=1)) == weights(original)
    assert weights(make_model(tokenizer, **sizes, seed=2)) != weights(original)


@pytest.mark.parametrize(("heads", "keys"), [(1, 1), (2, 1), (4, 2), (8, 4)])
def test_a_model_has_the_asked_shape(tokenizer: Any, heads: int, keys: int) -> None:
    model = make_model(tokenizer, hidden=32, layers=3, heads=heads, seed=0)
    config: Any = model.config
    assert (config.hidden_size, config.num_hidden_layers, config.intermediate_size) == (32, 3, 32)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (heads, keys, 32 // heads)
    assert config.vocab_size == len(tokenizer) and config.eos_token_id == tokenizer.eos_token_id
    assert config._attn_implementation == NAME
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    assert head is not None and head.weight is embedding.weight


@pytest.mark.parametrize(("hidden", "heads"), [(32, 3), (30, 4), (12, 4), (32, 5)])
def test_a_shape_that_can_not_be_is_refused(tokenizer: Any, hidden: int, heads: int) -> None:
    with pytest.raises(ConfigError, match=f"model.tiny.heads={heads} in model.tiny.hidden={hidden}"):
        make_model(tokenizer, hidden=hidden, layers=1, heads=heads, seed=0)


def test_loaded_weights_lie_where_new_ones_would(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    loaded, saved = load_model(tmp_path), model.state_dict()
    assert all(weights.data_ptr() % 64 == 0 for weights in loaded.parameters()), "a file's begin where its header ends"
    assert all(weights.equal(saved[name]) for name, weights in loaded.named_parameters())
