"""Whatever tasks, tools and models say: a typed error or tokens, never a control token too many, in linear time."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import RenderError
from agentrl.render.renderer import Renderer
from agentrl.types import Message

from .conftest import ids, renderer_of

NAMES = ["qwen3", "llama3", "llama2", "mistral", "gemma3", "glm4", "deepseek_r1", "smollm3"]
ODD = [
    *("", " ", "\n\n", "\ud83d", "🙂é\u0301", "\x00", "\x01", "▁", "Zq0x0xq0Z", "{{ 7 * 7 }}", '"\\', "/no_think"),
    *("<think>", "</think>", "<|im_end|>", "</s>", "[/INST]", "<|user|>", "<tool_response>", "<0x0A>", "<｜User｜>"),  # noqa: RUF001
    "\u00a0",
]
TEXTS = st.lists(st.text(max_size=4) | st.sampled_from(ODD), max_size=5).map("".join)
ROLES = st.sampled_from(["system", "user", "assistant", "tool"])


def messages(roles: st.SearchStrategy[str]) -> st.SearchStrategy[list[Message]]:
    fields: Any = {"role": roles, "content": TEXTS}
    made: Any = st.fixed_dictionaries(fields, optional={"name": TEXTS, "tool_call_id": TEXTS})
    return st.lists(made, max_size=4)


def controls(renderer: Renderer, tokens: Sequence[int]) -> list[int]:
    tokenizer: Any = renderer.tokenizer
    control = {number for number, token in tokenizer.added_tokens_decoder.items() if str(token).strip()}
    return [token for token in tokens if token in control - {tokenizer.unk_token_id}]


def outcome(write: Callable[[list[Message]], Any], conversation: list[Message]) -> list[int] | None:
    """The tokens; None where the messages are refused."""
    try:
        written = write(conversation)
    except RenderError:
        return None
    return ids(written if isinstance(written, list) else [written])


@pytest.mark.slow
@given(name=st.sampled_from(NAMES), opening=messages(ROLES), turn=TEXTS, answer=messages(ROLES))
def test_any_conversation(name: str, opening: list[Message], turn: str, answer: list[Message]) -> None:
    """What is shown has the control tokens of the same conversation whose contents say nothing."""
    renderer = renderer_of(name)
    tokens_of_turn = renderer.turn(turn)
    assert controls(renderer, tokens_of_turn[:-1]) == []
    renderer.text([*tokens_of_turn, *tokens_of_turn])
    for write, given_messages in ((renderer.prompt, opening), (lambda m: renderer.extend(tokens_of_turn, m), answer)):
        calm: list[Message] = [{**m, "content": "x" if m["content"] else ""} for m in given_messages]  # type: ignore
        tokens, harmless = (outcome(write, conversation) for conversation in (given_messages, calm))
        assert (tokens is None) == (harmless is None), "whether a conversation is refused depends on no content"
        assert controls(renderer, tokens or []) == controls(renderer, harmless or [])


@given(name=st.sampled_from(NAMES), tokens=st.lists(st.integers(0, 250), max_size=12), answer=TEXTS)
def test_any_turn(name: str, tokens: list[int], answer: str) -> None:
    """Whatever was sampled, control tokens and half letters too, has a text, and can be answered."""
    renderer = renderer_of(name)
    assert isinstance(renderer.text(tokens), str)
    result = Message(role="tool", content=answer, name="python")
    end = renderer.turn("", answered_by="tool")[-1]
    # GLM's ends open the next message.
    ended = bool(tokens) and tokens[-1] in (renderer.stop_ids if name != "glm4" else (end,))
    whole = ids(renderer.extend([], [result]))
    assert ids(renderer.extend(tokens, [result])) == (whole[whole.index(end) + 1 :] if ended else whole)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("unit", ["<think>", "<", " ", "\n", "</s", "a", "é", "<<think>think>", '"', "▁"])
def test_time_grows_with_the_text(name: str, unit: str) -> None:
    renderer = renderer_of(name)

    def seconds(length: int) -> float:
        result = Message(role="tool", content=unit * (length // len(unit)))
        began = time.process_time()
        renderer.extend([], [result])
        return time.process_time() - began

    short = min(seconds(2_000) for _ in range(3))
    # Eight times the text takes about eight times as long, not 64 times.
    assert any(seconds(16_000) < 30 * short + 0.02 for _ in range(3))
