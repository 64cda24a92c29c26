"""Compares a result with what a program of the data files must get.

The keys of an expectation: ``verdict`` (allowed statuses), ``etype`` (allowed exception classes, where the status is
``error``), ``state``, ``value``, ``value_none``, ``value_lacks``, ``stdout``, ``stdout_has``, ``stdout_lacks``,
``stdout_starts``, ``stderr_has``, ``tb_has``, ``tb_matches`` (a pattern of the traceback), ``exit_code``, ``signal``,
lengths ``stdout_max``, ``value_max`` and ``tb_max`` [characters], and ``cpu_max``, ``wall_max`` and ``wall_slack``
[seconds].
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from agentrl.sandboxes.base import Result

Expectation = Mapping[str, Any]
"""The entry ``expect`` of a data file's case."""

CHECKS: Final[dict[str, Callable[[Any, Result], bool]]] = {
    "verdict": lambda wanted, result: result.status in wanted,
    "etype": lambda wanted, result: result.status != "error" or result.exc_type in wanted,
    "state": lambda wanted, result: result.state == wanted,
    "value": lambda wanted, result: result.value == wanted,
    "value_none": lambda wanted, result: (result.value is None) == wanted,
    "value_lacks": lambda wanted, result: wanted not in (result.value or ""),
    "stdout": lambda wanted, result: result.stdout == wanted,
    "stdout_has": lambda wanted, result: wanted in result.stdout,
    "stdout_lacks": lambda wanted, result: wanted not in result.stdout,
    "stdout_starts": lambda wanted, result: result.stdout.startswith(wanted),
    "stderr_has": lambda wanted, result: wanted in result.stderr,
    "tb_has": lambda wanted, result: wanted in (result.traceback or ""),
    "tb_matches": lambda wanted, result: re.fullmatch(wanted, result.traceback or "", re.DOTALL) is not None,
    "exit_code": lambda wanted, result: result.exit_code == wanted,
    "signal": lambda wanted, result: result.signal == wanted,
    "stdout_max": lambda wanted, result: len(result.stdout) <= wanted,
    "value_max": lambda wanted, result: len(result.value or "") <= wanted,
    "tb_max": lambda wanted, result: len(result.traceback or "") <= wanted,
    "cpu_max": lambda wanted, result: result.cpu_s <= wanted,
    "wall_max": lambda wanted, result: result.wall_s <= wanted,
    "wall_slack": lambda wanted, result: result.wall_s <= wanted,
}


def broken(expected: Expectation, result: Result) -> Iterator[str]:
    """Yield the parts of an expectation that a result does not meet.

    Raises:
        KeyError: There is no such expectation.
    """
    for name, wanted in expected.items():
        if not CHECKS[name](wanted, result):
            yield describe({name: wanted})


def describe(expected: Expectation) -> str:
    """Return an expectation in words."""
    return ", ".join(f"{name} {wanted!r}" for name, wanted in expected.items())
