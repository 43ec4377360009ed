"""A layer that sees several rows per example in dimension 0, [n r, ...], one after the other.

Here dimension 0 counts examples again, [n, r, ...]: the r rows are shared positions, as the pixels
of a convolution are. All else is left to the layer's own adapter.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from fop.layers.base import Gram, LayerAdapter
from fop.layers.norm import NormAdapter


def folded(adapter: LayerAdapter, rows: int) -> LayerAdapter:
    """The adapter for calls where so many rows of dimension 0 belong to each example."""
    if not isinstance(adapter, NormAdapter):
        return FoldedAdapter(adapter, rows)
    adapter = copy.copy(adapter)
    adapter.rows_per_example = rows
    return adapter


class FoldedAdapter(LayerAdapter):
    """Takes gradient and input as [n, r, ...]; the adapter within takes them as [n r, ...]."""

    def __init__(self, within: LayerAdapter, rows: int) -> None:
        self._within, self._rows = within, rows
        self.groups, self.one_hot = within.groups, within.one_hot

    def _fold(self, tensor: Tensor) -> Tensor:
        folded: Tensor = tensor.unflatten(0, (-1, self._rows))
        return folded

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None, output: Tensor) -> Tensor:
        return self._fold(self._within.forward(_flat(x), weight, bias, _flat(output)))

    def prepare(self, x: Tensor) -> Tensor:
        return self._within.prepare(x)

    def cast(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return self._within.cast(x, dtype)

    def batched(self, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        return self._fold(x), self._fold(grad)

    def input_gradient(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return self._within.input_gradient(_flat(grad), _flat(x), weight)

    def weight_gradient(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return self._within.weight_gradient(_flat(grad), _flat(x), weight)

    def _add_weight_gradient(self, onto: Tensor, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return self._within._add_weight_gradient(onto, _flat(grad), _flat(x), weight)

    def bias_gradient(self, grad: Tensor) -> Tensor:
        return self._within.bias_gradient(_flat(grad))

    def input_rows(self, x: Tensor, grad: Tensor) -> Tensor:
        rows = self._fold(self._within.input_rows(_flat(x), _flat(grad)))
        return rows.flatten(1) if self.one_hot else rows.transpose(1, 2).flatten(2, 3)

    def input_totals(self, x: Tensor, grad: Tensor) -> Tensor:
        return self._fold(self._within.input_totals(_flat(x), _flat(grad))).sum(1)

    def input_moment(self, x: Tensor, grad: Tensor, out: Gram) -> None:
        self._within.input_moment(_flat(x), _flat(grad), out)

    def output_rows(self, grad: Tensor) -> Tensor:
        return self._fold(self._within.output_rows(_flat(grad))).transpose(1, 2).flatten(2, 3)


def _flat(tensor: Tensor) -> Tensor:
    return tensor.flatten(0, 1)
