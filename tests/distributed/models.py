"""Models, data and loops for checks on several ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import fop
from tests.common import CLASSES, distance, snapshot
from tests.distributed.launch import Rank

Batch = tuple[Tensor, Tensor]


class Net(nn.Module):
    """A grouped convolution, a convolution, a linear layer, and a norm without curvature."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1)
        self.grouped = nn.Conv2d(4, 6, 2, groups=2, bias=False)
        self.norm = nn.GroupNorm(2, 6)
        self.last = nn.Linear(54, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.grouped(self.first(x).tanh()).tanh()
        return self.last(self.norm(x).flatten(1))


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Net().double()


def batches(sizes: Sequence[int], seed: int = 0) -> list[Batch]:
    """One local batch a rank."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for size in sizes:
        x = torch.randn(size, 2, 4, 4, generator=generator, dtype=torch.float64)
        found.append((x, torch.randint(CLASSES, (size,), generator=generator)))
    return found


def in_parts(batch: Batch, parts: int) -> list[Batch]:
    return list(zip(batch[0].chunk(parts), batch[1].chunk(parts), strict=True))


def together(
    rank: Rank,
    kind: Callable[..., Any],
    sizes: Sequence[int],
    *,
    steps: int = 4,
    wrapped: bool = True,
    parts: int = 1,
    synchronise: bool = False,
    clip: float | None = None,
    make: Callable[[], nn.Module] = net,
    **settings: Any,
) -> tuple[nn.Module, Any]:
    """Train on all ranks, each on its own batch; `parts` micro-batches a step."""
    model = make()
    module = DistributedDataParallel(model) if wrapped else model
    optimizer = kind(module, **settings)
    for step in range(steps):
        optimizer.zero_grad()
        local = in_parts(batches(sizes, seed=step)[rank.index], parts)
        for number, (x, y) in enumerate(local):
            last = number == len(local) - 1
            if wrapped:
                module.require_backward_grad_sync = last or synchronise
            (cross_entropy(module(x), y) / len(local)).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
    return model, optimizer


def alone(
    rank: Rank,
    kind: Callable[..., Any],
    sizes: Sequence[int],
    *,
    steps: int = 4,
    clip: float | None = None,
    make: Callable[[], nn.Module] = net,
    **settings: Any,
) -> tuple[nn.Module, Any]:
    """The same training in one process: a micro-batch takes the place of a rank, so that alternate
    micro-batches are even and odd ranks."""
    model = make()
    if kind is fop.FOP:
        settings.setdefault("halves", "microbatches" if len(sizes) > 1 else "samples")
    settings.pop("strategy", None)
    optimizer = kind(model, process_group=rank.alone, **settings)
    for step in range(steps):
        optimizer.zero_grad()
        for x, y in batches(sizes, seed=step):
            (cross_entropy(model(x), y) / len(sizes)).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model, optimizer


def assert_same(model: nn.Module, expected: nn.Module, tolerance: float = 1e-10) -> None:
    found = distance(snapshot(model), snapshot(expected))
    assert found < tolerance, f"relative distance {found}"
