"""Which units parts C to F have, and in which order, given the rows that are there. Nothing is run here."""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from statistics import mean
from typing import Any

from arms import LEARNING, POOLED, SAME_SIGNED, STALE, UPDATING, VARIANTS, WARM, Arm, Unit

Row = Mapping[str, Any]
Book = Mapping[str, Sequence[Row]]
"""Rows by part; W has those of warm starts."""

TUNING, RESULTS = 1000, 2000
"""The first seed that is tried for each purpose."""
_FURTHER_SEEDS = 10
"""Seeds with which D has further arms: those that only see differences of rewards, with rewards of ±1; and VARIANTS."""
COUNTS = (0.05, 0.30)
"""Success of a warm start that counts."""
LADDER = (1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
RATES = {"C": (1e-4, 3e-4, 1e-3, 3e-3, 1e-2), "E": (3e-5, 1e-4, 3e-4, 1e-3)}
TUNING_SEEDS = {"C": 2, "E": 1}
TUNING_STEPS = {"C": 15, "E": 12}
FURTHER = {"C": 30, "E": 14}
"""Most runs beyond the edges of the rates."""
SIZE = {"C": 90, "D": 230, "E": 196, "F": 60}
"""Units of each part, without further rates and warm starts."""
STEPS = {"D": 30, "E": 20, "F": 20}
SEEDS = {"D": 20, "E": 10, "F": 5}
WITHIN = 0.02
"""Of rates whose success is that close the lower one is taken."""
_WARM_S, _STEP_S, _PASS_S = 36.0, 4.5, 1.5


class NotYet(Exception):
    """A part needs rows of another one."""


def units(part: str, book: Book) -> Iterator[Unit]:
    """List the units of a part that are known from the rows, in order, done or not.

    Raises:
        NotYet: rows of another part are missing.
    """
    if part in RATES:
        yield from _tuning(part, book)
    if part in STEPS:
        rates = _rates(part, book)
        for seed in _seeds(RESULTS, SEEDS[part], book):
            if isinstance(seed, dict):
                yield seed
                continue
            for arm in _arms(part, seed, book):
                rate = rates[arm.name, "0/1" if arm in SAME_SIGNED else arm.rewards]
                yield arm.unit(part, "results", lr=rate, seed=seed, steps=STEPS[part])


def ready_units(part: str, book: Book) -> tuple[list[Unit], str]:
    """Return the units of a part that are known, and what the others wait for; an empty text where all are known."""
    ready: list[Unit] = []
    try:
        ready.extend(units(part, book))
    except NotYet as error:
        return ready, str(error)
    return ready, ""


@dataclass(frozen=True, slots=True)
class Left:
    """How much of a part is done, and what is left."""

    done: int
    """Runs that have a row."""
    units: Sequence[Unit]
    """Those of the part that are known and have none."""
    warm: int
    """Warm starts that are to be tried before further units are known."""
    reason: str
    """What units that are not known wait for; empty where there are none."""
    total: int
    """Runs of the whole part, as many as the plan has or as are known."""


def left_of(part: str, book: Book) -> Left:
    """Compare a part's units with its rows."""
    units_known, reason = ready_units(part, book)
    done = _keys((*book[part], *book["W"]))
    waiting = [unit for unit in units_known if key_of(unit) not in done]
    left = [unit for unit in waiting if unit["part"] == part]
    total = max(SIZE[part], len(book[part]) + len(left))
    return Left(len(book[part]), left, len(waiting) - len(left), reason, total)


def so_far(part: str, book: Book) -> str:
    """Write how much of a part is done; empty where all of it is."""
    left = left_of(part, book)
    if not (left.reason or left.units or left.warm):
        return ""
    return f"*So far {left.done} of about {left.total} runs: nothing is decided by them.*"


def key_of(unit: Unit) -> str:
    """Write a unit so that equal ones are equal texts."""
    return json.dumps(unit, sort_keys=True)


def _keys(rows: Iterable[Row]) -> set[str]:
    return {key_of(row["unit"]) for row in rows}


def success(row: Row) -> float:
    """Mean success over the second half of the steps; steps that a run did not reach count as none."""
    steps = row["unit"]["steps"]
    shares = [won / played for won, played in zip(row["successes"], row["episodes"], strict=True)]
    return sum(shares[steps // 2 :]) / (steps - steps // 2)


def area(row: Row) -> float:
    """Success of all training episodes of a run."""
    return sum(row["successes"]) / sum(row["episodes"])


def by_rate(rows: Iterable[Row], arm: str, rewards: str) -> dict[float, list[Row]]:
    """Sort the tuning runs of an arm by their rate, lowest first."""
    runs: dict[float, list[Row]] = defaultdict(list)
    for row in rows:
        unit = row["unit"]
        if (unit["purpose"], unit["arm"], unit["rewards"]) == ("rates", arm, rewards):
            runs[unit["lr"]].append(row)
    return dict(sorted(runs.items()))


def best_rate(tried: Mapping[float, Sequence[Row]], level: Callable[[Row], float] = success) -> float:
    """Choose the rate of highest success, as ``level`` measures it, and of those within two points the lowest."""
    levels = {rate: mean(map(level, rows)) for rate, rows in tried.items()}
    return min(rate for rate, value in levels.items() if value >= max(levels.values()) - WITHIN)


def counts(row: Row) -> bool:
    """Return True if a warm start's seed counts."""
    return COUNTS[0] <= row["success"] <= COUNTS[1]


def chosen_seeds(first_seed: int, wanted: int, book: Book) -> list[int]:
    """List the seeds that count, so far as they are known; none after one that was not tried."""
    return [seed for seed in _seeds(first_seed, wanted, book) if isinstance(seed, int)]


def seconds(unit: Unit) -> float:
    """Estimate a unit's time on one core."""
    if unit["part"] == "W":
        return _WARM_S
    passes = unit["settings"].get("optim.epochs", 1) - 1 + (unit["settings"].get("optim.minibatches", 1) > 1)
    return unit["steps"] * (_STEP_S + _PASS_S * passes)


def _seeds(first_seed: int, wanted: int, book: Book) -> Iterator[int | Unit]:
    """List the first seeds that count, and in the place of one that was not tried the unit that tries it."""
    tried = {row["unit"]["seed"]: row for row in book["W"]}
    chosen = 0
    for seed in count(first_seed):
        if chosen == wanted:
            return
        if seed not in tried:
            yield {"part": "W", "purpose": "warm start", "seed": seed, "steps": WARM["sft.steps"]}
        elif counts(tried[seed]):
            yield seed
        else:
            continue
        # One that was not tried yet may count: whether others are needed shows later.
        chosen += 1


def _tuning(part: str, book: Book) -> Iterator[Unit]:
    arms, steps = LEARNING if part == "C" else UPDATING, TUNING_STEPS[part]
    seeds = list(_seeds(TUNING, TUNING_SEEDS[part], book))
    for seed in seeds:
        if isinstance(seed, dict):
            yield seed
            continue
        for arm in arms:
            for rate in RATES[part]:
                yield arm.unit(part, "rates", lr=rate, seed=seed, steps=steps)
    if all(isinstance(seed, int) for seed in seeds):
        yield from _further(part, arms, [seed for seed in seeds if isinstance(seed, int)], book)


def _further(part: str, arms: Sequence[Arm], seeds: Sequence[int], book: Book) -> Iterator[Unit]:
    """Follow each arm whose best rate is at the edge of those that all seeds have."""
    done = _keys(row for row in book[part] if row["unit"]["purpose"] == "rates")
    left = FURTHER[part] + len(arms) * len(RATES[part]) * len(seeds) - len(done)
    for arm in arms:
        tried = by_rate(book[part], arm.name, arm.rewards)
        rates = [*RATES[part]]
        while set(rates) <= {rate for rate, rows in tried.items() if len(rows) >= len(seeds)}:
            best = best_rate({rate: tried[rate] for rate in rates})
            index = LADDER.index(best)
            if min(rates) < best < max(rates):
                break
            index += 1 if best == max(rates) else -1
            if index not in range(len(LADDER)):
                break
            rate = LADDER[index]
            further = [arm.unit(part, "rates", lr=rate, seed=seed, steps=TUNING_STEPS[part]) for seed in seeds]
            left -= sum(key_of(unit) not in done for unit in further)
            if left < 0:
                return
            yield from further
            rates = sorted([*rates, rate])
            if part == "E":
                break


def _missing(part: str, book: Book) -> list[Unit]:
    done = _keys(book[part])
    return [unit for unit in _tuning(part, book) if key_of(unit) not in done]


def _rates(part: str, book: Book) -> dict[tuple[str, str], float]:
    """Choose the rate of each arm of a part, by its name and rewards."""
    for source in {"D": "C", "E": "E", "F": "CE"}[part]:
        if missing := _missing(source, book):
            raise NotYet(f"part {part} has its rates from part {source}, of which {len(missing)} or more are missing")

    def chosen(source: str, arm: Arm) -> float:
        return best_rate(by_rate(book[source], arm.name, arm.rewards))

    rates = {(arm.name, arm.rewards): chosen("C", arm) for arm in (LEARNING if part in "DF" else ())}
    if part == "D":
        rates |= {(arm.name, arm.rewards): chosen("C", POOLED) for arm in VARIANTS}
    rates |= {(arm.name, arm.rewards): chosen("E", arm) for arm in (UPDATING if part in "EF" else ())}
    if part == "F":
        rates |= {
            (arm.name, "0/1"): min(rates[c_arm, "0/1"], rates[e_arm, "0/1"]) for arm, c_arm, e_arm in STALE.values()
        }
    return rates


def _arms(part: str, seed: int, book: Book) -> Sequence[Arm]:
    if part == "D":
        chosen = chosen_seeds(RESULTS, _FURTHER_SEEDS, book)
        return (*LEARNING, *((*SAME_SIGNED, *VARIANTS) if seed in chosen else ()))
    return UPDATING if part == "E" else [arm for arm, _, _ in STALE.values()]
