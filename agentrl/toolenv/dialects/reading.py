"""JSON to and from a model: read strictly, in linear time, with errors that the model can learn from."""

import json
import math
import re
from collections import Counter
from collections.abc import Mapping

from agentrl.types import ToolCall

MAX_DEPTH = 64
"""Deepest nesting of lists and objects."""
MAX_DIGITS = 1000
"""Most digits of a whole number: Python reads one in quadratic time."""
MAX_NAME = 128
"""Longest name of a tool."""
_SURROGATE = re.compile("[\ud800-\udfff]")
_KINDS: Mapping[type, str] = {
    **{dict: "an object", list: "a list", str: "a text", bool: "true or false"},
    **{int: "a number", float: "a number", type(None): "null"},
}


class UnreadableCall(ValueError):
    """A call can't be read; the message says why, in words for the model."""


def read_object(text: str) -> dict[str, object]:
    """Read ``text`` as one JSON object.

    Raises:
        UnreadableCall: it is none; see :func:`read_json`.
    """
    value = read_json(text)
    if not isinstance(value, dict):
        raise UnreadableCall(f"the arguments must be one JSON object, not {kind_of(value)}")
    return value


def read_json(text: str) -> object:
    """Read ``text`` as one JSON value.

    Raises:
        UnreadableCall: it is not JSON, repeats a key, holds a number that is not finite or too long or half a surrogate
            pair, or is nested too deeply.
    """
    value, end = read_json_at(text, 0)
    if rest := text[end:].strip():
        raise UnreadableCall(f"there is more text after the JSON: {_excerpt(rest, 0)}")
    return value


def read_json_at(text: str, position: int) -> tuple[object, int]:
    """Read the JSON value that begins at ``position`` or after white space there; return it and where it ends.

    Raises:
        UnreadableCall: see :func:`read_json`.
    """
    # raw_decode does not skip white space itself.
    start = _SPACE.match(text, position)
    assert start is not None
    try:
        value, end = _DECODER.raw_decode(text, start.end())
    except json.JSONDecodeError as error:
        raise UnreadableCall(f"this is not JSON: {error.msg} at {_excerpt(text, error.pos)}") from error
    except RecursionError as error:
        raise UnreadableCall(_TOO_DEEP) from error
    # Python's own recursion limit depends on the caller's stack: _check sets one that is the same everywhere.
    _check(value)
    return value, end


def write_json(value: object, protect: re.Pattern[str] | None = None) -> str:
    r"""Write ``value`` as one line of JSON.

    Args:
        value: plain data.
        protect: matches text that must not occur, each match beginning with ``<``, which becomes ``\u003c``.

    Raises:
        TypeError: it is no JSON value.
        ValueError: likewise.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if protect is None else protect.sub(lambda tag: "\\u003c" + tag.group()[1:], text)


def read_call(value: object, arguments_key: str = "arguments", extra: frozenset[str] = frozenset()) -> ToolCall:
    """Make a call of a JSON value; a fault becomes the call's ``error``.

    Args:
        value: as read.
        arguments_key: the form's key for the arguments; a call without the key has none.
        extra: further keys that the form allows; their values are ignored.
    """
    if not isinstance(value, dict):
        return malformed(f'a call is a JSON object with "name" and "{arguments_key}", not {kind_of(value)}')
    call: dict[str, object] = value
    name, arguments = call.get("name"), call.get(arguments_key, {})
    if not isinstance(name, str) or not name:
        return malformed('the call lacks "name", the name of a tool' if name is None else '"name" must be a text')
    if len(name) > MAX_NAME:
        return malformed(f"the name of a tool has at most {MAX_NAME} characters", name[:MAX_NAME])
    if unknown := [key for key in call if key not in {"name", arguments_key, *extra}]:
        only = f'a call has "name" and "{arguments_key}" only'
        return malformed(f"{only}, so {unknown[0][:20]!r} belongs elsewhere", name)
    if not isinstance(arguments, dict):
        return malformed(f'"{arguments_key}" must be one JSON object, not {kind_of(arguments)}', name)
    return ToolCall(name=name, arguments=arguments)


def malformed(error: str, name: str = "") -> ToolCall:
    """Make a call that can't be read.

    Args:
        error: why, in words for the model.
        name: the tool's name, as far as it could be read.
    """
    return ToolCall(name=name, arguments={}, error=error)


def kind_of(value: object) -> str:
    """Name the kind of a JSON value."""
    return _KINDS[type(value)]


def _excerpt(text: str, position: int) -> str:
    if position >= len(text):
        return "its end"
    return repr(text[position : position + 20])


def _check(value: object) -> None:
    """Check depth and surrogates level by level, without recursion, visiting each value once."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        inner: list[object] = []
        for node in level:
            if isinstance(node, dict):
                inner += [*node.keys(), *node.values()]
            elif isinstance(node, list):
                inner += node
            # JSON can spell a surrogate, but UTF-8 can't encode it: logs and checkpoints could not hold the call.
            elif isinstance(node, str) and _SURROGATE.search(node):
                raise UnreadableCall(
                    r"a text holds half a surrogate pair: write both \u escapes, or the character itself"
                )
        if not inner:
            return
        level = inner
    raise UnreadableCall(_TOO_DEEP)


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    # Python's json would keep the last value of a repeated key, and the model would never hear of it.
    made = dict(pairs)
    if len(made) < len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise UnreadableCall(f"the key {twice[:20]!r} is there twice")
    return made


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise UnreadableCall(f"the number {_excerpt(text, 0)} is too large")
    return number


def _whole(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise UnreadableCall(f"a whole number has at most {MAX_DIGITS} digits")
    return int(text)


def _no_constant(text: str) -> object:
    raise UnreadableCall(f"{text} is no JSON number")


_TOO_DEEP = f"lists and objects may be nested {MAX_DEPTH} deep"
_SPACE = re.compile(r"[ \t\n\r]*")
# Python's json accepts more than JSON (NaN, repeated keys, numbers of any size): the hooks refuse it.
_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique, parse_float=_finite, parse_int=_whole, parse_constant=_no_constant
)
