"""What the engine asks of a curvature.

It keeps no state itself: all tensors live in the optimizer's own state. So checkpoints carry them
without further ado, and resume continues bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from fop.capture import Eigenbasis
from fop.entries import AnyEntry, Entry
from fop.linalg import Factor
from fop.projection import Metric

# By how much a batch may exceed what is usual before it counts for less. Batches of ordinary
# training differ by less, and with the usual decay of 0.95 a bounded one adds half of the average.
LARGEST_GROWTH = 10.0
LAST_SIZE = "_last_size"  # after the name of an average: the size of the latest batch

# The part of `optimizer.state[weight]` that belongs to the curvature: tensors and numbers under
# plain names.
CurvatureState = MutableMapping[str, Any]


class PrefixedState(MutableMapping[str, Any]):
    """The entries of a state whose names start with a prefix: for layers that share a weight."""

    def __init__(self, state: MutableMapping[str, Any], prefix: str) -> None:
        self._state = state
        self._prefix = prefix

    def __getitem__(self, key: str) -> Any:
        return self._state[self._prefix + key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._state[self._prefix + key] = value

    def __delitem__(self, key: str) -> None:
        del self._state[self._prefix + key]

    def __iter__(self) -> Iterator[str]:
        start = len(self._prefix)
        return (key[start:] for key in self._state if key.startswith(self._prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)


@dataclass(frozen=True)
class RefreshJob:
    """One layer whose metric is to be refreshed from its moving averages."""

    state: CurvatureState
    shape: tuple[int, int]  # rows and columns of the layer's matrix
    damping: float
    uses: int = 1  # on how many steps the metric will serve, as far as is known


class Curvature(Protocol):
    keys: Mapping[str, AnyEntry]
    """All entries this curvature keeps in a state, by name: what loading checks them against."""

    def absorb(self, state: CurvatureState, inputs: Factor, outputs: Factor, decay: float) -> None:
        """Take a batch's factors A, G into the moving averages; the first initialises them."""
        ...

    def refresh(self, jobs: Sequence[RefreshJob]) -> list[bool]:
        """Refresh what `metric` needs. False where that failed and the layer keeps what it had."""
        ...

    def ready(self, state: CurvatureState, shape: tuple[int, int]) -> bool:
        """Whether `metric` can be had for a layer matrix of so many rows and columns."""
        ...

    def metric(self, state: CurvatureState, shape: tuple[int, int]) -> Metric: ...

    def basis(self, state: CurvatureState) -> Eigenbasis | None:
        """Where squares of per-example gradients are wanted, the basis to take them in."""
        ...

    def absorb_squares(self, state: CurvatureState, squares: Tensor, decay: float) -> None:
        """Take a batch's mean squares, measured in `basis`, into their moving average."""
        ...


def averaged(name: str, entry: Entry) -> dict[str, AnyEntry]:
    """All that `moving_average` keeps under a name, whose average is such an entry."""
    return {name: entry, name + LAST_SIZE: Entry(lambda size: [(size[0],)], low=0.0)}


def moving_average(
    state: CurvatureState,
    name: str,
    batch: Tensor,
    size: Callable[[Tensor], Tensor],
    decay: float,
) -> None:
    """Take a batch's value [groups, ...] into the average under `name`; the first becomes it.

    `size` gives the mean eigenvalue [groups]. The average forgets slowly, so one bad batch must not
    enlarge it much: a batch counts at most as if it were LARGEST_GROWTH times as large as the
    average, or as the batch before. Growth that lasts therefore comes in, one batch later.
    """
    average, last, now = state.get(name), state.get(name + LAST_SIZE), size(batch)
    state[name + LAST_SIZE] = now
    if average is None or average.shape != batch.shape:
        state[name] = batch
        return
    before = size(average)
    largest = LARGEST_GROWTH * (before if last is None else torch.maximum(before, last))
    # An average of zeros does not tell what is large.
    share = torch.where((now > largest) & (before > 0), largest / now, 1.0)
    weight = (1 - decay) * share.reshape(-1, *(1,) * (batch.dim() - 1))
    average.mul_(decay).addcmul_(batch, weight)


class WithoutSquares:
    """The part of a curvature that rests on its factors alone."""

    def basis(self, state: CurvatureState) -> Eigenbasis | None:
        return None

    def absorb_squares(self, state: CurvatureState, squares: Tensor, decay: float) -> None:
        raise AssertionError("none were asked for")
