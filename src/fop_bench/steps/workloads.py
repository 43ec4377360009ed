"""The networks that are timed, with synthetic data: what a step costs does not depend on pixels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from fop_bench.models import cnn, mlp, resnet18_for_cifar, seeded
from fop_bench.models.attention import Block

CLASSES = 10


class ViT(nn.Module):
    """A plain vision transformer: patches by a convolution, a class token, learned positions."""

    def __init__(
        self, *, image: int = 32, patch: int = 4, width: int = 192, depth: int = 6, heads: int = 3
    ) -> None:
        super().__init__()
        tokens = (image // patch) ** 2 + 1
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, tokens, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, heads, 4 * width) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        tokens = self.patches(image).flatten(2).transpose(1, 2)
        x = torch.cat((self.class_token.expand(len(tokens), -1, -1), tokens), dim=1)
        x = self.norm(self.blocks(x + self.positions))
        logits: Tensor = self.head(x[:, 0])
        return logits


@dataclass(frozen=True)
class Workload:
    """A network, the shape of one example and a batch size."""

    name: str
    label: str
    build: Callable[[], nn.Module]
    example: tuple[int, ...]
    batch: int

    def model(self) -> nn.Module:
        return seeded(self.build, 0).train()

    def data(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(self.batch, *self.example, generator=generator)
        return inputs, torch.randint(CLASSES, (self.batch,), generator=generator)


def _mlp(width: int, batch: int) -> Workload:
    return Workload(
        f"mlp-w{width}-b{batch}",
        f"MLP 784-{width}-{width}-10, batch {batch}",
        partial(mlp, 784, width, width, CLASSES),
        (784,),
        batch,
    )


def _cnn(batch: int) -> Workload:
    return Workload(f"cnn-b{batch}", f"CNN 28x28, batch {batch}", cnn, (1, 28, 28), batch)


def _resnet(batch: int) -> Workload:
    label = f"ResNet-18 CIFAR, batch {batch}"
    return Workload(f"resnet18-b{batch}", label, resnet18_for_cifar, (3, 32, 32), batch)


def _vit(batch: int) -> Workload:
    return Workload(f"vit-b{batch}", f"ViT 192x6, batch {batch}", ViT, (3, 32, 32), batch)


def _register(*workloads: Workload) -> dict[str, Workload]:
    return {workload.name: workload for workload in workloads}


# The columns of the table. All methods run on the first four; at the large batches, where a step
# takes many seconds, only fop's own and SGD do unless everything is asked for.
TABLE = _register(_resnet(64), _vit(64), _mlp(1024, 512), _cnn(512), _resnet(256), _cnn(4096))
LARGE_BATCH = ("resnet18-b256", "cnn-b4096")

# How cost grows: name of the axis, and the workloads along it.
SWEEPS: dict[str, dict[int, Workload]] = {
    "MLP, batch 512: width": {w: _mlp(w, 512) for w in (256, 512, 1024, 2048)},
    "MLP, width 1024: batch size": {b: _mlp(1024, b) for b in (128, 512, 2048, 8192)},
    "CNN: batch size": {b: _cnn(b) for b in (128, 512, 2048)},
}

WORKLOADS = {
    **_register(*(workload for sweep in SWEEPS.values() for workload in sweep.values())),
    **TABLE,
}
