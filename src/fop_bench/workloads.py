"""Workloads: each owns its data, model, loss, metric and target.

The paper's settings are those of its appendix C; laptop workloads take minutes on two cores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fop_bench.data.catalog import (
    data_status,
    load_cifar,
    load_digits,
    load_fashion,
    load_imagenet,
    load_shakespeare,
)
from fop_bench.data.longtail import class_groups
from fop_bench.data.sources import DataStatus
from fop_bench.data.splits import Batches, Request, Splits
from fop_bench.data.text import ALPHABET
from fop_bench.models import (
    GPT,
    cifar_resnet,
    cnn,
    imagenet_resnet50,
    mlp,
    resnet18_for_cifar,
    t2t_vit_14,
)
from fop_bench.networks import Network
from fop_bench.registry import by_name

__all__ = ["WORKLOADS", "Batches", "DataStatus", "Splits", "Workload", "data_status"]


@dataclass(frozen=True, kw_only=True)
class Workload(Network):
    """A task with a target to reach; every method trains it with the same loop."""

    summary: str
    data: str  # the data set, see data_status
    load: Callable[[Request], Splits] = field(repr=False)
    epochs: int
    base_batch: int  # the batch size learning rates and curvature intervals are given for
    batch_sizes: tuple[int, ...]
    target: float
    metric: Literal["accuracy", "perplexity"] = "accuracy"
    scale: Literal["paper", "laptop"] = "laptop"
    seeds: tuple[int, ...] = (0, 1, 2)
    train_images: int | None = None  # how many are used unless a run asks for another number
    long_tail_classes: int | None = None  # report head, middle and tail errors
    optimizer_overrides: Mapping[str, str | float] = field(default_factory=dict)
    loss_reduction: Literal["mean"] = "mean"

    @property
    def higher_is_better(self) -> bool:
        return self.metric == "accuracy"

    def splits(
        self,
        data_dir: Path | None,
        *,
        device: torch.device | str = "cpu",
        validation: bool = False,
        subset: int | None = None,
        workers: int | None = None,
    ) -> Splits:
        """The data, found or downloaded, read and checked; DataError if that fails.

        validation: hold out a part of the training data, for tuning.
        subset: at most this many examples in each split; above a workload's own number it gives
            more, so that subset=60000 trains fashion-mlp on all images.
        workers: processes that decode image files (default: one a processor).
        """
        chosen = self.train_images if subset is None else subset
        return self.load(Request(data_dir, torch.device(device), validation, chosen, workers))

    @torch.no_grad()
    def evaluate(self, model: nn.Module, batches: Batches) -> dict[str, float]:
        """Loss and metrics over `batches`, in evaluation mode; the model's mode is put back."""
        training = model.training
        model.eval()
        try:
            return self._metrics(*_count(model, self.loss, batches))
        finally:
            model.train(training)

    def _metrics(self, loss: float, hits: Tensor, totals: Tensor) -> dict[str, float]:
        """hits, totals: right answers and examples of each class [classes]."""
        metrics = {"loss": loss, "accuracy": float(hits.sum() / totals.sum())}
        if self.metric == "perplexity":
            metrics["perplexity"] = float(torch.tensor(loss).exp())  # inf where math.exp raises
        if self.long_tail_classes is not None:
            metrics["error"] = 1 - metrics["accuracy"]
            for name, group in class_groups(self.long_tail_classes).items():
                metrics[f"error_{name}"] = 1 - float(hits[group].sum() / totals[group].sum())
        return metrics


def _count(
    model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], batches: Batches
) -> tuple[float, Tensor, Tensor]:
    """(mean loss, right answers of each class, examples of each class)."""
    losses, hits, totals = [], [], []
    for inputs, target in batches:
        output = model(inputs)
        classes = output.shape[-1]
        right = target[output.argmax(-1) == target]
        losses.append(loss(output.float(), target).item() * target.numel())
        hits.append(torch.bincount(right, minlength=classes).cpu())
        totals.append(torch.bincount(target.flatten(), minlength=classes).cpu())
    seen = torch.stack(totals).sum(0).double()
    return sum(losses) / float(seen.sum()), torch.stack(hits).sum(0).double(), seen


def _fashion(**own: Any) -> Workload:
    return Workload(
        data="fashion-mnist",
        load=partial(load_fashion, held_out=0.1),
        train_images=20_000,
        input_shape=(1, 28, 28),
        **own,
    )


def _cifar(
    name: str,
    data: Literal["cifar10", "cifar100"] = "cifar10",
    imbalance: int | None = None,
    **own: Any,
) -> Workload:
    load = partial(load_cifar, held_out=0.1, name=data, imbalance=imbalance)
    return Workload(name=name, data=data, load=load, **own)


def _small_resnet(depth: int, target: float) -> Workload:
    return _cifar(
        f"cifar10-resnet{depth}",
        summary=f"CIFAR-10, 10,000 images, ResNet-{depth}",
        build=partial(cifar_resnet, depth),
        epochs=15,
        base_batch=256,
        batch_sizes=(256, 2048),
        target=target,
        train_images=10_000,
    )


def _long_tail(data: Literal["cifar10", "cifar100"], imbalance: int, target: float) -> Workload:
    """The target is the SGD baseline of Zhang et al. 2021 that the paper compares with."""
    classes = {"cifar10": 10, "cifar100": 100}[data]
    return _cifar(
        f"{data}-lt-{imbalance}",
        data,
        imbalance,
        summary=f"CIFAR-{classes}-LT at imbalance {imbalance}, ResNet-32",
        build=partial(cifar_resnet, 32, classes),
        epochs=200,
        base_batch=128,
        batch_sizes=(128,),
        target=target,
        scale="paper",
        seeds=(0, 1, 2, 3, 4),
        long_tail_classes=classes,
    )


_TEXT_LENGTH = 64

WORKLOADS: dict[str, Workload] = by_name(
    Workload(
        name="digits-mlp",
        summary="handwritten digits (in the package), MLP 64-64-32-10",
        data="digits",
        load=partial(load_digits, held_out=0.2),
        build=partial(mlp, 64, 64, 32, 10),
        epochs=40,
        base_batch=64,
        batch_sizes=(64, 1438),
        input_shape=(1, 8, 8),
        target=0.95,
    ),
    _fashion(
        name="fashion-mlp",
        summary="Fashion-MNIST, 20,000 images, MLP 784-128-64-10",
        build=partial(mlp, 784, 128, 64, 10),
        epochs=40,
        base_batch=512,
        batch_sizes=(512, 20_000),
        target=0.84,
    ),
    _fashion(
        name="fashion-cnn",
        summary="Fashion-MNIST, 20,000 images, two convolutions and two linear layers",
        build=cnn,
        epochs=10,
        base_batch=256,
        batch_sizes=(256, 4096),
        target=0.88,
    ),
    _small_resnet(8, target=0.58),
    _small_resnet(20, target=0.60),
    _cifar(
        "cifar10-lt-resnet32",
        imbalance=100,
        summary="CIFAR-10-LT at imbalance 100, ResNet-32, reduced length",
        build=partial(cifar_resnet, 32),
        epochs=10,
        base_batch=128,
        batch_sizes=(128, 1024),
        target=0.45,
        long_tail_classes=10,
    ),
    Workload(
        name="shakespeare-gpt",
        summary="tiny Shakespeare, character transformer with 2 layers of width 64",
        data="tinyshakespeare",
        load=partial(load_shakespeare, held_out=0.1, length=_TEXT_LENGTH),
        build=partial(GPT, len(ALPHABET), _TEXT_LENGTH, width=64, depth=2, heads=4),
        epochs=5,
        base_batch=64,
        batch_sizes=(64, 1024),
        target=7.0,
        metric="perplexity",
        optimizer_overrides={"fallback": "adamw"},
        input_shape=(_TEXT_LENGTH,),
        tokens=len(ALPHABET),
    ),
    _cifar(
        "cifar10-resnet18",
        summary="CIFAR-10, ResNet-18 (table 1)",
        build=resnet18_for_cifar,
        epochs=100,
        base_batch=1024,
        batch_sizes=(2048, 4096, 8192, 16_384, 32_768, 50_000),
        target=0.91,
        scale="paper",
        seeds=(0, 1, 2, 3, 4),
    ),
    Workload(
        name="imagenet100-t2tvit",
        summary="ImageNet-100, T2T-ViT-14 (table 2)",
        data="imagenet100",
        load=partial(load_imagenet, held_out=0.04, name="imagenet100"),
        build=partial(t2t_vit_14, 100),
        epochs=100,
        base_batch=512,
        batch_sizes=(512, 1024, 2048, 4096),
        target=0.806,
        scale="paper",
        optimizer_overrides={"fallback": "adamw"},
        input_shape=(3, 224, 224),
    ),
    Workload(
        name="imagenet1k-resnet50",
        summary="ImageNet-1K, ResNet-50 (table 3); the paper gives KFAC and FOP 50 epochs",
        data="imagenet",
        load=partial(load_imagenet, held_out=0.02, name="imagenet"),
        build=imagenet_resnet50,
        epochs=80,
        base_batch=1024,
        batch_sizes=(1024, 2048, 4096, 8192),
        target=0.759,
        scale="paper",
        input_shape=(3, 224, 224),
    ),
    _long_tail("cifar10", 100, target=0.7195),
    _long_tail("cifar10", 50, target=0.7645),
    _long_tail("cifar100", 100, target=0.3773),
    _long_tail("cifar100", 50, target=0.4378),
)
