"""Small models, data and loops that several test files share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tests import LIBRARY

CLASSES = 3
Batch = tuple[Tensor, Tensor]


def mlp(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, CLASSES)).to(dtype)


def cnn(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Convolution, batch norm, an in-place activation and a linear layer."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(64, CLASSES),
    ).to(dtype)


def points(n: int = 12, seed: int = 0, dtype: torch.dtype = torch.float64) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 5, generator=generator, dtype=torch.float64).to(dtype)
    return x, torch.randint(CLASSES, (n,), generator=generator)


def images(n: int = 12, seed: int = 0, dtype: torch.dtype = torch.float32) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 2, 4, 4, generator=generator).to(dtype)
    return x, torch.randint(CLASSES, (n,), generator=generator)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Batch],
    before_step: Callable[[], object] | None = None,
) -> None:
    """The ordinary loop."""
    for x, y in batches:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        if before_step is not None:
            before_step()
        optimizer.step()


def snapshot(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def same(left: Iterable[Tensor], right: Iterable[Tensor]) -> bool:
    """Equal bit for bit."""
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def distance(left: Iterable[Tensor], right: Iterable[Tensor]) -> float:
    """Largest relative difference of two lists of tensors."""
    errors = [
        float((a.detach() - b.detach()).norm() / b.detach().norm().clamp(min=1e-30))
        for a, b in zip(left, right, strict=True)
    ]
    return max(errors)


@contextmanager
def library_defaults() -> Iterator[None]:
    """Optimizers as users get them; tests otherwise have steps of a fixed size."""
    kinds = list(LIBRARY)
    before = [dict(kind.__init__.__kwdefaults__) for kind in kinds]
    try:
        for kind in kinds:
            kind.__init__.__kwdefaults__.update(LIBRARY[kind])
        yield
    finally:
        for kind, defaults in zip(kinds, before, strict=True):
            kind.__init__.__kwdefaults__.update(defaults)
