"""Tokens where a content meets what the template writes: those of the template's whole rendering."""

from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.render.renderer import Renderer
from agentrl.toolenv.dialects import get_dialect
from agentrl.types import Message

from .conftest import byte_tokens, ids, renderer_of, result, search, whole

NAMES = ["qwen2_5", "llama3", "glm4", "deepseek_v3", "smollm3", "mistral"]
PIECES = [
    *(".", ".\n", "\n", "\n\n", " ", "  ", "12", "+", "(", '"', "\\", ">", "<", "é", "你好", "🙂", "help", " user"),
    "\t",
]
CONTENTS = st.lists(st.sampled_from(PIECES), max_size=6).map("".join)
FULL = """{% for m in messages %}{{ '<|im_start|>' + m.role + ':\\n' + m.content }}
{{- '' if m.role == 'assistant' else DESCRIBED '.\\n' }}<|im_end|>{% endfor %}"""
OPEN = "{% if add_generation_prompt %}<|im_start|>assistant:\n{% endif %}"
TOOLS = r"'.\n\n# Tools\n' + tools | tojson if tools and m.role == 'system' else"


@cache
def greedy(template: str = FULL.replace("DESCRIBED", "") + OPEN) -> Any:
    """A tokenizer that makes one token of everything between two letters or digits: every border has one of its own."""
    from transformers import PreTrainedTokenizerFast

    control = ["<|im_start|>", "<|im_end|>"]
    blanks = [f"x{a}{b}x" for a in [".", ":\n", "\n", " ", '"'] for b in [".\n", "\n", "\n\n", " ", '"', "."]]
    made = byte_tokens(control, r"\w+|[^\w]+", blanks * 3, size=600, words=False)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=control[1], chat_template=template)


@pytest.mark.parametrize("name", [*NAMES, "greedy"])
@given(text=CONTENTS, other=CONTENTS)
def test_any_content(name: str, text: str, other: str) -> None:
    """Prompt and answers alike, where no content is empty or spells a control token."""
    renderer = Renderer(greedy()) if name == "greedy" else renderer_of(name)
    opening = [Message(role="system", content=f"a{text}"), Message(role="user", content=f"{other}b")]
    opening = opening[1:] if name == "mistral" else opening  # which moves its system message
    answer = result(f"{text}c{other}")
    prompt = list(renderer.prompt(opening).token_ids)
    assert prompt == whole(renderer, opening)
    turn = renderer.turn("42", answered_by="tool")
    segments = renderer.extend(turn, [answer])
    assert [*prompt, *turn, *ids(segments)] == whole(
        renderer, [*opening, Message(role="assistant", content="42"), answer]
    )
    if name != "mistral" and "\\" not in text + other and '"' not in text + other:  # quoted there
        (content,) = [segment for segment in segments if segment.source == "tool"]
        shown = renderer.tokenizer.decode(content.token_ids).replace("\\n", "\n").replace("\\t", "\t")
        assert answer["content"].strip() in shown


def test_a_token_that_reaches_over_a_border_is_the_contents() -> None:
    renderer = Renderer(greedy())
    answers = [result("\n42."), result(""), Message(role="user", content="Why.")]
    segments = renderer.extend(renderer.turn("x"), answers)
    assert [(s.source, renderer.tokenizer.decode(s.token_ids)) for s in segments] == [
        ("template", "<|im_start|>tool"),
        ("tool", ":\n\n42..\n"),
        ("template", "<|im_end|><|im_start|>tool:\n.\n<|im_end|><|im_start|>user:\n"),
        ("prompt", "Why..\n"),
        ("template", "<|im_end|><|im_start|>assistant:\n"),
    ]


def test_contents_that_stand_together_share_a_border() -> None:
    """Folded into one user message, the token between two contents belongs to the first."""
    strict = "{% if 'tool' in messages | map(attribute='role') %}{{ raise_exception('no') }}{% endif %}"
    strict += FULL.replace("DESCRIBED", "") + OPEN
    renderer = Renderer(greedy(strict))
    answers = [Message(role="tool", content="42."), Message(role="user", content="\nWhy")]
    segments = renderer.extend(renderer.turn("x"), answers)
    as_one = [Message(role="user", content="42.\n\n\nWhy")]
    assert ids(segments) == ids(renderer.extend(renderer.turn("x"), as_one))
    shown = [(s.source, renderer.tokenizer.decode(s.token_ids)) for s in segments if s.source != "template"]
    assert shown == [("tool", "42.\n\n"), ("prompt", "\nWhy")]


def test_instructions_before_the_templates_tools() -> None:
    """A full stop and the blank line behind it are one token in most vocabularies."""
    tools = get_dialect("native-hermes", [search]).template_tools
    renderer = Renderer(greedy(FULL.replace("DESCRIBED", TOOLS) + OPEN), tools=tools)
    opening = [Message(role="system", content="Be brief\n"), Message(role="user", content="Why?")]
    assert list(renderer.prompt(opening).token_ids) == whole(renderer, opening, tools=list(tools))
