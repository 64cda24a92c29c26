"""Messages to token ids, append-only: tokens that were sampled or shown are never tokenized again.

The chat template's text is cut at its control tokens. The text between two of them, contents included, is tokenized as
one plain text, as when the template renders the complete conversation. So a task or a tool's output that spells a
control token stays text.

Some templates rewrite the past as the conversation continues. They strip the thinking from earlier turns, move the
system message to the newest question, or add an empty thinking block. The renderer rewrites nothing: prompts and
sampled tokens stay as they were shown. Every turn is followed by the text that the template writes after the first turn
of a conversation. Only :meth:`Renderer.rewrite` shows the past as the template does.
"""

import bisect
import functools
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from agentrl.errors import RenderError
from agentrl.render import harmony, thinking
from agentrl.render.loading import ENDS
from agentrl.render.template import ChatTemplate, Piece, Shape, Slot, shapes_of
from agentrl.render.tokens import IN_TEXT, ChatTokenizer, Owned, TextTokens
from agentrl.segments import Segment, Source
from agentrl.types import Message, Role


@dataclass(frozen=True, slots=True, kw_only=True)
class _Suffix:
    """The continuation of the prompt after the assistant's turn."""

    blank: str
    """White space that the template writes before the end-of-turn token."""
    end: int
    """The end-of-turn token."""
    closes: bool
    """True if any end token may stand in for ``end``; False if ``end`` opens the next message, so it must be there."""
    rest: Sequence[str | int | Slot]
    """The template's texts and control tokens after the end of the turn, and slots for the contents."""


class Renderer:
    """Writes prompts for one tokenizer and its chat template.

    Args:
        tokenizer: has a chat template that ends the assistant's turn with a control token.
        template_args: further variables of the chat template, such as ``enable_thinking``.
        tools: schemas of the tools that the chat template is to describe; with tools, a tokenizer with named templates
            uses ``tool_use``.
        marks: the dialect's marks, such as ``<tool_call>``: no content is written with their tokens.

    Raises:
        RenderError: the tokenizer does not decode its tokens to the same text, or a tool's schema spells a control
            token. Or the chat template is missing, changes a content, numbers messages, or does not end every turn with
            a token that occurs nowhere inside of turns.
        ConfigError: the chat template has no variable of such a name.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        template_args: Mapping[str, object] | None = None,
        tools: Sequence[Mapping[str, object]] = (),
        marks: Sequence[str] = (),
    ) -> None:
        if tokenizer.eos_token_id is None:
            raise RenderError("the tokenizer has no eos_token, so there is nothing to end a turn with: set eos_token")
        self.tokenizer = tokenizer
        self._given = template_args, tools, marks
        self._tokens = TextTokens(tokenizer, "\n".join([str(tokenizer.chat_template), *marks]))
        # The template writes the schemas into its own text, where their control tokens would count as its own.
        if self._tokens.parts(schemas := json.dumps(list(tools), ensure_ascii=False)) != [schemas]:
            raise RenderError("a tool's schema spells a control token of the tokenizer: change its description")
        self._template = ChatTemplate(tokenizer, template_args or {}, tools)
        closing = self._tokens.parts(self._template.closing)
        self._closing = next((part for part in closing if isinstance(part, int)), None)
        self._lead = self._tokens.parts(self._template.lead)
        ends = self._tokens.parts(harmony.RETURN + harmony.CALL) if self._template.lead == harmony.LEAD else ()
        self._harmony = tuple(end for end in ends if isinstance(end, int))
        # Cached by shapes, which repeat from turn to turn, unlike contents.
        self._suffix = functools.lru_cache(maxsize=256)(self._make_suffix)
        answers = [(Shape(role="user"),), (Shape(role="tool", name="python", call_id="call00000"),)]
        self._closes = {answer[0].role: self._suffix(answer) for answer in answers}
        for answer in answers:
            self._template.check_turns(answer)
        self._check_stops()
        # The token before every sampled turn: after some, the tokenizer puts a space, which text() has to know.
        self._opened = self.prompt([Message(role="user", content="x")]).token_ids[-1]

    def __reduce__(self) -> tuple[object, ...]:
        # The other process analyses the template anew: caches and cached functions can't be pickled.
        return type(self), (self.tokenizer, *self._given)

    def describing(self, tools: Sequence[Mapping[str, object]], marks: Sequence[str] = ()) -> "Renderer":
        """Return the renderer of the same tokenizer and template for other tools and marks.

        Raises:
            RenderError: as of the class.
        """
        template_args, own_tools, own_marks = self._given
        same = (list(tools), list(marks)) == (list(own_tools), list(own_marks))
        return self if same else Renderer(self.tokenizer, template_args, tools, marks)

    @property
    def marks(self) -> Sequence[str]:
        """The dialect's marks: no content is written with their tokens."""
        return self._given[2]

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The tokens that end the assistant's turn: its end-of-turn token, or one per role that may speak next.

        Then come the tokenizer's ``eos_token`` and its ``end_token_ids``, where they are different tokens.
        """
        ends = self._harmony or [close.end for close in self._closes.values()]
        return tuple(dict.fromkeys([*ends, int(self.tokenizer.eos_token_id), *self._listed_ends]))

    @property
    def _listed_ends(self) -> Sequence[int]:
        """The model's other end tokens, as :func:`load_tokenizer` has recorded them."""
        return self.tokenizer.init_kwargs.get(ENDS, ())

    @functools.cached_property
    def drops_thinking(self) -> bool:
        """True if the chat template takes thinking out of earlier turns.

        Raises:
            RenderError: the template is gpt-oss's, whose thinking is a channel of its own.
        """
        return thinking.drops_thinking(self._template)

    def prompt(self, messages: Sequence[Message]) -> Segment:
        """Render the first prompt, up to where the assistant begins to speak.

        Args:
            messages: the environment's first observation.

        Raises:
            RenderError: the chat template refuses the messages, or skips, repeats or changes one.
        """
        return self._opening(self._template.write(shapes_of(messages)), messages)

    def extend(self, turn: Sequence[int], messages: Sequence[Message]) -> list[Segment]:
        """Render what follows a sampled turn: its end, the new messages, and the beginning of the next turn.

        Args:
            turn: the tokens of the turn; where one of ``stop_ids`` ends it, no other end is written.
            messages: the environment's answer.

        Returns:
            Segments of source ``template``, and ``tool`` or ``prompt`` for the contents; a token that covers both
            template and content belongs to the content.

        Raises:
            RenderError: the chat template refuses the messages, or skips, repeats or changes one.
        """
        called = bool(turn) and turn[-1] in self._harmony[1:] and bool(messages) and messages[0]["role"] == "tool"
        return self._following(turn, self._suffix(shapes_of(messages), called), messages)

    def rewrite(self, messages: Sequence[Message], turns: Mapping[int, Sequence[int]]) -> tuple[list[Segment], bool]:
        """Render a conversation as the chat template does, which may drop the thinking of earlier turns.

        Args:
            messages: the conversation, up to where the assistant speaks next.
            turns: the tokens of the assistant's turns, by the index of the message. What is shown of a turn is its own
                tokens; a token in which that begins stays whole.

        Returns:
            The segments, all of them context; and True if what is shown of some turn begins inside of a token.

        Raises:
            RenderError: the chat template refuses the messages, or skips, repeats or changes one.
        """
        segments, run, inside = list[Segment](), list[Piece](), False
        turn: Sequence[int] | None = None
        for piece in (*thinking.write(self._template, messages), None):
            if isinstance(piece, str | Slot):
                run.append(piece)
                continue
            segments += (
                [self._opening(run, messages)]
                if turn is None
                else self._following(turn, self._as_suffix(run), messages)
            )
            if piece is not None:
                run, turn = [], turns[piece.number]
                start = self._token_at(turn, piece.start)
                inside |= len(self.text(turn[:start])) < piece.start
                segments.append(Segment("prompt", tuple(turn[start:])))
        return segments, inside

    def _token_at(self, turn: Sequence[int], offset: int) -> int:
        """Return the index of the token in which a character of the turn's text is."""
        if not offset:
            return 0
        length = len(turn) - bool(turn and turn[-1] in self.stop_ids)
        return bisect.bisect_right(range(length + 1), offset, key=lambda count: len(self.text(turn[:count]))) - 1

    def _opening(self, pieces: Sequence[Piece], messages: Sequence[Message]) -> Segment:
        written = self._tokens.write(_filled(self._cut(pieces), messages), None)
        return Segment("prompt", tuple(token for token, _ in written))

    def _following(self, turn: Sequence[int], suffix: _Suffix, messages: Sequence[Message]) -> list[Segment]:
        last = turn[-1] if turn else None
        # A turn that was cut off lacks its end-of-turn token, which the template then supplies.
        ended = last == suffix.end or (suffix.closes and last in self.stop_ids)
        pieces = suffix.rest if ended else (suffix.blank, suffix.end, *suffix.rest)
        written = self._tokens.write(_filled(pieces, messages), last if ended else IN_TEXT)
        template: list[int] = []
        segments: list[Segment] = []
        for owner, run in itertools.groupby(written, lambda token: token[1]):
            ids = tuple(token for token, _ in run)
            if owner is None:
                template += ids
                continue
            source: Source = "tool" if messages[owner]["role"] == "tool" else "prompt"
            segments += [Segment("template", tuple(template)), Segment(source, ids)]
            template = []
        return [*segments, Segment("template", tuple(template))]

    def text(self, turn: Sequence[int]) -> str:
        """Decode a sampled turn, without its end-of-turn token.

        A ``<think>`` that the template opened for the model belongs to the prompt and is not repeated. Of gpt-oss's
        channels, thinking is put between ``<think>`` and ``</think>``, and the answer is bare.
        """
        turn = turn[:-1] if turn and turn[-1] in self.stop_ids else turn
        if not self._harmony:
            return self._tokens.text(turn, self._opened).removeprefix(self._template.lead)
        # One run per control token, and one for all text between two of them.
        runs = itertools.groupby(enumerate(turn), lambda item: item[0] if item[1] in self._tokens.control else None)
        return harmony.read((self._tokens.text([token for _, token in run]), key is not None) for key, run in runs)

    def turn(
        self, text: str, *, answered_by: Role = "user", marks: Sequence[str] = (), ended: bool = True
    ) -> list[int]:
        """Tokenize a turn that was not sampled.

        Args:
            text: the turn's text.
            answered_by: who speaks next. Some templates end a turn with the token that begins the next one.
            marks: those that the vocabulary has as tokens become tokens; other control tokens' spellings stay text.
            ended: with its end-of-turn token; else it is to be continued, and lacks the template's own beginning.
        """
        close = self._closes[answered_by]
        lead, end = self._lead, close.end
        # In harmony a call has its recipient in place of the answer's channel, and an end of its own.
        if self._harmony:
            call = text.startswith(harmony.RECIPIENT)
            lead, end = ([] if call else lead), self._harmony[call]
        spoken = self._tokens.marked(text, marks if ended else self.marks)
        pieces = (*lead, *spoken, close.blank, end) if ended else spoken
        return [token for token, _ in self._tokens.write([(piece, None) for piece in pieces], self._opened)]

    def _make_suffix(self, shapes: tuple[Shape, ...], called: bool = False) -> _Suffix:
        """Split the template's text after an assistant's turn, or after a call in harmony."""
        if called:
            rest = self._cut(self._template.after_call(shapes))
            return _Suffix(blank="", end=self._harmony[1], closes=True, rest=rest)
        return self._as_suffix(self._template.after_turn(shapes))

    def _as_suffix(self, pieces: Sequence[Piece]) -> _Suffix:
        parts = self._cut(pieces)
        blank = str(parts.pop(0)) if parts and isinstance(parts[0], str) and parts[0].isspace() else ""
        end = parts.pop(0) if parts else None
        if not isinstance(end, int) or not self._ends_a_turn(end):
            raise RenderError(
                "the chat template does not end the assistant's turn with the tokenizer's eos_token (id "
                f"{self.tokenizer.eos_token_id}) or another control token: set eos_token to the token that ends a turn"
            )
        return _Suffix(blank=blank, end=end, closes=bool(self._harmony) or end == self._closing, rest=parts)

    def _ends_a_turn(self, end: int) -> bool:
        # A padding token would not be learned as an end, and a token that opens a turn can't end it.
        usable = end != self.tokenizer.pad_token_id and end not in self._tokens.parts(self._template.opening)
        return usable or end == self.tokenizer.eos_token_id

    def _check_stops(self) -> None:
        """Check that no stop token occurs inside a turn.

        Raises:
            RenderError: the template writes the end-of-turn token after thinking, or before a call.
        """
        inside = {part for text in self._template.inside_turns() for part in self._tokens.parts(text)}
        for token in self.stop_ids:
            if token in inside:
                spelled = self._tokens.text([token])
                remedy = "take it out of generation_config.json" if token in self._listed_ends else "use another model"
                raise RenderError(
                    f"the chat template writes {spelled!r}, which ends the assistant's turn, inside of turns too, so "
                    "that sampling would stop behind the thinking or before a call, and what came so far would be the "
                    f"answer: {remedy}, or set tokenizer.chat_template to one that ends a turn otherwise"
                )

    def _cut(self, pieces: Sequence[Piece]) -> list[str | int | Slot]:
        return [part for piece in pieces for part in (self._tokens.parts(piece) if isinstance(piece, str) else [piece])]


def _filled(pieces: Sequence[str | int | Slot], messages: Sequence[Message]) -> Iterator[Owned[str | int]]:
    """Fill the contents into the slots; each content is owned by its message."""
    for piece in pieces:
        if isinstance(piece, Slot):
            yield piece.fill(messages[piece.number]["content"]), piece.number
        else:
            yield piece, None
