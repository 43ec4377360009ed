"""What the half-batch gradients cost: forward and backward of a watched against a plain model.

Both are measured in turn in one process, on one thread, as CPU time, on steps that renew no
curvature. The ratio of the medians is the figure; the spread is that of the ratio of neighbours.

    python benchmarks/half_gradients.py [--repeats 15]
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fop


def mlp() -> tuple[nn.Module, Tensor]:
    model = nn.Sequential(
        nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
    )
    return model, torch.randn(512, 784)


def cnn() -> tuple[nn.Module, Tensor]:
    model = nn.Sequential(
        nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * 49, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip
    return model, torch.randn(128, 1, 28, 28)


def deep_cnn() -> tuple[nn.Module, Tensor]:
    layers: list[nn.Module] = []
    widths = [3, 32, 32, 64, 64, 128]
    for index, (i, o) in enumerate(itertools.pairwise(widths)):
        stride = 2 if index in (2, 4) else 1
        layers += [nn.Conv2d(i, o, 3, stride, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU(True)]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))
    return model, torch.randn(64, 3, 32, 32)


def cpu_time(model: nn.Module, x: Tensor, y: Tensor) -> float:
    start = time.process_time()
    cross_entropy(model(x), y).backward()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    for build in (mlp, cnn, deep_cnn):
        torch.manual_seed(0)
        model, x = build()
        y = torch.randint(10, (len(x),))
        plain: list[float] = []
        watched: list[float] = []
        for repeat in range(repeats + 1):
            model.zero_grad()
            without = cpu_time(model, x, y)
            model.zero_grad()
            optimizer = fop.FOP(model, curvature="identity")
            with_halves = cpu_time(model, x, y)
            del optimizer
            if repeat:  # the first round warms up
                plain.append(without)
                watched.append(with_halves)
        ratios = [a / b for a, b in zip(watched, plain, strict=True)]
        low, _, high = statistics.quantiles(ratios)
        print(
            f"{build.__name__:9} plain {statistics.median(plain) * 1e3:7.1f} ms   ratio "
            f"{statistics.median(watched) / statistics.median(plain):.3f}   "
            f"(quartiles {low:.3f} to {high:.3f})"
        )


if __name__ == "__main__":
    main()
