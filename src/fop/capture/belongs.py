"""Statistics belong to one gradient: they are found by that tensor, and live as long.

Not by its address or its norm, which another gradient may have too. So a `p.grad` that is set aside
and put back brings its own, and one that came from elsewhere has none.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fop._torch import is_view, version_of
from fop.capture.moments import PassMoments
from fop.capture.statistics import Statistics, factor_dtype


@dataclass(eq=False)
class GradientRecord:
    """What backward passes into one gradient have left behind."""

    kind: tuple[torch.dtype, torch.device]  # of the weight, when it was recorded
    statistics: Statistics = field(default_factory=Statistics)
    passes: int = 0  # with and without moments
    partial: bool = False  # the gradient holds more than this: its half-batches are not known
    incomplete: bool = False  # passes that belong to the same step are missing
    running: bool = False  # a pass has added to it that has not ended, or never will
    # The gradient as the last pass left it, to notice what others do to it.
    gradient: weakref.ref[Tensor] | None = None
    version: int = -1
    norm: Tensor | None = None  # of a shard: of the rank's own rows

    def may_return(self, grad: Tensor | None) -> bool:
        """Whether its gradient is not the present `grad`, but may be put back there.

        DistributedDataParallel puts the same view of a bucket there over and over, for new ones.
        """
        own = None if self.gradient is None else self.gradient()
        return own is not None and own is not grad and not is_view(own)

    def unchanged(self, grad: Tensor) -> bool:
        """GradScaler.unscale_ leaves no mark, all others who write to a gradient do."""
        return self.version == version_of(grad)

    def ratio(self, grad: Tensor) -> Tensor:
        """By how much the gradient was scaled since."""
        now = norm_of(grad)
        if self.norm is None:
            return torch.ones_like(now)
        before = self.norm.to(now)
        return torch.where(before > 0, now / before, 1.0)

    def follow(self, weight: Tensor) -> None:
        """Move along with a model that was moved or cast between a backward pass and its step."""
        if self.kind != (weight.dtype, weight.device):
            self.kind = weight.dtype, weight.device
            self.statistics = self.statistics.to(weight.device, weight.dtype)


@dataclass
class RunningPass:
    """One layer's part of one backward pass, until it is known to have reached `p.grad`."""

    task: int
    record: GradientRecord  # what it will be added to
    fresh: bool = False  # p.grad holds nothing yet
    rescale: Tensor | None = None  # what became of p.grad since the last pass
    halves: Statistics = field(default_factory=Statistics)  # the difference, and what it is over
    moments: PassMoments | None = None
    total: Tensor | None = None  # the weight's gradient by all calls of its modules


@dataclass
class Seen:
    """What the calls and passes since the last step were like."""

    empty: bool = False  # a call without examples
    examples: bool = False  # a call with some
    replaced: bool = False  # the module was called with another parameter in its place
    without_forward: bool = False  # a gradient came without a call of the module
    foreign: bool = False  # p.grad is not what backward passes left there
    gradients: int = 0  # that were begun
    with_bias: bool | None = None  # whether the gradient came with the bias


def norm_of(grad: Tensor) -> Tensor:
    # Half precision would overflow.
    norm: Tensor = torch.linalg.vector_norm(grad, dtype=factor_dtype(grad.dtype))
    return norm
