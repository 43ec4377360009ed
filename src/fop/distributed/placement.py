"""Which rank of a group looks after which layer: a pure function of modelled costs.

A layer with factors [g, i, i] and [g, o, o] costs

    refresh   g (i^3 + o^3) / T          both decompositions, every T steps
    step      g 6 o i (o + i)            three two-sided products, every step

A factor kept as its diagonal costs nothing to decompose and next to nothing to multiply with.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Work:
    """One layer's matrix, as far as its costs are concerned."""

    rows: int
    columns: int
    groups: int = 1
    diagonal_rows: bool = False
    diagonal_columns: bool = False


def cost(work: Work, interval: int) -> float:
    """Floating point operations a step, up to a common factor."""
    refresh = products = 0.0
    for size, diagonal in (
        (work.rows, work.diagonal_rows),
        (work.columns, work.diagonal_columns),
    ):
        if not diagonal:
            refresh += float(size) ** 3
            products += 6.0 * work.rows * work.columns * size
    elementwise = 6.0 * work.rows * work.columns
    return work.groups * (refresh / interval + products + elementwise)


def place(costs: Sequence[float], ranks: int) -> list[int]:
    """The rank of each layer: the costliest first, each to the rank with the least so far."""
    loads = [(0.0, rank) for rank in range(ranks)]
    owners = [0] * len(costs)
    # The index breaks ties, so that all ranks come to the same answer.
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, rank = heapq.heappop(loads)
        owners[index] = rank
        heapq.heappush(loads, (load + costs[index], rank))
    return owners


def lower_bound(costs: Sequence[float], ranks: int) -> float:
    """What no placement can beat: the mean load, or the costliest layer."""
    return max(sum(costs) / ranks, max(costs, default=0.0))
