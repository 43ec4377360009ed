"""Symmetric matrices of which half is kept, and what is computed with them, by rows of blocks.

A wide symmetric matrix [d, d] is stored as the rows of its blocks up to the diagonal,

    S_00                    rows [0, b),  columns [0, b)
    S_10  S_11              rows [b, 2b), columns [0, 2b)
    S_20  S_21  S_22        ...

one after the other in a tensor [groups, 1, n] with n little more than d^2 / 2. All work on it is
products of blocks, which run at the full speed of products. Its damped Cholesky factor has the same
form, with the blocks on the diagonal inverted: so solving with it is products of blocks, too.

Narrow matrices are stored whole, [groups, d, d]: there half is too little to care for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import isqrt

import torch
from torch import Tensor

# Narrower matrices are stored whole. This and the height of the blocks are part of the format of
# checkpoints.
WHOLE_BELOW = 512
BLOCK = 192
# Where the result is stored whole, blocks only serve to compute half of it. Smaller are slower.
NARROW_BLOCK = 128
# Numbers in a cache line, of the shortest type that factors have. Products written to rows that do
# not start on one are slower by a third (MKL).
ALIGNMENT = 16


# ---- how they lie


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
        return self.values[..., self.start :]


@dataclass(frozen=True)
class Lower:
    """The lower block triangles of symmetric matrices [groups, width, width]."""

    storage: Tensor  # [groups, 1, n]
    width: int
    rows: tuple[BlockRow, ...]

    @staticmethod
    def new(like: Tensor, groups: int, width: int) -> Lower:
        """Room for them, with nothing in it, but zeros where rows are filled up."""
        block = _block_height(width)
        storage = like.new_empty(groups, 1, _length(width, block))
        return Lower(storage, width, tuple(_block_rows(storage, width, block, clear=True)))

    @staticmethod
    def of(storage: Tensor) -> Lower:
        """Of what is stored in halves."""
        width = matrix_width(storage.shape)
        return Lower(storage, width, tuple(_block_rows(storage, width, BLOCK)))

    def leading(self, width: int) -> tuple[BlockRow, ...]:
        """The upper left part."""
        return tuple(
            BlockRow(row.start, end, row.values[:, : end - row.start, :end])
            for row in self.rows
            if (end := min(row.end, width)) > row.start
        )

    def fill_last(self, values: Tensor) -> None:
        """Write the last row, and with it the last column: [groups, width]."""
        last = self.rows[-1]
        last.values[:, -1] = values
        last.diagonal_block[:, :, -1] = values[:, last.start :]

    def stored(self) -> Tensor:
        """The tensor to keep."""
        return self.storage if self.width >= WHOLE_BELOW else self.whole()

    def whole(self) -> Tensor:
        """[groups, width, width]"""
        matrix = self.storage.new_empty(len(self.storage), self.width, self.width)
        for row in self.rows:
            matrix[:, row.start : row.end, : row.end] = row.values
            matrix[:, : row.start, row.start : row.end] = row.before.mT
        return matrix


def stored_shape(groups: int, width: int) -> tuple[int, int, int]:
    """Of symmetric matrices, as they are kept."""
    if width < WHOLE_BELOW:
        return groups, width, width
    return groups, 1, _length(width, BLOCK)


def is_halved(shape: Sequence[int]) -> bool:
    """Whether half of each matrix is stored; False for whole and for diagonal ones [groups, d]."""
    return len(shape) == 3 and shape[1] != shape[2]


def matrix_width(shape: Sequence[int]) -> int:
    """d, of what is stored in any form."""
    if not is_halved(shape):
        return shape[-1]
    width = _width_of(shape[-1], BLOCK)
    if width is None:
        raise ValueError(
            f"expected symmetric matrices in a known form, found the shape {tuple(shape)}"
        )
    return width


def whole(stored: Tensor) -> Tensor:
    """[groups, d, d]; what is stored whole, as it is."""
    return Lower.of(stored).whole() if is_halved(stored.shape) else stored


def halved(matrix: Tensor) -> Tensor:
    """The lower half of whole matrices [groups, d, d], stored as wide ones are."""
    width = matrix.shape[-1]
    storage = matrix.new_empty(len(matrix), 1, _length(width, BLOCK))
    for row in _block_rows(storage, width, BLOCK, clear=True):
        row.values.copy_(matrix[:, row.start : row.end, : row.end])
    return storage


def diagonal(stored: Tensor) -> Tensor:
    """[groups, d] of any form."""
    if stored.dim() == 2:
        return stored
    if not is_halved(stored.shape):
        return stored.diagonal(dim1=-2, dim2=-1)
    blocks = (row.diagonal_block for row in Lower.of(stored).rows)
    return torch.cat([block.diagonal(dim1=-2, dim2=-1) for block in blocks], dim=-1)


def _block_height(width: int) -> int:
    return BLOCK if width >= WHOLE_BELOW else NARROW_BLOCK


def aligned_length(width: int) -> int:
    """What rows are filled up to; narrow ones gain nothing by it."""
    return width if width < NARROW_BLOCK else -(-width // ALIGNMENT) * ALIGNMENT


def _spans(width: int, block: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + block, width)) for start in range(0, width, block))


def _length(width: int, block: int) -> int:
    return sum((end - start) * aligned_length(end) for start, end in _spans(width, block))


@lru_cache(maxsize=256)
def _width_of(length: int, block: int) -> int | None:
    """The inverse of `_length`, which grows with the width and is at least half its square."""
    low, high = 1, isqrt(2 * length) + 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _length(middle, block) >= length else (middle + 1, high)
    return low if _length(low, block) == length else None


def _block_rows(
    storage: Tensor, width: int, block: int, *, clear: bool = False
) -> Iterator[BlockRow]:
    offset = 0
    for start, end in _spans(width, block):
        height, length = end - start, aligned_length(end)
        lines = storage[:, 0, offset : offset + height * length].unflatten(-1, (height, length))
        if clear and length > end:
            lines[..., end:] = 0
        yield BlockRow(start, end, lines[..., :end])
        offset += height * length


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


def aligned(like: Tensor, height: int, width: int) -> Tensor:
    """An empty [groups, height, width] whose rows start on cache lines."""
    return like.new_empty(len(like), height, aligned_length(width))[..., :width]


def columns(rows: Tensor) -> Tensor:
    """Rows [n, g, s, d] as columns [g, d, n s], copied only if they do not lie like that."""
    _, groups, positions, width = rows.shape
    if positions > 1 and rows.stride(3) != 1 and rows.stride(2) == 1:  # channels before positions
        return rows.permute(1, 3, 0, 2).reshape(groups, width, -1)
    return rows.transpose(0, 1).reshape(groups, -1, width).mT


def gram(chunks: Iterable[Tensor], rows: Sequence[BlockRow]) -> None:
    """Write the sum of c c^T over all chunks c [groups, d, k] to the block rows of a `Lower`."""
    for number, chunk in enumerate(chunks):
        for row in rows:
            left, right = chunk[:, row.start : row.end], chunk[:, : row.end].mT
            if number == 0:
                multiply(left, right, row.values)
            else:
                add_product(row.values, left, right)


def from_right(v: Tensor, stored: Tensor) -> Tensor:
    """v S, for v [groups, k, d] and any form of S."""
    if stored.dim() == 2:
        return v * stored.unsqueeze(-2)
    return _times(v, stored, aligned(v, v.shape[1], v.shape[2]))


def from_left(stored: Tensor, v: Tensor) -> Tensor:
    """S v, for v [groups, d, k] and any form of S."""
    if stored.dim() == 2:
        return stored.unsqueeze(-1) * v
    out = aligned(v, v.shape[1], v.shape[2])
    if not is_halved(stored.shape):
        return multiply(stored, v, out)
    _times(v.mT, stored, out.mT)  # S is symmetric
    return out


def _times(v: Tensor, stored: Tensor, out: Tensor) -> Tensor:
    if not is_halved(stored.shape):
        return multiply(v, stored, out)
    for row in Lower.of(stored).rows:
        if row.start:
            add_product(out[..., : row.start], v[..., row.start : row.end], row.before)
        multiply(v[..., : row.end], row.values.mT, out[..., row.start : row.end])
    return out


# ---- roots: L with L L^T = S, its diagonal blocks inverted


def make_root(storage: Tensor) -> Tensor:
    """Overwrite stored halves of S by those of L; flags [groups] that tell whether it is sound.

    Row by row: L_kj = (S_kj - sum over m < j of L_km L_jm^T) L_jj^-T, and likewise on the diagonal.
    """
    rows = Lower.of(storage).rows
    good = torch.ones(len(storage), dtype=torch.bool, device=storage.device)
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


def finite_diagonal(triangle: Tensor) -> Tensor:
    """Flags [groups]. Enough to look at: the diagonal bounds what is beside it."""
    return triangle.diagonal(dim1=-2, dim2=-1).isfinite().all(-1)


def half_solve_right(v: Tensor, root: Tensor) -> Tensor:
    """v L^-T, for v [groups, k, d]: <v L^-T, w L^-T> = <v, w S^-1>."""
    return _substitute(v, root, aligned(v, v.shape[1], v.shape[2]))


def half_solve_left(root: Tensor, v: Tensor) -> Tensor:
    """L^-1 v, for v [groups, d, k]."""
    out = aligned(v, v.shape[1], v.shape[2])
    _substitute(v.mT, root, out.mT)
    return out


def finish_solve_right(v: Tensor, root: Tensor) -> Tensor:
    """v L^-1, in place: after `half_solve_right` it makes v S^-1."""
    for row in reversed(Lower.of(root).rows):
        own = v[..., row.start : row.end]
        own.copy_(_product_like(own, own, row.diagonal_block))
        if row.start:
            add_product(v[..., : row.start], own, row.before, sign=-1)
    return v


def finish_solve_left(root: Tensor, v: Tensor) -> Tensor:
    """L^-T v, in place."""
    finish_solve_right(v.mT, root)
    return v


def _substitute(v: Tensor, root: Tensor, out: Tensor) -> Tensor:
    for row in Lower.of(root).rows:
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
