"""What a step asks of a curvature. A new one is a subclass of `Curvature` in a file of its own.

It keeps no state itself: all tensors live in the optimizer's own state, under the names that
`entries` declares. So checkpoints carry them, and a resumed run continues bit for bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fop.capture import Eigenbasis, Statistics
from fop.entries import AnyEntry, Entry
from fop.projection import Metric

# By how much a batch may exceed what is usual before it counts for less. Batches of ordinary
# training differ by less, and with the usual decay of 0.95 a bounded one adds half of the average.
LARGEST_GROWTH = 10.0
LAST_SIZE = "_last_size"  # after the name of an average: the size of the latest batch

# The part of `optimizer.state[weight]` that belongs to one layer's curvature.
CurvatureState = MutableMapping[str, Any]
Shape = tuple[int, int]  # rows o and columns i of a layer's matrix, the bias included


@dataclass(frozen=True)
class Requires:
    """What a curvature is made of; nothing else is computed."""

    factors: bool = False  # second moments of inputs and of output gradients
    squares: bool = False  # squares of per-example gradients, in `Curvature.basis`
    gradients: bool = False  # the gradient of every step, by `Curvature.watch`


@dataclass(frozen=True)
class RefreshJob:
    """One layer whose metric is to be refreshed from its moving averages."""

    state: CurvatureState
    shape: Shape
    damping: float
    uses: int = 1  # on how many steps the metric will serve, as far as is known


@dataclass(frozen=True)
class Spectrum:
    """A layer's curvature in a basis where F and M act elementwise; float64, for diagnostics."""

    input_values: Tensor  # [groups, i], of the (damped) input factor; and of the output factor
    output_values: Tensor  # [groups, o]
    to_basis: Callable[[Tensor], Tensor]
    fisher: Tensor  # [groups, o, i]
    damped: Tensor


class Curvature(ABC):
    requires = Requires()
    entries: Mapping[str, AnyEntry] = {}  # all that is kept in a state: what loading checks

    def update(self, state: CurvatureState, batch: Statistics, decay: float) -> None:
        """Take a batch, scaled to means, into the moving averages; the first initialises them."""
        raise AssertionError(f"{type(self).__name__} requires no statistics")

    def watch(self, state: CurvatureState, gradient: Tensor) -> None:
        """Take a step's gradient [groups, o, i] into account, if `requires.gradients`."""
        raise AssertionError(f"{type(self).__name__} requires no gradients")

    def basis(self, state: CurvatureState) -> Eigenbasis | None:
        """The basis to take squares of per-example gradients in; None: there is none yet."""
        return None

    def refresh(self, jobs: Sequence[RefreshJob]) -> list[bool]:
        """Refresh what `metric` needs. False where that failed and the layer keeps what it had."""
        return [True] * len(jobs)

    @abstractmethod
    def ready(self, state: CurvatureState, shape: Shape) -> bool:
        """Whether `metric` can be had for a layer of this shape."""

    @abstractmethod
    def metric(self, states: Sequence[CurvatureState], shape: Shape) -> Metric:
        """Of layers of one shape, stacked along dimension 0; their states have the same entries."""

    def mean_eigenvalue(self, state: CurvatureState, shape: Shape) -> Tensor | None:
        """tr F / dim F, 0-dimensional, for rules of damping; None where it is not known."""
        return None

    def spectrum(self, state: CurvatureState, shape: Shape) -> Spectrum | None:
        """For diagnostics; None where there is nothing to tell."""
        return None


def stacked(states: Sequence[CurvatureState], name: str) -> Tensor:
    """One entry of several layers along dimension 0.

    From the first time on, the entries are views of what is returned, so that nothing is copied
    again until one of them is replaced.
    """
    tensors: list[Tensor] = [state[name] for state in states]
    if len(tensors) == 1:
        return tensors[0]
    base, end = tensors[0]._base, 0
    if base is not None and len(base) == sum(map(len, tensors)):
        row = base.stride(0)
        for tensor in tensors:
            if tensor._base is not base or tensor.storage_offset() != end * row:
                break
            end += len(tensor)
        else:
            return base
    base = torch.cat(tensors)
    views = base.split([len(tensor) for tensor in tensors])
    for state, view in zip(states, views, strict=True):
        state[name] = view
    return base


def stacked_damping(states: Sequence[CurvatureState], groups: int, like: Tensor) -> Tensor | float:
    """lambda of each of the stacked layers, to be broadcast over matrices [L groups, o, i]."""
    values = [float(state["damping"]) for state in states]
    if len(set(values)) == 1:
        return values[0]
    spread = [value for value in values for _ in range(groups)]
    return torch.tensor(spread, dtype=like.dtype, device=like.device).reshape(-1, 1, 1)


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
