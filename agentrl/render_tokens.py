"""Text to tokens, piece by piece: as the tokenizer would write the whole, and text never becomes a control token."""

import functools
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from agentrl.errors import RenderError

IN_TEXT = -1
"""Stands for the token before a piece, where that is some token of a text."""
_CUTS = 4
"""How often a text that still spells a control token is cut, before it is written letter by letter."""


class TextTokenizer(Protocol):
    """What is needed of a Hugging Face tokenizer to write and read text."""

    @property
    def eos_token_id(self) -> Any:
        """The token that ends a text, or a turn."""
        ...

    @property
    def unk_token_id(self) -> Any:
        """The token for what can't be written."""
        ...

    @property
    def added_tokens_decoder(self) -> Any:
        """The tokens that are not found by merging, by id."""
        ...

    def get_vocab(self) -> Any:
        """The id of every token."""
        ...

    def __call__(self, text: str, **options: Any) -> Any:
        """Tokenize a text."""
        ...

    def convert_ids_to_tokens(self, ids: Any) -> Any:
        """A token as the vocabulary spells it."""
        ...

    def decode(self, token_ids: Any, **options: Any) -> Any:
        """Turn ids back into text."""
        ...


class TextTokens:
    """Writes pieces of one text.

    Some tokenizers, such as Llama 2's and Mistral's, put a space before every text they are given. A piece from the
    middle is then written after a letter that merges with nothing, whose tokens are taken away again.

    Args:
        tokenizer: writes whole texts.

    Raises:
        RenderError: the tokenizer puts a space before every text, and there is no such letter.
    """

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        added: Mapping[int, object] = tokenizer.added_tokens_decoder
        # A blank, or a single letter, controls nothing although some tokenizers list a few.
        spelled = {number: str(token) for number, token in added.items() if len(str(token).strip()) > 1}
        self._by_text = {text: number for number, text in spelled.items()}
        self.control = frozenset(spelled) | ({int(tokenizer.eos_token_id)} & set(added))
        self._forbidden = self.control - {tokenizer.unk_token_id}
        self._anchor = "" if self._decode([*self._raw("a"), *self._raw("a")]) == "aa" else self._find_anchor()
        # Whether it also puts a space behind every control token.
        control = next(iter(spelled.values()), "")
        self._spaced = bool(control) and self._raw(f"{control}a")[1:] == self._raw("a")

    def template(self, text: str, after: int | None) -> list[int]:
        """The tokens of a template's text, control tokens included.

        Args:
            text: a piece.
            after: the token before it; None at the very beginning.
        """
        return self._placed(text, after, plain=False)

    def plain(self, text: str, after: int | None) -> list[int]:
        """The tokens of a text that may spell anything; none of them is a control token.

        Args:
            text: a piece.
            after: the token before it; None at the very beginning.
        """
        # A lone surrogate can't be written as UTF-8: it becomes a question mark.
        text = text.encode("utf-8", errors="replace").decode("utf-8")
        ids = self._placed(text, after, plain=True)
        return ids if self._forbidden.isdisjoint(ids) else list(self._disarmed(text, after))

    def spoken(self, text: str, after: int | None, marks: Sequence[str]) -> list[int]:
        """The tokens of a text as a model says it: plain but for its marks, each a token where there is one for it.

        Args:
            text: a turn.
            after: the token before it; None at the very beginning.
            marks: such as ``<tool_call>``.
        """
        own = [re.escape(mark) for mark in marks if mark in self._by_text]
        ids: list[int] = []
        for place, part in enumerate(re.split(f"({'|'.join(own)})", text) if own else [text]):
            ids += [self._by_text[part]] if place % 2 else self.plain(part, ids[-1] if ids else after)
        return ids

    def text(self, ids: Sequence[int], after: int = IN_TEXT) -> str:
        """The text of tokens from the middle of a conversation.

        Args:
            ids: the tokens.
            after: the token before them.
        """
        before = [] if self._spaced and after in self.control else self._anchor_ids
        return self._decode([*before, *ids])[len(self._decode(before)) :]

    def _disarmed(self, text: str, after: int | None) -> Iterator[int]:
        """Tokens of ``text``, cut apart wherever it spells a control token that the tokenizer would write as one."""
        parts = [(text, 0)]
        while parts:
            part, cuts = parts.pop()
            ids = self._placed(part, after, plain=True)
            if not self._forbidden.isdisjoint(ids):
                if cuts < _CUTS:
                    parts += [(piece, cuts + 1) for piece in reversed(self._cut(part))]
                    continue
                ids = [token for letter in part for token in self._letter(letter)]
            yield from ids
            after = ids[-1] if ids else after

    def _cut(self, text: str) -> list[str]:
        """The pieces of ``text``, each control token's first letter apart from the others."""
        found = self._tokenizer(text, add_special_tokens=False, split_special_tokens=True, return_offsets_mapping=True)
        spans = zip(found.input_ids, found.offset_mapping, strict=True)
        places = [0, *(start + 1 for token, (start, _) in spans if token in self._forbidden), len(text)]
        return [text[start:end] for start, end in itertools.pairwise(places) if end > start]

    def _letter(self, letter: str) -> list[int]:
        ids = self._placed(letter, IN_TEXT, plain=True)
        return ids if self._forbidden.isdisjoint(ids) else self._raw("?", plain=True)

    def _placed(self, text: str, after: int | None, *, plain: bool) -> list[int]:
        if not text or after is None or not self._anchor or (self._spaced and after in self.control):
            return self._raw(text, plain=plain) if text else []
        return self._raw(self._anchor + text, plain=plain)[len(self._anchor_ids) :]

    def _raw(self, text: str, *, plain: bool = False) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False, split_special_tokens=plain).input_ids)

    def _decode(self, ids: Sequence[int]) -> str:
        options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        return str(self._tokenizer.decode(list(ids), **options))

    @functools.cached_property
    def _anchor_ids(self) -> list[int]:
        return self._raw(self._anchor) if self._anchor else []

    def _find_anchor(self) -> str:
        vocabulary = list(self._tokenizer.get_vocab())
        for letter in map(chr, (10, *range(1, 127))):
            ids = self._raw(letter)
            spelled = str(self._tokenizer.convert_ids_to_tokens(ids[-1]))
            merges = any(0 <= token.find(spelled) < len(token) - len(spelled) for token in vocabulary)
            if not merges and self._tokenizer.unk_token_id not in ids:
                return letter
        raise RenderError(
            "the tokenizer puts a space before every text and has no letter that merges with nothing, so a piece of a "
            "conversation can't be tokenized apart: use a tokenizer with add_prefix_space=False"
        )
