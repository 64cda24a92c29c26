"""Compare the renderer's tokens of a conversation with a chat template's own rendering of the whole."""

import datetime
import difflib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from real_templates_talk import Conversation

from agentrl.errors import RenderError
from agentrl.render.renderer import Renderer
from agentrl.toolenv.dialects import Dialect

Rows = list[dict[str, Any]]
Kind = Literal["exact", "folded", "append-only", "piecewise", "refused", "differs"]
"""How a conversation compares with the template's whole rendering of it.

exact        the same tokens
folded       the same tokens, after a change of messages that the template refuses or drops: a tool result or a system
             message becomes the user's words, and a call becomes the turn's text
append-only  the template rewrites earlier turns when the conversation continues, and ours stay as they were shown; the
             prompt is the template's, and so is each answer in the conversation that ends with it
piecewise    the same, but the template refuses the complete conversation, or writes a later answer differently from the
             same answer after the first turn, whose form ours has
refused      the renderer refuses the messages
differs      none of these
"""
_DAY = datetime.datetime(2025, 1, 1)
_LEFT_OUT = "it drops a message"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of a comparison."""

    kind: Kind
    spoken: bool = False
    """True if the turns had to be the template's own."""
    refused: str = ""
    """Why there is no whole rendering of the messages as they are, or why the renderer refuses them."""
    pairs: tuple[tuple[str, str], ...] = ()
    """Our text and the template's, for each place where they differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """The template's rendering of a conversation."""

    rows: Rows
    tokens: Sequence[int] = ()
    refused: str = ""
    """Why there is none."""


class Player:
    """Plays conversations with one tokenizer in one dialect.

    Args:
        tokenizer: has a chat template.
        dialect: of the tool of ``real_templates_talk``.

    Raises:
        RenderError: the renderer refuses the tokenizer.
    """

    def __init__(self, tokenizer: Any, dialect: Dialect) -> None:
        self._tokenizer = tokenizer
        self._dialect = dialect
        self._options: Mapping[str, Any] = {"tools": list(dialect.template_tools)} if dialect.native else {}
        self._known: dict[str, Whole] = {}
        self.renderer = Renderer(tokenizer, tools=dialect.template_tools, marks=dialect.marks)

    def judge(self, conversation: Conversation) -> Verdict:
        """Compare the renderer's tokens with those of the template's whole rendering."""
        refused = next(self._wholes(conversation)).refused
        accepted = next((whole for whole in self._wholes(conversation) if not whole.refused), None)
        try:
            written = [(False, self._stages(conversation, self.turns(conversation)))]
            if (
                accepted
                and _joined(written[0][1]) != accepted.tokens
                and (turns := self._spoken(conversation, accepted))
            ):
                written.append((True, self._stages(conversation, turns)))
        except RenderError as error:
            return Verdict(kind="refused", refused=str(error))
        for number, whole in enumerate(self._wholes(conversation)):
            for spoken, stages in written:
                if _joined(stages) == whole.tokens:
                    pairs = (
                        () if not number or refused or not accepted else self.differing(whole.tokens, accepted.tokens)
                    )
                    kind = "folded" if number else "exact"
                    return Verdict(kind=kind, spoken=spoken, refused=refused, pairs=pairs)
        kinds: list[Kind] = [self._by_stage(conversation, stages, refused=bool(refused)) for _, stages in written]
        kind, (spoken, stages) = min(zip(kinds, written, strict=True), key=lambda pair: pair[0] == "differs")
        shown = accepted is not None and not (refused and kind == "piecewise")
        pairs = self.differing(_joined(stages), accepted.tokens) if accepted and shown else ()
        return Verdict(kind=kind, spoken=spoken, refused=refused, pairs=pairs)

    def _by_stage(self, conversation: Conversation, stages: Sequence[Sequence[int]], *, refused: bool) -> Kind:
        """Classify a conversation that equals no whole rendering by its prompt and each answer.

        A turn's end may be another control token than the template's, because a model samples it: gpt-oss ends turns
        otherwise than its template ends past ones.
        """
        opening = replace(conversation, rounds=())
        if list(stages[0]) not in [list(whole.tokens) for whole in self._wholes(opening)]:
            return "differs"
        piecewise = self._appends(conversation)
        for number, played in enumerate(conversation.rounds, start=1):
            added = stages[2 * number]
            index = self._place(replace(conversation, rounds=conversation.rounds[:number]), added)
            if index is None:
                # What follows a turn does not depend on its words, which some templates want.
                alone = replace(conversation, rounds=[replace(played, text=played.text or "x")])
                piecewise, index = True, self._place(alone, added)
            if index is None:
                return "differs"
            # A tool's answer that was written as it is, in a conversation that is refused as it is.
            piecewise = piecewise or (refused and index == 0 and played.answered_by == "tool")
        return "piecewise" if piecewise else "append-only"

    def _place(self, conversation: Conversation, end: Sequence[int]) -> int | None:
        """Return the index of the first of the template's renderings that ends with ``end``."""
        control = self._tokenizer.added_tokens_decoder
        for index, whole in enumerate(self._wholes(conversation)):
            last = list(whole.tokens[-len(end) :])
            if last[1:] == list(end[1:]) and last[:1] and (last[0] == end[0] or last[0] in control):
                return index
        return None

    def _appends(self, conversation: Conversation) -> bool:
        """Return True if the template's rendering of each prefix begins with that of the one before."""
        rows = next((whole.rows for whole in self._wholes(conversation) if not whole.refused), [])
        prefixes: list[Sequence[int]] = []
        for index, row in enumerate(rows):
            if row["role"] == "assistant":
                prefixes += [self._whole(rows[:index]).tokens, self._whole(rows[: index + 1], opened=False).tokens]
        grown = itertools.pairwise([*prefixes, self._whole(rows).tokens])
        return all(list(later[: len(earlier)]) == list(earlier) for earlier, later in grown)

    def turns(self, conversation: Conversation) -> list[list[int]]:
        """Write the turns with the renderer."""
        turn = self.renderer.turn
        return [
            turn(text, answered_by=played.answered_by, marks=self._dialect.marks)
            for text, played in zip(self._texts(conversation), conversation.rounds, strict=True)
        ]

    def _spoken(self, conversation: Conversation, whole: Whole) -> list[list[int]]:
        """Write the turns as the template does after its own prompts; none where it changes the prompts then."""
        turns: list[list[int]] = []
        places = [index for index, row in enumerate(whole.rows) if row["role"] == "assistant"]
        for index, played in zip(places, conversation.rounds, strict=True):
            asked = self._whole(whole.rows[:index]).tokens
            spoken = self._whole(whole.rows[: index + 1], opened=False).tokens
            if not spoken or list(spoken[: len(asked)]) != list(asked):
                return []
            spoken = list(spoken[len(asked) :])
            ends = [at for at, token in enumerate(spoken) if token in self.renderer.stop_ids]
            end = self.renderer.turn("", answered_by=played.answered_by)[-1:]
            turns.append(spoken[: ends[0] + 1] if ends else [*spoken, *end])
        return turns

    def _stages(self, conversation: Conversation, turns: Sequence[list[int]]) -> list[Sequence[int]]:
        """Split into the prompt, and per round the turn without its end, and its end with the answer."""
        stages: list[Sequence[int]] = [list(self.renderer.prompt(conversation.opening).token_ids)]
        for turn, played in zip(turns, conversation.rounds, strict=True):
            added = self.renderer.extend(turn, played.answers)
            stages += [turn[:-1], [turn[-1], *(token for segment in added for token in segment.token_ids)]]
        return stages

    def _texts(self, conversation: Conversation) -> Iterator[str]:
        # Where the template opens the thinking, the model does not do so again.
        opened = self._decode(self.renderer.prompt(conversation.opening).token_ids).rstrip().endswith("<think>")
        for played in conversation.rounds:
            thought = f"<think>\n{played.thought}\n</think>\n\n" if played.thought else ""
            calls = [self._dialect.render(name, arguments) for name, arguments in played.calls]
            yield thought.removeprefix("<think>\n" * opened) + "\n".join(filter(None, (played.text, *calls)))

    def _rows(self, conversation: Conversation, *, structured: bool) -> Rows:
        rows: Rows = [dict(message) for message in conversation.opening]
        for text, played in zip(self._texts(conversation), conversation.rounds, strict=True):
            row: dict[str, Any] = {"role": "assistant", "content": text}
            if structured and played.calls:
                ids = [answer.get("tool_call_id") for answer in played.answers]
                functions = [{"name": name, "arguments": dict(arguments)} for name, arguments in played.calls]
                calls = [{"type": "function", "id": i, "function": f} for i, f in zip(ids, functions, strict=False)]
                row |= {"content": played.text, "tool_calls": calls}
            rows += [row, *map(dict, played.answers)]
        return rows

    def _wholes(self, conversation: Conversation) -> Iterator[Whole]:
        """Yield the template's renderings: of the messages as they are, then with more and more of them folded."""
        opening = len(conversation.opening)
        for structured in (True, False) if self._dialect.native else (False,):
            rows = self._rows(conversation, structured=structured)
            head, rest = rows[:opening], rows[opening:]
            yield self._whole(rows)
            yield self._whole([*head, *_folded(rest)])
            yield self._whole([*_folded(head), *rest])
            yield self._whole([*_folded(head), *_folded(rest)])

    def _whole(self, rows: Rows, *, opened: bool = True) -> Whole:
        key = repr((rows, opened))
        if key not in self._known:
            self._known[key] = self._rendered(rows, opened)
        return self._known[key]

    def _rendered(self, rows: Rows, opened: bool) -> Whole:
        options = {**self._options, "strftime_now": _DAY.strftime, "add_generation_prompt": opened}
        try:
            text = self._tokenizer.apply_chat_template(rows, tokenize=False, **options)
        except Exception as error:  # templates raise whatever their author chose
            return Whole(rows=rows, refused=" ".join(str(error).split()))
        at = 0
        for row in rows:
            # Enough of a content to recognise it, whatever the template does to quotes and white space.
            words = re.match(r"\s*([\w ]*)", row["content"] if row["role"] != "assistant" else "")
            assert words is not None
            at = text.find(words[1], at)
            if at < 0:
                return Whole(rows=rows, refused=_LEFT_OUT)
            at += len(words[1])
        return Whole(rows=rows, tokens=self._tokenizer(text, add_special_tokens=False).input_ids)

    def differing(self, ours: Sequence[int], theirs: Sequence[int]) -> tuple[tuple[str, str], ...]:
        """Return our text and theirs for each place where they differ, each pair once."""
        matcher = difflib.SequenceMatcher(None, ours, theirs, autojunk=False)
        ranges = [places for op, *places in matcher.get_opcodes() if op != "equal"]
        return tuple(dict.fromkeys((self._decode(ours[a:b]), self._decode(theirs[c:d])) for a, b, c, d in ranges))

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _joined(stages: Sequence[Sequence[int]]) -> list[int]:
    return [token for stage in stages for token in stage]


def _folded(rows: Rows) -> Rows:
    """Merge all messages between two of the assistant's turns into one user message."""
    folded: Rows = []
    for assistant, side in itertools.groupby(rows, lambda row: row["role"] == "assistant"):
        if assistant:
            folded += side
        else:
            folded.append({"role": "user", "content": "\n\n".join(row["content"] for row in side if row["content"])})
    return folded
