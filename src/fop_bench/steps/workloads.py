"""The networks that are timed, with synthetic data: what a step costs does not depend on pixels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fop_bench.models import ViT, cnn, mlp, resnet18_for_cifar
from fop_bench.networks import Network
from fop_bench.registry import by_name

CLASSES = 10


@dataclass(frozen=True, kw_only=True)
class TimedWorkload(Network):
    """A network at a batch size, on made-up data."""

    title: str
    batch: int

    @property
    def label(self) -> str:
        return f"{self.title}, batch {self.batch}"

    def data(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1)
        return self.made_up(self.batch), torch.randint(CLASSES, (self.batch,), generator=generator)


def _mlp(width: int, batch: int) -> TimedWorkload:
    return TimedWorkload(
        name=f"mlp-w{width}-b{batch}",
        title=f"MLP 784-{width}-{width}-10",
        build=partial(mlp, 784, width, width, CLASSES),
        input_shape=(784,),
        batch=batch,
    )


def _cnn(batch: int) -> TimedWorkload:
    return TimedWorkload(
        name=f"cnn-b{batch}", title="CNN 28x28", build=cnn, input_shape=(1, 28, 28), batch=batch
    )


def _resnet(batch: int) -> TimedWorkload:
    return TimedWorkload(
        name=f"resnet18-b{batch}", title="ResNet-18 CIFAR", build=resnet18_for_cifar, batch=batch
    )


# The columns of the table. All methods run on the first four; at the large batches, where a step
# takes many seconds, only fop's own and SGD do unless everything is asked for.
TABLE = by_name(
    _resnet(64),
    TimedWorkload(name="vit-b64", title="ViT 192x6", build=ViT, batch=64),
    _mlp(1024, 512),
    _cnn(512),
    _resnet(256),
    _cnn(4096),
)
LARGE_BATCH = ("resnet18-b256", "cnn-b4096")

# How cost grows: name of the axis, and the workloads along it.
SWEEPS: dict[str, dict[int, TimedWorkload]] = {
    "MLP, batch 512: width": {w: _mlp(w, 512) for w in (256, 512, 1024, 2048)},
    "MLP, width 1024: batch size": {b: _mlp(1024, b) for b in (128, 512, 2048, 8192)},
    "CNN: batch size": {b: _cnn(b) for b in (128, 512, 2048)},
}

WORKLOADS = {
    **by_name(*(workload for sweep in SWEEPS.values() for workload in sweep.values())),
    **TABLE,
}
