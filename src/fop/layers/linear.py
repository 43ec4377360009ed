"""nn.Linear on inputs [n, ..., i]: dimension 0 counts examples, the middle ones positions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fop.layers.base import LayerAdapter


class LinearAdapter(LayerAdapter):
    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None, output: Tensor) -> Tensor:
        return F.linear(x, weight, bias)

    def input_gradient(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return grad @ weight

    def weight_gradient(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return grad.flatten(0, -2).t() @ x.flatten(0, -2)

    def _add_weight_gradient(self, onto: Tensor, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        if type(self).weight_gradient is not LinearAdapter.weight_gradient:
            return super()._add_weight_gradient(onto, grad, x, weight)
        return torch.addmm(onto, grad.flatten(0, -2).t(), x.flatten(0, -2))  # one pass less

    def bias_gradient(self, grad: Tensor) -> Tensor:
        return grad.flatten(0, -2).sum(0)
