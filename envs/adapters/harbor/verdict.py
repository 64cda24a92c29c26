"""What a verifier's reward files mean; whatever can't be read strictly is a 0 with its reason, never a fault."""

import json
import math
import re
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, Final, cast

from agentrl.sandboxes.docker.task_engine import CountedStream

MOST_REWARD: Final = 1 << 16
"""Most bytes of a reward file."""
FILES: Final = ("/logs/verifier/reward.json", "/logs/verifier/reward.txt")
"""Where a verifier writes its reward; one of them is enough."""
_NUMBER: Final = re.compile(rb"\s*[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?\s*")


class UnreadableError(Exception):
    """A reward that can't be read; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The outcome of a grading."""

    parts: Mapping[str, float]
    """The reward's declared parts, each from 0 to 1."""
    reason: str = ""
    """Why there is no readable reward, where there is none; every part is 0 then."""
    timeout: bool = False
    """The tests took too long."""


def regular(stream: CountedStream | IO[bytes]) -> bytes:
    """Return the content of the only member of a tar stream.

    Raises:
        UnreadableError: It is no small regular file.
    """
    try:
        with tarfile.open(fileobj=stream, mode="r|") as members:  # pyright: ignore[reportArgumentType, reportCallIssue]
            member = members.next()
            if member is None or not member.isreg():
                raise UnreadableError("a reward file is no regular file")
            if member.size > MOST_REWARD:
                raise UnreadableError(f"a reward file has more than {MOST_REWARD >> 10} KiB")
            content = members.extractfile(member)
            return content.read() if content is not None else b""
    except tarfile.TarError as error:
        raise UnreadableError(f"a reward file can't be read: {error}") from error


def parts_of(files: Mapping[str, bytes], declared: Mapping[str, float]) -> Mapping[str, float]:
    """Return the declared parts of what the reward files say.

    Args:
        files: the contents of those of ``FILES`` that are there.
        declared: the environment's own parts; others are not read.

    Raises:
        UnreadableError: There is no file, or they differ, or a part is missing or no number from 0 to 1.
    """
    rewards = [_json(files[FILES[0]])] if FILES[0] in files else []
    rewards += [{"reward": _number(files[FILES[1]])}] if FILES[1] in files else []
    if not rewards:
        raise UnreadableError("there is no reward file")
    if len({numbers.get("reward") for numbers in rewards}) > 1:
        raise UnreadableError("reward.json and reward.txt say different things")
    for name in declared:
        if name not in rewards[0]:
            raise UnreadableError(f"the verdict has no part {name!r}, only {', '.join(rewards[0])[:200] or 'none'}")
        if not 0 <= rewards[0][name] <= 1:
            raise UnreadableError(f"{name} is {rewards[0][name]:g}: no number from 0 to 1")
    return {name: rewards[0][name] for name in declared}


def _number(text: bytes) -> float:
    if not _NUMBER.fullmatch(text):
        raise UnreadableError(f"reward.txt holds {text[:60]!r}: no number")
    return _finite("reward", float(text))


def _json(text: bytes) -> dict[str, float]:
    try:
        pairs: object = json.loads(text, object_pairs_hook=_Pairs)
    except (ValueError, RecursionError) as error:
        raise UnreadableError(f"reward.json is no JSON: {str(error)[:200]}") from error
    if not isinstance(pairs, _Pairs):
        raise UnreadableError("reward.json is no table of numbers")
    numbers: dict[str, float] = {}
    for name, value in cast(list[tuple[str, object]], pairs):
        if name in numbers or not isinstance(value, int | float):
            raise UnreadableError(f"reward.json: {name[:60]!r} is there twice, or no number")
        numbers[name] = _finite(name, value)
    return numbers


class _Pairs(list[object]):
    """The pairs of a JSON object, repeated names included."""


def _finite(name: str, value: float) -> float:
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise UnreadableError(f"{name[:60]!r} is {number}")
    return number
