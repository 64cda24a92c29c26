"""The result of collecting episodes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from agentrl.errors import InfrastructureError, RefusedError
from agentrl.rollout.plan import EpisodeSpec
from agentrl.types import Group


@dataclass(slots=True, kw_only=True)
class Clock:
    """Seconds spent while collecting, summed over concurrent episodes."""

    tools: float = 0.0
    """Seconds in environments: tools and grading."""
    engine: float = 0.0
    """Seconds of waiting for completions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """The episodes of one collection, and counts of those that failed."""

    groups: tuple[Group, ...]
    """The complete groups, in the order they were asked for."""
    faults: int
    """Attempts at an episode that an infrastructure fault ended."""
    last_fault: InfrastructureError | None = None
    """The last of them."""
    lost: int
    """Groups skipped because an episode failed twice."""
    refused: Mapping[EpisodeSpec, RefusedError] = field(default_factory=dict[EpisodeSpec, RefusedError])
    """Episodes that a server refuses to continue, and why; their groups are skipped and not counted in ``lost``."""
    cancelled: int = 0
    """Groups cancelled because enough others finished earlier."""
    seconds: float
    """Wall time of the collection."""
    clock: Clock
    """The episodes' time in environments and in the engine, summed over all of them."""
    sandbox: Mapping[str, float]
    """Metrics of the sandbox behind the ``python`` tool during the collection."""


def joined(parts: Sequence[Collected]) -> Collected:
    """Join collections, at least one, that were made one after the other."""
    # Counts and times add up. Percentiles don't, but the largest bound of any part holds for all of them.
    sandbox = {
        name: (max if name.endswith(("_p50", "_p99")) else sum)(part.sandbox[name] for part in parts)
        for name in parts[0].sandbox
    }
    return Collected(
        groups=tuple(group for part in parts for group in part.groups),
        faults=sum(part.faults for part in parts),
        last_fault=next((part.last_fault for part in reversed(parts) if part.last_fault), None),
        lost=sum(part.lost for part in parts),
        refused={spec: error for part in parts for spec, error in part.refused.items()},
        cancelled=sum(part.cancelled for part in parts),
        seconds=sum(part.seconds for part in parts),
        clock=Clock(tools=sum(part.clock.tools for part in parts), engine=sum(part.clock.engine for part in parts)),
        sandbox=sandbox,
    )
