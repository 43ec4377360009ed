"""Rows of a parameter: what a layer has of one that it shares, and what a rank has of a shard.

Packed attention keeps the weights of three layers as rows of one parameter [3 E, E]. FSDP2's
`fully_shard` makes DTensors, Shard(0) over R ranks: each has ceil(n / R) of a parameter's n rows,
the last ones fewer or none. Both are rows of dimension 0, and both are answered here:

    parameter [6, i]     rows 0 1 | 2 3 | 4 5        a layer has rows 2 3
    two ranks            0 1 2    | 3 4 5            rank 0 has row 2 of it, rank 1 row 3

Update rules see a rank's own rows, as a plain tensor; a layer is preconditioned with all of its
rows. Everything here hands on a plain parameter as it is.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

EVERYTHING = slice(None)


def is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "placements")  # a DTensor; importing the class takes long


def local(tensor: Any) -> Tensor:
    """This rank's rows, sharing memory."""
    rows: Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return rows


class ParameterSlice:
    """Some rows of a parameter, or all of them."""

    def __init__(self, parameter: nn.Parameter, rows: slice = EVERYTHING) -> None:
        self.parameter, self.sharded = parameter, is_sharded(parameter)
        shape, count = parameter.shape, parameter.shape[0] if parameter.dim() else 1
        self.start, self.end, _ = rows.indices(count)
        self._full = self.end - self.start == count
        # On every rank, whichever rows it has.
        self.shape = shape if self._full else torch.Size((self.end - self.start, *shape[1:]))
        if self.sharded:
            mesh: Any = parameter.device_mesh  # type: ignore[attr-defined]
            each = -(-count // mesh.size())
            begin = min(count, each * mesh.get_local_rank())
            first = min(max(self.start, begin), self.end)
            last = max(min(self.end, begin + each), first)
            # A rank without any of the rows has an empty part, wherever it begins.
            begin = begin if last > first else first
            self._in_slice = slice(first - self.start, last - self.start)
            self._in_shard = slice(first - begin, last - begin)

    @cached_property
    def like(self) -> Tensor:
        """A tensor of this shape without memory, to ask for shapes."""
        return torch.empty(self.shape, device="meta")

    def of(self, full: Tensor) -> Tensor:
        """Of a tensor shaped like the parameter, the view of these rows."""
        return full if self._full else full[self.start : self.end]

    def local(self, tensor: Tensor) -> Tensor:
        """The same of a sharded tensor, or of this rank's part of it: the rows that it has."""
        return local(tensor)[self._in_shard] if self.sharded else self.of(tensor)

    def held(self, values: Tensor) -> Tensor:
        """Of values shaped like the slice, those of the rows that this rank has."""
        return values[self._in_slice] if self.sharded else values

    def padded(self, tensor: Tensor) -> Tensor:
        """`local`, with zeros for the rows of other ranks: over the ranks these add up."""
        rows = self.local(tensor)
        if not self.sharded:
            return rows
        full = torch.zeros(self.shape, dtype=rows.dtype, device=rows.device)
        self.held(full).copy_(rows)
        return full


def group_of(model: nn.Module) -> ProcessGroup | None:
    """The ranks that a model is sharded over; None if it is not sharded."""
    parameter: Any = next(model.parameters())
    return parameter.device_mesh.get_group() if is_sharded(parameter) else None


def check_shards(model: nn.Module) -> None:
    """Raise, naming the parameter, unless all or none are sharded by rows over the same ranks."""
    named: dict[str, Any] = dict(model.named_parameters())
    sharded = {name: p for name, p in named.items() if is_sharded(p)}
    meshes = [parameter.device_mesh for parameter in sharded.values()]
    for name, parameter in sharded.items():
        placements, mesh = parameter.placements, parameter.device_mesh
        # By name, because torch's strided shards are a kind of Shard, and not rows in one piece.
        simple = len(placements) == 1 and type(placements[0]).__name__ == "Shard"
        if not (simple and placements[0].dim == 0):
            raise NotImplementedError(
                f"parameter {name!r} is a DTensor with placements {tuple(placements)}, but fop "
                "knows (Shard(dim=0),) over a mesh of one dimension only, which is what "
                "fully_shard(module) makes. Tensor-parallel models, HSDP (meshes of two "
                "dimensions) and shards along other dimensions are not supported: use fully_shard "
                "with a mesh of one dimension, or DistributedDataParallel"
            )
        if mesh != meshes[0]:
            raise NotImplementedError(
                f"parameter {name!r} is sharded over {mesh}, others over {meshes[0]}: apply "
                "fully_shard with one mesh to all of the model"
            )
    plain = [name for name in named if name not in sharded]
    if sharded and plain:
        raise NotImplementedError(
            f"parameter {plain[0]!r} is not sharded, but others of the model are: apply "
            "fully_shard to the whole model too, after its blocks, without ignored_params"
        )
