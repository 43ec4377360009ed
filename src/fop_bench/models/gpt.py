"""A small character transformer (GPT-2's shape) with learned token and position embeddings."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from fop_bench.models.attention import Block


class GPT(nn.Module):
    """Tokens [n, t] to logits [n, t, vocabulary]; t is at most `length`."""

    def __init__(self, vocabulary: int, length: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.length = length
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(length, width)
        self.blocks = nn.Sequential(
            *(Block(width, heads, 4 * width, causal=True) for _ in range(depth))
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                # GPT-2: what is added to the residual stream shrinks with the number of additions.
                residual = name.endswith(("attention.proj", "mlp.2"))
                scale = 1 / math.sqrt(2 * depth) if residual else 1.0
                nn.init.normal_(module.weight, std=0.02 * scale)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        if tokens.shape[1] > self.length:
            raise ValueError(f"got {tokens.shape[1]} tokens, the model has {self.length} positions")
        # One row a sequence, although all are equal: the first axis is examples for every layer.
        places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        x = self.token(tokens) + self.position(places)
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits
