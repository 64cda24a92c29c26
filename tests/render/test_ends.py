"""What ends a turn: the template's own token, and others that a model's files list; inside of a turn none may stand."""

import json
from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import RenderError, UsageError
from agentrl.render.loading import load_tokenizer
from agentrl.render.renderer import Renderer
from agentrl.toolenv.dialects import get_dialect

from .conftest import MORE, ids, result, search, tokenizer_of

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


def saved(folder: Path, family: str, ends: Any, file: str = "generation_config.json", **template: str) -> Any:
    """A family's tokenizer, saved beside a model's file and loaded."""
    tokenizer = tokenizer_of(family, **template)
    tokenizer.save_pretrained(folder)
    spelled = [tokenizer.convert_tokens_to_ids(end) if isinstance(end, str) else end for end in ends]
    (folder / file).write_text(json.dumps({"eos_token_id": spelled}), encoding="utf-8")
    return load_tokenizer(folder)


@pytest.mark.parametrize(
    ("family", "other"),
    [("qwen3", "<|endoftext|>"), ("llama3", "<|eom_id|>"), ("gemma3", "<pad>"), ("smollm3", "<|end_of_text|>")],
)
@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_it_ends_a_turn(tmp_path: Path, family: str, other: str, file: str) -> None:
    """Sampling stops there, the text lacks it, and what follows is what follows the template's own end."""
    tokenizer = saved(tmp_path, family, [other], file)
    renderer, other_id = Renderer(tokenizer), tokenizer.convert_tokens_to_ids(other)
    assert other_id in renderer.stop_ids
    for answered_by, answer in (("user", MORE), ("tool", result("42"))):
        turn = renderer.turn("12 + 30", answered_by=answered_by)
        ended = [*turn[:-1], other_id]
        assert renderer.text(ended) == renderer.text(turn) == "12 + 30"
        assert ids(renderer.extend(ended, [answer])) == ids(renderer.extend(turn, [answer]))


def test_what_opens_the_next_message_is_written_behind_it(tmp_path: Path) -> None:
    """GLM's turns end with the token that opens the next one's."""
    tokenizer = saved(tmp_path, "glm4", ["<|endoftext|>", "<|user|>", "<|observation|>", "<|assistant|>"])
    renderer = Renderer(tokenizer)
    ended = [*renderer.turn("42")[:-1], tokenizer.convert_tokens_to_ids("<|assistant|>")]
    assert ended[-1] in renderer.stop_ids and renderer.text(ended) == "42"
    assert tokenizer.decode(ids(renderer.extend(ended, [MORE]))).startswith("<|user|>\nAnd times 3?")


def test_it_is_saved_with_the_tokenizer(tmp_path: Path) -> None:
    """A checkpoint of adapters alone, or an export, has the same ends; one that was recorded is not read again."""
    renderer = Renderer(saved(tmp_path, "qwen3", ["<|im_end|>", "<|endoftext|>"]))
    renderer.tokenizer.save_pretrained(tmp_path / "checkpoint")  # type: ignore[attr-defined]
    (tmp_path / "checkpoint" / "generation_config.json").write_text('{"eos_token_id": 0}', encoding="utf-8")
    written = (tmp_path / "checkpoint" / "tokenizer_config.json").read_bytes()
    again = load_tokenizer(tmp_path / "checkpoint")
    assert Renderer(again).stop_ids == renderer.stop_ids and len(renderer.stop_ids) == 2
    again.save_pretrained(tmp_path / "resumed")
    assert (tmp_path / "resumed" / "tokenizer_config.json").read_bytes() == written


@pytest.mark.parametrize("ends", [[], ["<|im_end|>"], [70], ["<|im_end|>", 10**6]])
def test_letters_and_the_ends_that_are_known_add_nothing(tmp_path: Path, ends: list[Any]) -> None:
    """Llama's class has 2 for a default, which is a letter elsewhere."""
    tokenizer = saved(tmp_path, "qwen3", ends)
    assert Renderer(tokenizer).stop_ids == (tokenizer.eos_token_id,)
    assert "end_token_ids" not in tokenizer.init_kwargs


def test_a_file_that_lists_no_tokens_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no tokenizer can be loaded from .* \(generation_config\.json"):
        saved(tmp_path, "qwen3", [["<|im_end|>"]])


def test_an_end_inside_of_turns_is_refused_with_its_file(tmp_path: Path) -> None:
    thinking = "{% if m.thinking %}{{ m.thinking }}</think>{% endif %}{{ m.content }}<|im_end|>"
    with pytest.raises(RenderError, match=r"'</think>', which ends .*: take it out of generation_config\.json"):
        Renderer(saved(tmp_path, "qwen3", ["</think>"], template=CHAT.replace("TURN", thinking)))


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
