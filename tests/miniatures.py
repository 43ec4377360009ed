"""Small models that lay their examples out as xlnet, longformer, nanoGPT, T5, swin and others do.

Each has a twin: with `twin=True` the same parameters and values, but every layer sees the examples
in dimension 0. What is looked up once for the whole batch stays as it is, named in `tables`.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

WORDS, WIDTH, CLASSES = 11, 4, 3


class Miniature(nn.Module):
    tables: ClassVar[list[str]] = []
    positions = 5  # of an example
    labels = 1  # per example

    def __init__(self, twin: bool = False, checkpointing: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.twin, self.reentrant = twin, checkpointing
        self.build()
        self.double()

    def build(self) -> None:
        self.words = nn.Embedding(WORDS, WIDTH)
        self.body, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def run(self, x: Tensor) -> Tensor:
        """The body, run again in the backward pass if asked for."""
        if self.reentrant is None:
            return self.inner(x)
        found: Tensor = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return found

    def inner(self, x: Tensor) -> Tensor:
        return self.norm(torch.tanh(self.body(x)))

    def data(self, n: int, seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randint(WORDS, (n, self.positions), generator=generator)
        shape = (n,) if self.labels == 1 else (n, self.labels)
        return x, torch.randint(CLASSES, shape, generator=generator)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(output.flatten(0, -2), target.flatten())


class SequenceFirst(Miniature):
    """xlnet: everything in between is [T, B, d]."""

    def forward(self, x: Tensor) -> Tensor:
        if self.twin:
            return self.head(self.run(self.words(x)).mean(1))
        return self.head(self.run(self.words(x.t().contiguous())).mean(0))


class LongSequenceFirst(SequenceFirst):
    """T is a multiple of B, so that it might be rows of examples, too."""

    positions = 12


class Transposed(Miniature):
    """longformer: a part of the model is given [T, B, d], as a view."""

    positions = 12

    def forward(self, x: Tensor) -> Tensor:
        z = self.words(x)
        z = self.run(z) if self.twin else self.run(z.transpose(0, 1)).transpose(0, 1)
        return self.head(z.mean(1))


class CopiedTransposed(Transposed):
    """fairseq: the same in memory of its own."""

    def forward(self, x: Tensor) -> Tensor:
        z = self.words(x)
        turned = z.transpose(0, 1).contiguous()
        z = self.run(z) if self.twin else self.run(turned).transpose(0, 1)
        return self.head(z.mean(1))


class Positions(Miniature):
    """nanoGPT: positions are looked up once for the whole batch."""

    tables: ClassVar = ["places"]

    def build(self) -> None:
        super().build()
        self.places = nn.Embedding(12, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        places = self.places(torch.arange(x.shape[1]))
        return self.head(self.run(self.words(x) + places).mean(1))


class AsManyPositions(Positions):
    """as there are examples."""

    positions = 6


class MorePositions(Positions):
    """a multiple of the examples."""

    positions = 12


class RowOfPositions(AsManyPositions):
    """BERT: with a dimension of one for all examples."""

    def forward(self, x: Tensor) -> Tensor:
        places = self.places(torch.arange(x.shape[1]).unsqueeze(0))
        return self.head(self.run(self.words(x) + places).mean(1))


class RelativeBias(Miniature):
    """T5: a table of distances."""

    tables: ClassVar = ["bias"]

    def build(self) -> None:
        super().build()
        self.bias = nn.Embedding(30, 1)

    def forward(self, x: Tensor) -> Tensor:
        z, at = self.words(x), torch.arange(x.shape[1])
        scores = z @ z.mT + self.bias(at - at.unsqueeze(1) + 15).squeeze(-1)
        return self.head(self.run(scores.softmax(-1) @ z).mean(1))


class SquareRelativeBias(RelativeBias):
    """as many positions as examples."""

    positions = 6


class FlatHead(Miniature):
    """head(z.view(-1, d)), with a label per position."""

    labels = 5

    def forward(self, x: Tensor) -> Tensor:
        z = self.run(self.words(x))
        return self.head(z if self.twin else z.view(-1, WIDTH))


class FlatWords(Miniature):
    """The tokens themselves are flattened."""

    def forward(self, x: Tensor) -> Tensor:
        if self.twin:
            return self.head(self.run(self.words(x)).mean(1))
        z = self.run(self.words(x.view(-1)))
        return self.head(z.view(*x.shape, WIDTH).mean(1))


class Choices(Miniature):
    """Several texts per example in one large batch, with types of tokens of the model's making."""

    positions = 10

    def build(self) -> None:
        super().build()
        self.types = nn.Embedding(2, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        texts = x.unflatten(1, (2, 5)) if self.twin else x.view(-1, 5)
        z = self.run(self.words(texts) + self.types(texts % 2))
        return self.head(z.reshape(*x.shape, WIDTH).mean(1))


class Windows(Miniature):
    """swin: windows of an image are rows, here as many in each as there are examples."""

    def build(self) -> None:
        super().build()
        self.words = None  # type: ignore[assignment]
        self.patches = nn.Conv2d(1, WIDTH, 2, stride=2)

    def data(self, n: int, seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(n, 1, 8, 6, generator=generator, dtype=torch.float64)
        return x, torch.randint(CLASSES, (n,), generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        z = self.patches(x).flatten(2).mT.unflatten(1, (2, 6)).contiguous()  # [B, 2, 6, d]
        z = self.run(z) if self.twin else self.run(z.flatten(0, 1)).unflatten(0, z.shape[:2])
        return self.head(z.flatten(1, 2).mean(1))


class Frames(Windows):
    """Videos, whose frames are images of one large batch for a convolution."""

    def build(self) -> None:
        super().build()
        self.norm = nn.GroupNorm(2, WIDTH)  # type: ignore[assignment]
        self.body = nn.Conv2d(WIDTH, WIDTH, (2, 3), padding=1, groups=2)  # type: ignore[assignment]

    def data(self, n: int, seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(n, 3, 1, 6, 4, generator=generator, dtype=torch.float64)
        return x, torch.randint(CLASSES, (n,), generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        if self.twin:  # a call per frame: each adds positions to the same examples
            frames = [self.run(self.patches(frame)).mean((2, 3)) for frame in x.unbind(1)]
            return self.head(torch.stack(frames, 1).mean(1))
        z = self.run(self.patches(x.flatten(0, 1))).mean((2, 3))
        return self.head(z.unflatten(0, x.shape[:2]).mean(1))


class AttentionWindows(Windows):
    """The same with nn.MultiheadAttention."""

    def build(self) -> None:
        super().build()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def inner(self, x: Tensor) -> Tensor:
        if self.twin:
            parts = [self.attention(part, part, part)[0] for part in x.unbind(1)]
            return super().inner(torch.stack(parts, 1))
        return super().inner(self.attention(x, x, x)[0])


MINIATURES: list[type[Miniature]] = [
    SequenceFirst,
    LongSequenceFirst,
    Transposed,
    CopiedTransposed,
    Positions,
    AsManyPositions,
    MorePositions,
    RowOfPositions,
    RelativeBias,
    SquareRelativeBias,
    FlatHead,
    FlatWords,
    Choices,
    Windows,
    Frames,
    AttentionWindows,
]
