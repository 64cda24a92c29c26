"""Tokenizers that lose text, folders without a tokenizer, and templates that come by name."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import RenderError, UsageError
from agentrl.models.tiny import CHAT_TEMPLATE
from agentrl.render.loading import load_tokenizer
from agentrl.render.renderer import Renderer
from agentrl.toolenv.dialects import get_dialect

from .conftest import USER, Wrapped, ids, result, search, tokenizer_of

RESULT = "('<tool_response>' + message.content + '</tool_response>' if message.role == 'tool' else message.content)"
TOOL_USE = "{% for t in tools %}{{ t | tojson }}{% endfor %}" + CHAT_TEMPLATE.replace("message['content']", RESULT)


class Losing(Wrapped):
    """Does not write some letters."""

    def __init__(self, inner: Any, lost: str) -> None:
        super().__init__(inner)
        self.lost = lost

    def __call__(self, text: str, **options: Any) -> Any:
        return self.inner(text.translate({ord(letter): None for letter in self.lost}), **options)


def test_a_mistyped_folder_does_not_wait_for_a_hub_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UsageError, match=r"there is no folder 'nowhere' here, and the hub at .* can't be reached"):
        load_tokenizer("nowhere")


@pytest.mark.parametrize("lost", [" ", "\n", "\t", "é", "à", "你", "🙂", "5", ","])
def test_a_tokenizer_that_loses_text_is_refused(lost: str) -> None:
    with pytest.raises(RenderError, match=r"not give back what it writes: .* comes back as .*; put the model's own"):
        Renderer(Losing(tokenizer_of("qwen3"), lost))


def test_the_wrong_kind_of_tokenizer_is_refused(tmp_path: Path) -> None:
    """DeepSeek's folder names a kind that transformers knows to replace only where config.json names the model."""
    tokenizer_of("deepseek_v3").save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**settings, "tokenizer_class": "LlamaTokenizerFast"}), encoding="utf-8")
    with pytest.raises(RenderError, match=r"put the model's own config\.json"):
        Renderer(load_tokenizer(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v3"}', encoding="utf-8")
    assert Renderer(load_tokenizer(tmp_path)).prompt([USER]) == Renderer(tokenizer_of("deepseek_v3")).prompt([USER])


@pytest.mark.parametrize("model", ["qwen2", "qwen3", "llama"])
def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path, model: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model}), encoding="utf-8")
    with pytest.raises(UsageError, match=f"no tokenizer can be loaded from '{tmp_path}': give the folder of one"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", "{}"),
        ("tokenizer.json", "[" * 100_000),
        ("tokenizer_config.json", "[]"),
        ("config.json", "[]"),
        ("config.json", '{"model_type": "qwen3", "hidden_size": "64"}'),
    ],
)
def test_files_of_anyones_are_refused_in_a_sentence(tmp_path: Path, file: str, content: str) -> None:
    tokenizer_of("qwen3").save_pretrained(tmp_path)
    (tmp_path / file).write_text(content, encoding="utf-8")
    with pytest.raises(UsageError, match=r"no tokenizer can be loaded from .* \(\w"):
        load_tokenizer(tmp_path)


def test_a_named_template_is_chosen_once() -> None:
    """Tools in the prompt choose ``tool_use``, and so results are written by it too; without tools it is the other."""
    named: Any = {"default": CHAT_TEMPLATE, "tool_use": TOOL_USE}
    tools = get_dialect("native-hermes", [search]).template_tools
    by_name = copy.deepcopy(tokenizer_of("qwen3", CHAT_TEMPLATE))
    by_name.chat_template = named
    for chosen, schemas in ((TOOL_USE, tools), (CHAT_TEMPLATE, ())):
        alone, chosen_of_two = Renderer(tokenizer_of("qwen3", chosen), tools=schemas), Renderer(by_name, tools=schemas)
        assert chosen_of_two.prompt([USER]) == alone.prompt([USER])
        assert chosen_of_two.extend([], [result("42")]) == alone.extend([], [result("42")])
        shown = by_name.decode(ids(chosen_of_two.extend([], [result("42")])))
        assert ("<tool_response>42</tool_response>" in shown) == bool(schemas)


def test_no_template_of_the_name_that_is_needed() -> None:
    by_name = copy.deepcopy(tokenizer_of("qwen3", CHAT_TEMPLATE))
    by_name.chat_template = {"rag": CHAT_TEMPLATE}
    with pytest.raises(RenderError, match=r"refuses these messages: .*rag"):
        Renderer(by_name)


def test_a_tokenizer_that_was_loaded_is_saved_as_it_was(tmp_path: Path) -> None:
    tokenizer_of("qwen3").save_pretrained(tmp_path / "first")
    load_tokenizer(tmp_path / "first").save_pretrained(tmp_path / "second")
    saved, saved_again = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("first", "second")
    )
    assert saved == saved_again
