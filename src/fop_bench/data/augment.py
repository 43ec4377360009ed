"""Random crop and flip of whole batches: one gather on the device, no loop over images."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def crop_and_flip(pixels: Tensor, padding: int, randomness: torch.Generator) -> Tensor:
    """Pad [n, c, h, w] with zeros, cut h x w at a random place, mirror every second image.

    The random numbers are drawn on the CPU so that every device trains on the same images.
    """
    n, _, height, width = pixels.shape
    top, left = torch.randint(0, 2 * padding + 1, (2, n), generator=randomness)
    mirrored = torch.rand(n, generator=randomness) < 0.5
    rows = top[:, None] + torch.arange(height)
    columns = left[:, None] + torch.arange(width)
    columns = torch.where(mirrored[:, None], columns.flip(1), columns)

    padded = F.pad(pixels, (padding, padding, padding, padding))
    image = torch.arange(n, device=pixels.device)[:, None, None]
    rows, columns = rows.to(pixels.device), columns.to(pixels.device)
    # Advanced indices around the channel slice put it last: [n, h, w, c].
    cut = padded[image, :, rows[:, :, None], columns[:, None, :]]
    return cut.permute(0, 3, 1, 2).contiguous()
