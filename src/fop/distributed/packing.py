"""Tensors into flat messages and back."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

# Large enough to use the wire well, small enough that several are under way during a backward.
BUCKET_BYTES = 8 * 2**20


@dataclass(frozen=True)
class Parcel:
    """What one layer puts into a message: tensors of these shapes, one after the other."""

    key: Hashable
    owner: int
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def numel(self) -> int:
        return sum(torch.Size(shape).numel() for shape in self.shapes)


@dataclass
class Bucket:
    """Parcels for one owner, in one message."""

    owner: int
    dtype: torch.dtype
    device: torch.device
    parcels: list[Parcel] = field(default_factory=list)

    def empty(self) -> Tensor:
        numel = sum(parcel.numel for parcel in self.parcels)
        return torch.empty(numel, dtype=self.dtype, device=self.device)

    def views(self, flat: Tensor) -> dict[Hashable, list[Tensor]]:
        """The places of each parcel's tensors in a message."""
        found: dict[Hashable, list[Tensor]] = {}
        start = 0
        for parcel in self.parcels:
            found[parcel.key] = parts = []
            for shape in parcel.shapes:
                numel = torch.Size(shape).numel()
                parts.append(flat[start : start + numel].view(shape))
                start += numel
        return found


def into_buckets(parcels: Iterable[Parcel], limit: int = BUCKET_BYTES) -> list[Bucket]:
    """Parcels of one owner, type and device together, up to `limit` bytes, in the order given.

    A bucket takes its place in the order when it is full, that is, when all its parcels have come.
    """
    done: list[Bucket] = []
    growing: dict[Hashable, tuple[Bucket, int]] = {}
    for parcel in parcels:
        kind = (parcel.owner, parcel.dtype, parcel.device)
        bucket, numbytes = growing.pop(kind, (Bucket(*kind), 0))
        size = parcel.numel * parcel.dtype.itemsize
        if bucket.parcels and numbytes + size > limit:
            done.append(bucket)
            bucket, numbytes = Bucket(*kind), 0
        bucket.parcels.append(parcel)
        growing[kind] = bucket, numbytes + size  # now last: ordered by the latest parcel
    return done + [bucket for bucket, _ in growing.values()]
