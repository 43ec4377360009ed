"""nn.Conv2d with any stride, dilation, groups and padding (numbers, "same", circular, ...).

Padding that the convolution itself can't apply alike on both sides is applied to the input first,
differentiably; what remains is a plain zero-padded convolution.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fop.layers.base import Layer


class Conv2dLayer(Layer):
    def __init__(self, module: nn.Module) -> None:
        assert isinstance(module, nn.Conv2d)
        self.groups = module.groups
        self.kernel_size = module.kernel_size
        self.stride = module.stride
        self.dilation = module.dilation
        self._pad_mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        # Torch's order: (left, right, top, bottom); holds "same" and "valid" already worked out.
        left, right, top, bottom = module._reversed_padding_repeated_twice
        if self._pad_mode == "constant" and left == right and top == bottom:
            self._pad_first: list[int] | None = None
            self.padding = (top, left)
        else:
            self._pad_first = [left, right, top, bottom]
            self.padding = (0, 0)

    def prepare(self, x: Tensor) -> Tensor:
        if self._pad_first is None:
            return x
        return F.pad(x, self._pad_first, mode=self._pad_mode)

    def example_count(self, x: Tensor) -> int:
        return x.shape[0] if x.dim() == 4 else 1

    def batched(self, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        return (x, grad) if x.dim() == 4 else (x.unsqueeze(0), grad.unsqueeze(0))

    def input_gradient(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return self._backward(grad, x, weight, (True, False, False))[0]

    def weight_gradient(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return self._backward(grad, x, weight, (False, True, False))[1]

    def bias_gradient(self, grad: Tensor) -> Tensor:
        return grad.sum((0, 2, 3))

    def _backward(
        self, grad: Tensor, x: Tensor, weight: Tensor, mask: tuple[bool, bool, bool]
    ) -> tuple[Tensor, Tensor, Tensor]:
        gradients: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.convolution_backward(
            grad,
            x,
            weight,
            None,
            self.stride,
            self.padding,
            self.dilation,
            False,
            (0, 0),
            self.groups,
            mask,
        )
        return gradients

    def input_rows(self, x: Tensor) -> Tensor:
        patches = F.unfold(x, self.kernel_size, self.dilation, self.padding, self.stride)
        n, _, positions = patches.shape
        return patches.reshape(n, self.groups, -1, positions).transpose(2, 3)

    def output_rows(self, grad: Tensor) -> Tensor:
        n = grad.shape[0]
        return grad.reshape(n, self.groups, grad.shape[1] // self.groups, -1).transpose(2, 3)
