"""A layer that sees several rows per example in dimension 0, [n r, ...], one after the other.

Here dimension 0 counts examples again, [n, r, ...]: the r rows are shared positions, as the pixels
of a convolution are. All else is left to the layer itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fop.layers.base import Gram, LayerAdapter
from fop.layers.norm import NormAdapter


class FoldedAdapter(LayerAdapter):
    """Sees the gradient and the input as [n, r, ...], and the layer within sees them flat."""

    def __init__(self, layer: LayerAdapter, rows: int) -> None:
        self._layer, self._rows = layer, rows
        self.groups, self.one_hot = layer.groups, layer.one_hot

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None, output: Tensor) -> Tensor:
        flat = self._layer.forward(x.flatten(0, 1), weight, bias, output.flatten(0, 1))
        return self._fold(flat)

    def prepare(self, x: Tensor) -> Tensor:
        return self._layer.prepare(x)

    def cast(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return self._layer.cast(x, dtype)

    def batched(self, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        return self._fold(x), self._fold(grad)

    def input_gradient(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return self._layer.input_gradient(grad.flatten(0, 1), x.flatten(0, 1), weight)

    def weight_gradient(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return self._layer.weight_gradient(grad.flatten(0, 1), x.flatten(0, 1), weight)

    def _add_weight_gradient(self, onto: Tensor, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return self._layer._add_weight_gradient(onto, grad.flatten(0, 1), x.flatten(0, 1), weight)

    def bias_gradient(self, grad: Tensor) -> Tensor:
        return self._layer.bias_gradient(grad.flatten(0, 1))

    def input_rows(self, x: Tensor, grad: Tensor) -> Tensor:
        rows = self._fold(self._layer.input_rows(x.flatten(0, 1), grad.flatten(0, 1)))
        return rows.flatten(1) if self.one_hot else rows.transpose(1, 2).flatten(2, 3)

    def input_totals(self, x: Tensor, grad: Tensor) -> Tensor:
        return self._fold(self._layer.input_totals(x.flatten(0, 1), grad.flatten(0, 1))).sum(1)

    def input_moment(self, x: Tensor, grad: Tensor, out: Gram) -> None:
        self._layer.input_moment(x.flatten(0, 1), grad.flatten(0, 1), out)

    def output_rows(self, grad: Tensor) -> Tensor:
        rows = self._fold(self._layer.output_rows(grad.flatten(0, 1)))
        return rows.transpose(1, 2).flatten(2, 3)

    def _fold(self, tensor: Tensor) -> Tensor:
        folded: Tensor = tensor.unflatten(0, (-1, self._rows))
        return folded


class FoldedNorm(NormAdapter):
    """Its layer's gradients of single rows, added up per example."""

    def __init__(self, layer: NormAdapter, rows: int) -> None:
        self._layer, self._rows = layer, rows
        self.groups, self.shape = layer.groups, layer.shape

    def units_last(self, x: Tensor) -> Tensor:
        return self._layer.units_last(x)

    def unit_shape(self, x: Tensor) -> tuple[int, ...]:
        return self._layer.unit_shape(x)

    def normalised(self, x: Tensor, statistics: Any) -> Tensor:
        return self._layer.normalised(x, statistics)

    def statistics(self, module: Any) -> Any:
        return self._layer.statistics(module)

    def example_gradients(self, x: Tensor, grad: Tensor, statistics: Any, has_bias: bool) -> Tensor:
        of_rows = self._layer.example_gradients(x, grad, statistics, has_bias)
        of_examples: Tensor = of_rows.unflatten(0, (-1, self._rows)).sum(1)
        return of_examples


def folded(layer: LayerAdapter, rows: int) -> LayerAdapter:
    """The layer where so many rows of dimension 0 belong to each example."""
    if rows == 1:
        return layer
    return FoldedNorm(layer, rows) if isinstance(layer, NormAdapter) else FoldedAdapter(layer, rows)
