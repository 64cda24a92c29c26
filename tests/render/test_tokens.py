"""Pieces of a text, tokenized apart: as in the whole text, whatever a tokenizer puts before a text that it is given."""

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import RenderError
from agentrl.render.renderer import Renderer
from agentrl.render.tokens import IN_TEXT, TextTokens
from agentrl.types import Message

from .conftest import Wrapped, tokenizer_of

SCHEMES = ["first", "always", "never", "legacy"]
WORDS = ["What is", " 12", "+", "30?", "\n", "print(", "é", "🙂", "  ", ""]


def make(scheme: str) -> Any:
    """A tokenizer of words, with a way of its own to put spaces before texts."""
    return tokenizer_of("mistral", pieces=scheme)


def plain(tokens: TextTokens, text: str, after: int | None) -> list[int]:
    return [token for token, _ in tokens.write([(text, None)], after)]


@pytest.mark.parametrize("scheme", SCHEMES)
@given(pieces=st.lists(st.sampled_from(WORDS) | st.text(max_size=5), max_size=6))
def test_pieces_decode_to_the_text(scheme: str, pieces: list[str]) -> None:
    tokenizer = make(scheme)
    tokens = TextTokens(tokenizer)
    ids = [token for piece in pieces for token in plain(tokens, piece, IN_TEXT)]
    text = "".join(pieces).encode("utf-8", errors="replace").decode()
    assert tokens.text(ids) == text.replace("▁", " ")


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("after", ["[INST]", "</s>"])
def test_a_piece_behind_a_control_token_is_as_in_the_whole(scheme: str, after: str) -> None:
    tokenizer = make(scheme)
    tokens = TextTokens(tokenizer)
    for text in ("What is 12?", " 12", "\n", "é"):
        whole = tokenizer(after + text, add_special_tokens=False).input_ids
        (control,) = tokens.parts(after)
        assert isinstance(control, int)
        pieces = [control, *plain(tokens, text, control)]
        assert pieces == whole[-len(pieces) :]


@pytest.mark.parametrize("added", [True, False])
@pytest.mark.parametrize("split", [True, False])
def test_the_tokenizers_own_settings_change_nothing(added: bool, split: bool) -> None:
    """A tokenizer that adds BOS, or that was told to read control tokens as text."""
    plain = tokenizer_of("llama3")
    changed = copy.deepcopy(plain)
    changed.split_special_tokens = split
    changed.add_bos_token = added
    conversation = [Message(role="user", content="What is <|eot_id|>?")]
    result = Message(role="tool", content="<|eot_id|>")
    assert Renderer(changed).prompt(conversation) == Renderer(plain).prompt(conversation)
    assert Renderer(changed).extend([], [result]) == Renderer(plain).extend([], [result])


def test_a_tokenizer_whose_letters_all_merge_is_refused() -> None:
    class Merging(Wrapped):
        """Every token is the beginning of another one."""

        def get_vocab(self) -> Any:
            vocabulary = self.inner.get_vocab()
            return {**vocabulary, **{f"{token}!": len(vocabulary) for token in vocabulary}}

    with pytest.raises(RenderError, match="use a tokenizer with add_prefix_space=False"):
        TextTokens(Merging(make("first")))


def test_letters_that_no_piece_can_hold_back() -> None:
    """Overlapping spellings of control tokens, cut apart until none is left."""
    tokenizer = tokenizer_of("qwen3")
    tokens = TextTokens(tokenizer)
    for text in ("<think><think>", "<<think>think>", "<tool_call><tool_call", "</think></think>" * 50):
        ids = plain(tokens, text, None)
        assert not set(ids) & tokens.control and tokenizer.decode(ids) == text


def test_a_run_of_spaces_controls_nothing() -> None:
    """Gemma lists them as added tokens, spelled as its vocabulary spells them."""
    tokenizer = copy.deepcopy(tokenizer_of("gemma3"))
    tokenizer.add_tokens(["▁▁", "▁▁▁▁"])
    assert not set(tokenizer.convert_tokens_to_ids(["▁▁", "▁▁▁▁"])) & TextTokens(tokenizer).control
