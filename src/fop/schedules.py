"""The paper's rules for carrying settings from a base batch size to a larger one."""

from __future__ import annotations

from typing import TypedDict

SMALLEST_INTERVAL = 5


class Scaled(TypedDict):
    """Keyword arguments for `fop.FOP` and `fop.KFAC`."""

    lr: float
    update_every: int


def scale_to_batch(
    batch_size: int, base_batch_size: int, *, lr: float, update_every: int = 10
) -> Scaled:
    """`lr` and `update_every` for `batch_size`, from values found good at `base_batch_size`.

    The learning rate grows in proportion to the batch; the curvature interval shrinks in
    proportion, to 5 steps at least (or to `update_every` if that is less), so that curvature is
    refreshed about equally often an epoch. Use as `fop.FOP(model, **fop.scale_to_batch(8192, 1024,
    lr=0.1, update_every=100))`.
    """
    for name, value in (
        ("batch_size", batch_size),
        ("base_batch_size", base_batch_size),
        ("update_every", update_every),
    ):
        if value != int(value) or value < 1:
            raise ValueError(f"{name} must be a whole number >= 1, got {value!r}")
    factor = batch_size / base_batch_size
    smallest = min(SMALLEST_INTERVAL, update_every)
    return {"lr": lr * factor, "update_every": max(smallest, round(update_every / factor))}
