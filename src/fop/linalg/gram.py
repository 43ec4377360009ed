"""Sums of x x^T, of which half is computed."""

from __future__ import annotations

import torch
from torch import Tensor

from fop.linalg import blocked
from fop.linalg.blocked import BlockRow, BlockTriangle
from fop.linalg.factor import Blocked, Dense, Factor


class Gram:
    """The sum of x x^T over vectors x: symmetric matrices [groups, width, width] in the making.

    Packed if wide, and else the lower blocks of a dense matrix, mirrored at the end. With
    `features` < width, vectors fill the upper left part [features, features] only, and the last row
    and column are for `fill_last`.
    """

    def __init__(self, like: Tensor, groups: int, width: int, features: int | None = None) -> None:
        storage, self._packed = blocked.STORAGE, None
        if width >= storage.packed_from:
            self._packed = BlockTriangle.empty(like, groups, width, storage.block)
            rows = list(self._packed.rows)
        else:
            block = min(storage.dense_block, width)
            length = width if block == width else blocked.aligned_length(width)
            self._dense = like.new_empty(groups, width, length)[..., :width]
            ends = ((start, min(start + block, width)) for start in range(0, width, block))
            rows = [BlockRow(start, end, self._dense[:, start:end, :end]) for start, end in ends]
        self._rows = rows
        self._filled = rows  # by vectors
        if features is not None:
            self._filled = [
                BlockRow(row.start, end, row.values[:, : end - row.start, :end])
                for row in rows
                if (end := min(row.end, features)) > row.start
            ]
        self._empty = True

    def add_rows(self, rows: Tensor) -> None:
        """Vectors [n, groups, s, d]."""
        self.add_columns(columns(rows))

    def add_columns(self, vectors: Tensor) -> None:
        """Vectors [groups, d, k]."""
        beta = 0 if self._empty else 1  # with 0, what is in the memory does not count
        for row in self._filled:
            out, left, right = row.values, vectors[:, row.start : row.end], vectors[:, : row.end].mT
            if len(out) == 1:
                torch.addmm(out[0], left[0], right[0], beta=beta, out=out[0])
            else:
                torch.baddbmm(out, left, right, beta=beta, out=out)
        self._empty = False

    def write_rows(self, values: Tensor, start: int, step: int) -> None:
        """Set the matrices' rows start, start + step, ... to values [groups, count, d]."""
        for row in self._filled:
            skipped = (start - row.start) % step
            own = row.values[:, skipped::step]
            first = (row.start + skipped - start) // step
            own.copy_(values[:, first : first + own.shape[1], : row.end])

    def fill_last(self, values: Tensor) -> None:
        """Set the last row, and with it the last column: [groups, width]."""
        last = self._rows[-1]
        last.values[:, -1] = values
        last.values[:, :, -1] = values[:, last.start :]

    def factor(self) -> Factor:
        if self._packed is not None:
            return Blocked(self._packed.values, self._packed.width, self._packed.block)
        for row in self._rows[1:]:
            self._dense[:, : row.start, row.start : row.end] = row.values[..., : row.start].mT
        return Dense(self._dense.contiguous())


def columns(rows: Tensor) -> Tensor:
    """Rows [n, g, s, d] as columns [g, d, n s], copied only if they do not lie like that."""
    _, groups, positions, width = rows.shape
    if positions > 1 and rows.stride(3) != 1 and rows.stride(2) == 1:  # channels before positions
        return rows.permute(1, 3, 0, 2).reshape(groups, width, -1)
    return rows.transpose(0, 1).reshape(groups, -1, width).mT
