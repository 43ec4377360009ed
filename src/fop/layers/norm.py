"""Normalisation layers with unit-wise curvature: exact 2 x 2 blocks, one for each scale and shift.

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


class NormAdapter(LayerAdapter):
    autograd_backward = True
    homogeneous_bias = False

    def __init__(self, module: nn.Module) -> None:
        weight = module._parameters["weight"]
        assert weight is not None
        self.groups, self.shape = weight.numel(), weight.shape
        self.eps: float | None = module.eps  # type: ignore[assignment]

    @abstractmethod
    def units_last(self, x: Tensor) -> Tensor:
        """[n, positions, units]"""

    @abstractmethod
    def normalised(self, x: Tensor, statistics: Any) -> Tensor:
        """z, shaped like the input."""

    def forward(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        output: Tensor,
        statistics: Any = None,
    ) -> Tensor:
        shape = self.unit_shape(x)
        scaled = self.normalised(x, statistics) * weight.reshape(shape)
        return scaled if bias is None else scaled + bias.reshape(shape)

    @abstractmethod
    def unit_shape(self, x: Tensor) -> tuple[int, ...]:
        """The shape of a weight that is broadcast over the input."""

    def statistics(self, module: nn.Module) -> Any:
        """What the normalisation rests on besides the input, as of the forward pass."""
        return None

    def example_gradients(self, x: Tensor, grad: Tensor, statistics: Any, has_bias: bool) -> Tensor:
        """[n, units, 2], or [n, units, 1] without a bias."""
        dtype = torch.promote_types(grad.dtype, torch.float32)
        g = self.units_last(grad).to(dtype)
        z = self.units_last(self.normalised(x.to(dtype), statistics))
        parts = [(g * z).sum(1), g.sum(1)] if has_bias else [(g * z).sum(1)]
        return torch.stack(parts, dim=-1)

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
        assert isinstance(module, (nn.LayerNorm, nn.RMSNorm))
        self._shape = list(module.normalized_shape)
        self._centred = isinstance(module, nn.LayerNorm)

    def unit_shape(self, x: Tensor) -> tuple[int, ...]:
        return tuple(self._shape)

    def free_dimensions(self, x: Tensor) -> int:
        return x.dim() - len(self._shape)

    def units_last(self, x: Tensor) -> Tensor:
        if x.dim() == len(self._shape):
            return x.reshape(1, 1, -1)
        return x.reshape(x.shape[0], -1, self.groups)

    def normalised(self, x: Tensor, statistics: Any) -> Tensor:
        if self._centred:
            assert self.eps is not None
            return F.layer_norm(x, self._shape, eps=self.eps)
        return F.rms_norm(x, self._shape, eps=self.eps)


class _ChannelNormAdapter(NormAdapter):
    """Inputs [n, units, ...]."""

    def unit_shape(self, x: Tensor) -> tuple[int, ...]:
        return (1, self.groups, *(1,) * (x.dim() - 2))

    def units_last(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], self.groups, -1).transpose(1, 2)


class GroupNormAdapter(_ChannelNormAdapter):
    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        assert isinstance(module, nn.GroupNorm)
        self._num_groups = module.num_groups

    def normalised(self, x: Tensor, statistics: Any) -> Tensor:
        assert self.eps is not None
        return F.group_norm(x, self._num_groups, eps=self.eps)


class BatchNormAdapter(_ChannelNormAdapter):
    """With batch statistics, an example's gradient is what goes through its own output."""

    def statistics(self, module: nn.Module) -> Any:
        assert isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d))
        if module.training or module.running_mean is None or module.running_var is None:
            return None
        return module.running_mean.clone(), module.running_var.clone()

    def normalised(self, x: Tensor, statistics: Any) -> Tensor:
        assert self.eps is not None
        if statistics is None:
            return F.batch_norm(x, None, None, training=True, eps=self.eps)
        mean, variance = (value.to(x.dtype) for value in statistics)
        return F.batch_norm(x, mean, variance, training=False, eps=self.eps)
