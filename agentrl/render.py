"""Messages to token ids, append-only: what was sampled or shown once is never tokenized again.

The chat template is rendered with a mark in place of every content. What lies between the marks is *template*: it is
tokenized with its control tokens. The contents are tokenized apart, as plain text: a task or a tool's output that
spells a control token stays text.
"""

import functools
import re
from collections.abc import Sequence
from typing import Any, Protocol

from agentrl.errors import RenderError
from agentrl.types import Message, Segment, Source

_MARK = "Zq0x{}xq0Z"
_MARKS = re.compile(r"Zq0x(\d+)xq0Z")


class ChatTokenizer(Protocol):
    """What the renderer needs of a Hugging Face tokenizer."""

    @property
    def eos_token_id(self) -> Any:
        """The token that ends a turn."""
        ...

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        """Write a conversation as one text."""
        ...

    def __call__(self, text: str, **options: Any) -> Any:
        """Tokenize a text."""
        ...

    def decode(self, token_ids: Any, **options: Any) -> Any:
        """Turn ids back into text."""
        ...


class Renderer:
    """Writes prompts for one tokenizer and its chat template.

    Args:
        tokenizer: has a chat template, and an end-of-turn token as ``eos_token``.

    Raises:
        RenderError: there is no chat template, or it can't be extended: a turn's text is changed or not followed by
            the end-of-turn token.
    """

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self.tokenizer = tokenizer
        if tokenizer.eos_token_id is None:
            raise RenderError("the tokenizer has no eos_token, so there is nothing to end a turn with")
        self._end = int(tokenizer.eos_token_id)
        self._suffix = functools.lru_cache(maxsize=256)(self._suffix_pieces)
        self._suffix((("tool", "python"),))

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The tokens that end the assistant's turn."""
        return (self._end,)

    def prompt(self, messages: Sequence[Message]) -> Segment:
        """The first prompt, up to where the assistant begins to speak.

        Raises:
            RenderError: the chat template refuses the messages, or leaves one out, repeats or changes it.
        """
        pieces = _split(self._template([_marked(message, i) for i, message in enumerate(messages)]))
        _check_contents(pieces, range(len(messages)))
        ids: list[int] = []
        for piece in pieces:
            ids += self._encode_template(piece) if isinstance(piece, str) else self._encode(messages[piece]["content"])
        return Segment("prompt", tuple(ids))

    def extend(self, turn: Sequence[int], messages: Sequence[Message]) -> list[Segment]:
        """What follows a sampled turn: its end, the new messages, and the beginning of the next turn.

        Args:
            turn: the tokens of the turn, whose end-of-turn token is not written twice.
            messages: the environment's answer.

        Returns:
            Segments of source ``template``, and ``tool`` or ``prompt`` for the contents.

        Raises:
            RenderError: the chat template refuses the messages, or leaves one out, repeats or changes it.
        """
        pieces = self._suffix(tuple((message["role"], _plain(message.get("name", ""))) for message in messages))
        segments: list[Segment] = []
        template: list[int] = []
        for number, piece in enumerate(pieces):
            if isinstance(piece, tuple):
                # The first piece begins with the end-of-turn token.
                template += piece[1:] if number == 0 and turn and turn[-1] == self._end else piece
                continue
            if content := self._encode(messages[piece]["content"]):
                source: Source = "tool" if messages[piece]["role"] == "tool" else "prompt"
                segments += [Segment("template", tuple(template)), Segment(source, tuple(content))]
                template = []
        return [*segments, Segment("template", tuple(template))]

    def text(self, turn: Sequence[int]) -> str:
        """The text of a sampled turn, without its end-of-turn token."""
        ids = list(turn[:-1] if turn and turn[-1] == self._end else turn)
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def turn(self, text: str) -> list[int]:
        """The tokens of a turn that somebody else wrote, its end-of-turn token included."""
        return [*self._encode(text), self._end]

    def _suffix_pieces(self, kinds: tuple[tuple[str, str], ...]) -> list[tuple[int, ...] | int]:
        """The template after an assistant's turn, tokenized, with the number of each message where its content goes."""
        turns: list[Any] = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _MARK.format(0)}]
        for number, (role, name) in enumerate(kinds, start=1):
            turns.append(_marked({"role": role, "name": name} if name else {"role": role}, number))
        pieces = _split(self._template(turns))
        _check_contents(pieces, range(len(turns) - 1))
        after = pieces[pieces.index(0) + 1 :]
        tail = [tuple(self._encode_template(p)) if isinstance(p, str) else p - 1 for p in after]
        if not tail or not isinstance(tail[0], tuple) or tail[0][:1] != (self._end,):
            raise RenderError(
                f"the chat template does not end the assistant's turn with the tokenizer's eos_token (id {self._end}): "
                "set eos_token to the token that ends a turn"
            )
        return tail

    def _template(self, conversation: list[Any]) -> str:
        try:
            text = self.tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # templates raise whatever their author chose
            raise RenderError(f"the chat template refuses these messages: {error}") from error
        return str(text)

    def _encode_template(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False).input_ids

    def _encode(self, text: str) -> list[int]:
        # A lone surrogate can't be written as UTF-8: it becomes a question mark.
        clean = text.encode("utf-8", errors="replace").decode("utf-8")
        return self.tokenizer(clean, add_special_tokens=False, split_special_tokens=True).input_ids if clean else []


def _marked(message: Any, number: int) -> dict[str, object]:
    return {**message, "content": _MARK.format(number)}


def _check_contents(pieces: Sequence[str | int], expected: range) -> None:
    if [piece for piece in pieces if isinstance(piece, int)] != [*expected]:
        raise RenderError("the chat template does not write every message's content once, in order, as it is")


def _plain(name: str) -> str:
    # A tool's name is the model's own text and lands in the template: it must not bring a control token along.
    return name if re.fullmatch(r"[\w.-]{0,64}", name) and not _MARKS.search(name) else "unknown"


def _split(text: str) -> list[str | int]:
    """Text and marks in turn, empty texts left out."""
    parts = _MARKS.split(text)
    return [int(part) if i % 2 else part for i, part in enumerate(parts) if i % 2 or part]
