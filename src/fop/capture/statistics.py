"""What backward passes leave behind for a layer: sums over examples, and what they are over.

    difference   H1 - H2, shaped like the weight and, if it is trained, the bias: the parts of the
                 gradient that the two half-batches contributed, subtracted instead of added
    inputs       sum of x x^T, a factor [groups, i (+1), i (+1)]
    outputs      sum of g g^T, a factor [groups, o, o]
    squares      sum of squared per-example gradients [groups, o, i (+1)] (EKFAC, squares.py)

A call, a backward pass, a micro-batch and a rank all contribute this one type, and `+=` adds them
up. Nothing is divided before the step: fop.scaling does that, once.

    >>> total = Statistics()
    >>> total += Statistics(difference=[h1 - h2], first=4, second=4)   # a batch of 8
    >>> total += Statistics(difference=[h3 - h4], first=2, second=2)   # 4 more: first == 6
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fop.linalg import Factor


def factor_dtype(dtype: torch.dtype) -> torch.dtype:
    """Curvature is kept in float32 or better: half precision breaks its decompositions."""
    return torch.float32 if dtype.itemsize < 4 else dtype


@dataclass
class Statistics:
    """Sums; what is None was not recorded."""

    difference: list[Tensor] | None = None
    first: int = 0  # examples in each half-batch
    second: int = 0
    inputs: Factor | None = None
    outputs: Factor | None = None
    squares: Tensor | None = None
    examples: int = 0  # what the moments are over: inputs, outputs and squares
    rows: int = 0  # examples times shared positions
    passes: int = 0

    @property
    def factors(self) -> list[Factor]:
        """Moments of inputs and outputs, or neither: a curvature may do with squares alone."""
        return [factor for factor in (self.inputs, self.outputs) if factor is not None]

    def __iadd__(self, other: Statistics) -> Statistics:
        """Takes over the tensors of `other`, or adds to its own in place."""
        if other.difference is not None:
            # A pass may come with the bias, or without it: whichever is frozen at the time.
            own = self.difference or []
            both = min(len(own), len(other.difference))
            if both:
                torch._foreach_add_(own[:both], other.difference[:both])
            self.difference = own + other.difference[both:]
            self.first += other.first
            self.second += other.second
        for name in ("inputs", "outputs", "squares"):
            total, term = getattr(self, name), getattr(other, name)
            if total is None or term is None:
                setattr(self, name, term if total is None else total)
            else:
                total.add_(term)
        self.examples += other.examples
        self.rows += other.rows
        self.passes += other.passes
        return self

    def only_moments(self) -> Statistics:
        return replace(self, difference=None, first=0, second=0)

    def without_moments(self) -> Statistics:
        return Statistics(self.difference, self.first, self.second)

    def bounds(self) -> list[Tensor]:
        """What is finite only if all moments are: sums of squares bound the other products."""
        bounds = [factor.diagonal() for factor in self.factors]
        return bounds if self.squares is None else [*bounds, self.squares]

    def to(self, device: torch.device, dtype: torch.dtype) -> Statistics:
        """Of a parameter that was moved or cast: its dtype, and that of its factors."""
        moved, precise = replace(self), factor_dtype(dtype)
        if self.difference is not None:
            moved.difference = [part.to(device, dtype) for part in self.difference]
        if self.factors:
            moved.inputs, moved.outputs = (f.to(device, precise) for f in self.factors)
        if self.squares is not None:
            moved.squares = self.squares.to(device, precise)
        return moved
