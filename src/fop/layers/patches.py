"""The patches of a convolution's input: as rows, summed, and their second moment.

The patch at position t holds, for each channel c and tap k of the kernel, the input
x[c, t stride + k dilation - before]; its features are ordered (c, k), as in the weight.

Their second moment is far cheaper than the product of written-out patches. With stride 1

    sum over t of x[c, t + k] x[c', t + k'] = sum over q of x[c, q] x[c', q + (k' - k)],

where only the range of q depends on k itself, and only at the edges. So one product for each
distinct lag k' - k serves all pairs of taps with that lag, but for corrections of an edge's size:
13 products in place of 81 for a 3 x 3 kernel, of shifted views of one copy of the input.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from fop.layers.base import Gram

Sizes = tuple[int, ...]  # one entry per spatial dimension
Range = tuple[int, int]  # first and end

# So many numbers of written-out patches at a time, to bound memory.
CHUNK = 1 << 24
# A rough model of time, in multiply-adds: products are not faster when narrower than this, and
# copying a number costs as much as so many.
NARROW = 12
COPY = 10


@dataclass(frozen=True)
class Patches:
    """Where the patches of an input [n, channels, *lengths] lie."""

    groups: int
    kernel: Sizes
    stride: Sizes
    dilation: Sizes
    before: Sizes  # zeros in front of the input; negative where it is cut off instead
    sizes: Sizes  # positions

    @property
    def taps(self) -> int:
        return math.prod(self.kernel)

    def rows(self, x: Tensor) -> Tensor:
        """[n, groups, positions, features], laid out in the order groups, features, n, positions.

        This way they are copied in runs of positions, and are columns as products take them.
        """
        channels = x.shape[1] // self.groups
        windows: Tensor = self._padded(x).unflatten(1, (self.groups, channels))
        for axis in reversed(range(len(self.kernel))):
            windows = self._unfolded(windows, 3 + axis, axis)
        taps = range(3, windows.dim(), 2)  # of [n, groups, channels, tap, position, tap, ...]
        columns = windows.permute(1, 2, *taps, 0, *(at + 1 for at in taps))
        shape = (self.groups, channels * self.taps, len(x), math.prod(self.sizes))
        return columns.reshape(shape).permute(2, 0, 3, 1)

    def totals(self, x: Tensor) -> Tensor:
        """Sums over positions, [n, groups, features]."""
        x = self._padded(x)
        for axis in range(len(self.kernel)):
            x = self._unfolded(x, 2 + axis, axis).sum(3 + axis)
        return x.reshape(len(x), self.groups, -1)

    def moment(self, x: Tensor, out: Gram) -> None:
        """Leave the sum of v v^T over all patches v in `out`, which is empty."""
        if self._lags_pay(x):
            self._moment_by_lags(x, out)
        else:
            self._moment_by_rows(x, out)

    # ---- written out

    def _padded(self, x: Tensor) -> Tensor:
        amounts: list[int] = []
        for axis in reversed(range(len(self.kernel))):
            reach = (self.sizes[axis] - 1) * self.stride[axis] + self._reach(axis) + 1
            amounts += (self.before[axis], reach - self.before[axis] - x.shape[2 + axis])
        return F.pad(x, amounts) if any(amounts) else x

    def _reach(self, axis: int) -> int:
        return self.dilation[axis] * (self.kernel[axis] - 1)

    def _unfolded(self, x: Tensor, at: int, axis: int) -> Tensor:
        """A view with (taps, positions) in place of dimension `at`, which is that of `axis`."""
        size, stride = list(x.shape), list(x.stride())
        step = stride[at]
        size[at : at + 1] = (self.kernel[axis], self.sizes[axis])
        stride[at : at + 1] = (step * self.dilation[axis], step * self.stride[axis])
        return x.as_strided(size, stride)

    def _moment_by_rows(self, x: Tensor, out: Gram) -> None:
        count = max(1, CHUNK // (x.shape[1] * self.taps * math.prod(self.sizes)))
        for part in x.split(count):
            out.add_rows(self.rows(part))

    # ---- by lags

    def _lags_pay(self, x: Tensor) -> bool:
        flat = len(self.kernel) <= 2 and set(self.stride) == {1} and self.taps > 1
        # On images of a kernel's size edges are all there is.
        if not flat or any(m < k for m, k in zip(self.sizes, self.kernel, strict=True)):
            return False
        examples, channels = len(x), x.shape[1] // self.groups
        features = channels * self.taps
        lags = (math.prod(2 * k - 1 for k in self.kernel) + 1) // 2
        shifted = math.prod(x.shape[2:-1]) * (x.shape[-1] + self._reach(-1))
        by_lags = lags * channels * max(channels, NARROW) * examples * shifted
        written = examples * math.prod(self.sizes)
        by_rows = (0.6 * max(features, NARROW) + COPY) * features * written
        return by_lags + 2 * COPY * features**2 < by_rows

    def _moment_by_lags(self, x: Tensor, out: Gram) -> None:
        if len(self.kernel) == 1:  # an image of height one
            kernel, stride, dilation, sizes = (
                (1, *own) for own in (self.kernel, self.stride, self.dilation, self.sizes)
            )
            flat = Patches(self.groups, kernel, stride, dilation, (0, *self.before), sizes)
            flat._moment_by_lags(x.unsqueeze(2), out)
            return
        products = _LagProducts(self, x).by_taps()
        for one in range(self.taps):
            of_tap = [
                products[one, two] if one <= two else products[two, one].mT
                for two in range(self.taps)
            ]
            values = torch.stack(of_tap, dim=-1).flatten(2)  # [groups, channels, features]
            out.write_rows(values, start=one, step=self.taps)


class _LagProducts:
    """Products of shifted views of one copy of a two-dimensional input.

    The copy is [groups, channels, height, n, width + gap], with zeros in the gap, so that a shift
    of the flattened last three dimensions shifts the image: columns that leave it meet zeros.
    """

    def __init__(self, patches: Patches, x: Tensor) -> None:
        self._patches, self._gap = patches, patches._reach(1)
        grouped = x.unflatten(1, (patches.groups, -1)).permute(1, 2, 3, 0, 4)
        self._lengths, width = x.shape[2:], x.shape[-1]
        self._image = x.new_empty(*grouped.shape[:4], width + self._gap)
        self._image[..., :width] = grouped
        self._image[..., width:] = 0
        self._flat = self._image.flatten(2)
        self._row = len(x) * (width + self._gap)

    def by_taps(self) -> dict[tuple[int, int], Tensor]:
        """[groups, channels, channels] for each pair of taps, the first not after the second."""
        taps_high, taps_wide = self._patches.kernel
        found = {}
        for down in range(taps_high):
            for right in range(0 if down == 0 else 1 - taps_wide, taps_wide):
                for (top, left), product in self._of_lag(down, right):
                    one = top * taps_wide + left
                    found[one, one + down * taps_wide + right] = product
        return found

    def _of_lag(self, down: int, right: int) -> Iterator[tuple[Range, Tensor]]:
        """For each tap whose partner at this lag is a tap too: the sum over its own range.

        Rows between two borders are common to all taps that have one of them, so each such band is
        multiplied once, over all columns; the columns outside of a tap's range are taken off.
        """
        rows, columns = self._ranges(0, down), self._ranges(1, right)
        dilation = self._patches.dilation
        low, beside = down * dilation[0], right * dilation[1]
        borders = sorted({at for start, end in rows.values() if start < end for at in (start, end)})
        bands = list(pairwise(borders))
        inside = range(max(0, -beside), self._lengths[1] - max(0, beside))
        edges = [at for at in inside if any(not s <= at < e for s, e in columns.values())]
        full = {band: self._product(band, low, beside) for band in bands}
        cut = {(band, at): self._column(band, at, low, beside) for band in bands for at in edges}

        @cache
        def total(above: int, below: int, start: int, end: int) -> Tensor:
            own = [band for band in bands if above <= band[0] < below]
            outside = [at for at in edges if not start <= at < end]
            if not own:
                return self._flat.new_zeros(*self._flat.shape[:2], self._flat.shape[1])
            added = sum((full[band] for band in own[1:]), start=full[own[0]])
            return added - sum(cut[band, at] for band in own for at in outside)

        for top, height in rows.items():
            for left, width in columns.items():
                yield (top, left), total(*height, *width)

    def _ranges(self, axis: int, lag: int) -> dict[int, Range]:
        """For each tap with a partner: the inputs that meet both, first and end."""
        found = {}
        patches, length = self._patches, self._lengths[axis]
        apart = patches.dilation[axis] * lag
        for tap in range(max(0, -lag), patches.kernel[axis] - max(0, lag)):
            start = patches.dilation[axis] * tap - patches.before[axis]
            first = max(start, 0, -apart)
            end = min(start + patches.sizes[axis], length, length - apart)
            found[tap] = first, max(first, end)
        return found

    def _product(self, band: Range, low: int, beside: int) -> Tensor:
        """Over all columns of a band of rows, with those so many rows and columns on."""
        start, end = band[0] * self._row, band[1] * self._row - self._gap
        shift = low * self._row + beside
        return _times(self._flat[..., start:end], self._flat[..., start + shift : end + shift])

    def _column(self, band: Range, at: int, low: int, beside: int) -> Tensor:
        """Over one column of a band of rows."""
        start, end = band
        one = self._image[:, :, start:end, :, at]
        two = self._image[:, :, start + low : end + low, :, at + beside]
        return _times(one.flatten(2), two.flatten(2))


def _times(one: Tensor, two: Tensor) -> Tensor:
    """one two^T, batched over groups."""
    return (one[0] @ two[0].mT).unsqueeze(0) if len(one) == 1 else one @ two.mT
