"""Raw second moments of a layer's inputs and output gradients: sums and counts, undivided."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


def factor_dtype(dtype: torch.dtype) -> torch.dtype:
    """Curvature is kept in float32 or better: half precision breaks its decompositions."""
    return torch.promote_types(dtype, torch.float32)


@dataclass
class FactorSums:
    """Sums of x x^T [groups, i(+1), i(+1)] and g g^T [groups, o, o], and what they are over.

    A factor that is kept diagonal has one dimension less.
    """

    inputs: Tensor
    outputs: Tensor
    examples: int
    rows: int
    passes: int = 1
    squares: Tensor | None = None  # of per-example gradients, see squares.py

    def add(self, other: FactorSums) -> None:
        self.inputs.add_(other.inputs)
        self.outputs.add_(other.outputs)
        self.examples += other.examples
        self.rows += other.rows
        self.passes += other.passes
        if self.squares is not None and other.squares is not None:
            self.squares.add_(other.squares)


@dataclass(frozen=True)
class FactorForm:
    """What a layer's sums look like."""

    dtype: torch.dtype
    has_bias: bool
    diagonal_inputs: bool
    diagonal_outputs: bool

    def of_inputs(self, rows: Tensor) -> Tensor:
        return _second_moment(rows.to(self.dtype), self.has_bias, self.diagonal_inputs)

    def of_outputs(self, rows: Tensor) -> Tensor:
        return _second_moment(rows.to(self.dtype), False, self.diagonal_outputs)


class PassSums:
    """Collects one backward pass through one layer, which may be called several times in it.

    All calls of a pass belong to the same examples: each adds further shared positions.
    """

    def __init__(self, form: FactorForm, sharing: str) -> None:
        self._reduce = sharing == "reduce"
        self._form = form
        self._inputs: Tensor | None = None
        self._outputs: Tensor | None = None
        self._examples = 0
        self._rows = 0
        # "reduce" only: per-example sums over positions, [n, groups, features], until the pass is
        # complete.
        self._input_total: Tensor | None = None
        self._output_total: Tensor | None = None
        self._positions = 0

    def add_inputs(self, rows: Tensor) -> None:
        """`rows` [n, groups, s, i]."""
        self._count(rows.shape[0], rows.shape[2])
        if self._reduce:
            self._input_total = _sum_of(self._input_total, rows.to(self._form.dtype).sum(2))
        else:
            self._inputs = _sum_of(self._inputs, self._form.of_inputs(rows))

    def add_indices(self, indices: Tensor, width: int) -> None:
        """`indices` [n, s] of one-hot inputs of the given width; -1 for a row of zeros."""
        n, positions = indices.shape
        self._count(n, positions)
        weights = torch.ones_like(indices, dtype=self._form.dtype)
        if self._reduce:
            # An example's mean row is c_v / s; its square is spread over the c_v positions.
            same = indices.unsqueeze(1) == indices.unsqueeze(2)
            weights = same.sum(2).to(self._form.dtype) / positions**2
        weights = weights.masked_fill(indices < 0, 0.0)
        counts = weights.new_zeros(width)
        counts.index_add_(0, indices.clamp(min=0).reshape(-1), weights.reshape(-1))
        self._inputs = _sum_of(self._inputs, counts.unsqueeze(0))

    def _count(self, examples: int, positions: int) -> None:
        self._examples = max(self._examples, examples)
        self._rows += examples * positions
        self._positions += positions

    def add_outputs(self, rows: Tensor) -> None:
        """`rows` [n, groups, s, o]."""
        if self._reduce:
            self._output_total = _sum_of(self._output_total, rows.to(self._form.dtype).sum(2))
        else:
            self._outputs = _sum_of(self._outputs, self._form.of_outputs(rows))

    def close_outputs(self) -> None:
        """End a set of output gradients that belong together; several sets may share the inputs."""
        if self._output_total is not None:
            moment = self._form.of_outputs(self._output_total.unsqueeze(2))
            self._outputs = _sum_of(self._outputs, moment)
            self._output_total = None

    def finish(self) -> FactorSums:
        self.close_outputs()
        if self._input_total is not None:
            mean = (self._input_total / self._positions).unsqueeze(2)
            self._inputs = self._form.of_inputs(mean)
        assert self._inputs is not None
        assert self._outputs is not None
        return FactorSums(self._inputs, self._outputs, self._examples, self._rows)


def _sum_of(total: Tensor | None, term: Tensor) -> Tensor:
    if total is None:
        return term
    if total.shape == term.shape:
        return total.add_(term)
    # Calls of one pass with different batch sizes: example i of one is example i of the other as
    # far as both go.
    longer, shorter = (total, term) if len(total) >= len(term) else (term, total)
    longer[: len(shorter)].add_(shorter)
    return longer


def _second_moment(rows: Tensor, has_bias: bool, diagonal: bool) -> Tensor:
    """Sum of x x^T over examples and positions, [groups, i, i]; with a bias, of [x, 1] [x, 1]^T."""
    groups, features = rows.shape[1], rows.shape[3]
    flat = rows.transpose(0, 1).reshape(groups, -1, features)
    if diagonal:
        squares = flat.square().sum(1)
        return nn.functional.pad(squares, (0, 1), value=flat.shape[1]) if has_bias else squares
    product = flat.transpose(1, 2) @ flat
    if not has_bias:
        return product
    moment = product.new_empty(groups, features + 1, features + 1)
    moment[:, :features, :features] = product
    moment[:, features, :features] = moment[:, :features, features] = flat.sum(1)
    moment[:, features, features] = flat.shape[1]
    return moment
