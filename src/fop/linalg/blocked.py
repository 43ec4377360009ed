"""The lower triangle of a symmetric matrix, packed by rows of blocks, and the work done on it.

A matrix [d, d] is stored as the rows of its blocks of height b, up to the diagonal,

    S_00                    rows [0, b),  columns [0, b)
    S_10  S_11              rows [b, 2b), columns [0, 2b)
    S_20  S_21  S_22        ...

one after the other in a tensor [groups, 1, n] with n little more than d^2 / 2. All work on it is
products of blocks, which run at the full speed of products. A Cholesky factor has the same layout,
with the blocks on the diagonal inverted: so solving with it is products of blocks, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property, lru_cache
from typing import TypeVar

import torch
from torch import Tensor

# Numbers in a cache line, of the shortest type that factors have. Products written to rows that do
# not start on one are slower by a third (MKL), unless the rows are shorter than this.
ALIGNMENT = 16
ALIGNED_FROM = 128


@dataclass
class Storage:
    """Which matrices are packed, in blocks of which height, and what pays with them."""

    # Narrower matrices are dense: half of one is too little to care for. This and the height of the
    # blocks are part of the format of checkpoints.
    packed_from: int = 512
    block: int = 192
    # For blocks that only serve to compute half of a dense result. Smaller ones are slower.
    dense_block: int = 128
    # Solving with a Cholesky factor of width d costs this over d more than multiplying with the
    # inverse (measured on CPUs with MKL, widths 576 to 4608).
    solve_overhead: int = 500

    @contextmanager
    def changed(self, **fields: int) -> Iterator[None]:
        """Other values for a while: tests have small matrices packed."""
        before = asdict(self)
        vars(self).update(fields)
        try:
            yield
        finally:
            vars(self).update(before)


STORAGE = Storage()


@dataclass(frozen=True)
class BlockRow:
    """Rows [start, end) of lower block triangles, up to the diagonal."""

    start: int
    end: int
    values: Tensor  # [groups, end - start, end]

    @property
    def before(self) -> Tensor:
        """The blocks before the diagonal, [groups, end - start, start]."""
        return self.values[..., : self.start]

    @property
    def diagonal_block(self) -> Tensor:
        """[groups, end - start, end - start]"""
        return self.values[..., self.start :]


Kind = TypeVar("Kind", bound="BlockTriangle")


@dataclass(frozen=True, eq=False)
class BlockTriangle:
    """Lower block triangles [groups, width, width], packed."""

    values: Tensor  # [groups, 1, n]
    width: int
    block: int = field(default_factory=lambda: STORAGE.block)

    @classmethod
    def empty(cls: type[Kind], like: Tensor, groups: int, width: int, block: int) -> Kind:
        """Room for them, with nothing in it, but zeros where rows are filled up."""
        found = cls(like.new_empty(packed_shape(groups, width, block)), width, block)
        for _, end, lines in found._lines():
            if lines.shape[-1] > end:
                lines[..., end:] = 0
        return found

    @classmethod
    def from_dense(cls: type[Kind], matrix: Tensor, block: int | None = None) -> Kind:
        """The lower triangles of matrices [groups, d, d]."""
        groups, width, _ = matrix.shape
        found = cls.empty(matrix, groups, width, STORAGE.block if block is None else block)
        for row in found.rows:
            row.values.copy_(matrix[:, row.start : row.end, : row.end])
        return found

    @cached_property
    def rows(self) -> tuple[BlockRow, ...]:
        return tuple(BlockRow(start, end, lines[..., :end]) for start, end, lines in self._lines())

    def leading(self, width: int) -> tuple[BlockRow, ...]:
        """The rows of the upper left part."""
        return tuple(
            BlockRow(row.start, end, row.values[:, : end - row.start, :end])
            for row in self.rows
            if (end := min(row.end, width)) > row.start
        )

    def dense(self) -> Tensor:
        """The symmetric matrices, [groups, width, width]."""
        matrix = self.values.new_empty(len(self.values), self.width, self.width)
        for row in self.rows:
            matrix[:, row.start : row.end, : row.end] = row.values
            matrix[:, : row.start, row.start : row.end] = row.before.mT
        return matrix

    def diagonal(self) -> Tensor:
        """[groups, width]"""
        blocks = [row.diagonal_block.diagonal(dim1=-2, dim2=-1) for row in self.rows]
        return torch.cat(blocks, dim=-1)

    def _lines(self) -> Iterator[tuple[int, int, Tensor]]:
        """Of each row of blocks: where it starts and ends, and its lines, filled up."""
        offset = 0
        for start, end in _spans(self.width, self.block):
            height, length = end - start, aligned_length(end)
            lines = self.values[:, 0, offset : offset + height * length]
            yield start, end, lines.unflatten(-1, (height, length))
            offset += height * length


@lru_cache(maxsize=256)
def packed_shape(groups: int, width: int, block: int) -> tuple[int, int, int]:
    """[groups, 1, n]"""
    n = sum((end - start) * aligned_length(end) for start, end in _spans(width, block))
    return groups, 1, n


def aligned_length(width: int) -> int:
    """What lines are filled up to; short ones gain nothing by it."""
    return width if width < ALIGNED_FROM else -(-width // ALIGNMENT) * ALIGNMENT


def _spans(width: int, block: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + block, width)) for start in range(0, width, block))


# ---- products


def multiply(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """a b for batches of matrices, written to `out`."""
    if len(out) == 1:
        torch.mm(a[0], b[0], out=out[0])
    else:
        torch.bmm(a, b, out=out)
    return out


def add_product(out: Tensor, a: Tensor, b: Tensor, sign: int = 1) -> Tensor:
    """out + sign a b for batches of matrices, in place."""
    if len(out) == 1:
        torch.addmm(out[0], a[0], b[0], alpha=sign, out=out[0])
    else:
        torch.baddbmm(out, a, b, alpha=sign, out=out)
    return out


def empty_like(v: Tensor) -> Tensor:
    """An empty tensor of the shape [groups, height, width] of v whose lines are aligned."""
    width = v.shape[-1]
    return v.new_empty(*v.shape[:-1], aligned_length(width))[..., :width]


def symmetric_product(v: Tensor, rows: Sequence[BlockRow], out: Tensor) -> Tensor:
    """v S, for v [groups, k, d] and the block rows of a symmetric S, written to `out`."""
    for row in rows:
        if row.start:
            add_product(out[..., : row.start], v[..., row.start : row.end], row.before)
        multiply(v[..., : row.end], row.values.mT, out[..., row.start : row.end])
    return out


# ---- Cholesky factors


def finite_diagonal(triangle: Tensor) -> Tensor:
    """Flags [groups]. Enough to look at: the diagonal bounds what is beside it."""
    return triangle.diagonal(dim1=-2, dim2=-1).isfinite().all(-1)


def factorise(triangle: BlockTriangle) -> Tensor:
    """Overwrite the triangle of S by that of L with L L^T = S, its diagonal blocks inverted.

    Row by row: L_kj = (S_kj - sum over m < j of L_km L_jm^T) L_jj^-T, and likewise on the diagonal.
    Returns flags [groups] that tell whether S is positive definite and L finite.
    """
    values, rows = triangle.values, triangle.rows
    good = torch.ones(len(values), dtype=torch.bool, device=values.device)
    for number, row in enumerate(rows):
        for other in rows[:number]:
            block = row.values[..., other.start : other.end]
            if other.start:
                add_product(block, row.values[..., : other.start], other.before.mT, sign=-1)
            block.copy_(block @ other.diagonal_block.mT)
        corner = row.diagonal_block
        if row.start:
            add_product(corner, row.before, row.before.mT, sign=-1)
        lower, info = torch.linalg.cholesky_ex(corner)
        unit = torch.eye(row.end - row.start, dtype=lower.dtype, device=lower.device)
        # From the left it would take twice as long (MKL).
        inverse = torch.linalg.solve_triangular(
            lower, unit.expand_as(lower), upper=False, left=False
        )
        corner.copy_(inverse)
        good &= (info == 0) & finite_diagonal(lower) & finite_diagonal(inverse)
    return good


@dataclass(frozen=True, eq=False)
class Cholesky(BlockTriangle):
    """L with L L^T = S, so that S^-1 = L^-T L^-1; the blocks on its diagonal are inverted.

    <v L^-T, w L^-T> = <v, w S^-1>: one triangular solve is enough for inner products.
    """

    def solve_right(self, v: Tensor) -> Tensor:
        """v L^-T, for v [groups, k, d]."""
        return self._substitute(v, empty_like(v))

    def solve_left(self, v: Tensor) -> Tensor:
        """L^-1 v, for v [groups, d, k]."""
        out = empty_like(v)
        self._substitute(v.mT, out.mT)
        return out

    def solve_transposed_right(self, v: Tensor) -> Tensor:
        """v L^-1, in place: after `solve_right` it makes v S^-1."""
        for row in reversed(self.rows):
            own = v[..., row.start : row.end]
            own.copy_(_product_like(own, own, row.diagonal_block))
            if row.start:
                add_product(v[..., : row.start], own, row.before, sign=-1)
        return v

    def solve_transposed_left(self, v: Tensor) -> Tensor:
        """L^-T v, in place: after `solve_left` it makes S^-1 v."""
        self.solve_transposed_right(v.mT)
        return v

    def _substitute(self, v: Tensor, out: Tensor) -> Tensor:
        for row in self.rows:
            own = v[..., row.start : row.end]
            if row.start:
                own = _minus_product(own, out[..., : row.start], row.before.mT)
            multiply(own, row.diagonal_block.mT, out[..., row.start : row.end])
        return out


# Results lie like v, row by row or column by column: to copy between the two orders is slow.


def _minus_product(v: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """v - a b"""
    if v.stride(-1) != 1:
        return _minus_product(v.mT, b.mT, a.mT).mT
    if len(v) == 1:
        return torch.addmm(v[0], a[0], b[0], alpha=-1).unsqueeze(0)
    return torch.baddbmm(v, a, b, alpha=-1)


def _product_like(v: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """a b"""
    return a @ b if v.stride(-1) == 1 else (b.mT @ a.mT).mT
