"""Random streams named by what they are for, so that a resumed run draws the same numbers."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def stream(*key: int | str) -> torch.Generator:
    """A CPU generator that depends on `key` alone, not on global state or what ran before."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)


def epoch_order(size: int, seed: int, epoch: int) -> Tensor:
    """The order [size] in which an epoch visits the examples."""
    return torch.randperm(size, generator=stream("order", seed, epoch))


def shuffled_members(labels: Tensor, label: int, purpose: str) -> Tensor:
    """Indices of a class's examples in a fixed random order, one order a purpose."""
    members = (labels == label).nonzero().flatten()
    return members[torch.randperm(len(members), generator=stream(purpose, label))]
