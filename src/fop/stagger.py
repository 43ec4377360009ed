"""Which layer renews its curvature on which step of an interval, so that no step is much the worst.

A pure function of the layers' shapes and the interval: a resumed run finds the same schedule.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

# Rows that a factor is the product of: only the batch knows, and only an order of size is needed.
NOMINAL_ROWS = 512


def refresh_cost(factors: Iterable[tuple[int, bool]], groups: int) -> float:
    """Multiply-adds, roughly, of one renewal, from each factor's width and if it is diagonal."""
    return groups * sum(
        width * NOMINAL_ROWS if diagonal else width**3 / 3 + width**2 * NOMINAL_ROWS
        for width, diagonal in factors
    )


def phases(costs: Sequence[float], interval: int) -> tuple[int, ...]:
    """For each layer, by how many steps its renewals come after the start of an interval.

    Dearest first, each to the step with the least work so far; of equal ones, the first.
    """
    return _phases(tuple(costs), interval)


@lru_cache(maxsize=32)
def _phases(costs: tuple[float, ...], interval: int) -> tuple[int, ...]:
    work: dict[int, float] = dict.fromkeys(range(min(interval, len(costs))), 0.0)
    chosen = [0] * len(costs)
    for layer in sorted(range(len(costs)), key=lambda layer: (-costs[layer], layer)):
        chosen[layer] = min(work, key=lambda phase: (work[phase], phase))
        work[chosen[layer]] += costs[layer]
    return tuple(phase * interval // max(len(work), 1) for phase in chosen)
