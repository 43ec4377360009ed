"""A model and the inputs it takes, common to workloads that are trained and that are timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fop_bench.models import seeded


@dataclass(frozen=True, kw_only=True)
class Network:
    """`input_shape` is that of one example; with `tokens`, inputs are numbers below it."""

    name: str
    build: Callable[[], nn.Module] = field(repr=False)
    input_shape: tuple[int, ...] = (3, 32, 32)
    tokens: int | None = None

    def model(self, seed: int = 0) -> nn.Module:
        """A freshly initialised model; the global random state stays as it was."""
        return seeded(self.build, seed)

    def made_up(self, count: int) -> Tensor:
        """Random inputs [count, ...]: what a step costs does not depend on what is in them."""
        generator = torch.Generator().manual_seed(0)
        shape = (count, *self.input_shape)
        if self.tokens is not None:
            return torch.randint(self.tokens, shape, generator=generator)
        return torch.randn(shape, generator=generator)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Mean cross-entropy over all predictions: output [..., classes], target [...]."""
        return F.cross_entropy(output.flatten(0, -2), target.flatten())
