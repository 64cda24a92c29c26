"""Text to tokens, piece by piece: as in a tokenization of the complete text, and text never becomes a control token."""

import bisect
import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from agentrl.errors import RenderError

_T = TypeVar("_T")
Owned = tuple[_T, int | None]
"""An item and the index of the message that owns it; the template's own items have no owner (None)."""
Span = tuple[int, int, int]
"""A token, and the offsets in the text where it begins and ends."""
IN_TEXT = -1
"""Stands for the token before a piece where that is any token of text."""
_CUTS = 4
"""How often a text that still spells a control token is cut before it is written letter by letter."""
_MARKS = re.compile(r"<[|｜].*[|｜]>|</?(?:think|tool|arg)[\w:]*>")  # noqa: RUF001  # DeepSeek's bars are wide
"""Control tokens that some vocabularies do not list as special."""
_SAMPLE = "Read  this\n\n\tback: d\u00e9j\u00e0, 12 345; \u4f60\u597d, \U0001f642."
"""A round-trip test: spaces, line ends, accents, digits, Chinese and an emoji."""


class ChatTokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used here, with its chat template."""

    eos_token_id: Any
    """The token that ends a text, or a turn."""
    pad_token_id: int | None
    """The padding token."""
    unk_token_id: Any
    """The token for text outside the vocabulary."""
    all_special_tokens: list[str]
    """Spellings of the special tokens."""
    all_special_ids: list[int]
    """Their ids."""
    added_tokens_decoder: Any
    """The tokens added to the merged vocabulary, by id."""
    init_kwargs: dict[str, Any]
    """Settings that are saved with it, among them ``end_token_ids``, as :func:`load_tokenizer` records them."""
    chat_template: Any
    """The chat template's source."""

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        """Render a conversation as one text."""
        ...

    def get_vocab(self) -> Any:
        """Return the id of every token."""
        ...

    def __call__(self, text: str, **options: Any) -> Any:
        """Tokenize a text."""
        ...

    def convert_ids_to_tokens(self, ids: Any) -> Any:
        """Look up the vocabulary's spelling of tokens."""
        ...

    def decode(self, token_ids: Any, **options: Any) -> Any:
        """Turn ids back into text."""
        ...


class TextTokens:
    """Tokenizes pieces of one text.

    Some tokenizers, such as Llama 2's and Mistral's, put a space before every text. A piece from the middle is then
    tokenized after an anchor, a letter that merges with nothing, whose tokens are dropped again.

    Control tokens are the special ones, those of :data:`_MARKS`, and those in ``written``. Other tokens that were added
    to the vocabulary, such as Gemma's HTML tags, are text like any other.

    Args:
        tokenizer: writes whole texts.
        written: the source of its chat template, and a dialect's marks.

    Raises:
        RenderError: the tokenizer does not decode its own tokens to the same text; or it puts a space before every text
            and has no anchor.
    """

    def __init__(self, tokenizer: ChatTokenizer, written: str = "") -> None:
        self._tokenizer = tokenizer
        self._check_reading()
        added: Mapping[int, Any] = tokenizer.added_tokens_decoder
        # Some tokenizers list blanks and single letters here, which control nothing; "▁" stands for a space.
        spelled = {number: str(token) for number, token in added.items() if len(str(token).strip("▁ \n\r\t")) > 1}
        self._by_text = {text: number for number, text in spelled.items()}
        self.control = frozenset(
            number
            for number, text in spelled.items()
            if added[number].special or _MARKS.fullmatch(text) or text in written
        ) | ({int(tokenizer.eos_token_id)} & set(added))
        self._forbidden = self.control - {tokenizer.unk_token_id}
        # Two texts whose tokens decode to "aa" were given no space, so pieces need no anchor.
        self._anchor = "" if self._decode([*self._raw("a"), *self._raw("a")]) == "aa" else self._find_anchor()
        # True if the tokenizer also puts a space after every control token.
        control = next(iter(spelled.values()), "")
        self._spaced = bool(control) and self._raw(f"{control}a")[1:] == self._raw("a")

    def parts(self, text: str) -> list[str | int]:
        """Cut a template's text at its control tokens and the end-of-text token, which become ids."""
        ends = self.control | {self._tokenizer.eos_token_id}
        parts: list[str | int] = []
        at = 0
        for token, start, end in self._spans(text, plain=False):
            if token in ends:
                parts += [text[at:start], token]
                at = end
        return [part for part in (*parts, text[at:]) if part != ""]

    def write(self, pieces: Iterable[Owned[str | int]], after: int | None) -> list[Owned[int]]:
        """Tokenize pieces; each token has its piece's owner.

        The text between two control tokens is tokenized at once, as in the complete text: a token that covers
        several pieces belongs to the first one with an owner. No token of a text is a control token.

        Args:
            pieces: texts and control tokens; those of the template have no owner.
            after: the token before them; None at the very beginning.
        """
        written: list[Owned[int]] = []
        for control, run in itertools.groupby(pieces, lambda piece: isinstance(piece[0], int)):
            if control:
                written += [(int(token), owner) for token, owner in run]
            else:
                texts = [(str(text), owner) for text, owner in run]
                written += self._run(texts, written[-1][0] if written else after)
        return written

    def marked(self, text: str, marks: Sequence[str]) -> list[str | int]:
        """Cut a text at its marks; a mark that the vocabulary has becomes a token.

        Args:
            text: a turn.
            marks: such as ``<tool_call>``.
        """
        own = [re.escape(mark) for mark in marks if mark in self._by_text]
        cut = re.split(f"({'|'.join(own)})", text) if own else [text]
        return [self._by_text[part] if index % 2 else part for index, part in enumerate(cut)]

    def text(self, ids: Sequence[int], after: int = IN_TEXT) -> str:
        """Decode tokens from the middle of a conversation.

        Args:
            ids: the tokens.
            after: the token before them.
        """
        # Decoding drops a text's first space, so the anchor goes before the tokens and its text is cut off again.
        before = [] if self._spaced and after in self.control else self._anchor_ids
        return self._decode([*before, *ids])[len(self._decode(before)) :]

    def _check_reading(self) -> None:
        # strip, because the tokenizer may put a space before every text.
        back = self._decode(self._raw(_SAMPLE)).strip()
        if back != _SAMPLE:
            raise RenderError(
                f"the tokenizer does not give back what it writes: {_SAMPLE!r} comes back as {back!r}; put the model's "
                "own config.json and tokenizer_config.json beside its tokenizer.json, so that transformers makes the "
                "right kind of tokenizer, or use another one"
            )

    def _run(self, texts: Sequence[Owned[str]], after: int | None) -> Iterator[Owned[int]]:
        # UTF-8 can't encode a lone surrogate: it becomes a question mark.
        whole = "".join(text for text, _ in texts).encode("utf-8", errors="replace").decode("utf-8")
        edges = list(itertools.accumulate(len(text) for text, _ in texts))
        for token, start, end in self._disarmed(whole, after):
            touched = texts[bisect.bisect(edges, start) : bisect.bisect_left(edges, end) + 1]
            yield token, next((owner for _, owner in touched if owner is not None), None)

    def _disarmed(self, text: str, after: int | None, at: int = 0, cuts: int = 0) -> Iterator[Span]:
        """Tokenize ``text``, cut wherever the tokenizer would write a control token that the text spells.

        Args:
            text: a piece.
            after: the token before it.
            at: its offset in the whole text.
            cuts: how often the whole was cut.
        """
        spans = self._in_context(text, after)
        cut_at = [start + 1 for token, start, _ in spans if token in self._forbidden]
        if not cut_at:
            yield from ((token, at + start, at + end) for token, start, end in spans)
        elif cuts < _CUTS:
            # A cut after a control token's first letter. The parts may spell another one, so they are checked too.
            for start, end in itertools.pairwise([0, *cut_at, len(text)]):
                for span in self._disarmed(text[start:end], after, at + start, cuts + 1):
                    yield span
                    after = span[0]
        else:
            for offset, letter in enumerate(text, start=at):
                yield from ((token, offset, offset + 1) for token in self._letter(letter))

    def _letter(self, letter: str) -> list[int]:
        ids = [token for token, _, _ in self._in_context(letter, IN_TEXT)]
        return ids if self._forbidden.isdisjoint(ids) else self._raw("?")

    def _in_context(self, text: str, after: int | None) -> list[Span]:
        bare = after is None or (self._spaced and after in self.control)
        anchor = "" if bare else self._anchor
        spans = self._spans(anchor + text)[len(self._anchor_ids) if anchor else 0 :] if text else []
        return [(token, max(0, start - len(anchor)), end - len(anchor)) for token, start, end in spans]

    def _raw(self, text: str) -> list[int]:
        return [token for token, _, _ in self._spans(text, plain=False)]

    def _spans(self, text: str, *, plain: bool = True) -> list[Span]:
        options = {"add_special_tokens": False, "split_special_tokens": plain, "return_offsets_mapping": True}
        encoded = self._tokenizer(text, **options)
        offsets = zip(encoded.input_ids, encoded.offset_mapping, strict=True)
        return [(token, start, end) for token, (start, end) in offsets]

    def _decode(self, ids: Sequence[int]) -> str:
        options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        return str(self._tokenizer.decode(list(ids), **options))

    @functools.cached_property
    def _anchor_ids(self) -> list[int]:
        return self._raw(self._anchor) if self._anchor else []

    def _find_anchor(self) -> str:
        # A letter that no longer token has before other letters: it can't merge with the text after it.
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
