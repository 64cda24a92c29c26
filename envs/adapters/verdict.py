"""What somebody else's grader paid, as a share of the range that the user of an adapter has declared."""

import math

from agentrl.errors import ConfigError

GRADED = "graded"
"""A part of weight 0: 1 where the verdict was in its range, so that the metric ``reward/graded`` shows those that were
not."""
_SLACK = 1e-6
"""Sums of floats may pass the range's end by their rounding."""


def weights(parts: dict[str, float]) -> dict[str, float]:
    """Return the weights of an adapter's parts, :data:`GRADED` included.

    Raises:
        ConfigError: there is no part, or one has that name.
    """
    if not parts or GRADED in parts:
        raise ConfigError(f"an adapter's reward needs parts, none of them called {GRADED!r}: name others")
    return {**parts, GRADED: 0.0}


def share(paid: float | None, low: float, high: float) -> tuple[float, str]:
    """Return what was paid on a scale from 0 to 1, and an empty text; or else 0 and the reason.

    Args:
        paid: any number; None where there is no verdict, which is not a 0.
        low: the least that can be paid.
        high: the most.

    Example:
        >>> share(0.5, -1.0, 1.0)
        (0.75, '')
        >>> share(1_000_000, 0.0, 1.0)
        (0.0, '1e+06 was paid, which is not from 0 to 1')
    """
    if paid is None:
        return 0.0, "nothing was paid"
    scaled = (paid - low) / (high - low)
    if not math.isfinite(scaled) or not -_SLACK <= scaled <= 1 + _SLACK:
        return 0.0, f"{paid:g} was paid, which is not from {low:g} to {high:g}"
    return min(max(scaled, 0.0), 1.0), ""
