"""Call a submitted function inside the sandbox: this file is sent there as text, beside the submission.

It imports the standard library only, and names no other package: the sandbox picks an interpreter by the words of a
program. Nothing here is trusted inside, since the submission can change all of it. So the output is a claim about the
submission's own return value and about nothing else.
"""

import ast
import json
from typing import Any, cast

_PLAIN_BITS = 63


class Claim:
    """A text whose repr is the text itself: the last expression of a program is shown by its repr."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def describe(value: object) -> object:
    """``value`` in JSON's types, without losing what kind of value it was.

    Lists and tuples become lists; what JSON lacks becomes a mapping with one key that names it: ``dict`` (its keys
    that are no texts are written as JSON), ``set`` (its members sorted), ``int`` (a large one, in hexadecimal), and
    ``other`` for everything that can't be compared. What has ``tolist``, as arrays do, becomes what that returns.

    Raises:
        RecursionError: it is nested too deeply, or contains itself.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value) if value.bit_length() <= _PLAIN_BITS else {"int": hex(value)}
    if isinstance(value, float):
        return float(value)
    if isinstance(value, list | tuple):
        return [describe(item) for item in value]
    if isinstance(value, set | frozenset):
        return {"set": sorted((describe(item) for item in value), key=json.dumps)}
    if isinstance(value, dict):
        keys = [key if isinstance(key, str) else json.dumps(describe(key)) for key in value]
        items = dict(zip(keys, map(describe, value.values()), strict=True))
        # Of 1 and "1" one would be lost.
        return {"dict": items} if len(items) == len(value) else {"other": "dict"}
    if hasattr(value, "tolist"):
        return describe(cast(Any, value).tolist())
    return {"other": type(value).__name__}


def report(entry_point: str, truth: bool = False) -> Claim:
    """Call the submission's ``name`` or ``Class().method`` with what ``call.txt`` holds, a literal (args, kwargs).

    Args:
        entry_point: what is called.
        truth: claim only whether the value counts as true.
    """
    with open("call.txt", encoding="utf-8") as file:
        args, kwargs = ast.literal_eval(file.read())
    import solution  # pyright: ignore[reportMissingImports]

    name, _, method = entry_point.partition("().")
    function = vars(solution)[name]
    if method:
        function = getattr(function(), method)
    value = function(*args, **kwargs)
    return Claim(json.dumps(describe(bool(value) if truth else value)))
