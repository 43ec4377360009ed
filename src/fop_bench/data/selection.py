"""Which examples a run uses: hold-out, long tail, random subset, in this order.

Every choice is fixed (it does not depend on a run's seed), so that all runs of a workload
see the same data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from fop_bench.data.longtail import long_tail
from fop_bench.data.seeding import shuffled_members, stream


class Labelled(Protocol):
    """Examples with labels [n], of which some can be selected."""

    @property
    def labels(self) -> Tensor: ...

    def select(self: Data, indices: Tensor) -> Data: ...


Data = TypeVar("Data", bound=Labelled)


@dataclass(frozen=True)
class Selection:
    """`held_out`: share of the training data kept for validation (0: train on everything);
    `imbalance`: largest over smallest class of a long tail; `subset`: at most this many examples
    of each split."""

    held_out: float = 0.0
    imbalance: float | None = None
    subset: int | None = None

    def apply(self, training: Data, test: Data) -> tuple[Data, Data, Data | None]:
        """(training, test, validation); validation is held out before the long tail is cut."""
        rest, held = hold_out(training.labels, self.held_out)
        validation = self._cut(training.select(held)) if self.held_out else None
        training = training.select(rest)
        if self.imbalance is not None:
            training = training.select(long_tail(training.labels, self.imbalance))
        return self._cut(training), self._cut(test), validation

    def _cut(self, data: Data) -> Data:
        return data.select(random_subset(len(data.labels), self.subset))


def hold_out(labels: Tensor, fraction: float) -> tuple[Tensor, Tensor]:
    """Split indices into (rest, held out) with the same fraction of every class, at least one."""
    held = torch.zeros(len(labels), dtype=torch.bool)
    for label in range(int(labels.max()) + 1):
        members = shuffled_members(labels, label, "hold-out")
        count = max(1, round(fraction * len(members))) if fraction else 0
        held[members[:count]] = True
    return (~held).nonzero().flatten(), held.nonzero().flatten()


def random_subset(size: int, count: int | None) -> Tensor:
    """`count` of `size` indices, in ascending order; all of them for None."""
    if count is not None and count < 1:
        raise ValueError(f"subset must be at least 1, got {count}")
    if count is None or count >= size:
        return torch.arange(size)
    return torch.randperm(size, generator=stream("subset", size))[:count].sort().values
