"""Raw second moments of a layer's inputs and output gradients: sums and counts, undivided."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def factor_dtype(dtype: torch.dtype) -> torch.dtype:
    """Curvature is kept in float32 or better: half precision breaks its decompositions."""
    return torch.promote_types(dtype, torch.float32)


@dataclass
class FactorSums:
    """Sums of x x^T [groups, i(+1), i(+1)] and g g^T [groups, o, o], and what they are over."""

    inputs: Tensor
    outputs: Tensor
    examples: int
    rows: int

    def add(self, other: FactorSums) -> None:
        self.inputs.add_(other.inputs)
        self.outputs.add_(other.outputs)
        self.examples += other.examples
        self.rows += other.rows


class PassSums:
    """Collects one backward pass through one layer, which may be called several times in it.

    All calls of a pass belong to the same examples: each adds further shared positions.
    """

    def __init__(self, sharing: str, has_bias: bool, dtype: torch.dtype) -> None:
        self._reduce = sharing == "reduce"
        self._has_bias = has_bias
        self._dtype = dtype
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
        n, _, positions, _ = rows.shape
        self._examples = max(self._examples, n)
        self._rows += n * positions
        if self._reduce:
            self._input_total = _sum_of(self._input_total, rows.to(self._dtype).sum(2))
            self._positions += positions
        else:
            self._inputs = _sum_of(self._inputs, _second_moment(rows, self._dtype, self._has_bias))

    def add_outputs(self, rows: Tensor) -> None:
        """`rows` [n, groups, s, o]."""
        if self._reduce:
            self._output_total = _sum_of(self._output_total, rows.to(self._dtype).sum(2))
        else:
            self._outputs = _sum_of(self._outputs, _second_moment(rows, self._dtype, False))

    def close_outputs(self) -> None:
        """End a set of output gradients that belong together; several sets may share the inputs."""
        if self._output_total is not None:
            moment = _second_moment(self._output_total.unsqueeze(2), self._dtype, False)
            self._outputs = _sum_of(self._outputs, moment)
            self._output_total = None

    def finish(self) -> FactorSums:
        self.close_outputs()
        if self._input_total is not None:
            mean = (self._input_total / self._positions).unsqueeze(2)
            self._inputs = _second_moment(mean, self._dtype, self._has_bias)
        assert self._inputs is not None and self._outputs is not None
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


def _second_moment(rows: Tensor, dtype: torch.dtype, has_bias: bool) -> Tensor:
    """Sum of x x^T over examples and positions, [groups, i, i]; with a bias, of [x, 1] [x, 1]^T."""
    groups, features = rows.shape[1], rows.shape[3]
    flat = rows.to(dtype).transpose(0, 1).reshape(groups, -1, features)
    product = flat.transpose(1, 2) @ flat
    if not has_bias:
        return product
    moment = product.new_empty(groups, features + 1, features + 1)
    moment[:, :features, :features] = product
    moment[:, features, :features] = moment[:, :features, features] = flat.sum(1)
    moment[:, features, features] = flat.shape[1]
    return moment
