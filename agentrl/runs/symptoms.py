"""Symptoms of training that goes wrong in a known way, recognised from the rows of ``metrics.jsonl`` alone.

symptoms.toml has their sentences; docs/symptoms.md has the runs that the thresholds come from. No decision reads them.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TypeAlias

from agentrl.config.reading import read_toml
from agentrl.runs.folder import number

PATIENCE = 5
"""Steps in a row with a symptom after which it begins, and steps in a row without it after which it has ended."""
START = 5
"""Steps at the beginning of a run that later ones are compared with."""

_CERTAIN = 0.005
"""Entropy in nats below which a policy tries nothing else."""


class _Numbers(dict[str, float]):
    """The numbers of a row. What it lacks is NaN, for which no comparison holds: then there is no symptom."""

    def __missing__(self, key: str) -> float:
        return math.nan


_Check: TypeAlias = Callable[[_Numbers, Sequence[_Numbers]], tuple[float, ...]]
"""Gets a row and the rows of the run's start up to it; returns the numbers of the symptom's text, or none at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Symptom:
    """A way in which training goes wrong."""

    name: str
    """Its name in the list ``symptoms`` of a row."""
    check: _Check
    """Returns the numbers that ``text`` names where a step has the symptom."""
    text: str
    """Its first clause, with a field for each number."""
    cause: str
    """Its usual cause."""
    remedy: str
    """The settings that help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Onset:
    """A symptom that has begun."""

    symptom: Symptom
    """What has begun."""
    step: float
    """The step at which its patience was used up."""
    text: str
    """The symptom with its numbers at that step."""
    end: float | None = None
    """The step at which it had been absent for as long; None where it lasts."""

    @property
    def sentence(self) -> str:
        """The symptom, its usual cause and what helps."""
        return f"{self.text}: {self.symptom.cause}; {self.symptom.remedy}"


def _entropy_rising(row: _Numbers, start: Sequence[_Numbers]) -> tuple[float, ...]:
    lowest = min(earlier["entropy"] for earlier in start)
    return (row["entropy"], lowest) if row["entropy"] > max(1.5 * lowest, lowest + 0.2) else ()


def _entropy_gone(row: _Numbers, _: Sequence[_Numbers]) -> tuple[float, ...]:
    # A policy that solves its tasks may be certain.
    return (row["entropy"], row["success"]) if row["entropy"] < _CERTAIN and row["success"] < 0.9 else ()


def _silent(row: _Numbers, _: Sequence[_Numbers]) -> tuple[float, ...]:
    # Below it is rounding only: a baseline computed from equal rewards may miss them by as little.
    return (PATIENCE, row["reward_mean"]) if row["advantage_abs"] < 1e-6 else ()


def _unsolved(row: _Numbers, start: Sequence[_Numbers]) -> tuple[float, ...]:
    never = len(start) == START and all(other["success"] == 0 for other in (*start, row))
    # A best return that nobody reaches is no fault as long as the reward rises.
    return (row["step"],) if never and row["reward_mean"] <= max(other["reward_mean"] for other in start) else ()


def _turns_cut(row: _Numbers, _: Sequence[_Numbers]) -> tuple[float, ...]:
    turns = row["turns_mean"] * row["episodes"]
    return (row["cut_turns"] / turns,) if row["cut_turns"] >= 0.25 * turns > 0 else ()


def _episodes_cut(row: _Numbers, start: Sequence[_Numbers]) -> tuple[float, ...]:
    many = row["truncated"] >= 0.25 * row["episodes"] > 0
    return (row["truncated"] / row["episodes"],) if many and not _turns_cut(row, start) else ()


def _tools_dropped(row: _Numbers, start: Sequence[_Numbers]) -> tuple[float, ...]:
    before, now = max(map(_calls, start)), _calls(row)
    return (now, before) if before >= 0.1 and now <= 0.2 * before else ()


def _tools_failing(row: _Numbers, _: Sequence[_Numbers]) -> tuple[float, ...]:
    calls = row["tool_calls"]
    return (row["tool_errors"] / calls,) if row["tool_errors"] >= 0.5 * calls > 0 else ()


def _ratios_off(row: _Numbers, _: Sequence[_Numbers]) -> tuple[float, ...]:
    return (row["ratio_mean"],) if abs(row["ratio_mean"] - 1) > 0.1 else ()


def _clipped(row: _Numbers, _: Sequence[_Numbers]) -> tuple[float, ...]:
    return (row["clip_fraction"],) if row["clip_fraction"] > 0.5 else ()


def _weights_still(row: _Numbers, _: Sequence[_Numbers]) -> tuple[float, ...]:
    # The first update of a step meets the ratio 1 at any learning rate: only a second one shows what it has moved.
    # A policy without entropy has no gradient either, and no larger step brings it back.
    judged = row["updates"] > 1 and row["advantage_abs"] > 0.01 and row["entropy"] >= _CERTAIN
    return (row["log_ratio_abs_max"],) if judged and row["log_ratio_abs_max"] < 1e-3 else ()


def _gradient_rising(row: _Numbers, start: Sequence[_Numbers]) -> tuple[float, ...]:
    before = median(earlier["grad_norm"] for earlier in start)
    return (row["grad_norm"], before) if len(start) == START and row["grad_norm"] > 10 * before > 0 else ()


def _faulty(row: _Numbers, _: Sequence[_Numbers]) -> tuple[float, ...]:
    return (row["faults"], row["episodes"]) if row["faults"] >= 0.1 * row["episodes"] > 0 else ()


def _calls(row: _Numbers) -> float:
    """Return the tool calls per episode; 0 without an episode."""
    return row["tool_calls"] / row["episodes"] if row["episodes"] else 0.0


_CHECKS: Mapping[str, _Check] = {
    "entropy_rising": _entropy_rising,
    "entropy_gone": _entropy_gone,
    "silent": _silent,
    "unsolved": _unsolved,
    "turns_cut": _turns_cut,
    "episodes_cut": _episodes_cut,
    "tools_dropped": _tools_dropped,
    "tools_failing": _tools_failing,
    "ratios_off": _ratios_off,
    "clipped": _clipped,
    "weights_still": _weights_still,
    "gradient_rising": _gradient_rising,
    "faulty": _faulty,
}
_SENTENCES = read_toml(Path(__file__).with_suffix(".toml"))
SYMPTOMS = tuple(Symptom(name=name, check=check, **_SENTENCES[name]) for name, check in _CHECKS.items())
"""All symptoms, in the order in which a step shows them."""


class Watch:
    """Watches the rows of a run for symptoms; the same rows have the same symptoms, also after a resume."""

    def __init__(self) -> None:
        self.onsets: list[Onset] = []
        """All that has begun, in order."""
        self._start: list[_Numbers] = []
        self._streaks = dict.fromkeys((symptom.name for symptom in SYMPTOMS), 0)
        self._lasting: dict[str, int] = {}

    @property
    def lasting(self) -> list[str]:
        """Names of the symptoms that the run has now."""
        return [*self._lasting]

    def add(self, row: Mapping[str, object]) -> list[Onset]:
        """Add a step's row; return the symptoms that begin with it."""
        numbers = _Numbers((key, value) for key in row if (value := number(row[key])) is not None)
        self._start += [numbers] if len(self._start) < START else []
        before = len(self.onsets)
        for symptom in SYMPTOMS:
            self._judge(symptom, numbers, symptom.check(numbers, self._start))
        return self.onsets[before:]

    def _judge(self, symptom: Symptom, row: _Numbers, values: Sequence[float]) -> None:
        """Count the steps in a row that contradict what is known of a symptom, and change that after enough of them."""
        name = symptom.name
        index = self._lasting.get(name)
        self._streaks[name] = self._streaks[name] + 1 if bool(values) == (index is None) else 0
        if self._streaks[name] < PATIENCE:
            return
        self._streaks[name] = 0
        if index is None:
            self._lasting[name] = len(self.onsets)
            self.onsets.append(Onset(symptom=symptom, step=row["step"], text=symptom.text.format(*values)))
        else:
            del self._lasting[name]
            self.onsets[index] = replace(self.onsets[index], end=row["step"])


def watched(rows: Iterable[Mapping[str, object]]) -> Watch:
    """Return a watch that has seen these rows of a run, in order of steps."""
    watch = Watch()
    for row in rows:
        watch.add(row)
    return watch
