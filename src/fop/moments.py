"""Raw second moments of a layer's inputs and output gradients: sums and counts, undivided."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fop.layers import LayerAdapter
from fop.linalg import Diagonal, Factor, Form, Gram


def factor_dtype(dtype: torch.dtype) -> torch.dtype:
    """Curvature is kept in float32 or better: half precision breaks its decompositions."""
    return torch.float32 if dtype.itemsize < 4 else dtype


@dataclass
class FactorSums:
    """Sums of x x^T [groups, i(+1), i(+1)] and g g^T [groups, o, o], and what they are over."""

    inputs: Factor
    outputs: Factor
    examples: int
    rows: int
    passes: int = 1
    squares: Tensor | None = None  # of per-example gradients, see squares.py

    def bounds(self) -> list[Tensor]:
        """What is finite only if all entries are: sums of squares bound the other products."""
        bounds = [self.inputs.diagonal(), self.outputs.diagonal()]
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
        self.inputs, self.outputs = (f.to(device, dtype) for f in (self.inputs, self.outputs))
        if self.squares is not None:
            self.squares = self.squares.to(device, dtype)


@dataclass(frozen=True)
class SumForms:
    """What a layer's sums look like."""

    dtype: torch.dtype
    has_bias: bool
    inputs: Form  # the bias included
    outputs: Form

    def of_outputs(self, rows: Tensor) -> Factor:
        """Sum of g g^T over rows [n, groups, s, o]."""
        rows = rows.to(self.dtype)
        if self.outputs.diagonal:
            return Diagonal(rows.square().sum((0, 2)))
        gram = Gram(rows, rows.shape[1], rows.shape[3])
        gram.add_rows(rows)
        return gram.factor()

    def of_inputs(self, layer: LayerAdapter, x: Tensor, grad: Tensor, rows: int) -> Factor:
        """Sum of x x^T over the input rows of one call, so many in number."""
        x = x.to(self.dtype)
        if self.inputs.diagonal:
            # Rows hold elements of the input, so their squares are rows of its square.
            return Diagonal(self._with_bias(layer.input_totals(x.square(), grad).sum(0), rows))
        gram = self._input_gram(x)
        layer.input_moment(x, grad, gram)
        if self.has_bias:
            # Summed over the examples first: rows are linear in the input.
            total = layer.input_totals(x.sum(0, keepdim=True), grad[:1])[0]
            gram.fill_last(self._with_bias(total, rows))
        return gram.factor()

    def of_mean_inputs(self, means: Tensor) -> Factor:
        """Sum of x x^T over one row per example, [n, groups, i]."""
        if self.inputs.diagonal:
            return Diagonal(self._with_bias(means.square().sum(0), len(means)))
        gram = self._input_gram(means)
        gram.add_rows(means.unsqueeze(2))
        if self.has_bias:
            gram.fill_last(self._with_bias(means.sum(0), len(means)))
        return gram.factor()

    def _input_gram(self, like: Tensor) -> Gram:
        groups, width = self.inputs.groups, self.inputs.width
        return Gram(like, groups, width, features=width - self.has_bias)

    def _with_bias(self, total: Tensor, rows: int) -> Tensor:
        """A sum over so many rows, with that of the constant input 1 that a bias sees."""
        return nn.functional.pad(total, (0, 1), value=rows) if self.has_bias else total


class PassSums:
    """Collects one backward pass through one layer, which may be called several times in it.

    All calls of a pass belong to the same examples: each adds further shared positions.
    """

    def __init__(self, forms: SumForms, sharing: str) -> None:
        self._reduce = sharing == "reduce"
        self._forms = forms
        self._inputs: Factor | None = None
        self._outputs: Factor | None = None
        self._examples = 0
        self._rows = 0
        # "reduce" only: per-example sums over positions, [n, groups, features], until the pass is
        # complete.
        self._input_total: Tensor | None = None
        self._output_total: Tensor | None = None
        self._positions = 0

    def add_inputs(self, layer: LayerAdapter, x: Tensor, grad: Tensor, positions: int) -> None:
        """A call's input, and its output gradient for the sizes."""
        n = grad.shape[0]
        self._count(n, positions)
        if self._reduce:
            totals = layer.input_totals(x.to(self._forms.dtype), grad)
            self._input_total = _sum_of(self._input_total, totals)
        else:
            moment = self._forms.of_inputs(layer, x, grad, n * positions)
            self._inputs = _sum_of_factors(self._inputs, moment)

    def add_indices(self, indices: Tensor) -> None:
        """`indices` [n, s] of one-hot inputs; -1 for a row of zeros."""
        n, positions = indices.shape
        self._count(n, positions)
        weights = torch.ones_like(indices, dtype=self._forms.dtype)
        if self._reduce:
            # An example's mean row is c_v / s; its square is spread over the c_v positions.
            same = indices.unsqueeze(1) == indices.unsqueeze(2)
            weights = same.sum(2).to(self._forms.dtype) / positions**2
        weights = weights.masked_fill(indices < 0, 0.0)
        counts = weights.new_zeros(self._forms.inputs.width)
        counts.index_add_(0, indices.clamp(min=0).reshape(-1), weights.reshape(-1))
        self._inputs = _sum_of_factors(self._inputs, Diagonal(counts.unsqueeze(0)))

    def _count(self, examples: int, positions: int) -> None:
        self._examples = max(self._examples, examples)
        self._rows += examples * positions
        self._positions += positions

    def add_outputs(self, rows: Tensor) -> None:
        """`rows` [n, groups, s, o]."""
        if self._reduce:
            self._output_total = _sum_of(self._output_total, rows.to(self._forms.dtype).sum(2))
        else:
            self._outputs = _sum_of_factors(self._outputs, self._forms.of_outputs(rows))

    def close_outputs(self) -> None:
        """End a set of output gradients that belong together; several sets may share the inputs."""
        if self._output_total is not None:
            moment = self._forms.of_outputs(self._output_total.unsqueeze(2))
            self._outputs = _sum_of_factors(self._outputs, moment)
            self._output_total = None

    def finish(self) -> FactorSums:
        self.close_outputs()
        if self._input_total is not None:
            self._inputs = self._forms.of_mean_inputs(self._input_total.div_(self._positions))
        assert self._inputs is not None
        assert self._outputs is not None
        return FactorSums(self._inputs, self._outputs, self._examples, self._rows)


def _sum_of_factors(total: Factor | None, term: Factor) -> Factor:
    return term if total is None else total.add_(term)


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
