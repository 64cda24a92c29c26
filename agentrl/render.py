"""Messages to token ids, append-only: what was sampled or shown once is never tokenized again.

What the chat template writes around contents is tokenized with its control tokens. The contents are tokenized apart, as
plain text: a task or a tool's output that spells a control token stays text.

Where a template would rewrite the past when the conversation goes on (strip the thinking from earlier turns, move the
system message to the newest question, add an empty thinking block), nothing is rewritten: prompts and sampled tokens
stay as they were shown, and what follows a turn is what the template writes after the first turn of a conversation.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from agentrl.errors import RenderError, UsageError
from agentrl.render_template import ChatTemplate, Shape, Slot, Template, shapes_of
from agentrl.render_tokens import IN_TEXT, TextTokenizer, TextTokens
from agentrl.types import Message, Segment, Source


class ChatTokenizer(TextTokenizer, Template, Protocol):
    """What the renderer needs of a Hugging Face tokenizer."""

    @property
    def pad_token_id(self) -> int | None:
        """The token that fills up short rows."""
        ...


def load_tokenizer(source: str | Path, remedy: str = "give the folder of one") -> Any:
    """Load a tokenizer from a folder or by its name on the Hugging Face hub.

    Args:
        source: the folder or name.
        remedy: what to do where there is none.

    Raises:
        UsageError: transformers is not installed, or there is no such tokenizer.
    """
    try:
        from transformers import AutoTokenizer
    except ModuleNotFoundError as error:
        raise UsageError("checking tokens needs transformers: pip install 'agentrl[train]'") from error
    try:
        return AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"no tokenizer can be loaded from {str(source)!r}: {remedy} ({reason})") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class _Suffix:
    """What follows the assistant's turn."""

    close: tuple[int, ...]
    """Ends the turn: blanks, where the template writes any, and the end-of-turn token."""
    rest: tuple[tuple[int, ...] | Slot, ...]
    """The template's tokens, and slots for the contents."""

    @property
    def end(self) -> int:
        """The end-of-turn token."""
        return self.close[-1]


class Renderer:
    """Writes prompts for one tokenizer and its chat template.

    Args:
        tokenizer: has a chat template that ends the assistant's turn with a control token.
        template_args: further variables of the chat template, such as ``enable_thinking``.

    Raises:
        RenderError: there is no chat template, or it can't be extended: a content is changed, a turn is not followed
            by an end-of-turn token, or messages are numbered.
        ConfigError: the chat template has no variable of such a name.
    """

    def __init__(self, tokenizer: ChatTokenizer, template_args: Mapping[str, object] | None = None) -> None:
        if tokenizer.eos_token_id is None:
            raise RenderError("the tokenizer has no eos_token, so there is nothing to end a turn with: set eos_token")
        self.tokenizer = tokenizer
        self._tokens = TextTokens(tokenizer)
        self._template = ChatTemplate(tokenizer, template_args or {})
        self._suffix = functools.lru_cache(maxsize=256)(self._make_suffix)
        self._schemas = functools.lru_cache(maxsize=16)(self._check_schemas)
        answers = [(Shape(role="user"),), (Shape(role="tool", name="python", call_id="call00000"),)]
        self._closes = {answer[0].role: self._suffix(answer).close for answer in answers}
        for answer in answers:
            self._template.check_turns(answer)
        self._opened = self.prompt([Message(role="user", content="x")]).token_ids[-1]

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The tokens that end the assistant's turn: its end-of-turn token, or one for each side that speaks next.

        The tokenizer's ``eos_token`` comes last where it is another one.
        """
        ends = [close[-1] for close in self._closes.values()]
        return tuple(dict.fromkeys([*ends, int(self.tokenizer.eos_token_id)]))

    def prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, object]] = ()) -> Segment:
        """The first prompt, up to where the assistant begins to speak.

        Args:
            messages: the environment's first observation.
            tools: schemas of the tools that the chat template is to describe.

        Raises:
            RenderError: the chat template refuses the messages, or leaves one out, repeats or changes it; or a tool's
                schema spells a control token.
        """
        described = self._schemas(json.dumps(list(tools))) if tools else ""
        ids: list[int] = []
        for piece in self._template.write(shapes_of(messages), described):
            after = ids[-1] if ids else None
            if isinstance(piece, str):
                ids += self._tokens.template(piece, after)
            else:
                ids += self._tokens.plain(piece.fill(messages[piece.number]["content"]), after)
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
        suffix = self._suffix(shapes_of(messages))
        segments: list[Segment] = []
        template = [] if turn and turn[-1] == suffix.end else [*suffix.close]
        after = suffix.end
        for piece in suffix.rest:
            if isinstance(piece, tuple):
                template += piece
                after = piece[-1] if piece else after
                continue
            message = messages[piece.number]
            if content := self._tokens.plain(piece.fill(message["content"]), after):
                source: Source = "tool" if message["role"] == "tool" else "prompt"
                segments += [Segment("template", tuple(template)), Segment(source, tuple(content))]
                template, after = [], content[-1]
        return [*segments, Segment("template", tuple(template))]

    def text(self, turn: Sequence[int]) -> str:
        """The text of a sampled turn, without its end-of-turn token.

        What the template opened for the model, such as ``<think>``, belongs to the prompt and is not part of it.
        """
        text = self._tokens.text(turn[:-1] if turn and turn[-1] in self.stop_ids else turn, self._opened)
        return text.removeprefix(self._template.lead)

    def turn(self, text: str, *, answered_by: Literal["user", "tool"] = "user", marks: Sequence[str] = ()) -> list[int]:
        """The tokens of a turn that somebody else wrote, its end-of-turn token included.

        Args:
            text: what is said.
            answered_by: who speaks next. Some templates end a turn with the token that begins the next one.
            marks: what a model says as one token where its vocabulary has it, such as a dialect's ``<tool_call>``.
                All else that spells a control token stays text.
        """
        said = self._tokens.spoken(self._template.lead + text, self._opened, marks)
        return [*said, *self._closes[answered_by]]

    def _make_suffix(self, shapes: tuple[Shape, ...]) -> _Suffix:
        """The template after an assistant's turn, tokenized."""
        pieces = self._template.after_turn(shapes)
        first = self._tokens.template(pieces[0], IN_TEXT) if pieces and isinstance(pieces[0], str) else []
        ends = self._tokens.control | {self.tokenizer.eos_token_id}
        place = next((place for place, token in enumerate(first) if token in ends), 0)
        close = tuple(first[: place + 1])
        if not close or not self._ends_a_turn(close):
            raise RenderError(
                "the chat template does not end the assistant's turn with the tokenizer's eos_token (id "
                f"{self.tokenizer.eos_token_id}) or another control token: set eos_token to the token that ends a turn"
            )
        rest: list[tuple[int, ...] | Slot] = [tuple(first[place + 1 :])]
        for piece in pieces[1:]:
            rest.append(tuple(self._tokens.template(piece, IN_TEXT)) if isinstance(piece, str) else piece)
        return _Suffix(close=close, rest=tuple(rest))

    def _check_schemas(self, schemas: str) -> str:
        # The template writes them among its own control tokens, where theirs could not be told apart.
        text = json.dumps(json.loads(schemas), ensure_ascii=False)
        if not self._tokens.control.isdisjoint(self._tokens.template(text, IN_TEXT)):
            raise RenderError("a tool's schema spells a control token of the tokenizer: change its description")
        return schemas

    def _ends_a_turn(self, close: tuple[int, ...]) -> bool:
        *blanks, end = close
        if end == self.tokenizer.eos_token_id:
            return not self._tokens.text(blanks).strip()
        # A padding token would not be learned, and what opens the assistant's turn can't be what ends it.
        opening = self._tokens.template(self._template.opening, None)
        usable = end in self._tokens.control and end != self.tokenizer.pad_token_id and end not in opening
        return usable and not self._tokens.text(blanks).strip()
