"""The policy's own turns as clients have seen them, and how they are found again in a history that comes back.

Clients write a turn anew: they order keys, change how numbers are spelled, move texts, drop thoughts. So turns are
compared as values, and by the ids of their calls, which every client sends back unchanged.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from agentrl.endpoint.wire import Call, Item, ToolSpec, writable
from agentrl.toolenv.dialects import Dialect
from agentrl.types import ToolCall

UNREADABLE = "invalid"
"""The name of a call whose name can't be read; also what OpenCode calls such a call."""


_CALL = re.compile(r'\{\s*"name"\s*:\s*"(?P<name>[^"\\]+)"\s*,\s*"arguments"\s*:\s*(?P<arguments>.*)\}', re.DOTALL)
"""A call as most models are taught it, whose arguments need be no JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spoken:
    """What a turn says, apart from what it thinks and calls."""

    thinking: str
    """Its thoughts, without their tags."""
    text: str
    """What it says; blank text is none."""
    calls: tuple[tuple[ToolCall, str], ...]
    """Its calls as they were read, each with its own spelling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnTurn:
    """A turn of the policy, as a client has got it."""

    position: int
    """How many items came before it."""
    raw: str
    """Its text, as it was sampled."""
    thinking: str
    """The thoughts that were sent."""
    text: str
    """The text that was sent."""
    calls: tuple[Call, ...]
    """The calls that were sent."""


class OwnTurns:
    """The turns of one session, to be found again."""

    def __init__(self) -> None:
        self._by_call = dict[str, OwnTurn]()
        self._by_text = defaultdict[str, list[OwnTurn]](list)

    def add(self, turn: OwnTurn) -> None:
        """Remember a turn."""
        for call in turn.calls:
            self._by_call[call.id] = turn
        if not turn.calls:
            self._by_text[turn.text].append(turn)

    def number_of(self, call_id: str) -> tuple[int, str] | None:
        """Return which call of its turn a call of ours is, and its name."""
        turn = self._by_call.get(call_id)
        return next(((n, call.name) for n, call in enumerate(turn.calls) if call.id == call_id), None) if turn else None

    def is_edited(self, item: Item) -> bool:
        """Return True if the item has a call of ours."""
        return any(call.id in self._by_call for call in item.calls)

    def find(self, item: Item, position: int) -> tuple[OwnTurn | None, int]:
        """Find the turn that an assistant's item is.

        Args:
            item: as it came back.
            position: how many items come before it; of equal turns, the one that stood there is meant.

        Returns:
            The turn, and how many of the item's texts come before it, as those of an answer that was cut off.
        """
        if item.calls:
            turn = self._by_call.get(item.calls[0].id)
            candidates = [turn] if turn and _same_calls(turn.calls, item.calls) else []
        else:
            candidates = []
        for skipped in range(len(item.texts) + 1):
            text = "".join(item.texts[skipped:])
            alike = candidates if item.calls else self._by_text.get(text, [])
            same = [turn for turn in alike if turn.text == text and item.thinking in ("", turn.thinking)]
            # The newest of equal turns: an older one was dropped by the client.
            if same and (text or item.calls or item.thinking):
                return max(reversed(same), key=lambda turn: turn.position == position), skipped
        return None, 0


def read_turn(dialect: Dialect, text: str) -> Spoken:
    """Split a turn's text."""
    spoken, calls = {"text": "", "thinking": ""}, list[tuple[ToolCall, str]]()
    for piece in dialect.pieces(text):
        if piece.kind == "call":
            calls += [(call, piece.text) for call in piece.calls]
        else:
            spoken[piece.kind] += piece.text
    words = spoken["text"] if spoken["text"].strip() else ""
    return Spoken(thinking=writable(spoken["thinking"]), text=writable(words), calls=tuple(calls))


def readable_lines(dialect: Dialect, text: str) -> Spoken:
    """Read what a turn that is still being sampled has said so far and will not turn out to be anything else.

    A dialect's mark lies within a line, so a line is certain once it is complete. A JSON object may turn into a call.
    """
    lines = text[: text.rfind("\n") + 1]
    pieces = list(dialect.pieces(lines))
    if pieces and pieces[-1].kind == "text" and (brace := pieces[-1].text.find("{")) >= 0:
        lines = lines[: len(lines) - len(pieces[-1].text) + brace]
    return read_turn(dialect, lines)


def calls_of(spoken: Spoken, tools: Mapping[str, ToolSpec], turn_id: str) -> Iterator[Call]:
    """Write the calls of a turn for the client, whose ids begin with ``turn_id``."""
    for number, (call, spelled) in enumerate(spoken.calls):
        name, arguments = call.name, json.dumps(dict(call.arguments), ensure_ascii=False)
        if call.error:
            # What can't be read goes out as it is, for the client to say so.
            match = _CALL.search(spelled)
            name, arguments = (match["name"], _encodable(match["arguments"])) if match else (name, spelled)
        tool = tools.get(name)
        yield Call(
            id=f"{turn_id}_{number}",
            name=tool.own_name if tool else name or UNREADABLE,
            arguments=writable(arguments),
            free=tool is not None and tool.free,
            namespace=tool.namespace if tool else "",
        )


def value_of(arguments: object) -> object:
    """Read arguments as a value that a client's own spelling does not change."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            return writable(arguments)
    return _plain(arguments, 0)


def _encodable(arguments: str) -> str:
    """Replace escapes of lone surrogates in JSON: clients die of them."""
    if "\\ud" not in arguments.lower():
        return arguments
    try:
        return writable(json.dumps(json.loads(arguments), ensure_ascii=False))
    except (ValueError, RecursionError):
        return arguments


def _plain(value: object, depth: int) -> object:
    if value is None and not depth:
        return {}
    if depth > 100:
        return str(type(value))
    if isinstance(value, dict):
        inner = cast(dict[str, object], value)
        return {writable(key): _plain(item, depth + 1) for key, item in inner.items()}
    if isinstance(value, list):
        return [_plain(item, depth + 1) for item in cast(list[object], value)]
    if isinstance(value, bool):
        return ("bool", value)  # which equals 1 or 0 otherwise
    if isinstance(value, int):
        return float(value) if abs(value) < 2**1023 else str(value)
    return writable(value) if isinstance(value, str) else value


def _same_calls(sent: tuple[Call, ...], back: tuple[Call, ...]) -> bool:
    if [call.id for call in sent] != [call.id for call in back]:
        return False
    return all(map(_same_call, sent, back))


def _same_call(sent: Call, back: Call) -> bool:
    """Return True if a call that came back under our id has our content, or is what a client makes of a bad one."""
    if sent.arguments == back.arguments:
        return True
    ours, theirs = value_of(sent.arguments), value_of(back.arguments)
    if sent.free and isinstance(ours, dict) and isinstance(theirs, dict) and set(theirs) == {"input"}:
        # The client got the input alone.
        return ours.get("input", value_of(sent.arguments)) == theirs["input"] or theirs["input"] == sent.arguments
    if ours == theirs:
        return True
    if back.name == UNREADABLE and isinstance(theirs, dict) and set(theirs) == {"tool", "error"}:
        return True
    if isinstance(theirs, dict) and set(theirs) == {"__unparsedToolInput"}:
        raw: Any = theirs["__unparsedToolInput"]
        return isinstance(raw, dict) and raw.get("raw") == sent.arguments
    return isinstance(theirs, dict) and set(theirs) == {"value"} and theirs["value"] == ours
