"""What the optimizer must know about a layer type, and nothing more.

A layer with weight sharing, groups and a bias is brought to one canonical form, so that all later
mathematics is uniform:

    input rows    x  [n, groups, s, i]     n examples, s shared positions, i inputs per group
    output rows   g  [n, groups, s, o]     o outputs per group
    matrix        W~ [groups, o, i (+1)]   the bias in the last column

Gradients of the layer are computed here too, so that one backward pass can yield them for each of
the two half-batches.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

import torch
from torch import Tensor, nn


class Gram(Protocol):
    """Where a layer leaves the sum of r r^T over its input rows r: [groups, i, i], symmetric."""

    def add_rows(self, rows: Tensor) -> None:
        """Add rows [n, groups, s, i] to the sum."""
        ...

    def write_rows(self, values: Tensor, start: int, step: int) -> None:
        """Set the sum's own rows start, start + step, ... to values [groups, count, i]."""
        ...


class LayerAdapter(ABC):
    """The geometry of one module, whose parameters are `weight` and, if it has one, `bias`.

    A subclass says what a call computes (`forward`), how its tensors become rows, and how the
    parameters become the matrix. With r~ = [r, 1] for an input row r where there is a bias, every
    output row is W~ r~, and the gradient of W~ is the sum of g r~^T over examples and positions.

    The defaults are those of a layer on the last dimension, x [n, ..., i] to y [n, ..., o] with a
    weight [o, i]; gradients follow from the rows and from `forward`. So a layer y = x W + b with
    W [i, o] needs three methods (and `fop.register_layer(Conv1D, Conv1DAdapter)`):

        class Conv1DAdapter(fop.LayerAdapter):
            def forward(self, x, weight, bias, output):
                return x @ weight if bias is None else x @ weight + bias

            def to_matrix(self, weight, bias):
                return super().to_matrix(weight.t(), bias)

            def from_matrix(self, matrix, weight, bias):
                of_weight, *of_bias = super().from_matrix(matrix, weight.t(), bias)
                return [of_weight.t(), *of_bias]

    An adapter holds numbers copied from the module (stride, groups), never the module or a tensor.
    It is built at every call and compared with the one before, which is how a changed module is
    noticed; so building it is cheap. `fop.testing.check_layer` holds it to all of this.
    """

    groups: int = 1
    one_hot: bool = False  # inputs are indices that stand for one-hot rows
    autograd_backward: bool = False  # of a `NormAdapter`: its backward stays autograd's
    homogeneous_bias: bool = True  # the bias is the matrix's last column, for a constant input 1
    # Of the parameters with its weight and its bias, the rows that are the layer's own.
    weight_rows: slice = slice(None)
    bias_rows: slice = slice(None)
    state_prefix: str = ""  # before the names of its state, where layers share a weight's rows

    def __init__(self, module: nn.Module) -> None:
        del module  # its shapes are read off the tensors

    @classmethod
    def unsupported_reason(cls, module: nn.Module) -> str | None:
        """Why a module of a registered type can't be preconditioned all the same."""
        return None

    @abstractmethod
    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None, output: Tensor) -> Tensor:
        """What the module computes, with examples in dimension 0: what capture/verify.py compares.

        The output is given for its sizes only.
        """

    # ---- where the examples are

    def batched(self, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Input and output gradient with examples in dimension 0, also for an unbatched call."""
        return (x, grad) if self.free_dimensions(x) else (x.unsqueeze(0), grad.unsqueeze(0))

    def free_dimensions(self, x: Tensor) -> int:
        """How many leading dimensions are treated alike; 0 if the call is unbatched.

        With two or more, as nn.Linear has on [.., .., i], the examples may be in the second.
        """
        return x.dim() - 1

    # ---- rows

    def input_rows(self, x: Tensor, grad: Tensor) -> Tensor:
        """[n, groups, s, i], or [n, s] if `one_hot`. The gradient is given for its sizes only.

        They hold elements of the input and zeros, unscaled: rows of sums and of squares are the
        sums and squares of rows. A factor in the layer's formula belongs to `output_rows`.
        """
        return x.reshape(x.shape[0], 1, -1, x.shape[-1])

    def input_totals(self, x: Tensor, grad: Tensor) -> Tensor:
        """Input rows summed over positions, [n, groups, i]; override for speed."""
        return self.input_rows(x, grad).sum(2)

    def input_moment(self, x: Tensor, grad: Tensor, out: Gram) -> None:
        """Leave the sum of r r^T over input rows r in `out`, which is empty; override for speed."""
        out.add_rows(self.input_rows(x, grad))

    def output_rows(self, grad: Tensor) -> Tensor:
        """[n, groups, s, o]"""
        return grad.reshape(grad.shape[0], 1, -1, grad.shape[-1])

    # ---- gradients, also of a part of the examples; overrides of these are for speed

    def prepare(self, x: Tensor) -> Tensor:
        """Differentiable preprocessing (padding) of the input, before the layer proper.

        Everything but `forward` gets the prepared input; so with this comes an `input_gradient`.
        """
        return x

    def cast(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """The input in the precision that the gradient is computed in."""
        return x.to(dtype)

    def input_gradient(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """Gradient of the prepared input: by default of `forward`, by autograd."""
        again = torch.is_grad_enabled()  # it may be differentiated in its turn
        if not again:
            grad, weight = grad.detach(), weight.detach()
        with torch.enable_grad():
            x = x.view_as(x) if again and x.requires_grad else x.detach().requires_grad_()
            output = self.forward(x, weight, None, grad)
            (gradient,) = torch.autograd.grad(output, x, grad, create_graph=again)
        return gradient

    def weight_gradient(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """Gradient of the weight summed over the examples given: by default of the rows."""
        rows = self.output_rows(grad), self.input_rows(x, grad)
        return self.from_matrix(torch.einsum("ngso,ngsi->goi", *rows), weight, None)[0]

    def _add_weight_gradient(self, onto: Tensor, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """The sum of `onto` and the gradient of further examples; not for adapters of others."""
        return onto + self.weight_gradient(grad, x, weight)

    def bias_gradient(self, grad: Tensor) -> Tensor:
        """Gradient of the bias summed over the examples given: by default of the rows."""
        return self.output_rows(grad).sum((0, 2)).flatten()

    # ---- parameters

    def matrix_shape(self, weight: Tensor, has_bias: bool) -> tuple[int, int]:
        """Rows and columns of the matrix of one group."""
        _, rows, columns = self.to_matrix(weight, None).shape
        return rows, columns + has_bias

    def to_matrix(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[groups, o, i (+1)] from tensors shaped like the weight and the bias."""
        outputs = weight.shape[0] // self.groups
        matrix = weight.reshape(self.groups, outputs, -1)
        if bias is None:
            return matrix
        return torch.cat([matrix, bias.reshape(self.groups, outputs, 1)], dim=2)

    def from_matrix(self, matrix: Tensor, weight: Tensor, bias: Tensor | None) -> list[Tensor]:
        """The inverse of `to_matrix`: tensors shaped like the weight and, if given, the bias."""
        if bias is None:
            return [matrix.reshape(weight.shape)]
        return [matrix[..., :-1].reshape(weight.shape), matrix[..., -1].reshape(bias.shape)]
