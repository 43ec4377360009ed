"""Collectives of our own process groups: named in errors, counted in bytes, never blocking.

R ranks stand in rows of k. A row shares out the layers among its members; the ranks that own the
same layers, one of each row, form a column:

    k = R   one row: each layer has one owner ("owner", least memory)
    k = 1   R rows: everybody owns everything ("all", least latency)
    k       e.g. the accelerators of a host: factors k-fold sharded, updates travel within the host

The groups are not the user's, so that no message can be taken for one of DistributedDataParallel's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from fop._torch import timeout_of


class Operation(NamedTuple):
    """Bytes are those of ring and chain algorithms: so many passes over the ring."""

    name: str
    start: Callable[..., dist.Work | None]
    passes: int


ALL_REDUCE = Operation("all-reduce", dist.all_reduce, 2)
REDUCE = Operation("reduce", dist.reduce, 1)
BROADCAST = Operation("broadcast", dist.broadcast, 1)


class Ring(NamedTuple):
    """A process group and its members; no group where there is nobody else."""

    members: Sequence[int]
    group: dist.ProcessGroup | None


class Comm:
    """The ranks that share a model, and which of them this one is."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.ranks, self.index = dist.get_world_size(group), dist.get_rank(group)
        self.sent: Counter[str] = Counter()  # bytes, by what they were for; the mean over ranks
        self.under_way: list[Handle] = []  # the latest messages, for errors
        self._base = group
        self._all = self._new_ring(range(self.ranks))

    def form_rows(self, row_size: int) -> None:
        """Stand in rows of so many; all ranks must agree on the number."""
        self.row_size, self.rows = row_size, self.ranks // row_size
        self.row, self.column = divmod(self.index, row_size)
        rows = [range(row * row_size, (row + 1) * row_size) for row in range(self.rows)]
        columns = [range(column, self.ranks, row_size) for column in range(row_size)]
        # All ranks make all groups, in one order.
        self._row = self._all if self.rows == 1 else [*map(self._new_ring, rows)][self.row]
        self._column = self._all if row_size == 1 else [*map(self._new_ring, columns)][self.column]

    def _new_ring(self, part: range) -> Ring:
        of_base, group = dist.get_process_group_ranks(self._base), None
        members = [of_base[index] for index in part]
        # Where only a part of the world trains this model, the others can't be asked to join in.
        everybody = len(of_base) == dist.get_world_size()
        if len(part) > 1 and (everybody or self.index in part):
            group = dist.new_group(
                members,
                timeout=timeout_of(self._base),  # torch's default is another
                use_local_synchronization=not everybody,
            )
        return Ring(members, group)

    def sum_of_all(self, tensor: Tensor, what: str) -> Handle:
        """Onto every rank, in place."""
        return self._start(ALL_REDUCE, self._all, tensor, what)

    def reduce_in_row(self, tensor: Tensor, owner: int, what: str) -> Handle:
        """The row's sum onto its owner, in place; elsewhere the tensor is left undefined."""
        return self._start(REDUCE, self._row, tensor, what, owner)

    def sum_of_column(self, tensor: Tensor, what: str) -> Handle:
        return self._start(ALL_REDUCE, self._column, tensor, what)

    def broadcast_in_row(self, tensor: Tensor, owner: int, what: str) -> Handle:
        return self._start(BROADCAST, self._row, tensor, what, owner)

    def broadcast_to_all(self, tensor: Tensor, what: str) -> Handle:
        """From the first rank."""
        return self._start(BROADCAST, self._all, tensor, what, 0)

    def _start(
        self, operation: Operation, ring: Ring, tensor: Tensor, what: str, *root: int
    ) -> Handle:
        message, size = f"{operation.name} of {what}", len(ring.members)
        if ring.group is None:
            return Handle(self, message, None)
        numbytes = operation.passes * tensor.nbytes * (size - 1) / size
        self.sent[what.partition(" of ")[0]] += round(numbytes)
        with self.naming(message):
            ranks = [ring.members[index] for index in root]
            work = operation.start(tensor, *ranks, group=ring.group, async_op=True)
            handle = Handle(self, message, work)
            self.under_way = [*(h for h in self.under_way if not h.completed), handle]
        return handle

    def gather(self, mine: Any, what: str, to: int | None = None) -> list[Any]:
        """The plain objects of all ranks on rank `to`, or on all; an empty list elsewhere."""
        found, here, ring = [mine] * self.ranks, to in (None, self.index), self._all
        if ring.group is not None:
            with self.naming(f"gather of {what}"):
                if to is None:
                    dist.all_gather_object(found, mine, group=ring.group)
                else:
                    target = found if here else None
                    dist.gather_object(mine, target, ring.members[to], group=ring.group)
        return found if here else []

    @contextmanager
    def naming(self, message: str) -> Iterator[None]:
        """Errors of a collective say which rank, operation and layers they are about."""
        try:
            yield
        except RuntimeError as error:
            # A failure ends them all, so which of them came through can't be told any more.
            others = "; ".join(handle.message for handle in self.under_way) or "none"
            raise RuntimeError(
                f"rank {self.index} of {self.ranks}: {message} failed. Messages under way: "
                f"{others}. Another rank has died, hangs, or took a different number of backward "
                "passes or steps; its own output tells why. (The time-out is that of "
                f"init_process_group.) The back end says: {error}"
            ) from error


@dataclass(frozen=True)
class Handle:
    """A message under way."""

    comm: Comm
    message: str
    work: dist.Work | None  # None where there is nobody to send it to

    def wait(self, limit: timedelta | None = None) -> None:
        """Return when the result is there, or, on accelerators, will be for what comes next.

        With a limit, return when it is there, or raise.
        """
        if self.work is not None:
            with self.comm.naming(self.message):
                self.work.wait(*(() if limit is None else (limit,)))

    @property
    def completed(self) -> bool:
        return self.work is None or self.work.is_completed()
