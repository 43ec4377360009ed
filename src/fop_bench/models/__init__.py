"""The networks of the workloads, built from plain layers that KFAC can see."""

from __future__ import annotations

from fop_bench.models.cnn import cnn
from fop_bench.models.gpt import GPT
from fop_bench.models.mlp import mlp
from fop_bench.models.resnet import cifar_resnet, imagenet_resnet50, resnet18_for_cifar
from fop_bench.models.seeded import seeded
from fop_bench.models.t2t_vit import T2TViT, t2t_vit_14
from fop_bench.models.vit import ViT

__all__ = [
    "GPT",
    "T2TViT",
    "ViT",
    "cifar_resnet",
    "cnn",
    "imagenet_resnet50",
    "mlp",
    "resnet18_for_cifar",
    "seeded",
    "t2t_vit_14",
]
