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
    return torch.promote_types(dtype, torch.float32)


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
    def moments(self) -> tuple[Factor, Factor]:
        """Of inputs and outputs, where they are known to be there."""
        assert self.inputs is not None
        assert self.outputs is not None
        return self.inputs, self.outputs

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
        if other.inputs is None:
            return self
        if self.inputs is None:
            self.inputs, self.outputs, self.squares = other.inputs, other.outputs, other.squares
        else:
            for total, term in zip(self.moments, other.moments, strict=True):
                total.add_(term)
            if self.squares is not None and other.squares is not None:
                self.squares.add_(other.squares)
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
        if self.inputs is None:
            return []
        bounds = [moment.diagonal() for moment in self.moments]
        return bounds if self.squares is None else [*bounds, self.squares]

    def to(self, device: torch.device, dtype: torch.dtype) -> Statistics:
        """Of a parameter that was moved or cast: its dtype, and that of its factors."""
        moved, precise = replace(self), factor_dtype(dtype)
        if self.difference is not None:
            moved.difference = [part.to(device, dtype) for part in self.difference]
        if self.inputs is not None:
            moved.inputs, moved.outputs = (m.to(device, precise) for m in self.moments)
        if self.squares is not None:
            moved.squares = self.squares.to(device, precise)
        return moved
