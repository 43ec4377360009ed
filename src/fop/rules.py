"""The rules that a step follows, as values: how much damping, and how long a step.

A damping rule says lambda of each layer when its curvature is refreshed; a step rule says by what
one factor all updates are multiplied. Both may be replaced by the user's own:

    fop.FOP(model, damping=fop.rules.RelativeDamping(0.1), kl_clip=MyStepRule())
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from fop.projection import Coefficients


@dataclass(frozen=True)
class Feedback:
    """What a damping rule may go by, of one layer whose curvature is about to be refreshed."""

    layer: str
    step: int  # the one that refreshes it, counted from 1
    asked: float  # `damping` of the layer's parameter group
    previous: float | None  # what it was damped with so far; None before the first refresh
    find_mean_eigenvalue: Callable[[], Tensor | None]
    find_coefficients: Callable[[], Coefficients | None]

    @property
    def mean_eigenvalue(self) -> Tensor | None:
        """Of F, 0-dimensional; None where the curvature can't tell."""
        return self.find_mean_eigenvalue()

    @property
    def coefficients(self) -> Coefficients | None:
        """Of the layer's last step, 0-dimensional."""
        return self.find_coefficients()


@runtime_checkable
class DampingRule(Protocol):
    """lambda of each layer. Called on steps that refresh curvature, where host reads are fine."""

    @property
    def initial(self) -> float:
        """What parameter groups show as their damping, until the user changes it there."""
        ...

    def __call__(self, feedback: Feedback) -> float | Tensor: ...


@dataclass(frozen=True)
class FixedDamping:
    """The number in the parameter group, which a user or a schedule may change."""

    initial: float

    def __call__(self, feedback: Feedback) -> float:
        return feedback.asked


@dataclass(frozen=True)
class RelativeDamping:
    """lambda = share * tr F / dim F: a share of the layer's mean curvature.

    It does not depend on the scale of the loss, and is large where curvature is. The share is
    `damping` of the parameter group. Example: F = diag(1, 3) and a share of 0.1 give 0.2.
    """

    initial: float = 0.1
    smallest: float = 1e-12  # a layer whose curvature vanishes is damped by this

    def __call__(self, feedback: Feedback) -> float:
        mean = feedback.mean_eigenvalue
        if mean is None:
            return feedback.asked
        return max(self.smallest, feedback.asked * float(mean))


@runtime_checkable
class StepRule(Protocol):
    """One factor for the updates of all layers, from sums over them."""

    def terms(self, coefficients: Coefficients, lr: Tensor | float) -> Tensor:
        """What to add up over layers and ranks, [L, k] for L layers; lr is the reference."""
        ...

    def scale(self, totals: Tensor) -> Tensor | None:
        """The factor, 0-dimensional on the device, from totals [k]; None for 1."""
        ...


class _OneTerm:
    columns = 1  # what `terms` has, for ranks that own no layer


@dataclass(frozen=True)
class KLClip(_OneTerm):
    """nu = min(1, sqrt(limit / |lr^2 sum over layers of <u, c>|)): bounds the change of the output.

    <u, c> [L] of updates u = eta M^-1 c, in the quadratic model of the KL divergence.
    """

    limit: float | None  # None: no bound

    def terms(self, coefficients: Coefficients, lr: Tensor | float) -> Tensor:
        return (coefficients.update_alignment * lr**2).unsqueeze(-1)

    def scale(self, totals: Tensor) -> Tensor | None:
        if self.limit is None:
            return None
        return torch.sqrt(self.limit / totals[0].abs()).clamp(max=1.0)


@dataclass(frozen=True)
class SelfSizing(KLClip):
    """The step sizes itself (trust.py); the KL clip is for steps whose loss can't be read.

    Besides the clip's term, the energy <a, M^-1 a> and <d, M^-1 d> of the half-batches' difference.
    """

    limit: float | None = 1e-3
    columns = 3

    def terms(self, coefficients: Coefficients, lr: Tensor | float) -> Tensor:
        clip = super().terms(coefficients, lr)
        both = [coefficients.q, coefficients.difference_square]
        return torch.cat([clip, torch.stack(both, -1).to(clip)], -1)
