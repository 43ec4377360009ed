"""Random crop and flip of whole batches: one gather on the device, no loop over images."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def random_crops(
    size: int, padding: int, randomness: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Top, left [size] and whether to mirror, for a whole batch.

    Drawn on the CPU and for the whole batch, so that every device, and any number of ranks, trains
    on the same images.
    """
    top, left = torch.randint(0, 2 * padding + 1, (2, size), generator=randomness)
    return top, left, torch.rand(size, generator=randomness) < 0.5


def crop_and_flip(
    pixels: Tensor, padding: int, top: Tensor, left: Tensor, mirrored: Tensor
) -> Tensor:
    """Pad [n, c, h, w] with zeros, cut h x w at (top, left), mirror where told."""
    n, _, height, width = pixels.shape
    rows = top[:, None] + torch.arange(height)
    columns = left[:, None] + torch.arange(width)
    columns = torch.where(mirrored[:, None], columns.flip(1), columns)

    padded = F.pad(pixels, (padding, padding, padding, padding))
    image = torch.arange(n, device=pixels.device)[:, None, None]
    rows, columns = rows.to(pixels.device), columns.to(pixels.device)
    # Advanced indices around the channel slice put it last: [n, h, w, c].
    cut = padded[image, :, rows[:, :, None], columns[:, None, :]]
    return cut.permute(0, 3, 1, 2).contiguous()
