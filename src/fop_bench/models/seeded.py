"""Building a model from a seed without touching the global random state."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


def seeded(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    """`build()` with torch's CPU generator seeded, and its state put back afterwards."""
    with torch.random.fork_rng(devices=[]):  # models are built on the CPU
        # Not torch.manual_seed, which would seed the accelerators' generators as well.
        torch.default_generator.manual_seed(seed)
        return build()
