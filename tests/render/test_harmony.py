"""gpt-oss's channels: where a turn ends, what its thinking, answer and calls are, and what follows them."""

from collections.abc import Mapping
from typing import Any

import pytest

from agentrl.render import harmony
from agentrl.render.renderer import Renderer
from agentrl.toolenv.dialects import get_dialect, resolve_dialect

from ..toolenv.dialects.conftest import python
from .conftest import MORE, SYSTEM, USER, ids, result, tokenizer_of, whole

NEXT = "<|end|><|start|>assistant"
THOUGHT = "<|channel|>analysis<|message|>Let me see."
FINAL = "<|channel|>final<|message|>"
CALL = ' to=functions.python<|channel|>commentary json<|message|>{"code": "12 + 30"}'
LATE = '<|channel|>commentary to=functions.python <|constrain|>json<|message|>{"code": "12 + 30"}'


DIALECT = get_dialect("native-harmony", [python])


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    """Its template, with gpt-oss's control tokens, describes a tool."""
    return Renderer(tokenizer_of("harmony"), tools=DIALECT.template_tools)


def tokens(text: str) -> list[int]:
    return tokenizer_of("harmony")(text, add_special_tokens=False).input_ids


def test_thinking_and_calls_are_followed_as_the_template_does(renderer: Renderer) -> None:
    """Two calls with thinking before them, as the model samples them, against the template's own rendering."""
    called = {"type": "function", "function": {"name": "python", "arguments": {"code": "12 + 30"}}}
    messages: list[Mapping[str, Any]] = [SYSTEM, USER]
    written = list(renderer.prompt([SYSTEM, USER]).token_ids)
    for output in ("42", "\n\n\u4f60\u597d."):
        turn = tokens(THOUGHT + NEXT + CALL + "<|call|>")
        segments = renderer.extend(turn, [result(output)])
        assert {s.source for s in segments} == {"template", "tool"}
        written += [*turn, *ids(segments)]
        turn_message = {"role": "assistant", "content": "", "thinking": "Let me see.", "tool_calls": [called]}
        messages += [turn_message, result(output)]
        assert written == whole(renderer, messages, tools=list(DIALECT.template_tools))


@pytest.mark.parametrize(
    ("sampled", "read"),
    [
        (f"{THOUGHT}{NEXT}{FINAL}42<|return|>", "<think>Let me see.</think>42"),
        (f"{FINAL}42<|return|>", "42"),
        (f"{THOUGHT}", "<think>Let me see."),
        (f"{THOUGHT}<|return|>", "<think>Let me see."),
        (f"{THOUGHT}<|end|>", "<think>Let me see.</think>"),
        (f"<|channel|>commentary<|message|>I'll look.{NEXT}{CALL}<|call|>", "I'll look." + CALL),
        (f"{THOUGHT}{NEXT}{LATE}<|call|>", "<think>Let me see.</think>" + LATE),
        ("42<|return|>", "42"),
        ("<|channel|>fi", "<|channel|>fi"),
        (f"{FINAL}a<|message|>b<|channel|>c<|return|>", "a<|message|>b<|channel|>c"),
        ("", ""),
    ],
)
def test_a_turn_is_read_in_the_words_that_environments_know(renderer: Renderer, sampled: str, read: str) -> None:
    assert renderer.text(tokens(sampled)) == read


@pytest.mark.parametrize("call", [CALL, LATE, LATE.replace("functions.", ""), LATE.replace(" <|constrain|>json", "")])
def test_a_call_is_read(call: str) -> None:
    (read,) = DIALECT.parse(f"<think>{CALL}</think>Well.{call}")
    assert (read.name, read.arguments, read.error) == ("python", {"code": "12 + 30"}, "")


@pytest.mark.parametrize("body", ["", "12 + 30", "[5]", '{"code": '])
def test_a_call_that_can_not_be_read_says_why(body: str) -> None:
    (read,) = DIALECT.parse(f" to=functions.python<|channel|>commentary json<|message|>{body}")
    assert read.name == "python" and read.error


def test_control_tokens_in_a_body_are_text(renderer: Renderer) -> None:
    body = tokenizer_of("harmony")("a<|end|>b", add_special_tokens=False, split_special_tokens=True).input_ids
    assert renderer.text([*tokens(FINAL), *body, renderer.stop_ids[0]]) == "a<|end|>b"


GOLD = DIALECT.render("python", {"code": "<|message|> to=x <|end|>"})


@pytest.mark.parametrize("text", ["42", "<think>Hm.</think>42", "<|end|><|return|>", "", GOLD])
def test_a_gold_turn_has_the_tokens_that_a_model_would_sample(renderer: Renderer, text: str) -> None:
    turn = renderer.turn(text, answered_by="tool", marks=DIALECT.marks)
    call = text.startswith(harmony.RECIPIENT)
    assert turn[-1] == renderer.stop_ids[call] and not set(turn[:-1]) & set(renderer.stop_ids)
    assert renderer.tokenizer.decode(turn) == (f"{text}<|call|>" if call else f"{FINAL}{text}<|return|>")
    assert renderer.text(turn) == text and DIALECT.parse(renderer.text(turn)) == DIALECT.parse(text)


def test_results_of_a_call_in_other_words_are_the_users(renderer: Renderer) -> None:
    """Where the answer's channel held a call of another dialect, no call of the template's own precedes the results."""
    turn = renderer.turn("```python\n12 + 30\n```", answered_by="tool")
    text = renderer.tokenizer.decode(ids(renderer.extend(turn, [result("42"), MORE])))
    assert text == "<|start|>user<|message|>42\n\nAnd times 3?<|end|><|start|>assistant"


def test_a_turn_that_was_cut_off_is_closed_as_the_template_closes_a_message(renderer: Renderer) -> None:
    cut = tokens(THOUGHT)
    assert renderer.tokenizer.decode(ids(renderer.extend(cut, [MORE]))) == (
        "<|end|><|start|>user<|message|>And times 3?<|end|><|start|>assistant"
    )


def test_the_form_is_found() -> None:
    assert resolve_dialect("native", tokenizer_of("harmony")) == "native-harmony"
