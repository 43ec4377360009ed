"""Sums of x x^T, of which half is computed."""

from __future__ import annotations

from torch import Tensor

from fop.linalg import blocked
from fop.linalg.blocked import BlockTriangle, add_product, multiply
from fop.linalg.factor import Blocked, Dense, Factor


class Gram:
    """The sum of x x^T over vectors x: symmetric matrices [groups, width, width] in the making.

    With `features` < width, vectors fill the upper left part [features, features] only, and the
    last row and column are for `fill_last`.
    """

    def __init__(self, like: Tensor, groups: int, width: int, features: int | None = None) -> None:
        storage = blocked.STORAGE
        self._packed = width >= storage.packed_from
        block = storage.block if self._packed else storage.dense_block
        self._triangle = BlockTriangle.empty(like, groups, width, block)
        self._rows = self._triangle.leading(width if features is None else features)
        self._empty = True

    def add_rows(self, rows: Tensor) -> None:
        """Vectors [n, groups, s, d]."""
        self.add_columns(columns(rows))

    def add_columns(self, vectors: Tensor) -> None:
        """Vectors [groups, d, k]."""
        for row in self._rows:
            left, right = vectors[:, row.start : row.end], vectors[:, : row.end].mT
            if self._empty:
                multiply(left, right, row.values)
            else:
                add_product(row.values, left, right)
        self._empty = False

    def write_rows(self, values: Tensor, start: int, step: int) -> None:
        """Set the matrices' rows start, start + step, ... to values [groups, count, d]."""
        for row in self._rows:
            skipped = (start - row.start) % step
            own = row.values[:, skipped::step]
            first = (row.start + skipped - start) // step
            own.copy_(values[:, first : first + own.shape[1], : row.end])

    def fill_last(self, values: Tensor) -> None:
        """Set the last row, and with it the last column: [groups, width]."""
        last = self._triangle.rows[-1]
        last.values[:, -1] = values
        last.diagonal_block[:, :, -1] = values[:, last.start :]

    def factor(self) -> Factor:
        triangle = self._triangle
        if self._packed:
            return Blocked(triangle.values, triangle.width, triangle.block)
        return Dense(triangle.dense())


def columns(rows: Tensor) -> Tensor:
    """Rows [n, g, s, d] as columns [g, d, n s], copied only if they do not lie like that."""
    _, groups, positions, width = rows.shape
    if positions > 1 and rows.stride(3) != 1 and rows.stride(2) == 1:  # channels before positions
        return rows.permute(1, 3, 0, 2).reshape(groups, width, -1)
    return rows.transpose(0, 1).reshape(groups, -1, width).mT
