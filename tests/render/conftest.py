"""Tokenizers and chat templates that share the traps of well-known model families; all of them small and our own.

What each template is a trap for stands at the top of its file in ``tests/render/templates``.
"""

import copy
import datetime
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from agentrl.render.renderer import Renderer
from agentrl.toolenv.tools.function import tool
from agentrl.types import Message, Segment

from ..conftest import tiny_tokenizer

TEMPLATES = Path(__file__).with_name("templates")
TEXTS = [
    "system user assistant tool model ipython Be helpful. Day: Mode: /think /no_think 01 Jan 2025 January",
    'What is 12 + 30? And times 3? Let me see: {"content": 42, "call_id": "call00000"} [INST] x [/INST]\n\n<<SYS>>\n',
    "print(12 + 30) 42 Traceback: ValueError é 你好",
] * 4
SYSTEM = Message(role="system", content="Be helpful.")
USER = Message(role="user", content="What is 12 + 30?")
MORE = Message(role="user", content="And times 3?")


def result(content: str, number: int = 0, *, name: str = "python") -> Message:
    return Message(role="tool", content=content, name=name, tool_call_id=f"call_{number}")


@tool
def search(query: str) -> str:
    """Search."""
    return query


def ids(segments: Sequence[Segment]) -> list[int]:
    return [token for segment in segments for token in segment.token_ids]


def whole(renderer: Renderer, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
    """What the tokenizer makes of the whole conversation by itself."""
    tokenizer: Any = renderer.tokenizer
    day = datetime.datetime(2025, 1, 1)
    rows = [{**m, "tool_call_id": f"call0000{m['tool_call_id'][-1]}"} if m["role"] == "tool" else m for m in messages]
    return tokenizer.apply_chat_template(
        rows, add_generation_prompt=True, return_dict=False, strftime_now=day.strftime, **options
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What is particular to a family's tokenizer."""

    control: Sequence[str]
    """Special tokens: never found in text that is tokenized with ``split_special_tokens``."""
    spoken: Sequence[str] = ()
    """Added tokens that are not special: that option does not keep them from being found."""
    plain: Sequence[str] = ()
    """Added tokens that are text as any other."""
    eos: str
    """Ends a text; not a turn in every family."""
    bos: str | None = None
    """Put before every text by the tokenizer too."""
    pieces: str = "bytes"
    """How text becomes tokens: bytes, or words that begin with a space, of which the schemes of Metaspace are kinds."""
    stops: Sequence[str] = ()
    """What ends the assistant's turn, where a test asks for it."""


_LISTED = tomllib.loads(Path(__file__).with_name("families.toml").read_text(encoding="utf-8"))
FAMILIES: Mapping[str, Family] = {name: Family(**fields) for name, fields in _LISTED.items()}


def byte_tokens(control: Sequence[str], pattern: str, texts: Sequence[str], *, size: int, words: bool) -> Any:
    """Tokens of bytes, learned from texts that are split at a pattern, and into words as well."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)
    made.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(control), initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(texts, trainer)
    return made


def _words(control: Sequence[str], scheme: str) -> Any:
    """Words that carry the space before them, and bytes for letters that are in no word."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = pre_tokenizers.Metaspace()
    learned.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=300, show_progress=False))
    model = json.loads(learned.to_str())["model"]
    spelled = [*control, *(f"<0x{byte:02X}>" for byte in range(256)), *model["vocab"]]
    vocabulary = {token: number for number, token in enumerate(spelled)}
    merges = [tuple(merge) for merge in model["merges"]]
    made = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, unk_token=control[0]))
    strip = [decoders.Strip(" ", 1, 0)] if scheme != "never" else []
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    if scheme == "legacy":
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    return made


def make_tokenizer(family: Family, template: str) -> Any:
    from tokenizers import AddedToken, processors
    from transformers import PreTrainedTokenizerFast

    if family.pieces == "bytes":
        made = byte_tokens(family.control, r"\d|\n", TEXTS, size=400, words=True)
    else:
        made = _words(family.control, family.pieces)
    made.add_special_tokens([AddedToken(token, normalized=False) for token in family.control])
    made.add_tokens([AddedToken(token, normalized=False) for token in (*family.spoken, *family.plain)])
    if family.bos:
        pairs = [(family.bos, made.token_to_id(family.bos))]
        made.post_processor = processors.TemplateProcessing(single=f"{family.bos} $A", special_tokens=pairs)
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        eos_token=family.eos,
        bos_token=family.bos,
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


@cache
def tokenizer_of(name: str, template: str | None = None, pieces: str | None = None) -> Any:
    """The tokenizer of a family, with its own template or another one."""
    source = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8") if template is None else template
    return make_tokenizer(replace(FAMILIES[name], pieces=pieces or FAMILIES[name].pieces), source)


@cache
def renderer_of(name: str, **args: object) -> Renderer:
    """The renderer of a family."""
    return Renderer(tokenizer_of(name), args)


def templated(template: Any) -> Any:
    """The tiny tokenizer with another chat template."""
    changed = copy.deepcopy(tiny_tokenizer())
    changed.chat_template = template
    return changed


class Wrapped:
    """Passes everything on to another tokenizer."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __call__(self, text: str, **options: Any) -> Any:
        return self.inner(text, **options)
