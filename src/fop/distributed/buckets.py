"""Tensors of layers in flat buckets, and buckets that are reduced to owners asynchronously.

Under DistributedDataParallel buckets leave during the backward pass, as soon as their layers are
complete. All ranks must send in one order, while autograd may complete layers in another. So
buckets leave strictly in the order of a queue: one whose layers are complete waits for those before
it, and what is left at the end of the pass leaves then.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fop.distributed.comm import Comm, Handle
from fop.layer import Layer

# Large enough to use the wire well, small enough that several are under way during a backward.
BUCKET_BYTES = 8 * 2**20

Pack = Callable[[Any, list[Tensor]], None]  # writes what belongs to a key into these tensors


class Item(NamedTuple):
    """What one layer puts into a bucket: tensors of these shapes, one after the other."""

    key: Hashable
    owner: int
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def numel(self) -> int:
        return sum(map(prod, self.shapes))


@dataclass
class Bucket:
    """Items for one owner, in one message."""

    owner: int
    dtype: torch.dtype
    device: torch.device
    items: list[Item] = field(default_factory=list)

    def empty(self) -> Tensor:
        numel = sum(item.numel for item in self.items)
        return torch.empty(numel, dtype=self.dtype, device=self.device)

    def views(self, flat: Tensor) -> dict[Any, list[Tensor]]:
        """The tensors of each item within the message."""
        found: dict[Any, list[Tensor]] = {}
        start = 0
        for item in self.items:
            found[item.key] = parts = []
            for shape in item.shapes:
                parts.append(flat[start : start + prod(shape)].view(shape))
                start += prod(shape)
        return found

    def label(self, what: str) -> str:
        """For errors: which layers it is about."""
        names = [repr(item.key.name) for item in self.items if isinstance(item.key, Layer)]
        return f"{what} of {', '.join(names) or 'parameters in no layer'}"


def into_buckets(items: Iterable[Item], limit: int = BUCKET_BYTES) -> list[Bucket]:
    """Items of one owner, type and device together, up to `limit` bytes, in the order given.

    A bucket comes into the order when it is full, that is, when all its items have come.
    """
    done: list[Bucket] = []
    growing: dict[Hashable, tuple[Bucket, int]] = {}
    for item in items:
        kind = (item.owner, item.dtype, item.device)
        bucket, numbytes = growing.pop(kind, (Bucket(*kind), 0))
        size = item.numel * item.dtype.itemsize
        if bucket.items and numbytes + size > limit:
            done.append(bucket)
            bucket, numbytes = Bucket(*kind), 0
        bucket.items.append(item)
        growing[kind] = bucket, numbytes + size  # now last: ordered by the latest item
    return done + [bucket for bucket, _ in growing.values()]


@dataclass(frozen=True)
class Quantity:
    """What is reduced of each layer, last layers first, as backward passes complete them."""

    name: str
    items: Sequence[Item]
    pack: Pack
    to_all: bool = False  # onto all ranks, not the owner alone


class Reduction(NamedTuple):
    """A bucket that is being summed onto its owner, or all ranks."""

    bucket: Bucket
    flat: Tensor
    handle: Handle

    @staticmethod
    def start(comm: Comm, bucket: Bucket, quantity: Quantity) -> Reduction:
        flat, label = bucket.empty(), bucket.label(quantity.name)
        for key, tensors in bucket.views(flat).items():
            quantity.pack(key, tensors)
        if quantity.to_all:
            return Reduction(bucket, flat, comm.sum_of_all(flat, label))
        return Reduction(bucket, flat, comm.reduce_in_row(flat, bucket.owner, label))


class ReduceQueue:
    """The buckets of all quantities, in the order in which they leave."""

    def __init__(self, comm: Comm, layers: Sequence[Layer], quantities: Sequence[Quantity]) -> None:
        self._comm = comm
        self._waiting_for = set(layers)
        position: dict[Any, int] = {layer: i for i, layer in enumerate(reversed(layers))}
        pairs = [(quantity, b) for quantity in quantities for b in into_buckets(quantity.items)]
        # Of quantities that complete with the same layer, the first one first: sorts are stable.
        self._queue = sorted(pairs, key=lambda pair: max(position[x.key] for x in pair[1].items))
        self.started: dict[str, list[Reduction]] = {q.name: [] for q in quantities}
        self.closed = False
        self.outdated = False  # a later pass has added to what was sent

    def complete(self, layer: Layer) -> None:
        """The running pass adds nothing more to this layer."""
        if self.closed:
            self.outdated = True
            return
        self._waiting_for.discard(layer)
        while self._queue and not any(x.key in self._waiting_for for x in self._queue[0][1].items):
            self._start_next()

    def close(self) -> None:
        """Send the rest."""
        while self._queue:
            self._start_next()
        self.closed = True

    def _start_next(self) -> None:
        quantity, bucket = self._queue.pop(0)
        self.started[quantity.name].append(Reduction.start(self._comm, bucket, quantity))
