"""Where sampling would stop inside of a turn, behind its thinking, the template is refused when a renderer is made."""

from typing import Any

import pytest

from agentrl.errors import RenderError
from agentrl.render.renderer import Renderer
from agentrl.toolenv.dialects import get_dialect

from .conftest import search, tokenizer_of

CHAT = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}TURN{% else %}{{ m.content }}<|im_end|>{% endif %}
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
FIELD = "{% if m.THOUGHT %}<think>{{ m.THOUGHT }}CLOSE{% endif %}{{ m.content }}<|im_end|>"
SPLIT = "{% set parts = m.content.split('</think>') %}{{ parts | join('CLOSE') }}<|im_end|>"
LIST = """{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}
{{- part.thinking + 'CLOSE' if part.type == 'thinking' else part.text }}{% endfor %}{% endif %}<|im_end|>"""
BEFORE_CALLS = """{% if m.tool_calls and m.thinking %}{{ m.thinking }}CLOSE{{ m.tool_calls[0].function.name }}
{%- else %}{{ m.content }}{% endif %}<|im_end|>"""
EOS = "{% if m.thinking %}{{ m.thinking }}CLOSE{% endif %}{{ m.content }}<|endoftext|>"
TURNS = [
    *(FIELD.replace("THOUGHT", name) for name in ("reasoning_content", "reasoning", "thinking")),
    *(SPLIT, LIST, BEFORE_CALLS),
]
CALLING = "{{ m.content }}{% if m.tool_calls %}CLOSE{{ m.tool_calls[0].function.name }}{% endif %}<|im_end|>"


def make(turn: str, close: str, **options: Any) -> Renderer:
    """The renderer of a template whose assistant speaks so."""
    return Renderer(tokenizer_of("qwen3", CHAT.replace("TURN", turn.replace("CLOSE", close))), **options)


@pytest.mark.parametrize("turn", TURNS)
def test_a_stop_behind_the_thinking_is_refused(turn: str) -> None:
    assert make(turn, "</think>").stop_ids
    for close in ("<|im_end|>", "<|im_end|>\\n<|im_start|>assistant\\n", "</think><|im_end|>"):
        with pytest.raises(RenderError, match=r"writes '<\|im_end\|>', which ends .* inside of turns too"):
            make(turn, close)


def test_the_end_of_a_text_counts_too() -> None:
    """Sampling stops at ``eos_token`` as well, even where turns end with another token."""
    with pytest.raises(RenderError, match=r"writes '<\|im_end\|>'"):
        make(EOS, "<|im_end|>")


def test_a_stop_before_a_call_is_refused_where_the_template_describes_tools() -> None:
    """Calls of other dialects stand inside of the content."""
    close, tools = "<|im_end|>\n<|im_start|>assistant\n", get_dialect("native-hermes", [search]).template_tools
    assert make(CALLING, close).stop_ids and make(CALLING, "<tool_call>", tools=tools).stop_ids
    with pytest.raises(RenderError, match="before a call"):
        make(CALLING, close, tools=tools)
