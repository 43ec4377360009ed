"""What the optimizer must know about a layer type, and nothing more.

A layer with weight sharing, groups and a bias is brought to one canonical form, so that all later
mathematics is uniform:

    input rows    x  [n, groups, s, i]     n examples, s shared positions, i inputs a group
    output rows   g  [n, groups, s, o]     o outputs a group
    matrix        W~ [groups, o, i (+1)]   the bias in the last column

Gradients of the layer are computed here too, so that one backward pass can yield them for each half
of the batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

import torch
from torch import Tensor, nn


class Shaped(Protocol):
    """A tensor, or a slice of a parameter: what is asked for its sizes only."""

    @property
    def shape(self) -> torch.Size: ...


class Gram(Protocol):
    """Where a layer leaves the sum of r r^T over its input rows r: [groups, i, i], symmetric."""

    def add_rows(self, rows: Tensor) -> None:
        """Add rows [n, groups, s, i] to the sum."""
        ...

    def add_columns(self, vectors: Tensor) -> None:
        """Add rows that lie as columns [groups, i, k]."""
        ...

    def write_rows(self, values: Tensor, start: int, step: int) -> None:
        """Set the sum's own rows start, start + step, ... to values [groups, count, i]."""
        ...


class Layer(ABC):
    """The geometry of one module. Holds numbers copied from the module, never the module itself.

    It is built at every call and compared with the one before, which is how a changed module is
    noticed; so building it is cheap.
    """

    groups: int = 1
    indexed: bool = False  # inputs are indices that stand for one-hot rows
    observed: bool = False  # autograd's own backward stays; only `example_gradients` are taken
    bias_column: bool = True  # the bias is the matrix's last column, for a constant input 1
    weight_rows: slice = slice(None)  # of the parameter that holds its weight
    bias_rows: slice = slice(None)
    state_prefix: str = ""  # before the names of its state, where layers share a weight's rows

    @abstractmethod
    def __init__(self, module: nn.Module) -> None: ...

    @classmethod
    def refusal(cls, module: nn.Module) -> str | None:
        """Why a module of a supported type can't be preconditioned all the same."""
        return None

    @abstractmethod
    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None, output: Tensor) -> Tensor:
        """What the module computes, with examples in dimension 0: what verify.py compares.

        The output is given for its sizes only.
        """

    def prepare(self, x: Tensor) -> Tensor:
        """Differentiable preprocessing (padding) of the input, before the layer proper."""
        return x

    def cast(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """The input in the precision that the gradient is computed in."""
        return x.to(dtype)

    @abstractmethod
    def batched(self, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Input and output gradient with examples in dimension 0, also for an unbatched call."""

    def free_dimensions(self, x: Tensor) -> int:
        """How many leading dimensions are treated alike; 0 if the call is unbatched.

        With two or more, as nn.Linear has on [.., .., i], the examples may be in the second.
        """
        return 1 if self.batched(x, x)[0].dim() == x.dim() else 0

    @abstractmethod
    def input_gradient(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """Gradient of the prepared input."""

    @abstractmethod
    def weight_gradient(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """Gradient of the weight summed over the examples given."""

    def _add_weight_gradient(self, onto: Tensor, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """The sum of `onto` and the gradient of further examples; not for adapters of others."""
        return onto + self.weight_gradient(grad, x, weight)

    @abstractmethod
    def bias_gradient(self, grad: Tensor) -> Tensor:
        """Gradient of the bias summed over the examples given."""

    @abstractmethod
    def input_rows(self, x: Tensor, grad: Tensor) -> Tensor:
        """[n, groups, s, i], or [n, s] if `indexed`. The gradient is given for its sizes only."""

    def input_totals(self, x: Tensor, grad: Tensor) -> Tensor:
        """Input rows summed over positions, [n, groups, i]."""
        return self.input_rows(x, grad).sum(2)

    def input_moment(self, x: Tensor, grad: Tensor, out: Gram) -> None:
        """Leave the sum of r r^T over all input rows r in `out`, which is empty."""
        out.add_rows(self.input_rows(x, grad))

    @abstractmethod
    def output_rows(self, grad: Tensor) -> Tensor:
        """[n, groups, s, o]"""

    def matrix_shape(self, weight: Shaped, has_bias: bool) -> tuple[int, int]:
        """Rows and columns of the matrix of one group."""
        rows = weight.shape[0] // self.groups
        return rows, weight.shape[1:].numel() + has_bias

    def to_matrix(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[groups, o, i (+1)] from tensors shaped like the weight and the bias."""
        outputs = weight.shape[0] // self.groups
        matrix = weight.reshape(self.groups, outputs, -1)
        if bias is None:
            return matrix
        return torch.cat([matrix, bias.reshape(self.groups, outputs, 1)], dim=2)

    def from_matrix(self, matrix: Tensor, weight: Shaped, bias: Shaped | None) -> list[Tensor]:
        """The inverse of `to_matrix`: tensors shaped like the weight and, if given, the bias."""
        if bias is None:
            return [matrix.reshape(weight.shape)]
        return [matrix[..., :-1].reshape(weight.shape), matrix[..., -1].reshape(bias.shape)]
