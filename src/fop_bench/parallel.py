"""Training on several ranks: the process group that torchrun asks for, and what ranks agree on.

`--batch-size` stays that of the whole batch. Each rank takes a contiguous share of it, and its
loss is weighted so that the mean over ranks that DistributedDataParallel takes of the gradients
is the mean over examples exactly, however uneven the shares are:

    loss_r = (mean loss of rank r's share) * n_r * R / N

Alone, all of this is the identity: there is one loop for any number of ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parallel import DistributedDataParallel

from fop_bench.data.splits import Share
from fop_bench.methods import FOP_METHODS

Value = TypeVar("Value")


class StoppedError(RuntimeError):
    """The first rank met an error and has said so; this one stops with it."""


@dataclass(frozen=True)
class Ranks:
    """This process among those that train one model together."""

    index: int = 0
    count: int = 1

    @property
    def first(self) -> bool:
        """Whether this is the one rank that writes and shows anything."""
        return self.index == 0

    @property
    def alone(self) -> bool:
        return self.count == 1

    @property
    def share(self) -> Share:
        """This rank's part of every batch."""
        return Share(self.index, self.count)

    def wrap(self, model: nn.Module) -> nn.Module:
        return model if self.alone else DistributedDataParallel(model)

    def without_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """For every backward pass of a step but the last."""
        if isinstance(model, DistributedDataParallel):
            return model.no_sync()
        return nullcontext()

    def total(self, values: Tensor) -> Tensor:
        """Sums over all ranks, the same on each."""
        if not self.alone:
            values = values.clone()
            dist.all_reduce(values)
        return values

    def agreed(self, decide: Callable[[], Value]) -> Value:
        """What the first rank finds, on every rank; where it fails, all fail."""
        if self.alone:
            return decide()
        found: list[Any] = [None, None]
        if self.first:
            try:
                found = [decide(), None]
            except Exception as error:
                dist.broadcast_object_list([None, f"{type(error).__name__}: {error}"])
                raise
        dist.broadcast_object_list(found)
        if found[1] is not None:
            raise StoppedError(f"rank 0 stopped with {found[1]}")
        value: Value = found[0]
        return value

    def of_first(self, value: Value) -> Value:
        """The first rank's value, on every rank."""
        return self.agreed(lambda: value)

    def in_turn(self, work: Callable[[], Value]) -> Value:
        """Once by the first rank of each host and then by the others, who find what it left."""
        if self.alone:
            return work()
        first_here = int(os.environ.get("LOCAL_RANK", self.index)) == 0
        if first_here:
            value = work()
        dist.barrier()
        return value if first_here else work()

    def gathered(self, value: Value) -> list[Value]:
        """Everybody's value on the first rank, in order; nothing on the others."""
        if self.alone:
            return [value]
        received: list[Any] | None = [None] * self.count if self.first else None
        dist.gather_object(value, received)
        return received or []


def launched_ranks() -> int:
    """How many processes were launched together, by torchrun's environment; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


@contextmanager
def process_group(device: torch.device) -> Iterator[tuple[Ranks, torch.device]]:
    """The ranks that torchrun launched and this one's device; no group for a single process.

    gloo on CPUs; NCCL on CUDA, where a rank drives the device of its place on the host.
    """
    if launched_ranks() == 1:
        yield Ranks(), device
        return
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    yield Ranks(dist.get_rank(), dist.get_world_size()), device
    # Not after an error: others may still wait in a collective, and torchrun ends them.
    dist.destroy_process_group()


def depends_on_ranks(method: str, model: nn.Module) -> str | None:
    """Why the number of ranks decides a run's numbers beyond round-off; None where it does not."""
    if method in FOP_METHODS:
        return "FOP takes its two gradients from even and odd ranks"
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm):
            return f"each rank has its own batch statistics (batch norm {name!r})"
        if isinstance(module, _DropoutNd) and module.p > 0:
            return f"each rank draws its own random numbers (dropout {name!r})"
    return None
