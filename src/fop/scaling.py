"""The one place that knows how loss reduction and batch size enter gradients and curvature.

Backward passes leave raw sums; they are divided here, once. Then one batch, and the same examples
in k micro-batches or on R ranks, give the same step. R ranks train the mean of their losses.

    N      examples in the step, all micro-batches and ranks together
    R      ranks
    rows   examples times shared positions, N S
    H1, H2 the parts of `p.grad` that the two halves of the batch contributed, H1 + H2 = p.grad
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler

# Counts are plain numbers on one process, and 0-dimensional tensors where they were summed over
# ranks.
Number = float | Tensor


@dataclass(frozen=True)
class LossScale:
    """What torch.amp.GradScaler says at step()."""

    inverse: Tensor | None  # None if the user has called unscale_(): gradients are unscaled already
    found_inf: Tensor
    scaler: GradScaler | None = None  # if the user has named it

    @property
    def measured(self) -> bool:
        """Whether the scale is known from what has become of the gradients only."""
        return self.inverse is None and self.scaler is None

    def of_captured(self, gradient_ratio: Tensor) -> Tensor:
        """What brings a backward pass, which ran under the scaled loss, to the true loss.

        `gradient_ratio` is what happened to `p.grad` since. After unscale_() it holds the scale,
        and a clip if there was one: only the scaler itself could tell the two apart.
        """
        if self.inverse is not None:
            return self.inverse
        if self.scaler is not None:  # a host read, which steps that renew curvature have anyway
            return torch.full_like(gradient_ratio, 1 / self.scaler.get_scale())
        return gradient_ratio


def factor_scales(
    *, examples: float, rows: float, sharing: str, reduction: str, ranks: int = 1
) -> tuple[float, float]:
    """What turns the raw sums of x x^T and g g^T into the Kronecker factors A and G.

    `g` was seen by a hook under the rank's own loss. Under a mean loss, of which each rank has 1/R,
    it is R/N of the gradient of the example's own loss, and G is quadratic in it. Under a sum loss
    it is that gradient.
    """
    per_example = examples / ranks if reduction == "mean" else 1.0
    output_count = rows if sharing == "expand" else examples
    return 1.0 / examples, per_example**2 / output_count


def square_scale(*, examples: float, reduction: str, ranks: int = 1) -> float:
    """What turns the raw sum of squared per-example gradients into their mean; see above."""
    per_example = examples / ranks if reduction == "mean" else 1.0
    return per_example**2 / examples


def half_difference(
    average: Tensor, signed: Tensor, first: Any, second: Any, rescale: Tensor | None
) -> Tensor | None:
    """g1 - g2 on the scale of the gradient: N/n1 H1 - N/n2 H2, from H1 + H2 and H1 - H2.

    `first` and `second`, n1 and n2, are `Number`s, both of one kind.
    `rescale` is 0-dimensional and brings `signed` to the scale of `average`. With equal halves the
    result is twice the rescaled `signed`. An empty half leaves nothing to compare: None, or zeros
    where the counts are on the device.
    """
    on_device = isinstance(first, Tensor)
    if not on_device and (first == 0 or second == 0):
        return None
    total = first + second
    one, two = total / (2 * first), total / (2 * second)
    of_signed, of_average = one + two, one - two
    if on_device:
        both = (first > 0) & (second > 0)
        of_signed = torch.where(both, of_signed, 0.0).to(average)
        of_average = torch.where(both, of_average, 0.0).to(average)
    difference: Tensor = signed * (of_signed if rescale is None else of_signed * rescale.to(signed))
    if not on_device and of_average == 0:
        return difference
    return difference.add_(average * of_average)


def noise_scale(average_square: float, difference_square: float, first: int, second: int) -> float:
    """The simple gradient noise scale tr(Sigma)/|G|^2 in examples (McCandlish et al. 2018).

    The difference of the halves has variance tr(Sigma)(1/n1 + 1/n2), the mean tr(Sigma)/N.
    Infinite where the halves show no signal beyond noise.
    """
    total_variance = difference_square / (1 / first + 1 / second)
    signal = average_square - total_variance / (first + second)
    return total_variance / signal if signal > 0 else float("inf")
