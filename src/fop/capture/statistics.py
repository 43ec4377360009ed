"""What backward passes leave behind for a layer: sums over examples, and what they are over.

    difference   H1 - H2, shaped like the weight and, if it is trained, the bias: the parts of the
                 gradient that the two half-batches contributed, subtracted instead of added
    inputs       sum of x x^T, a factor [groups, i (+1), i (+1)]
    outputs      sum of g g^T, a factor [groups, o, o]
    squares      sum of squared per-example gradients [groups, o, i (+1)] (EKFAC, squares.py)

A call, a backward pass, a micro-batch and a rank all contribute this one type, and `+=` adds them
up. Nothing is divided before the step: fop.scaling does that, once.

    >>> total = Statistics()
    >>> total += Statistics(difference=[h1 - h2], first=4, second=4)   # a batch of 8
    >>> total += Statistics(difference=[h3 - h4], first=2, second=2)   # 4 more: first == 6

`PassMoments` makes the moments of one pass from a layer's rows x [n, groups, s, i] and
g [n, groups, s, o], of n examples at s shared positions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fop.capture.squares import Eigenbasis, GradientSquares
from fop.layers import LayerAdapter
from fop.linalg import Diagonal, Factor, Form, Gram
from fop.slices import ParameterSlice


def factor_dtype(dtype: torch.dtype) -> torch.dtype:
    """Curvature is kept in float32 or better: half precision breaks its decompositions."""
    return torch.float32 if dtype.itemsize < 4 else dtype


@dataclass
class Statistics:
    """Sums; what is None was not recorded."""

    difference: list[Tensor] | None = None
    first: int = 0  # examples in each half-batch
    second: int = 0
    inputs: Factor | None = None
    outputs: Factor | None = None
    squares: Tensor | None = None
    examples: int = 0  # what the moments are over: inputs, outputs and squares
    rows: int = 0  # examples times shared positions
    passes: int = 0

    @property
    def factors(self) -> list[Factor]:
        """Moments of inputs and outputs, or neither: a curvature may do with squares alone."""
        return [factor for factor in (self.inputs, self.outputs) if factor is not None]

    def __iadd__(self, other: Statistics) -> Statistics:
        """Takes over the tensors of `other`, or adds to its own in place."""
        if other.difference is not None:
            # A pass may come with the bias, or without it: whichever is frozen at the time.
            own = self.difference or []
            both = min(len(own), len(other.difference))
            if both:
                torch._foreach_add_(own[:both], other.difference[:both])
            self.difference = own + other.difference[both:]
            self.first += other.first
            self.second += other.second
        for name in ("inputs", "outputs", "squares"):
            total, term = getattr(self, name), getattr(other, name)
            if total is None or term is None:
                setattr(self, name, term if total is None else total)
            else:
                total.add_(term)
        self.examples += other.examples
        self.rows += other.rows
        self.passes += other.passes
        return self

    def only_moments(self) -> Statistics:
        return replace(self, difference=None, first=0, second=0)

    def without_moments(self) -> Statistics:
        return Statistics(self.difference, self.first, self.second)

    def bounds(self) -> list[Tensor]:
        """What is finite only if all moments are: sums of squares bound the other products."""
        bounds = [factor.diagonal() for factor in self.factors]
        return bounds if self.squares is None else [*bounds, self.squares]

    def to(self, device: torch.device, dtype: torch.dtype) -> Statistics:
        """Of a parameter that was moved or cast: its dtype, and that of its factors."""
        moved, precise = replace(self), factor_dtype(dtype)
        if self.difference is not None:
            moved.difference = [part.to(device, dtype) for part in self.difference]
        if self.factors:
            moved.inputs, moved.outputs = (f.to(device, precise) for f in self.factors)
        if self.squares is not None:
            moved.squares = self.squares.to(device, precise)
        return moved


@dataclass
class Sample:
    """What one layer brings to a step, on this rank."""

    slices: list[ParameterSlice]  # of the weight and, where it is trained, the bias
    shape: tuple[int, int]  # rows and columns of its matrix
    difference: list[Tensor] | None  # H1 - H2 by slices; None where it is not known of `p.grad`
    half_sizes: tuple[int, int]  # examples in the two half-batches that it is about
    statistics: Statistics  # second moments, until they are used up
    wants_moments: bool


@dataclass(frozen=True)
class MomentForms:
    """What a layer's moments look like."""

    dtype: torch.dtype
    has_bias: bool  # inputs have a last column of ones
    inputs: Form  # the bias included
    outputs: Form

    def of_rows(self, rows: Tensor, form: Form) -> Factor:
        """Sum of r r^T over rows [n, groups, s, d]."""
        rows = rows.to(self.dtype)
        if form.diagonal:
            return Diagonal(rows.square().sum((0, 2)))
        gram = Gram(rows, form.groups, form.width)
        gram.add_rows(rows)
        return gram.factor()

    def of_inputs(self, adapter: LayerAdapter, x: Tensor, grad: Tensor, rows: int) -> Factor:
        """Sum of x x^T over the input rows of one call, so many in number."""
        x, bias, form = x.to(self.dtype), int(self.has_bias), self.inputs
        if form.diagonal:
            # Rows hold elements of the input, so their squares are rows of its square.
            squares = adapter.input_totals(x.square(), grad).sum(0)
            return Diagonal(F.pad(squares, (0, bias), value=rows))
        gram = Gram(x, form.groups, form.width, features=form.width - bias)
        adapter.input_moment(x, grad, gram)
        if bias:
            # Summed over the examples first: rows are linear in the input.
            total = adapter.input_totals(x.sum(0, keepdim=True), grad[:1])[0]
            gram.fill_last(F.pad(total, (0, 1), value=rows))
        return gram.factor()

    def of_indices(self, indices: Tensor, *, reduce: bool) -> Factor:
        """Sum of x x^T over one-hot rows, from indices [n, s]; -1 for a row of zeros."""
        weights = torch.ones_like(indices, dtype=self.dtype)
        if reduce:
            # An example's mean row is c_v / s; its square is spread over the c_v positions.
            same = indices.unsqueeze(1) == indices.unsqueeze(2)
            weights = same.sum(2).to(self.dtype) / indices.shape[1] ** 2
        weights = weights.masked_fill(indices < 0, 0.0)
        counts = weights.new_zeros(self.inputs.width)
        counts.index_add_(0, indices.clamp(min=0).reshape(-1), weights.reshape(-1))
        return Diagonal(counts.unsqueeze(0))


class PassMoments:
    """Collects one backward pass through one layer, which may be called several times in it.

    All calls of a pass belong to the same examples: each adds further shared positions. So with
    sharing="reduce", as for `squares`, nothing can be squared before the pass is complete.
    """

    def __init__(
        self, forms: MomentForms, sharing: str, basis: Eigenbasis | None, *, factors: bool
    ) -> None:
        self._reduce = sharing == "reduce"
        self._factors = factors
        self._forms = forms
        self._squares = None
        if basis is not None:
            width, dtype = forms.inputs.width, forms.dtype
            self._squares = GradientSquares(basis, width, dtype, has_bias=forms.has_bias)
        self._found = Statistics(passes=1)
        # "reduce" only: per-example sums over positions, [n, groups, features].
        self._input_total: Tensor | None = None
        self._output_total: Tensor | None = None
        self._positions = 0

    def add(self, adapter: LayerAdapter, x: Tensor, grad: Tensor, *, with_inputs: bool) -> None:
        """A call's input and output gradient, with examples in dimension 0.

        Without inputs, the outputs go with those that are known, as another set of gradients.
        """
        outputs, forms, squares = adapter.output_rows(grad), self._forms, self._squares
        if with_inputs:
            n, _, positions, _ = outputs.shape
            self._found.examples = max(self._found.examples, n)
            self._found.rows += n * positions
            self._positions += positions
            if self._factors:
                self._add_inputs(adapter, x, grad, n * positions)
            if squares is not None:
                add = squares.add_indices if adapter.one_hot else squares.add_inputs
                add(adapter.input_rows(x, grad))
        if self._factors and self._reduce:
            self._output_total = _sum_of(self._output_total, outputs.to(forms.dtype).sum(2))
        elif self._factors:
            self._found += Statistics(outputs=forms.of_rows(outputs, forms.outputs))
        if squares is not None:
            squares.add_outputs(outputs)

    def _add_inputs(self, adapter: LayerAdapter, x: Tensor, grad: Tensor, rows: int) -> None:
        forms = self._forms
        if adapter.one_hot:
            moment = forms.of_indices(adapter.input_rows(x, grad), reduce=self._reduce)
        elif self._reduce:
            totals = adapter.input_totals(x.to(forms.dtype), grad)
            self._input_total = _sum_of(self._input_total, totals)
            return
        else:
            moment = forms.of_inputs(adapter, x, grad, rows)
        self._found += Statistics(inputs=moment)

    def close_outputs(self) -> None:
        """End a set of output gradients that belong together; several sets may share the inputs."""
        if self._output_total is not None:
            rows = self._output_total.unsqueeze(2)
            self._found += Statistics(outputs=self._forms.of_rows(rows, self._forms.outputs))
            self._output_total = None
        if self._squares is not None:
            self._squares.close_outputs()

    def finish(self) -> Statistics:
        self.close_outputs()
        if self._input_total is not None:
            means = self._input_total.div_(self._positions)
            rows = F.pad(means, (0, int(self._forms.has_bias)), value=1.0).unsqueeze(2)
            self._found.inputs = self._forms.of_rows(rows, self._forms.inputs)
        if self._squares is not None:
            self._found.squares = self._squares.finish()
        return self._found


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
