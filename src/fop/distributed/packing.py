"""Tensors into flat messages and back; symmetric factors travel as one triangle.

A symmetric [d, d] matrix has d (d + 1) / 2 entries, exactly a rectangle [d + 1, d / 2] (d even) or
[d, (d + 1) / 2] (d odd): the left columns' lower part, with the lower right triangle turned over
into the free upper corner (LAPACK's rectangular full packed format). No index tensors are needed.
Of a matrix that is stored in halves, by rows of blocks, the blocks on the diagonal are packed so.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fop.symmetric import BlockRow, Lower, is_halved, matrix_width

# Large enough to use the wire well, small enough that several are under way during a backward.
BUCKET_BYTES = 8 * 2**20


def packed_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """What `pack_symmetric` makes of a factor [g, d, d]; a diagonal [g, d] stays as it is."""
    if len(shape) == 2:
        return tuple(shape)
    groups, size = shape[0], matrix_width(shape)
    if is_halved(shape):
        return groups, size * (size + 1) // 2
    return groups, size + 1 - size % 2, (size + 1) // 2


def pack_symmetric(factor: Tensor, out: Tensor) -> None:
    """The lower triangle of each matrix [g, d, d] as a rectangle; a diagonal [g, d] as it is."""
    if factor.dim() == 2:
        out.copy_(factor)
        return
    if is_halved(factor.shape):
        for row, before, corner in _places(Lower.of(factor), out):
            before.copy_(row.before)
            pack_symmetric(row.diagonal_block, corner)
        return
    size = factor.shape[-1]
    half, shift = (size + 1) // 2, 1 - size % 2
    if shift:
        out[:, 0].zero_()
    out[:, shift:].copy_(factor[:, :, :half].tril())
    corner = factor[:, half:, half:]
    out[:, : size - half, 1 - shift :].add_(corner.triu())


def unpack_symmetric(packed: Tensor, shape: Sequence[int]) -> Tensor:
    """The inverse of `pack_symmetric`, exactly symmetric."""
    if len(shape) == 2:
        return packed.clone()
    size = matrix_width(shape)
    if is_halved(shape):
        halves = Lower.new(packed, len(packed), size)
        for row, before, corner in _places(halves, packed):
            row.before.copy_(before)
            row.diagonal_block.copy_(unpack_symmetric(corner, row.diagonal_block.shape))
        return halves.storage
    half, shift = (size + 1) // 2, 1 - size % 2
    lower = packed.new_zeros(tuple(shape))
    lower[:, :, :half] = packed[:, shift:].tril()
    lower[:, half:, half:] = packed[:, : size - half, 1 - shift :].triu().mT
    return lower + lower.tril(-1).mT


def _places(halves: Lower, packed: Tensor) -> Iterator[tuple[BlockRow, Tensor, Tensor]]:
    """Of each row of blocks: where those before the diagonal go, and the one on it."""
    start = 0
    for row in halves.rows:
        shapes = (tuple(row.before.shape[1:]), packed_shape(row.diagonal_block.shape)[1:])
        places = []
        for shape in shapes:
            end = start + shape[0] * shape[1]
            places.append(packed[:, start:end].unflatten(-1, shape))
            start = end
        yield row, places[0], places[1]


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
