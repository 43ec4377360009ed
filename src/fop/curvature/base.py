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

from fop._torch import view_of
from fop.capture import Eigenbasis, Statistics
from fop.entries import AnyEntry, Entry
from fop.linalg import Factor
from fop.projection import Metric, spread

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
    def metric(self, state: Mapping[str, Any], shape: Shape) -> Metric:
        """Of a layer, or of several of one shape whose entries are stacked along dimension 0."""

    def mean_eigenvalue(self, state: CurvatureState, shape: Shape) -> Tensor | None:
        """tr F / dim F, 0-dimensional, for rules of damping; None where it is not known."""
        return None

    def spectrum(self, state: CurvatureState, shape: Shape) -> Spectrum | None:
        """For diagnostics; None where there is nothing to tell."""
        return None


def averaged(entries: Mapping[str, Entry]) -> dict[str, AnyEntry]:
    """All that `update_averages` keeps, for averages that are such entries."""
    sizes = {name + LAST_SIZE: Entry(lambda size: [(size[0],)], low=0.0) for name in entries}
    return {**entries, **sizes}


def update_averages(state: CurvatureState, batches: Mapping[str, Factor], decay: float) -> None:
    """Take a batch's matrices into the averages under their names; the first become them.

    The average forgets slowly, so one bad batch must not enlarge it much: a batch counts at most as
    if its mean eigenvalue [groups] were LARGEST_GROWTH times that of the average, or of the batch
    before. Growth that lasts therefore comes in, one batch later.
    """
    for name, batch in batches.items():
        average, last, now = state.get(name), state.get(name + LAST_SIZE), batch.mean_eigenvalue()
        state[name + LAST_SIZE] = now
        if average is None or average.shape != batch.values.shape:
            state[name] = batch.values
            continue
        before = batch.like(average).mean_eigenvalue()
        largest = LARGEST_GROWTH * (before if last is None else torch.maximum(before, last))
        # An average of zeros does not tell what is large.
        share = torch.where((now > largest) & (before > 0), largest / now, 1.0)
        weight = (1 - decay) * share.reshape(-1, *(1,) * (average.dim() - 1))
        average.mul_(decay).addcmul_(batch.values, weight)


class StackedState(Mapping[str, Any]):
    """The states of L layers of one shape with the same entries, read as one.

    Tensors [groups, ...] are stacked along dimension 0, [L groups, ...]. A number is one for all,
    or a tensor [L groups, 1, 1] where it differs, to be broadcast over matrices [L groups, o, i]
    such as `like`.
    """

    def __init__(self, states: Sequence[CurvatureState], like: Tensor) -> None:
        self._states = states
        self._like = like

    def __getitem__(self, name: str) -> Any:
        values = [state[name] for state in self._states]
        if isinstance(values[0], Tensor):
            return self._tensor(name, values)
        if len(set(values)) == 1:
            return values[0]
        numbers = torch.tensor(values, dtype=self._like.dtype, device=self._like.device)
        return spread(numbers, self._like)

    def __contains__(self, name: object) -> bool:
        return name in self._states[0]

    def __iter__(self) -> Iterator[str]:
        return iter(self._states[0])

    def __len__(self) -> int:
        return len(self._states[0])

    def _tensor(self, name: str, tensors: Sequence[Tensor]) -> Tensor:
        """From the first time on, the layers' entries are views of what is returned.

        So nothing is copied again until one of them is replaced.
        """
        base, end = view_of(tensors[0]), 0
        if base is not None and len(base) == sum(map(len, tensors)):
            for tensor in tensors:
                if view_of(tensor) is not base or tensor.storage_offset() != end * base.stride(0):
                    break
                end += len(tensor)
            else:
                return base
        base = torch.cat(list(tensors))
        views = base.split([len(tensor) for tensor in tensors])
        for state, view in zip(self._states, views, strict=True):
            state[name] = view
        return base


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
