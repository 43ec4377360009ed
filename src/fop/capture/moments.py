"""Raw second moments of a layer's inputs and output gradients: sums and counts, undivided."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fop.capture.squares import Eigenbasis, GradientSquares
from fop.capture.statistics import Statistics
from fop.layers import LayerAdapter
from fop.linalg import Diagonal, Factor, Form, Gram


@dataclass(frozen=True)
class MomentForms:
    """What a layer's moments look like."""

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

    def of_inputs(self, adapter: LayerAdapter, x: Tensor, grad: Tensor, rows: int) -> Factor:
        """Sum of x x^T over the input rows of one call, so many in number."""
        x = x.to(self.dtype)
        if self.inputs.diagonal:
            # Rows hold elements of the input, so their squares are rows of its square.
            return Diagonal(self._with_bias(adapter.input_totals(x.square(), grad).sum(0), rows))
        gram = self._input_gram(x)
        adapter.input_moment(x, grad, gram)
        if self.has_bias:
            # Summed over the examples first: rows are linear in the input.
            total = adapter.input_totals(x.sum(0, keepdim=True), grad[:1])[0]
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


class PassMoments:
    """Collects one backward pass through one layer, which may be called several times in it.

    All calls of a pass belong to the same examples: each adds further shared positions. So with
    sharing="reduce", as for `squares`, nothing can be squared before the pass is complete.
    """

    def __init__(
        self, forms: MomentForms, sharing: str, basis: Eigenbasis | None, *, factors: bool = True
    ) -> None:
        self._reduce = sharing == "reduce"
        self._factors = factors
        self._forms = forms
        self._squares = None
        if basis is not None:
            self._squares = GradientSquares(
                basis, forms.inputs.width, forms.dtype, has_bias=forms.has_bias
            )
        self._found = Statistics(passes=1)
        # "reduce" only: per-example sums over positions, [n, groups, features].
        self._input_total: Tensor | None = None
        self._output_total: Tensor | None = None
        self._positions = 0

    def add(self, adapter: LayerAdapter, x: Tensor, grad: Tensor, *, with_inputs: bool) -> None:
        """A call's input and output gradient, with examples in dimension 0.

        Without inputs, the outputs go with those that are known, as another set of gradients.
        """
        outputs, squares = adapter.output_rows(grad), self._squares
        if with_inputs:
            n, positions = outputs.shape[0], outputs.shape[2]
            self._found.examples = max(self._found.examples, n)
            self._found.rows += n * positions
            self._positions += positions
            if self._factors and adapter.one_hot:
                self._add_indices(adapter.input_rows(x, grad))
            elif self._factors:
                self._add_inputs(adapter, x, grad, n * positions)
            if squares is not None:
                add = squares.add_indices if adapter.one_hot else squares.add_inputs
                add(adapter.input_rows(x, grad))
        if self._factors and self._reduce:
            self._output_total = _sum_of(self._output_total, outputs.to(self._forms.dtype).sum(2))
        elif self._factors:
            self._add_outputs(outputs)
        if squares is not None:
            squares.add_outputs(outputs)

    def close_outputs(self) -> None:
        """End a set of output gradients that belong together; several sets may share the inputs."""
        if self._output_total is not None:
            self._add_outputs(self._output_total.unsqueeze(2))
            self._output_total = None
        if self._squares is not None:
            self._squares.close_outputs()

    def finish(self) -> Statistics:
        self.close_outputs()
        found = self._found
        if self._input_total is not None:
            found.inputs = self._forms.of_mean_inputs(self._input_total.div_(self._positions))
        if self._squares is not None:
            found.squares = self._squares.finish()
        return found

    def _add_inputs(self, adapter: LayerAdapter, x: Tensor, grad: Tensor, rows: int) -> None:
        if self._reduce:
            totals = adapter.input_totals(x.to(self._forms.dtype), grad)
            self._input_total = _sum_of(self._input_total, totals)
        else:
            moment, known = self._forms.of_inputs(adapter, x, grad, rows), self._found.inputs
            self._found.inputs = moment if known is None else known.add_(moment)

    def _add_indices(self, indices: Tensor) -> None:
        """`indices` [n, s] of one-hot inputs; -1 for a row of zeros."""
        weights = torch.ones_like(indices, dtype=self._forms.dtype)
        if self._reduce:
            # An example's mean row is c_v / s; its square is spread over the c_v positions.
            same = indices.unsqueeze(1) == indices.unsqueeze(2)
            weights = same.sum(2).to(self._forms.dtype) / indices.shape[1] ** 2
        weights = weights.masked_fill(indices < 0, 0.0)
        counts = weights.new_zeros(self._forms.inputs.width)
        counts.index_add_(0, indices.clamp(min=0).reshape(-1), weights.reshape(-1))
        moment, known = Diagonal(counts.unsqueeze(0)), self._found.inputs
        self._found.inputs = moment if known is None else known.add_(moment)

    def _add_outputs(self, rows: Tensor) -> None:
        """`rows` [n, groups, s, o]."""
        moment, known = self._forms.of_outputs(rows), self._found.outputs
        self._found.outputs = moment if known is None else known.add_(moment)


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
