"""Squares of per-example gradients in a Kronecker eigenbasis: what EKFAC corrects eigenvalues by.

S = sum_n (U_G^T V_n U_A)^2, elementwise   [groups, o, i]
V_n = sum_s g_ns x_ns^T                    one example's gradient, over all its positions
U_A [groups, i, i], U_G [groups, o, o]     eigenvectors; None for a factor kept diagonal
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

# Per-example gradients are formed for so many examples at a time that they hold no more entries.
LARGEST_CHUNK = 2**24


@dataclass(frozen=True)
class Eigenbasis:
    """The basis a layer's curvature is diagonal in at present."""

    inputs: Tensor | None
    outputs: Tensor | None

    @property
    def axes(self) -> bool:
        """Whether it is no change of basis, and so fits a layer of any shape."""
        return self.inputs is None and self.outputs is None


class GradientSquares:
    """Collects one backward pass through one layer, as `moments.PassMoments` does beside it."""

    def __init__(self, basis: Eigenbasis, width: int, dtype: torch.dtype, *, has_bias: bool):
        self._basis = basis
        self._width = width  # i, with the bias
        self._dtype = dtype
        self._has_bias = has_bias
        self._inputs: list[Tensor] = []  # [n, groups, s, i], one entry per call
        self._indices: list[Tensor] = []  # [n, s]
        self._outputs: list[Tensor] = []  # [n, groups, s, o], of the set that is open
        self._total: Tensor | None = None

    def add_inputs(self, rows: Tensor) -> None:
        """`rows` [n, groups, s, i]."""
        rows = rows.to(self._dtype)
        if self._has_bias:
            rows = F.pad(rows, (0, 1), value=1.0)
        self._inputs.append(_rotated(rows, self._basis.inputs))

    def add_indices(self, indices: Tensor) -> None:
        """`indices` [n, s] of one-hot inputs; -1 for a row of zeros."""
        self._indices.append(indices)

    def add_outputs(self, rows: Tensor) -> None:
        """`rows` [n, groups, s, o]."""
        self._outputs.append(_rotated(rows.to(self._dtype), self._basis.outputs))

    def close_outputs(self) -> None:
        """End a set of output gradients that belong together; several sets may share the inputs."""
        if not self._outputs:
            return
        outputs = _all_calls(self._outputs, dim=2, fill=0.0)
        if self._indices:
            indices = _all_calls(self._indices, dim=1, fill=-1)
            squares = _squares_by_index(outputs, indices, self._width)
        else:
            squares = _squares(outputs, _all_calls(self._inputs, dim=2, fill=0.0))
        self._total = squares if self._total is None else self._total.add_(squares)
        self._outputs = []

    def finish(self) -> Tensor:
        self.close_outputs()
        assert self._total is not None
        return self._total


def _rotated(rows: Tensor, basis: Tensor | None) -> Tensor:
    return rows if basis is None else rows @ basis.to(rows)


def _all_calls(calls: list[Tensor], dim: int, fill: float) -> Tensor:
    """The positions of all calls side by side; a call with fewer examples has none of the rest."""
    examples = max(len(call) for call in calls)
    padded = [
        torch.cat([call, call.new_full((examples - len(call), *call.shape[1:]), fill)])
        if len(call) < examples
        else call
        for call in calls
    ]
    return padded[0] if len(padded) == 1 else torch.cat(padded, dim)


def _squares(outputs: Tensor, inputs: Tensor) -> Tensor:
    """From g [n, groups, s, o] and x [n, groups, s, i]."""
    n, groups, positions, o = outputs.shape
    i = inputs.shape[-1]
    if positions == 1:  # the square of an outer product is the outer product of squares
        g, x = (rows.squeeze(2).square() for rows in (outputs, inputs))
        return g.permute(1, 2, 0) @ x.transpose(0, 1)
    total = outputs.new_zeros(groups, o, i)
    chunk = max(1, LARGEST_CHUNK // total.numel())
    for start in range(0, n, chunk):
        some = slice(start, start + chunk)
        total += (outputs[some].mT @ inputs[some]).square_().sum(0)
    return total


def _squares_by_index(outputs: Tensor, indices: Tensor, width: int) -> Tensor:
    """From g [n, 1, s, o] and indices [n, s]: examples hold few of the `width` columns."""
    same = indices.unsqueeze(1) == indices.unsqueeze(2)  # [n, s, s]
    times = same.sum(2)  # how often this position's index occurs in its example
    column = same.to(outputs.dtype) @ outputs.squeeze(1)  # V_n's column for that index
    # Every occurrence holds the full column, so each counts for its share of the square.
    share = column.square_() / times.unsqueeze(-1)
    share.masked_fill_((indices < 0).unsqueeze(-1), 0.0)
    total = outputs.new_zeros(width, outputs.shape[-1])
    total.index_add_(0, indices.clamp(min=0).reshape(-1), share.flatten(0, 1))
    return total.t().unsqueeze(0)
