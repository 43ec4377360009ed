"""What the half-batch gradients cost: forward and backward of a hooked against a plain model.

Both are measured in turn in one process, on one thread, as CPU time, on steps that refresh no
curvature. The ratio of the medians is the figure; the spread is that of the ratio of neighbours.
"""

from __future__ import annotations

import itertools
import statistics
import time

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fop
from fop_bench.steps.workloads import WORKLOADS, TimedWorkload


def deep_cnn() -> nn.Module:
    """Batch norm and activations in place, with and without strides."""
    layers: list[nn.Module] = []
    widths = [3, 32, 32, 64, 64, 128]
    for index, (i, o) in enumerate(itertools.pairwise(widths)):
        stride = 2 if index in (2, 4) else 1
        layers += [nn.Conv2d(i, o, 3, stride, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU(True)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


NETWORKS = (
    WORKLOADS["mlp-w1024-b512"],
    WORKLOADS["cnn-b128"],
    TimedWorkload(name="deep-cnn-b64", title="CNN with batch norm", build=deep_cnn, batch=64),
)


def cpu_time(model: nn.Module, x: Tensor, y: Tensor) -> float:
    start = time.process_time()
    cross_entropy(model(x), y).backward()
    return time.process_time() - start


def compare(workload: TimedWorkload, repeats: int) -> str:
    """One line: time of a plain model, and the ratio."""
    model = workload.model()
    x, y = workload.data()
    plain: list[float] = []
    hooked: list[float] = []
    for repeat in range(repeats + 1):
        model.zero_grad()
        without = cpu_time(model, x, y)
        model.zero_grad()
        optimizer = fop.FOP(model, curvature="identity")
        with_halves = cpu_time(model, x, y)
        del optimizer
        if repeat:  # the first round warms up
            plain.append(without)
            hooked.append(with_halves)
    ratios = [a / b for a, b in zip(hooked, plain, strict=True)]
    low, _, high = statistics.quantiles(ratios)
    return (
        f"{workload.name:15} plain {statistics.median(plain) * 1e3:7.1f} ms   ratio "
        f"{statistics.median(hooked) / statistics.median(plain):.3f}   "
        f"(quartiles {low:.3f} to {high:.3f})"
    )
