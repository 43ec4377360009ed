"""One training step behind one call, for whatever measures steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

Loss = Callable[[Tensor, Tensor], Tensor]


class Stepper:
    """A model and what trains it. `step` is everything a training loop does with a batch."""

    def __init__(
        self, model: nn.Module, *optimizers: Optimizer, loss: Loss = cross_entropy
    ) -> None:
        self.model = model
        self.optimizers = optimizers
        self.loss = loss

    def step(self, inputs: Tensor, targets: Tensor) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        torch.autograd.backward(self.loss(self.model(inputs), targets))
        for optimizer in self.optimizers:
            optimizer.step()

    def state(self) -> list[Any]:
        """Whatever holds the tensors that live on between steps."""
        return [optimizer.state for optimizer in self.optimizers]


def load_lazy_code(
    build: Callable[[nn.Module], Stepper], device: torch.device | str = "cpu"
) -> None:
    """Three steps on next to nothing: much code is loaded only when it is used."""
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 10)).to(device)
    stepper = build(model)
    inputs, labels = torch.randn(4, 1, 4, 4), torch.randint(10, (4,))
    for _ in range(3):
        stepper.step(inputs.to(device), labels.to(device))
