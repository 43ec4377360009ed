"""The one place that knows how loss reduction, batch size, ranks and loss scale enter a step.

Backward passes leave raw sums; they are divided here, once. Then one batch, and the same examples
in k micro-batches or on R ranks, give the same step. R ranks train the mean of their losses.

    N      examples in the step, all micro-batches and ranks together
    R      ranks
    rows   examples times shared positions, N S
    H1, H2 the parts of `p.grad` that the two half-batches contributed, H1 + H2 = p.grad
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.amp import GradScaler

from fop.projection import spread

if TYPE_CHECKING:
    from fop.capture import Statistics

# Counts are plain numbers on one process, and tensors where they were summed over ranks.
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
        if self.scaler is not None:  # a host read, which steps that refresh curvature have anyway
            return torch.full_like(gradient_ratio, 1 / self.scaler.get_scale())
        return gradient_ratio


def unscaled(gradients: Sequence[Tensor], loss_scale: LossScale | None) -> Sequence[Tensor]:
    """Gradients without the loss scale of mixed precision, where they still carry it."""
    if loss_scale is None or loss_scale.inverse is None:
        return gradients
    inverse = loss_scale.inverse
    return [gradient * inverse.to(gradient) for gradient in gradients]


def mean_over_ranks(total: Tensor, ranks: int) -> Tensor:
    """Gradients of the ranks' losses, summed, as that of their mean; in place."""
    return total.div_(ranks)


def term_weight(terms: int, reduction: str) -> float:
    """Of one of the terms of an example's own loss, under a loss that is a mean or a sum."""
    return 1.0 / terms if reduction == "mean" else 1.0


def to_means(
    sums: Statistics,
    *,
    sharing: str,
    reduction: str,
    extra_passes: bool,
    scaled_by_loss: bool = False,
    ranks: int,
    loss_scale: Tensor | None,
) -> None:
    """Make raw sums the Kronecker factors A and G, and mean squares, in place.

    `g` was seen by a hook under the rank's own loss. Under a mean loss, of which each rank has 1/R,
    it is R/N of the gradient of the example's own loss, and G and squares are quadratic in it.
    Under a sum loss it is that gradient, and so it is in extra passes for the Fisher, whatever the
    user's loss is. Those that are scaled by the loss carry the square root of an example's weight
    in it, R/N again. `loss_scale` undoes that of mixed precision.
    """
    examples, rows = sums.examples, sums.rows
    weight = examples / ranks if reduction == "mean" else 1.0
    if extra_passes:
        weight = weight**0.5 if scaled_by_loss else 1.0
    quadratic = []
    if sums.inputs is not None and sums.outputs is not None:
        sums.inputs.values.mul_(1.0 / examples)
        quadratic.append((sums.outputs.values, rows if sharing == "expand" else examples))
    if sums.squares is not None:
        quadratic.append((sums.squares, examples))
    for values, count in quadratic:
        if loss_scale is not None:
            power = 1 if extra_passes else 2
            values.mul_(loss_scale.to(values) ** power)  # first: it only shrinks
        values.mul_(weight**2 / count)


def half_difference(
    average: Tensor, difference: Tensor, first: Number, second: Number, rescale: Tensor | None
) -> Tensor | None:
    """g1 - g2 on the scale of the gradient: N/n1 H1 - N/n2 H2, from H1 + H2 and H1 - H2.

    For stacked layers [L groups, o, i]. `first` and `second`, n1 and n2, are two numbers for all of
    them, or two tensors [L]. `rescale` [L] brings `difference` to the scale of `average`. With
    equal halves the result is twice the rescaled `difference`. An empty half leaves nothing to
    compare: None, or zeros where the counts are on the device.
    """
    if isinstance(first, Tensor):
        both = (first > 0) & (second > 0)
        of_one, of_two = ((first + second) / (2 * n) for n in (first, second))
        of_difference, of_average = (
            torch.where(both, weight, 0.0).to(average)
            for weight in (of_one + of_two, of_one - of_two)
        )
        if rescale is not None:
            of_difference = of_difference * rescale.to(average)
        found = difference * spread(of_difference, average)
        return found.addcmul_(average, spread(of_average, average))
    if first == 0 or second == 0:
        return None
    one, two = ((first + second) / (2 * n) for n in (first, second))
    found = difference * (one + two)
    if rescale is not None:
        found.mul_(spread(rescale.to(average), average))
    return found if one == two else found.add_(average, alpha=float(one - two))


def noise_scale(average_square: float, difference_square: float, first: int, second: int) -> float:
    """The simple gradient noise scale tr(Sigma)/|G|^2 in examples (McCandlish et al. 2018).

    The difference of the halves has variance tr(Sigma)(1/n1 + 1/n2), the mean tr(Sigma)/N.
    Infinite where the halves show no signal beyond noise.
    """
    total_variance = difference_square / (1 / first + 1 / second)
    signal = average_square - total_variance / (first + second)
    return total_variance / signal if signal > 0 else float("inf")
