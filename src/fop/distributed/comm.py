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
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from fop._torch import timeout_of


class Handle(Protocol):
    def wait(self, limit: timedelta | None = None) -> None:
        """Return when the result is there, or, on accelerators, will be for what comes next.

        With a limit, return when it is there, or raise.
        """
        ...


class _Done:
    def wait(self, limit: timedelta | None = None) -> None:
        pass


class Comm:
    """The ranks that share a model, and this one's place among them."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        members = dist.get_process_group_ranks(group)
        self.ranks, self.index = len(members), dist.get_rank(group)
        self.sent: Counter[str] = Counter()  # bytes, by what they were for
        self.under_way: list[_Pending] = []  # the latest messages, for errors
        self._base = group
        self._all = _Ring(group, range(self.ranks), self)
        self.form_rows(self.ranks)

    def form_rows(self, row_size: int) -> None:
        """Stand in rows of so many; all ranks must agree on the number."""
        self.row_size, self.rows = row_size, self.ranks // row_size
        self.row, self.place = divmod(self.index, row_size)
        rows = [range(r * row_size, (r + 1) * row_size) for r in range(self.rows)]
        columns = [range(place, self.ranks, row_size) for place in range(row_size)]
        self._row = self._ring(rows)
        self._column = self._ring(columns)

    def _ring(self, parts: Sequence[range]) -> _Ring:
        mine = None
        for part in parts:  # all ranks make all groups, in one order
            if len(part) == self.ranks:
                return self._all
            ring = _Ring(self._base, part, self)
            mine = ring if self.index in part else mine
        assert mine is not None
        return mine

    def sum_of_all(self, tensor: Tensor, what: str) -> Handle:
        """Onto every rank, in place."""
        return self._all.all_reduce(tensor, what)

    def reduce_in_row(self, tensor: Tensor, owner: int, what: str) -> Handle:
        """The row's sum onto its owner, in place; elsewhere the tensor is left undefined."""
        return self._row.reduce(tensor, owner, what)

    def sum_of_column(self, tensor: Tensor, what: str) -> Handle:
        return self._column.all_reduce(tensor, what)

    def broadcast_in_row(self, tensor: Tensor, owner: int, what: str) -> Handle:
        return self._row.broadcast(tensor, owner, what)

    def broadcast_to_all(self, tensor: Tensor, what: str) -> Handle:
        """From the first rank."""
        return self._all.broadcast(tensor, 0, what)

    def gather_from_all(self, mine: Any, what: str) -> list[Any]:
        """The plain objects of all ranks, on every rank."""
        return self._all.all_gather_objects(mine, what)

    def gather_objects(self, mine: Any, to: int, what: str) -> list[Any] | None:
        """The plain objects of all ranks on rank `to`; None elsewhere."""
        return self._all.gather_objects(mine, to, what)


class _Ring:
    """One process group; bytes are those of ring and chain algorithms, the mean over its ranks."""

    def __init__(self, base: dist.ProcessGroup, part: range, comm: Comm) -> None:
        members = dist.get_process_group_ranks(base)
        self._members = [members[index] for index in part]
        self._comm = comm
        # Where only a part of the world trains this model, the others can't be asked to join in.
        everybody = len(members) == dist.get_world_size()
        self._group = None
        if len(part) > 1 and (everybody or comm.index in part):
            self._group = dist.new_group(
                self._members,
                timeout=timeout_of(base),  # torch's default is another
                use_local_synchronization=not everybody,
            )

    def all_reduce(self, tensor: Tensor, what: str) -> Handle:
        if self._group is None:
            return _Done()
        self._count(what, tensor, 2)
        with _Named(self._comm, "all-reduce", what):
            work = dist.all_reduce(tensor, group=self._group, async_op=True)
            return self._handle(work, "all-reduce", what)

    def reduce(self, tensor: Tensor, place: int, what: str) -> Handle:
        if self._group is None:
            return _Done()
        self._count(what, tensor, 1)
        with _Named(self._comm, "reduce", what):
            work = dist.reduce(tensor, self._members[place], group=self._group, async_op=True)
            return self._handle(work, "reduce", what)

    def broadcast(self, tensor: Tensor, place: int, what: str) -> Handle:
        if self._group is None:
            return _Done()
        self._count(what, tensor, 1)
        with _Named(self._comm, "broadcast", what):
            work = dist.broadcast(tensor, self._members[place], group=self._group, async_op=True)
            return self._handle(work, "broadcast", what)

    def all_gather_objects(self, mine: Any, what: str) -> list[Any]:
        received: list[Any] = [mine] * len(self._members)
        if self._group is not None:
            with _Named(self._comm, "gather", what):
                dist.all_gather_object(received, mine, group=self._group)
        return received

    def gather_objects(self, mine: Any, to: int, what: str) -> list[Any] | None:
        here = to == self._comm.index
        received: list[Any] = [mine] * len(self._members)
        if self._group is not None:
            with _Named(self._comm, "gather", what):
                target = received if here else None
                dist.gather_object(mine, target, self._members[to], group=self._group)
        return received if here else None

    def _handle(self, work: dist.Work | None, operation: str, what: str) -> Handle:
        if work is None:
            return _Done()
        pending = _Pending(work, _Named(self._comm, operation, what))
        comm = self._comm
        comm.under_way = [*(p for p in comm.under_way if not p.completed()), pending]
        return pending

    def _count(self, what: str, tensor: Tensor, passes: int) -> None:
        size = len(self._members)
        numbytes = passes * tensor.numel() * tensor.element_size() * (size - 1) / size
        self._comm.sent[what.partition(" of ")[0]] += round(numbytes)


class _Named:
    """Says which rank, operation and layers an error of a collective is about."""

    def __init__(self, comm: Comm, operation: str, what: str) -> None:
        self._comm, self._operation, self._what = comm, operation, what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError):
            # A failure ends them all, so which of them came through can't be told any more.
            others = "; ".join(map(str, self._comm.under_way)) or "none"
            raise RuntimeError(
                f"rank {self._comm.index} of {self._comm.ranks}: {self} failed. Messages under "
                f"way: {others}. Another rank has died, hangs, or took a different number of "
                "backward passes or steps; its own output tells why. (The time-out is that of "
                f"init_process_group.) The back end says: {error}"
            ) from error

    def __str__(self) -> str:
        return f"{self._operation} of {self._what}"


class _Pending:
    def __init__(self, work: dist.Work, named: _Named) -> None:
        self._work, self._named = work, named

    def wait(self, limit: timedelta | None = None) -> None:
        with self._named:
            if limit is None:
                self._work.wait()
            else:
                self._work.wait(limit)

    def completed(self) -> bool:
        return self._work.is_completed()

    def __str__(self) -> str:
        return str(self._named)
