"""A factor: symmetric positive semi-definite matrices S [groups, d, d], one for each group.

    Dense      [groups, d, d]
    Diagonal   [groups, d]      all that is kept of a factor that is too wide, or of one-hot inputs
    Blocked    [groups, 1, n]   the lower triangle, packed by blocks (blocked.py); for wide matrices

The tensor, `values`, is what states hold; `from_state` makes it a factor again. The rest of the
library speaks of factors and need not know which of the three it has.

    >>> factor = from_state(torch.eye(3).unsqueeze(0), width=3)
    >>> factor.matmul(torch.ones(1, 3, 2))                            # S v
    >>> (inverse,), finite = factor.inverse(shift=torch.tensor([0.1]))  # (S + 0.1 I)^-1
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from fop.linalg.blocked import (
    ALIGNED_FROM,
    STORAGE,
    BlockRow,
    BlockTriangle,
    empty_like,
    factorise,
    multiply,
    packed_shape,
    symmetric_product,
)

Shape = tuple[int, ...]
# What a decomposition found, and flags [groups] on the device that tell whether it is finite.
Found = tuple[tuple[Tensor, ...], Tensor]
Kind = TypeVar("Kind", bound="Factor")


class Factor(ABC):
    values: Tensor

    @abstractmethod
    def diagonal(self) -> Tensor:
        """[groups, d]"""

    @abstractmethod
    def dense(self) -> Tensor:
        """[groups, d, d]; the values themselves where they are dense."""

    @abstractmethod
    def matmul(self, v: Tensor) -> Tensor:
        """S v, for v [groups, d, k]."""

    @abstractmethod
    def rmatmul(self, v: Tensor) -> Tensor:
        """v S, for v [groups, k, d]."""

    @abstractmethod
    def pack(self, out: Tensor) -> None:
        """Write each entry once, to a tensor of the form's `message_shape`."""

    def mean_eigenvalue(self) -> Tensor:
        """tr S / d, [groups]"""
        return self.diagonal().flatten(1).mean(-1)

    def inverse(self, shift: Tensor) -> Found:
        """(S + shift I)^-1 for a shift [groups], by Cholesky; dense unless diagonal."""
        damped = self._shifted(shift)
        diagonal = damped.diagonal(dim1=-2, dim2=-1)  # bounds what is beside it
        lower = damped.mT  # column by column, as LAPACK works: in place
        info = torch.empty(lower.shape[:-2], dtype=torch.int32, device=lower.device)
        torch.linalg.cholesky_ex(lower, out=(lower, info))
        good = (info == 0) & diagonal.isfinite().all(-1)
        torch.cholesky_inverse(lower, out=lower)  # in place, and symmetric
        return (damped,), good & diagonal.isfinite().all(-1)

    def eigenbasis(self, shift: Tensor) -> Found:
        """Eigenvalues [groups, d] >= 0 and eigenvectors [groups, d, d], found by S + shift I."""
        values, vectors = torch.linalg.eigh(self._shifted(shift))
        values = (values - shift.unsqueeze(-1)).clamp_(min=0.0)
        return (values, vectors), values.isfinite().all(-1) & vectors.isfinite().flatten(1).all(-1)

    def _shifted(self, shift: Tensor) -> Tensor:
        """S + shift I, a new dense matrix."""
        damped = self.dense()
        if damped is self.values:
            damped = damped.clone(memory_format=torch.contiguous_format)
        damped.diagonal(dim1=-2, dim2=-1).add_(shift.unsqueeze(-1))
        return damped

    def like(self: Kind, values: Tensor) -> Kind:
        """A factor of the same form with other values."""
        return replace(self, values=values)  # type: ignore[type-var]

    def to(
        self: Kind, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> Kind:
        values = self.values.to(device=device, dtype=dtype)
        return self if values is self.values else self.like(values)

    def add_(self: Kind, other: Factor) -> Kind:
        self.values.add_(other.values)
        return self


@dataclass(frozen=True, eq=False)
class Dense(Factor):
    values: Tensor  # [groups, d, d]

    def diagonal(self) -> Tensor:
        return self.values.diagonal(dim1=-2, dim2=-1)

    def dense(self) -> Tensor:
        return self.values

    def matmul(self, v: Tensor) -> Tensor:
        short = v.shape[-1] < ALIGNED_FROM
        return torch.bmm(self.values, v) if short else multiply(self.values, v, empty_like(v))

    def rmatmul(self, v: Tensor) -> Tensor:
        short = v.shape[-1] < ALIGNED_FROM
        return torch.bmm(v, self.values) if short else multiply(v, self.values, empty_like(v))

    def pack(self, out: Tensor) -> None:
        _pack_rows(self.rows, out)

    @property
    def rows(self) -> tuple[BlockRow]:
        """The matrix as a lower triangle of one block."""
        return (BlockRow(0, self.values.shape[-1], self.values),)


@dataclass(frozen=True, eq=False)
class Diagonal(Factor):
    values: Tensor  # [groups, d], or in as many dimensions as d = o i entries of a matrix have

    def diagonal(self) -> Tensor:
        return self.values

    def dense(self) -> Tensor:
        return torch.diag_embed(self.values)

    def matmul(self, v: Tensor) -> Tensor:
        return self.values.unsqueeze(-1) * v

    def rmatmul(self, v: Tensor) -> Tensor:
        return v * self.values.unsqueeze(-2)

    def pack(self, out: Tensor) -> None:
        out.copy_(self.values)

    def inverse(self, shift: Tensor) -> Found:
        inverse = (self.values + shift.unsqueeze(-1)).reciprocal()
        return (inverse,), ((inverse > 0) & inverse.isfinite()).all(-1)

    def eigenbasis(self, shift: Tensor) -> Found:
        """The eigenvalues alone: there are no other eigenvectors than the axes."""
        return (self.values.clamp(min=0.0),), self.values.isfinite().all(-1)


@dataclass(frozen=True, eq=False)
class Blocked(BlockTriangle, Factor):
    """The packed lower triangle of wide matrices."""

    def matmul(self, v: Tensor) -> Tensor:
        out = empty_like(v)
        symmetric_product(v.mT, self.rows, out.mT)  # S is symmetric
        return out

    def rmatmul(self, v: Tensor) -> Tensor:
        return symmetric_product(v, self.rows, empty_like(v))

    def pack(self, out: Tensor) -> None:
        _pack_rows(self.rows, out)

    def cholesky(self, shift: Tensor) -> Found:
        """The values of the `Cholesky` factor of S + shift I."""
        damped = self.like(self.values.clone())
        for row in damped.rows:
            row.diagonal_block.diagonal(dim1=-2, dim2=-1).add_(shift.unsqueeze(-1))
        return (damped.values,), factorise(damped)


@dataclass(frozen=True)
class Form:
    """What is known of a factor before there are numbers in it."""

    groups: int
    width: int
    diagonal: bool = False

    @property
    def packed(self) -> bool:
        return not self.diagonal and self.width >= STORAGE.packed_from

    @property
    def shape(self) -> Shape:
        """Of the values."""
        if self.packed:
            return packed_shape(self.groups, self.width, STORAGE.block)
        return (self.groups, self.width) if self.diagonal else (self.groups, self.width, self.width)

    @property
    def message_shape(self) -> Shape:
        """Of what `Factor.pack` writes."""
        length = self.width if self.diagonal else self.width * (self.width + 1) // 2
        return self.groups, length

    def unpack(self, message: Tensor) -> Factor:
        """The inverse of `Factor.pack`, exactly symmetric and with memory of its own."""
        if self.diagonal:
            return Diagonal(message.clone())
        if self.packed:
            found: Blocked | Dense = Blocked.empty(message, self.groups, self.width, STORAGE.block)
        else:
            found = Dense(message.new_empty(self.shape))
        for row, before, corner in _message_parts(found.rows, message):
            row.before.copy_(before)
            _unpack_triangle(corner, row.diagonal_block)
        return found


def from_state(values: Tensor, width: int) -> Factor:
    """The factor of this width whose values a state holds."""
    return Blocked(values, width) if _is_packed(values, width) else unpacked(values)


def fits(values: Tensor, width: int) -> bool:
    """Whether what a state holds are the values of a factor of this width."""
    if _is_packed(values, width):
        return values.shape[-1] == packed_shape(1, width, STORAGE.block)[-1]
    return values.shape[-1] == width


def _is_packed(values: Tensor, width: int) -> bool:
    return width >= STORAGE.packed_from and values.dim() == 3


def unpacked(values: Tensor) -> Factor:
    """Matrices [groups, d, d], or the diagonals [groups, d] of diagonal ones."""
    return Diagonal(values) if values.dim() == 2 else Dense(values)


def state_shapes(groups: int, width: int) -> list[Shape]:
    """What the values of a factor of this width may look like."""
    return [Form(groups, width, diagonal).shape for diagonal in (False, True)]


# ---- messages: one triangle
#
# A symmetric [d, d] matrix has d (d + 1) / 2 entries, exactly a rectangle [d + 1, d / 2] (d even)
# or [d, (d + 1) / 2] (d odd): the left columns' lower part, with the lower right triangle turned
# over into the free upper corner (LAPACK's rectangular full packed format). No index tensors are
# needed. Blocks on the diagonal are packed so; those before them are copied.


def _pack_rows(rows: Sequence[BlockRow], out: Tensor) -> None:
    for row, before, corner in _message_parts(rows, out):
        before.copy_(row.before)
        block = row.diagonal_block
        width, half, shift = _rectangle(block)
        if shift:
            corner[:, 0].zero_()
        corner[:, shift:].copy_(block[:, :, :half].tril())
        corner[:, : width - half, 1 - shift :].add_(block[:, half:, half:].triu())


def _unpack_triangle(message: Tensor, out: Tensor) -> None:
    width, half, shift = _rectangle(out)
    lower = torch.zeros_like(out, memory_format=torch.contiguous_format)
    lower[:, :, :half] = message[:, shift:].tril()
    lower[:, half:, half:] = message[:, : width - half, 1 - shift :].triu().mT
    torch.add(lower, lower.tril(-1).mT, out=out)


def _rectangle(block: Tensor) -> tuple[int, int, int]:
    """Of a block [groups, d, d]: d; columns of the rectangle; whether it has a row more than d."""
    width = block.shape[-1]
    return width, (width + 1) // 2, 1 - width % 2


def _message_parts(
    rows: Sequence[BlockRow], message: Tensor
) -> Iterator[tuple[BlockRow, Tensor, Tensor]]:
    """Of each row of blocks: where those before the diagonal go, and the one on it."""
    end = 0
    for row in rows:
        height, half, shift = _rectangle(row.diagonal_block)
        start, middle = end, end + height * row.start
        end = middle + (height + shift) * half
        before, corner = message[:, start:middle], message[:, middle:end]
        yield row, before.unflatten(-1, (height, row.start)), corner.unflatten(-1, (-1, half))
