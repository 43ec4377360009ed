"""A plain vision transformer for small images."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fop_bench.models.attention import Block


class ViT(nn.Module):
    """A plain vision transformer: patches by a convolution, a class token, learned positions."""

    def __init__(
        self,
        *,
        image: int = 32,
        patch: int = 4,
        width: int = 192,
        depth: int = 6,
        heads: int = 3,
        classes: int = 10,
    ) -> None:
        super().__init__()
        tokens = (image // patch) ** 2 + 1
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, tokens, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, heads, 4 * width) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, image: Tensor) -> Tensor:
        tokens = self.patches(image).flatten(2).transpose(1, 2)
        x = torch.cat((self.class_token.expand(len(tokens), -1, -1), tokens), dim=1)
        x = self.norm(self.blocks(x + self.positions))
        logits: Tensor = self.head(x[:, 0])
        return logits
