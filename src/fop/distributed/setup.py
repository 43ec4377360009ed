"""Whether, and with whom, an optimizer shares its steps; how the ranks come to equal models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fop.distributed.agreement import Description, check_agreement
from fop.distributed.ranks import Ranks
from fop.slices import group_of

if TYPE_CHECKING:
    from fop.distributed.comm import Comm


def join_group(
    model: nn.Module,
    wrapper: DistributedDataParallel | None,
    group: dist.ProcessGroup | None,
    strategy: str | int,
    description: Callable[[], Description],
) -> Ranks:
    """All ranks of the process group, if there is one with more than one; else this process.

    Raises on all of them if their descriptions of optimizer and model differ.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return Ranks()
    # Not before it is known that this torch has them.
    from fop.distributed.comm import Comm
    from fop.distributed.group import Group

    if wrapper is not None:
        if group is not None and group is not wrapper.process_group:
            raise ValueError(
                "process_group differs from the one of DistributedDataParallel: leave it out, the "
                "wrapper's is used"
            )
        group = wrapper.process_group
    shards = group_of(model)
    if shards is not None:
        same = group is None or _members(group) == _members(shards)
        if wrapper is not None or not same:
            raise ValueError(
                "the model is sharded by fully_shard over ranks "
                f"{_members(shards)}: leave out process_group and DistributedDataParallel, these "
                "ranks train it together"
            )
        group = shards
    group = dist.group.WORLD if group is None else group
    assert group is not None
    if dist.get_world_size(group) == 1 and shards is None:
        return Ranks(grouped=True)
    comm, form = Comm(group), "plain"
    if wrapper is not None:
        form = "wrapped in DistributedDataParallel"
    elif shards is not None:
        form = "sharded by fully_shard"
    check_agreement(comm, {"the model": form, **description()})
    comm.form_rows(_row_size(strategy, comm.ranks))
    if form == "plain":
        _broadcast(model, comm)
    return Group(comm, wrapper, sharded=shards is not None)


@dataclass(frozen=True)
class GroupReference:
    """A process group in a copy of an optimizer: the same one. No such group can be pickled."""

    group: dist.ProcessGroup

    @staticmethod
    def to(group: dist.ProcessGroup | None) -> GroupReference | None:
        """None for the group of all ranks, which is found again anywhere."""
        return None if group is None or group is dist.group.WORLD else GroupReference(group)

    def __deepcopy__(self, memo: dict[int, Any]) -> GroupReference:
        return self

    def __reduce__(self) -> NoReturn:
        raise RuntimeError(
            "an optimizer with a process_group of its own can't be pickled, because a process "
            "group can't: save optimizer.state_dict(), and load it into an optimizer that is built "
            "with the group"
        )


def _members(group: dist.ProcessGroup) -> list[int]:
    return dist.get_process_group_ranks(group)


def _row_size(strategy: str | int, ranks: int) -> int:
    """How many ranks share out the layers among themselves."""
    if isinstance(strategy, str):
        return ranks if strategy == "owner" else 1
    if ranks % strategy:
        divisors = [k for k in range(1, ranks + 1) if ranks % k == 0]
        raise ValueError(
            f"strategy={strategy} must divide the number of ranks, {ranks}: choose one of "
            f"{', '.join(map(str, divisors))}"
        )
    return strategy


def _broadcast(model: nn.Module, comm: Comm) -> None:
    """Start all ranks from the first one's parameters and buffers, as DDP does."""
    with torch.no_grad():
        tensors = [t.detach() for t in (*model.parameters(), *model.buffers())]
        buffers = [tensor.contiguous() for tensor in tensors]
        handles = [comm.broadcast_to_all(buffer, "model of all layers") for buffer in buffers]
        for tensor, buffer, handle in zip(tensors, buffers, handles, strict=True):
            handle.wait()
            if buffer is not tensor:
                tensor.copy_(buffer)
