"""Raw second moments of a layer's inputs and output gradients: sums and counts, undivided."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fop import symmetric
from fop.layers import Layer


def factor_dtype(dtype: torch.dtype) -> torch.dtype:
    """Curvature is kept in float32 or better: half precision breaks its decompositions."""
    return torch.promote_types(dtype, torch.float32)


@dataclass
class FactorSums:
    """Sums of x x^T [groups, i(+1), i(+1)] and g g^T [groups, o, o], and what they are over.

    In the forms of `symmetric.py`; a factor that is kept diagonal has one dimension less.
    """

    inputs: Tensor
    outputs: Tensor
    examples: int
    rows: int
    passes: int = 1
    squares: Tensor | None = None  # of per-example gradients, see squares.py

    def bounds(self) -> list[Tensor]:
        """What is finite only if all entries are: sums of squares bound the other products."""
        bounds = [symmetric.diagonal(self.inputs), symmetric.diagonal(self.outputs)]
        return bounds if self.squares is None else [*bounds, self.squares]

    def add(self, other: FactorSums) -> None:
        self.inputs.add_(other.inputs)
        self.outputs.add_(other.outputs)
        self.examples += other.examples
        self.rows += other.rows
        self.passes += other.passes
        if self.squares is not None and other.squares is not None:
            self.squares.add_(other.squares)

    def move(self, device: torch.device, dtype: torch.dtype) -> None:
        self.inputs, self.outputs = (t.to(device, dtype) for t in (self.inputs, self.outputs))
        if self.squares is not None:
            self.squares = self.squares.to(device, dtype)


@dataclass(frozen=True)
class FactorForm:
    """What a layer's sums look like."""

    dtype: torch.dtype
    width: int  # of the input factor, the bias included
    has_bias: bool
    diagonal_inputs: bool
    diagonal_outputs: bool

    def of_outputs(self, rows: Tensor) -> Tensor:
        """Sum of g g^T over rows [n, groups, s, o]."""
        rows = rows.to(self.dtype)
        if self.diagonal_outputs:
            return rows.square().sum((0, 2))
        moment = symmetric.Lower.new(rows, rows.shape[1], rows.shape[3])
        symmetric.gram([symmetric.columns(rows)], moment.rows)
        return moment.stored()

    def of_inputs(self, layer: Layer, x: Tensor, grad: Tensor, rows: int) -> Tensor:
        """Sum of x x^T over the input rows of one call, so many in number."""
        x = x.to(self.dtype)
        if self.diagonal_inputs:
            # Rows hold elements of the input, so their squares are rows of its square.
            squares = layer.input_totals(x.square(), grad).sum(0)
            return nn.functional.pad(squares, (0, 1), value=rows) if self.has_bias else squares
        moment = symmetric.Lower.new(x, layer.groups, self.width)
        layer.input_moment(x, grad, moment.leading(self.features))
        if self.has_bias:
            # Summed over the examples first: rows are linear in the input.
            self._fill_bias(moment, layer.input_totals(x.sum(0, keepdim=True), grad[:1])[0], rows)
        return moment.stored()

    def of_mean_inputs(self, means: Tensor) -> Tensor:
        """Sum of x x^T over one row an example, [n, groups, i]."""
        count = len(means)
        if self.diagonal_inputs:
            squares = means.square().sum(0)
            return nn.functional.pad(squares, (0, 1), value=count) if self.has_bias else squares
        moment = symmetric.Lower.new(means, means.shape[1], self.width)
        columns = symmetric.columns(means.unsqueeze(2))
        symmetric.gram([columns], moment.leading(self.features))
        if self.has_bias:
            self._fill_bias(moment, means.sum(0), count)
        return moment.stored()

    @property
    def features(self) -> int:
        return self.width - self.has_bias

    def _fill_bias(self, moment: symmetric.Lower, total: Tensor, rows: int) -> None:
        """The last row and column, of the constant input 1 that a bias sees."""
        moment.fill_last(torch.nn.functional.pad(total, (0, 1), value=rows))


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

    def add_inputs(self, layer: Layer, x: Tensor, grad: Tensor, positions: int) -> None:
        """A call's input, and its output gradient for the sizes."""
        n = grad.shape[0]
        self._count(n, positions)
        if self._reduce:
            totals = layer.input_totals(x.to(self._form.dtype), grad)
            self._input_total = _sum_of(self._input_total, totals)
        else:
            moment = self._form.of_inputs(layer, x, grad, n * positions)
            self._inputs = _sum_of(self._inputs, moment)

    def add_indices(self, indices: Tensor) -> None:
        """`indices` [n, s] of one-hot inputs; -1 for a row of zeros."""
        n, positions = indices.shape
        self._count(n, positions)
        weights = torch.ones_like(indices, dtype=self._form.dtype)
        if self._reduce:
            # An example's mean row is c_v / s; its square is spread over the c_v positions.
            same = indices.unsqueeze(1) == indices.unsqueeze(2)
            weights = same.sum(2).to(self._form.dtype) / positions**2
        weights = weights.masked_fill(indices < 0, 0.0)
        counts = weights.new_zeros(self._form.width)
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
            self._inputs = self._form.of_mean_inputs(self._input_total.div_(self._positions))
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
