"""What the host may ask of a device, and at what cost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import reduce

import torch
from torch import Tensor

_host_devices = frozenset({"cpu"})


def on_host(tensor: Tensor) -> bool:
    """Whether its device computes while the host waits.

    Then the host may read what it has found at no cost, and many small operations cost no more than
    one large one.
    """
    return tensor.device.type in _host_devices


@contextmanager
def treat_as_accelerator() -> Iterator[None]:
    """Have every device, a CPU too, take the path of accelerators: for tests."""
    global _host_devices
    before, _host_devices = _host_devices, frozenset()
    try:
        yield
    finally:
        _host_devices = before


def all_finite(tensors: Iterable[Tensor]) -> Tensor:
    """A 0-dimensional flag on the first tensor's device. There must be one tensor at least."""
    tensors = list(tensors)
    extremes: list[Tensor] = []
    alike: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel() == 0:  # a rank may have no row of any sharded parameter
            continue
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        if tensor.device.type in _host_devices:
            # Extremes can't overflow as sums do, and are found faster than an infinity norm.
            extremes += torch.aminmax(real)
        else:
            alike.setdefault(real.dtype, []).append(real)
    for some in alike.values():  # one launch for many
        extremes += torch._foreach_norm(some, float("inf"))
    if not extremes:
        return torch.ones((), dtype=torch.bool, device=tensors[0].device)
    first = extremes[0]
    widest = reduce(torch.promote_types, {extreme.dtype for extreme in extremes})
    return torch.stack([extreme.to(first.device, widest) for extreme in extremes]).isfinite().all()
