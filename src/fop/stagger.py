"""Which layer refreshes its curvature on which step of an interval: work is spread evenly.

A pure function of the layers' shapes and the interval: a resumed run finds the same schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache


def phases(costs: Sequence[float], interval: int) -> tuple[int, ...]:
    """For each layer, by how many steps its refreshes come after the start of an interval.

    Costliest first, each to the step with the least work so far; of equal ones, the first.
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
