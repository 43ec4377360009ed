"""Convolutions in one to three dimensions and their transposes, with all their options.

A position of the output sees a patch of the input: those patches are the rows. Padding that the
convolution itself can't apply alike on both sides is applied to the input first, differentiably;
what remains is a plain zero-padded convolution. A transposed convolution is a plain one, too: of
the input spread out with zeros in between, with the mirrored kernel.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fop.layers.base import Gram, LayerAdapter
from fop.layers.patches import Patches, Sizes

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d
TransposedConvolution = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d


class _AnyConvolution(LayerAdapter):
    """What both directions share."""

    transposed: bool
    padding: Sizes

    def __init__(self, module: nn.Module) -> None:
        assert isinstance(module, (Convolution, TransposedConvolution))
        self.groups = module.groups
        self.kernel: Sizes = tuple(module.weight.shape[2:])
        self.dimensions = len(self.kernel)
        self.stride = self._sizes(module.stride)
        self.dilation = self._sizes(module.dilation)

    def _sizes(self, value: Any) -> Sizes:
        """One number for each dimension; torch takes one for all of them, too."""
        return (value,) * self.dimensions if isinstance(value, int) else tuple(value)

    @property
    def reach(self) -> Sizes:
        """How far apart the first and the last input under the kernel are."""
        return tuple(d * (k - 1) for d, k in zip(self.dilation, self.kernel, strict=True))

    def output_padding(self, grad: Tensor, x: Tensor) -> Sizes:
        return (0,) * self.dimensions

    def _geometry(self, x: Tensor, output: Tensor) -> tuple[Any, ...]:
        """As torch's convolutions take it."""
        padding = self.output_padding(output, x)
        return self.stride, self.padding, self.dilation, self.transposed, padding, self.groups

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None, output: Tensor) -> Tensor:
        return torch.convolution(self.prepare(x), weight, bias, *self._geometry(x, output))

    def free_dimensions(self, x: Tensor) -> int:
        return x.dim() - self.dimensions - 1

    def input_gradient(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return self._gradient(0, grad, x, weight)

    def weight_gradient(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return self._gradient(1, grad, x, weight)

    def _gradient(self, which: int, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        wanted = [index == which for index in range(3)]  # of input, weight and bias
        gradients: tuple[Tensor, ...] = torch.ops.aten.convolution_backward(
            grad, x, weight, None, *self._geometry(x, grad), wanted
        )
        return gradients[which]

    def output_rows(self, grad: Tensor) -> Tensor:
        n, outputs = grad.shape[:2]
        return grad.reshape(n, self.groups, outputs // self.groups, -1).transpose(2, 3)

    @abstractmethod
    def patches(self, x: Tensor, grad: Tensor) -> tuple[Patches, Tensor]:
        """The geometry of the rows, and the input that they are patches of."""

    def input_rows(self, x: Tensor, grad: Tensor) -> Tensor:
        patches, x = self.patches(x, grad)
        return patches.rows(x)

    def input_totals(self, x: Tensor, grad: Tensor) -> Tensor:
        patches, x = self.patches(x, grad)
        return patches.totals(x)

    def input_moment(self, x: Tensor, grad: Tensor, out: Gram) -> None:
        patches, x = self.patches(x, grad)
        patches.moment(x, out)


class ConvAdapter(_AnyConvolution):
    transposed = False

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        assert isinstance(module, Convolution)
        self._mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        amounts = self._amounts(module)
        left, right = amounts[0::2], amounts[1::2]
        alike = self._mode == "constant" and left == right
        self._pad_first = None if alike else amounts
        self.padding = tuple(reversed(left)) if alike else (0,) * self.dimensions

    def _amounts(self, module: Convolution) -> list[int]:
        """Of padding, in the order of F.pad: last dimension first, before and after.

        Torch reads `padding` at a call, unless it pads with something else than zeros.
        """
        if self._mode != "constant":
            return list(module._reversed_padding_repeated_twice)
        if module.padding == "same":
            return [part for all_ in reversed(self.reach) for part in (all_ // 2, all_ - all_ // 2)]
        if module.padding == "valid":
            return [0] * (2 * self.dimensions)
        return [amount for amount in reversed(self._sizes(module.padding)) for _ in range(2)]

    def prepare(self, x: Tensor) -> Tensor:
        return x if self._pad_first is None else F.pad(x, self._pad_first, mode=self._mode)

    def patches(self, x: Tensor, grad: Tensor) -> tuple[Patches, Tensor]:
        geometry = (self.groups, self.kernel, self.stride, self.dilation, self.padding)
        return Patches(*geometry, tuple(grad.shape[2:])), x


class ConvTransposeAdapter(_AnyConvolution):
    transposed = True

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        assert isinstance(module, TransposedConvolution)
        self.padding = self._sizes(module.padding)

    def output_padding(self, grad: Tensor, x: Tensor) -> Sizes:
        """Read off the sizes, because a call may ask for another output_size than the module's."""
        sizes = zip(grad.shape[2:], self._spread_sizes(x), self.reach, self.padding, strict=True)
        return tuple(size - (length + reach - 2 * pad) for size, length, reach, pad in sizes)

    def _spread_sizes(self, x: Tensor) -> Sizes:
        return tuple((n - 1) * move + 1 for n, move in zip(x.shape[2:], self.stride, strict=True))

    def patches(self, x: Tensor, grad: Tensor) -> tuple[Patches, Tensor]:
        spread = x
        if set(self.stride) != {1}:
            spread = x.new_zeros(*x.shape[:2], *self._spread_sizes(x))
            every = tuple(slice(None, None, move) for move in self.stride)
            spread[(slice(None), slice(None), *every)] = x
        before = tuple(reach - pad for reach, pad in zip(self.reach, self.padding, strict=True))
        sizes, once = tuple(grad.shape[2:]), (1,) * self.dimensions
        return Patches(self.groups, self.kernel, once, self.dilation, before, sizes), spread

    # The weight is [inputs, outputs of a group, *kernel].

    def to_matrix(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        grouped = weight.reshape(self.groups, -1, *weight.shape[1:]).transpose(1, 2)
        mirrored = grouped.flip(*range(3, grouped.dim()))
        return super().to_matrix(mirrored.flatten(0, 1), bias)

    def from_matrix(self, matrix: Tensor, weight: Tensor, bias: Tensor | None) -> list[Tensor]:
        of_bias = [] if bias is None else [matrix[..., -1].reshape(bias.shape)]
        columns = matrix if bias is None else matrix[..., :-1]
        mirrored = columns.reshape(self.groups, weight.shape[1], -1, *self.kernel)
        grouped = mirrored.flip(*range(3, mirrored.dim()))
        return [grouped.transpose(1, 2).reshape(weight.shape), *of_bias]
