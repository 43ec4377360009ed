"""What was captured belongs to one gradient: it is found by that tensor, and lives as long.

Not by its address or its norm, which another gradient may have too. So a `p.grad` that is set aside
and put back brings its own, and one that came from elsewhere has none.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fop.moments import FactorSums, PassSums, factor_dtype
from fop.squares import GradientSquares


@dataclass(eq=False)
class Captured:
    """What backward passes into one gradient have left behind."""

    kind: tuple[torch.dtype, torch.device]  # of the weight, when it was captured
    signed: list[Tensor] | None = None  # H1 - H2, for the weight and a trained bias
    examples: list[int] = field(default_factory=lambda: [0, 0])
    passes: int = 0
    sums: FactorSums | None = None
    partial: bool = False  # the gradient holds more than this: its halves are not known
    incomplete: bool = False  # passes that belong to the same step are missing
    running: bool = False  # a pass has added to it that has not ended, or never will
    # The gradient as the last pass left it, to notice what others do to it.
    gradient: weakref.ref[Tensor] | None = None
    version: int = -1
    norm: Tensor | None = None  # of a shard: of the rank's own rows

    @property
    def returns(self) -> bool:
        """Whether the gradient may be put back, after it was taken from `p.grad`.

        DistributedDataParallel puts the same view of a bucket there over and over, for new ones.
        """
        grad = None if self.gradient is None else self.gradient()
        return grad is not None and not grad._is_view()

    def belongs_to(self, grad: Tensor | None) -> bool:
        return self.gradient is not None and grad is not None and self.gradient() is grad

    def mark(self, grad: Tensor) -> None:
        """It belongs to this gradient, as it is now."""
        self.gradient, self.version = weakref.ref(grad), grad._version

    def unchanged(self, grad: Tensor) -> bool:
        """GradScaler.unscale_ leaves no mark, all others who write to a gradient do."""
        return self.version == grad._version

    def ratio(self, grad: Tensor) -> Tensor:
        """By how much the gradient was scaled since."""
        now = norm_of(grad)
        if self.norm is None:
            return torch.ones_like(now)
        before = self.norm.to(now)
        return torch.where(before > 0, now / before, 1.0)

    def add_halves(self, signed: Sequence[Tensor], first: int, second: int) -> None:
        """A pass may come with the bias, or without it: whichever is frozen at the time."""
        if self.signed is None:
            self.signed = []
        both = min(len(self.signed), len(signed))
        if both:
            torch._foreach_add_(self.signed[:both], list(signed[:both]))
        self.signed += signed[both:]
        self.examples[0] += first
        self.examples[1] += second

    def add_sums(self, sums: FactorSums) -> None:
        if self.sums is None:
            self.sums = sums
        else:
            self.sums.add(sums)

    def follow(self, weight: Tensor) -> None:
        """Move along with a model that was moved or cast between a backward pass and its step."""
        kind = (weight.dtype, weight.device)
        if self.kind == kind:
            return
        self.kind = kind
        if self.signed is not None:
            self.signed = [part.to(weight.device, weight.dtype) for part in self.signed]
        if self.sums is not None:
            self.sums.move(weight.device, factor_dtype(weight.dtype))


@dataclass
class Pending:
    """One layer's part of one backward pass, until it is known to have reached `p.grad`."""

    task: int
    captured: Captured  # what it will be added to
    fresh: bool = False  # p.grad holds nothing yet
    rescale: Tensor | None = None  # what became of p.grad since the last pass
    signed: list[Tensor] | None = None
    first: int = 0
    second: int = 0
    sums: PassSums | None = None
    squares: GradientSquares | None = None
    total: Tensor | None = None  # the weight's gradient by all calls of its modules

    def finished_sums(self) -> FactorSums | None:
        if self.sums is None:
            return None
        sums = self.sums.finish()
        if self.squares is not None:
            sums.squares = self.squares.finish()
        return sums


def norm_of(grad: Tensor) -> Tensor:
    # Half precision would overflow.
    norm: Tensor = torch.linalg.vector_norm(grad, dtype=factor_dtype(grad.dtype))
    return norm
