"""Parameters of which a rank has some rows only: DTensors, as FSDP2's `fully_shard` makes them.

Shard(0) over R ranks: each has ceil(n / R) of a parameter's n rows, the last ones fewer or none.
Of such a parameter the optimizer's rules see the rank's own rows, as a plain tensor; its layer is
preconditioned as a whole. Everything here hands on a plain parameter as it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "placements")  # a DTensor; importing the class takes long


def local(tensor: Any) -> Tensor:
    """This rank's part, sharing memory."""
    shard: Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return shard


def own_rows(parameter: Any) -> slice:
    """Of the whole parameter, the rows that this rank has."""
    if not is_sharded(parameter):
        return slice(None)
    mesh, rows = parameter.device_mesh, parameter.shape[0]
    each = -(-rows // mesh.size())
    start = min(rows, each * mesh.get_local_rank())
    return slice(start, min(rows, start + each))


def padded(parameter: Tensor, shard: Tensor) -> Tensor:
    """A copy of the rank's rows with zeros for all others: over the ranks these add up."""
    if not is_sharded(parameter):
        return shard.clone()
    whole = torch.zeros(parameter.shape, dtype=shard.dtype, device=shard.device)
    whole[own_rows(parameter)] = shard
    return whole


def group_of(model: nn.Module) -> ProcessGroup | None:
    """The ranks that a model is sharded over; None if it is not sharded."""
    parameter: Any = next(model.parameters())
    return parameter.device_mesh.get_group() if is_sharded(parameter) else None


def check_shards(model: nn.Module) -> None:
    """Raise, naming the parameter, unless all or none are sharded by rows over the same ranks."""
    named: Any = model.named_parameters()
    first: Any = None
    plain = ""
    for name, parameter in named:
        if not is_sharded(parameter):
            plain = plain or name
            continue
        _check_layout(name, parameter)
        if first is None:
            first = parameter
        elif parameter.device_mesh != first.device_mesh:
            raise NotImplementedError(
                f"parameter {name!r} is sharded over {parameter.device_mesh}, others over "
                f"{first.device_mesh}: apply fully_shard with one mesh to all of the model"
            )
    if first is not None and plain:
        raise NotImplementedError(
            f"parameter {plain!r} is not sharded, but others of the model are: apply fully_shard "
            "to the whole model too, after its blocks, without ignored_params"
        )


def _check_layout(name: str, parameter: Any) -> None:
    placements = parameter.placements
    # By name, because torch's strided shards are a kind of Shard, and not rows in one piece.
    simple = len(placements) == 1 and type(placements[0]).__name__ == "Shard"
    if not (simple and placements[0].dim == 0):
        raise NotImplementedError(
            f"parameter {name!r} is a DTensor with placements {tuple(placements)}, but fop knows "
            "(Shard(dim=0),) over a mesh of one dimension only, which is what fully_shard(module) "
            "makes. Tensor-parallel models, HSDP (meshes of two dimensions) and shards along other "
            "dimensions are not supported: use fully_shard with a mesh of one dimension, or "
            "DistributedDataParallel"
        )
