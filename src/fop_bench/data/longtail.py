"""Long-tailed data: class sizes that fall exponentially, and the groups errors are reported for."""

from __future__ import annotations

import torch
from torch import Tensor

from fop_bench.data.seeding import shuffled_members


def long_tail_counts(largest: int, classes: int, imbalance: float) -> list[int]:
    """Examples per class, falling exponentially from `largest` to `largest / imbalance`."""
    if imbalance < 1:
        raise ValueError(f"imbalance is largest over smallest class, at least 1; got {imbalance}")
    return [int(largest * imbalance ** (-label / (classes - 1))) for label in range(classes)]


def long_tail(labels: Tensor, imbalance: float) -> Tensor:
    """Indices of a long-tailed choice from balanced classes: class 0 keeps all its examples."""
    sizes = torch.bincount(labels)
    counts = long_tail_counts(int(sizes.min()), len(sizes), imbalance)
    chosen = [
        shuffled_members(labels, label, "long tail")[:count] for label, count in enumerate(counts)
    ]
    return torch.cat(chosen).sort().values


def class_groups(classes: int) -> dict[str, slice]:
    """Head, middle and tail of classes numbered from the most to the least frequent.

    The cuts at 35 % and 70 % of the classes give, for CIFAR-100-LT at imbalance 100, exactly the
    usual groups of more than 100, 20 to 100 and fewer than 20 images; for 10 classes 3, 4 and 3.
    """
    head, middle = classes * 35 // 100, classes * 70 // 100
    return {"head": slice(head), "middle": slice(head, middle), "tail": slice(middle, classes)}
