"""Tokens-to-Token Vision Transformer (Yuan et al., ICCV 2021), performer variant.

The tokens-to-token module turns a 224 x 224 image into 14 x 14 tokens in three soft splits: unfold
overlapping patches (7 x 7 stride 4, then twice 3 x 3 stride 2), re-structure the tokens with a
narrow attention layer after the first two, and project after the third. A plain transformer with a
class token and fixed sinusoid positions follows. The narrow layers see 3,136 and 784 tokens, hence
performer attention, linear in their number.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fop_bench.models.attention import Block

SPLITS = ((7, 4, 2), (3, 2, 1), (3, 2, 1))  # kernel, stride, padding of the soft splits
TOKEN_WIDTH = 64


class TokenPerformer(nn.Module):
    """Single-head attention with positive random features, narrowing tokens to `width`.

    softmax(q k) becomes phi(q) phi(k) with phi(x) = exp(w x - |x|^2 / 2) / sqrt(m), for m fixed
    orthogonal directions w. The values are the residual, since input and output differ in width.
    """

    directions: Tensor

    def __init__(self, inputs: int, width: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(inputs)
        self.qkv = nn.Linear(inputs, 3 * width)
        self.proj = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, width), nn.GELU(), nn.Linear(width, width), nn.Dropout(dropout)
        )
        features = width // 2
        directions = nn.init.orthogonal_(torch.empty(features, width)) * math.sqrt(features)
        self.register_buffer("directions", directions)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        # The exponential overflows half precision, so autocast stays out of the attention.
        with torch.autocast(x.device.type, enabled=False):
            precise = torch.promote_types(query.dtype, torch.float32)
            mixed = self._attend(query.to(precise), key.to(precise), value.to(precise))
        y = value + self.dropout(self.proj(mixed.to(value.dtype)))
        out: Tensor = y + self.mlp(self.norm2(y))
        return out

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        phi_q, phi_k = self._features(query), self._features(key)
        mixed = phi_q @ (phi_k.transpose(1, 2) @ value)
        weight = phi_q @ phi_k.sum(dim=1).unsqueeze(-1)
        return mixed / (weight + 1e-8)

    def _features(self, x: Tensor) -> Tensor:
        exponent = x @ self.directions.t() - x.square().sum(-1, keepdim=True) / 2
        return exponent.exp() / math.sqrt(len(self.directions))


class TokensToToken(nn.Module):
    """Image [n, 3, h, w] to tokens [n, h w / 256, width]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        patch = [kernel * kernel for kernel, _, _ in SPLITS]
        self.restructure = nn.ModuleList(
            [
                TokenPerformer(3 * patch[0], TOKEN_WIDTH),
                TokenPerformer(TOKEN_WIDTH * patch[1], TOKEN_WIDTH),
            ]
        )
        self.project = nn.Linear(TOKEN_WIDTH * patch[2], width)

    def forward(self, image: Tensor) -> Tensor:
        for split, attention in zip(SPLITS, self.restructure, strict=False):
            tokens = attention(_soft_split(image, split))
            side = math.isqrt(tokens.shape[1])
            image = tokens.transpose(1, 2).unflatten(2, (side, side))
        out: Tensor = self.project(_soft_split(image, SPLITS[-1]))
        return out


def _soft_split(image: Tensor, split: tuple[int, int, int]) -> Tensor:
    """Overlapping patches as tokens [n, patches, channels * kernel^2]."""
    kernel, stride, padding = split
    return F.unfold(image, kernel, padding=padding, stride=stride).transpose(1, 2)


def sinusoid_positions(positions: int, width: int) -> Tensor:
    """Fixed encoding [1, positions, width]: sines at even places, cosines at odd ones."""
    place = torch.arange(width)
    wavelength = 10_000 ** (2 * (place // 2) / width)
    angle = torch.arange(positions)[:, None] / wavelength
    return torch.where(place % 2 == 0, angle.sin(), angle.cos()).unsqueeze(0)


class T2TViT(nn.Module):
    """Tokens-to-token module and a transformer over its tokens; square images only."""

    positions: Tensor

    def __init__(
        self,
        *,
        classes: int,
        image: int = 224,
        width: int = 384,
        depth: int = 14,
        heads: int = 6,
        mlp_ratio: float = 3.0,
        drop_path: float = 0.1,
    ) -> None:
        super().__init__()
        if image % 16:
            raise ValueError(f"image must be a multiple of 16 pixels, got {image}")
        self.tokens = TokensToToken(width)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.register_buffer("positions", sinusoid_positions((image // 16) ** 2 + 1, width))
        # Deeper blocks are dropped more often.
        rates = [drop_path * number / max(1, depth - 1) for number in range(depth)]
        self.blocks = nn.Sequential(
            *(
                Block(width, heads, int(mlp_ratio * width), qkv_bias=False, drop_path=rate)
                for rate in rates
            )
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)
        nn.init.trunc_normal_(self.class_token, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, image: Tensor) -> Tensor:
        tokens = self.tokens(image)
        x = torch.cat((self.class_token.expand(len(tokens), -1, -1), tokens), dim=1)
        x = self.norm(self.blocks(x + self.positions))
        logits: Tensor = self.head(x[:, 0])
        return logits


def t2t_vit_14(classes: int = 1000) -> T2TViT:
    """T2T-ViT-14: 14 layers of width 384 with 6 heads."""
    return T2TViT(classes=classes)
