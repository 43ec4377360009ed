"""nn.Embedding: a linear layer without bias on one-hot inputs, which are never written out.

Its input factor is diagonal, because a one-hot vector times its transpose is: entry v counts how
often index v occurs. The outputs are the embedding's columns, so the matrix is the transpose of the
weight.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fop.layers.base import LayerAdapter


class EmbeddingAdapter(LayerAdapter):
    one_hot = True

    def __init__(self, module: nn.Module) -> None:
        assert isinstance(module, nn.Embedding)
        # Torch's own backward takes -1 for none.
        self._padding_index = -1 if module.padding_idx is None else module.padding_idx

    @classmethod
    def unsupported_reason(cls, module: nn.Module) -> str | None:
        assert isinstance(module, nn.Embedding)
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(module, option):
                return f"it has {option}={getattr(module, option)}"
        return None

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None, output: Tensor) -> Tensor:
        return F.embedding(x, weight)

    def cast(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x  # indices

    def free_dimensions(self, x: Tensor) -> int:
        return x.dim()

    def weight_gradient(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        gradient: Tensor = torch.ops.aten.embedding_dense_backward(
            grad, x, weight.shape[0], self._padding_index, False
        )
        return gradient

    def input_rows(self, x: Tensor, grad: Tensor) -> Tensor:
        """Indices [n, s] in place of one-hot rows; the padding index, whose row is zero, is -1."""
        indices = x.reshape(x.shape[0], -1)
        return indices.masked_fill(indices == self._padding_index, -1)

    def to_matrix(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        return weight.t().unsqueeze(0)

    def from_matrix(self, matrix: Tensor, weight: Tensor, bias: Tensor | None) -> list[Tensor]:
        return [matrix.squeeze(0).t()]
