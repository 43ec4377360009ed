"""Normalisation layers with unit-wise curvature: exact 2 x 2 matrices, one per scale and shift.

For y = weight * z + bias with z the normalised input, an example's gradient of unit c is
(sum over positions of g z, sum over positions of g). Taken as the output gradient of a layer with
one constant input, the Kronecker form G (x) 1 of that is the exact Fisher of the unit:

    input rows  [n, units, 1, 1], all ones        output rows  [n, units, 1, 2]
    matrix      [units, 2, 1]: weight and bias    without bias [units, 1, 1]

The layer's own backward stays as it is; its cost is too small to own. z is computed again from the
input, because dividing the output by the weight would fail where a weight is zero.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fop.layers.base import LayerAdapter

Maybe = Tensor | None


class NormAdapter(LayerAdapter):
    autograd_backward = True
    homogeneous_bias = False
    rows_per_example = 1  # in dimension 0 of the input

    def __init__(self, module: nn.Module) -> None:
        weight = module._parameters["weight"]
        assert weight is not None
        self.groups, self.shape = weight.numel(), weight.shape
        self.eps: Any = module.eps

    @abstractmethod
    def units_last(self, x: Tensor) -> Tensor:
        """[n, positions, units]"""

    @abstractmethod
    def normalise(self, x: Tensor, statistics: Any, weight: Maybe, bias: Maybe) -> Tensor:
        """weight * z + bias, or z without them, shaped like the input."""

    def statistics(self, module: nn.Module) -> Any:
        """What the normalisation rests on besides the input, as of the forward pass."""
        return None

    def forward(
        self, x: Tensor, weight: Tensor, bias: Maybe, output: Tensor, statistics: Any = None
    ) -> Tensor:
        return self.normalise(x, statistics, weight, bias)

    def example_gradients(self, x: Tensor, grad: Tensor, statistics: Any, has_bias: bool) -> Tensor:
        """[n, units, 2], or [n, units, 1] without a bias."""
        dtype = torch.promote_types(grad.dtype, torch.float32)
        g = self.units_last(grad).to(dtype)
        z = self.units_last(self.normalise(x.to(dtype), statistics, None, None))
        parts = [(g * z).sum(1), g.sum(1)] if has_bias else [(g * z).sum(1)]
        of_rows = torch.stack(parts, dim=-1)
        if self.rows_per_example == 1:
            return of_rows
        of_examples: Tensor = of_rows.unflatten(0, (-1, self.rows_per_example)).sum(1)
        return of_examples

    # From here on `grad` is what example_gradients gave.

    def batched(self, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        return x, grad

    def free_dimensions(self, x: Tensor) -> int:
        return 1

    def weight_gradient(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return grad[..., 0].sum(0).reshape(self.shape)

    def bias_gradient(self, grad: Tensor) -> Tensor:
        return grad[..., 1].sum(0).reshape(self.shape)

    def input_rows(self, x: Tensor, grad: Tensor) -> Tensor:
        return grad.new_ones(grad.shape[0], self.groups, 1, 1)

    def output_rows(self, grad: Tensor) -> Tensor:
        return grad.unsqueeze(2)

    def matrix_shape(self, weight: Tensor, has_bias: bool) -> tuple[int, int]:
        return (2 if has_bias else 1), 1

    def to_matrix(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        parts = [weight.reshape(-1)] if bias is None else [weight.reshape(-1), bias.reshape(-1)]
        return torch.stack(parts, dim=-1).unsqueeze(-1)

    def from_matrix(self, matrix: Tensor, weight: Tensor, bias: Tensor | None) -> list[Tensor]:
        parts = [matrix[:, 0, 0].reshape(weight.shape)]
        return parts if bias is None else [*parts, matrix[:, 1, 0].reshape(bias.shape)]


class LayerNormAdapter(NormAdapter):
    """nn.LayerNorm and nn.RMSNorm: every element of the normalised shape is a unit."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._centred = isinstance(module, nn.LayerNorm)

    def free_dimensions(self, x: Tensor) -> int:
        return x.dim() - len(self.shape)

    def units_last(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0] if self.free_dimensions(x) else 1, -1, self.groups)

    def normalise(self, x: Tensor, statistics: Any, weight: Maybe, bias: Maybe) -> Tensor:
        if self._centred:
            return F.layer_norm(x, self.shape, weight, bias, self.eps)
        return F.rms_norm(x, list(self.shape), weight, self.eps)


class _ChannelNormAdapter(NormAdapter):
    """Inputs [n, units, ...]."""

    def units_last(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], self.groups, -1).transpose(1, 2)


class GroupNormAdapter(_ChannelNormAdapter):
    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._num_groups: Any = module.num_groups

    def normalise(self, x: Tensor, statistics: Any, weight: Maybe, bias: Maybe) -> Tensor:
        return F.group_norm(x, self._num_groups, weight, bias, self.eps)


class BatchNormAdapter(_ChannelNormAdapter):
    """With batch statistics, an example's gradient is what goes through its own output."""

    def statistics(self, module: Any) -> Any:
        if module.training or module.running_mean is None or module.running_var is None:
            return None
        return module.running_mean.clone(), module.running_var.clone()

    def normalise(self, x: Tensor, statistics: Any, weight: Maybe, bias: Maybe) -> Tensor:
        batch = statistics is None
        mean, variance = (None, None) if batch else (value.to(x.dtype) for value in statistics)
        return F.batch_norm(x, mean, variance, weight, bias, training=batch, eps=self.eps)
