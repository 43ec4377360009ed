"""Rows of a parameter: what a layer has of one that it shares, and what a rank has of a shard.

Packed attention keeps the weights of three layers as rows of one parameter [3 E, E]. FSDP2 gives
each rank some rows of every parameter. Both are rows of dimension 0, and both are answered here:

    parameter [6, i]     rows 0 1 | 2 3 | 4 5        a layer has rows 2 3
    two ranks            0 1 2    | 3 4 5            rank 0 has row 2 of it, rank 1 row 3
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fop.shards import is_sharded, own_rows

EVERYTHING = slice(None)


class ParameterSlice:
    """Some rows of a parameter, or all of them."""

    def __init__(self, parameter: nn.Parameter, rows: slice = EVERYTHING) -> None:
        self.parameter = parameter
        self.start, self.end, _ = rows.indices(parameter.shape[0] if parameter.dim() else 1)
        self.whole = rows == EVERYTHING or self.end - self.start == parameter.shape[0]
        self.sharded = is_sharded(parameter)
        shape = parameter.shape
        # On every rank, whichever rows it has; and a tensor without memory, to ask for shapes.
        self.shape = shape if self.whole else torch.Size((self.end - self.start, *shape[1:]))
        self.like = torch.empty(self.shape, device="meta")

    def of(self, full: Tensor) -> Tensor:
        """Of a tensor shaped like the parameter, the view of these rows."""
        return full if self.whole else full[self.start : self.end]

    def local(self, shard: Tensor) -> Tensor:
        """The same of this rank's part of such a tensor: those of these rows that it has."""
        if not self.sharded:
            return self.of(shard)
        first, last, offset = self._held()
        return shard[first - offset : last - offset]

    def held(self, values: Tensor) -> Tensor:
        """Of values shaped like the slice, those of the rows that this rank has."""
        if not self.sharded:
            return values
        first, last, _ = self._held()
        return values[first - self.start : last - self.start]

    def padded(self, shard: Tensor) -> Tensor:
        """`local`, with zeros for the rows of other ranks: over the ranks these add up."""
        if not self.sharded:
            return self.of(shard)
        full = torch.zeros(self.shape, dtype=shard.dtype, device=shard.device)
        self.held(full).copy_(self.local(shard))
        return full

    def _held(self) -> tuple[int, int, int]:
        """The first and the last row of the slice that this rank has, and its first row of all."""
        rows = own_rows(self.parameter)
        first = min(max(self.start, rows.start), self.end)
        last = max(min(self.end, rows.stop), first)
        # A rank without any of the rows has an empty part, wherever it begins.
        return (first, last, rows.start) if last > first else (first, first, first)
