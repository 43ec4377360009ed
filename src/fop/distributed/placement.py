"""Which rank of a group owns which layer: a pure function of modelled costs (`fop.costs`)."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def assign_owners(costs: Sequence[float], ranks: int) -> list[int]:
    """The rank of each layer: the costliest first, each to the rank with the least so far."""
    loads = [(0.0, rank) for rank in range(ranks)]
    owners = [0] * len(costs)
    # The index breaks ties, so that all ranks come to the same answer.
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, rank = heapq.heappop(loads)
        owners[index] = rank
        heapq.heappush(loads, (load + costs[index], rank))
    return owners
