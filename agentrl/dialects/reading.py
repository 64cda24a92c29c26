"""JSON that a model wrote, or that is written for it: read strictly, in linear time, with errors it can learn from."""

import json
import math
import re
from collections import Counter
from collections.abc import Mapping

from agentrl.types import ToolCall

MAX_DEPTH = 64
"""Deepest nesting of lists and objects."""
MAX_DIGITS = 1000
"""Longest whole number."""
MAX_NAME = 128
"""Longest name of a tool."""
_SURROGATE = re.compile("[\ud800-\udfff]")
_KINDS: Mapping[type, str] = {
    **{dict: "an object", list: "a list", str: "a text", bool: "true or false"},
    **{int: "a number", float: "a number", type(None): "null"},
}


class Unreadable(ValueError):
    """What is wrong, in words for the model."""


def read_object(text: str) -> dict[str, object]:
    """The one JSON object that is all of ``text``.

    Raises:
        Unreadable: it is not that.
    """
    value = read_json(text)
    if not isinstance(value, dict):
        raise Unreadable(f"the arguments must be one JSON object, not {kind_of(value)}")
    return value


def read_json(text: str) -> object:
    """The one JSON value that is all of ``text``.

    Raises:
        Unreadable: it is not JSON, has a key twice, a number that is not finite or too long, half a surrogate pair, or
            is nested too deeply.
    """
    value, end = read_json_at(text, 0)
    if rest := text[end:].strip():
        raise Unreadable(f"there is more text after the JSON: {_excerpt(rest, 0)}")
    return value


def read_json_at(text: str, position: int) -> tuple[object, int]:
    """The JSON value that begins at ``position`` or after white space there, and where it ends.

    Raises:
        Unreadable: see :func:`read_json`.
    """
    start = _SPACE.match(text, position)
    assert start is not None
    try:
        value, end = _DECODER.raw_decode(text, start.end())
    except json.JSONDecodeError as error:
        raise Unreadable(f"this is not JSON: {error.msg} at {_excerpt(text, error.pos)}") from error
    except RecursionError as error:
        raise Unreadable(_TOO_DEEP) from error
    _check(value)
    return value, end


def write_json(value: object, protect: re.Pattern[str] | None = None) -> str:
    r"""``value`` in one line of JSON.

    Args:
        value: plain data.
        protect: what must not be in the text, each beginning with ``<``, which is written as ``\u003c`` there.

    Raises:
        TypeError: it is no JSON value.
        ValueError: likewise.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if protect is None else protect.sub(lambda found: "\\u003c" + found.group()[1:], text)


def read_call(value: object, arguments_key: str = "arguments", extra: frozenset[str] = frozenset()) -> ToolCall:
    """The call that a JSON value describes; what is wrong with it is the call's ``error``.

    Args:
        value: as read.
        arguments_key: what the form calls the arguments; a call without them has none.
        extra: further keys that the form knows; what they hold is not looked at.
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
    """A call that can't be read.

    Args:
        error: why, in words for the model.
        name: the tool's name, as far as it could be read.
    """
    return ToolCall(name=name, arguments={}, error=error)


def kind_of(value: object) -> str:
    """What a JSON value is, in words."""
    return _KINDS[type(value)]


def _excerpt(text: str, position: int) -> str:
    if position >= len(text):
        return "its end"
    return repr(text[position : position + 20])


def _check(value: object) -> None:
    """Look at every level in turn: no recursion, and each value once."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        inner: list[object] = []
        for one in level:
            if isinstance(one, dict):
                inner += [*one.keys(), *one.values()]
            elif isinstance(one, list):
                inner += one
            elif isinstance(one, str) and _SURROGATE.search(one):
                raise Unreadable(r"a text holds half a surrogate pair: write both \u escapes, or the character itself")
        if not inner:
            return
        level = inner
    raise Unreadable(_TOO_DEEP)


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    made = dict(pairs)
    if len(made) < len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise Unreadable(f"the key {twice[:20]!r} is there twice")
    return made


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise Unreadable(f"the number {_excerpt(text, 0)} is too large")
    return number


def _whole(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise Unreadable(f"a whole number has at most {MAX_DIGITS} digits")
    return int(text)


def _no_constant(text: str) -> object:
    raise Unreadable(f"{text} is no JSON number")


_TOO_DEEP = f"lists and objects may be nested {MAX_DEPTH} deep"
_SPACE = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique, parse_float=_finite, parse_int=_whole, parse_constant=_no_constant
)
