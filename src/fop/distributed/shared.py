"""Several ranks: reports are summed, sums and gradients go to owners, updates come back.

A step's messages, in the order all ranks send them:

    curvature    packed sums of x x^T and g g^T to the owners, when due
    average      p.grad to the owners, unless DistributedDataParallel has averaged it; of FSDP2's
                 averages, the ranks' rows
    difference   H1 - H2 to the owners (FOP)
    totals       counts, health and problems: one small all-reduce
    gradient     all-reduce of p.grad of parameters in no layer, unless averaged
    update       from the owners to their rows, each while the next is computed
    clip         the KL clip's sum and, when curvature was due, what became of it: all-reduce

Under DistributedDataParallel the first three leave during the backward pass that it synchronises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fop.block import Block
from fop.capture import CapturePlan, Recorder
from fop.distributed.base import Gathered, Parts, Report, Request, Totals, Verdict
from fop.distributed.comm import Comm, Handle
from fop.distributed.mail import (
    Arrived,
    Letter,
    copy_or_zero,
    gradient_parcel,
    label_of,
    packed,
    sum_parcel,
    update_parcel,
)
from fop.distributed.outbox import Channel, Outbox
from fop.distributed.packing import Bucket, Parcel, into_buckets
from fop.distributed.placement import Work, cost, place
from fop.distributed.totals import SummedTotals
from fop.linalg import on_host
from fop.scaling import LossScale
from fop.shards import local

# With other ranks, where they may wait elsewhere for this one: much less than usual time-outs.
PATIENCE = timedelta(seconds=120)

KINDS = ("curvature", "average", "difference", "gradient")


class Shared:
    """The exchange of one model's optimizers on all ranks of a process group.

    With a `wrapper`, p.grad is equal on all ranks at step(); without, it is averaged here. Of a
    `sharded` model, each rank has its own rows of the averaged p.grad, and changes its own rows.
    """

    def __init__(
        self,
        comm: Comm,
        wrapper: DistributedDataParallel | None,
        *,
        sharded: bool = False,
    ) -> None:
        self.comm = comm
        self.ranks, self.index = comm.ranks, comm.index
        self._wrapper = wrapper
        self._sharded = sharded
        self._averaged = sharded or wrapper is not None
        self._owners: dict[Block, int] = {}
        self._by_capture: dict[Recorder, Block] = {}
        self._plan: CapturePlan | None = None
        self._loss_scale: LossScale | None = None
        self._outbox: Outbox | None = None
        # What backward passes have sent since the last step, whatever became of their gradients.
        self._sent: Outbox | None = None
        self._during_backward = True
        self._gathered: Arrived | None = None

    # ---- who has what

    def place(self, blocks: Sequence[Block], plan: CapturePlan, interval: int) -> None:
        costs = [cost(_work_of(block), interval) for block in blocks]
        self._owners = dict(zip(blocks, place(costs, self.comm.row_size), strict=True))
        self._by_capture = {block.capture: block for block in blocks}
        self._plan = plan
        if self._wrapper is not None:
            plan.passes.on_commit, plan.passes.on_end = self._layer_complete, self._pass_complete

    def owns(self, block: Block) -> bool:
        return self._owners[block] == self.comm.place

    @property
    def sharded(self) -> bool:
        return self.comm.row_size > 1

    @property
    def has_shards(self) -> bool:
        return self._sharded

    def trained(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        # Another rank may have a gradient where this one has none.
        return [p for p in parameters if p.requires_grad or p.grad is not None]

    # ---- during backward passes

    def _layer_complete(self, capture: Recorder) -> None:
        if self._outbox is not None:
            if self._outbox.closed:
                # A loop that synchronises every micro-batch: from now on, step() sends, and once.
                self._during_backward = False
            self._outbox.complete(self._by_capture[capture])
        elif self._synchronising:
            self._outbox = self._sent = self._new_outbox()
            self._outbox.complete(self._by_capture[capture])

    def _pass_complete(self) -> None:
        if self._outbox is not None:
            self._outbox.close()

    @property
    def _synchronising(self) -> bool:
        wrapper = self._wrapper
        return self._during_backward and wrapper is not None and wrapper.require_backward_grad_sync

    def _new_outbox(self) -> Outbox:
        """Of all trained layers, whether this rank uses them or not: the same on all ranks."""
        assert self._plan is not None
        trained = [block for block in self._owners if self.trained([block.weight])]
        backwards = [block for block in reversed(trained) if not block.capture.disabled]
        channels = []
        due = [block for block in backwards if block.capture.refresh_due]
        if self._plan.curvature and due:
            parcels = [sum_parcel(block, self._owners[block]) for block in due]
            channels.append(Channel("curvature", "curvature sums", parcels, _pack_sums))
        if self._sharded or not self._averaged:
            parcels = [gradient_parcel(b, self._owners[b]) for b in reversed(trained)]
            channels.append(Channel("average", "averages", parcels, _pack_gradients))
        if self._plan.halves != "none":
            parcels = [gradient_parcel(block, self._owners[block]) for block in backwards]
            channels.append(Channel("difference", "differences", parcels, self._pack_difference))
        return Outbox(self.comm, trained, channels)

    def _pack_difference(self, block: Block, places: list[Tensor]) -> None:
        signed = block.capture.difference
        for number, place_ in enumerate(places):
            copy_or_zero(None if signed is None else signed[number], place_)
            if signed is not None and not self._averaged:
                # Each rank may have clipped its own gradient.
                place_.mul_(block.rescaling(self._loss_scale).to(place_))

    # ---- one step

    def total(self, report: Report) -> Totals:
        self._loss_scale = report.loss_scale
        if self._sharded and report.loss_scale is not None:
            raise NotImplementedError(
                "GradScaler is not supported with fully_shard, because each rank would find the "
                "overflows of its own rows only: use bfloat16 (MixedPrecisionPolicy)"
            )
        sent, self._sent = self._sent, None
        if self._outbox is None and not report.gradients:
            self._outbox = sent  # this rank has zeroed its gradients, the others have not
        if self._outbox is None or self._outbox.outdated:
            self._outbox = self._new_outbox()
        self._outbox.close()
        totals = SummedTotals(report, self.comm, presence=not self._averaged, sharded=self._sharded)
        if self._averaged and not report.gradients:
            self._meet(totals)
        if report.problem is not None:
            totals.wait()  # so that the others don't wait for this rank
            raise report.problem
        if on_host(report.healthy):  # elsewhere problems are read on curvature steps
            totals.read()
        return totals

    def _meet(self, totals: SummedTotals) -> None:
        """Wait, without a gradient, for the others to come to step().

        They never do if they wait for this rank in a backward pass that averages gradients.
        """
        try:
            totals.wait(PATIENCE)
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self.index} of {self.ranks} called step() without a gradient, and the "
                f"others have not come to theirs within {PATIENCE.seconds} seconds: they wait for "
                "this rank in their backward pass. Run backward() on every rank before step(); a "
                "rank without data runs the model on an empty batch: (model(x).sum() * "
                "0).backward()"
            ) from error

    def gather(self, request: Request) -> Gathered:
        assert self._outbox is not None
        mail: dict[str, list[Letter]] = {kind: [] for kind in KINDS}
        mail.update(self._outbox.sent)
        known = {p.key for letter in mail["curvature"] for p in letter.bucket.parcels}
        missing = [block for block in reversed(request.with_sums) if block not in known]
        # Layers without curvature that fits them, on a step on which theirs is not due.
        for bucket in into_buckets(sum_parcel(block, self._owners[block]) for block in missing):
            letter = Letter.to_owner(self.comm, bucket, "curvature sums", _pack_sums)
            mail["curvature"].append(letter)
        if not self._averaged:
            parcels = [Parcel(p, 0, (tuple(p.shape),), p.dtype, p.device) for p in request.others]
            mail["gradient"] = [
                Letter.to_all(self.comm, bucket, _pack_gradient) for bucket in into_buckets(parcels)
            ]
        self._outbox = None
        self._gathered = Arrived(
            self.comm, request, mail, averaged=self._averaged, sharded=self._sharded
        )
        return self._gathered

    def recall(self, block: Block) -> Gathered | None:
        return self._gathered if self._gathered is not None and self.owns(block) else None

    def forget(self) -> None:
        self._gathered = self._outbox = None

    def share(
        self, blocks: Sequence[Block], compute: Callable[[Block], Parts]
    ) -> Callable[[], dict[Block, Parts]]:
        def pack(block: Block, places: list[Tensor]) -> None:
            for part, place_ in zip(compute(block), places, strict=True):
                place_.copy_(part)

        under_way: list[tuple[Bucket, Tensor, Handle]] = []
        for bucket in into_buckets(update_parcel(b, self._owners[b]) for b in blocks):
            mine = bucket.owner == self.comm.place
            flat = packed(bucket, pack) if mine else bucket.empty()
            label = label_of("updates", bucket)
            handle = self.comm.broadcast_in_row(flat, bucket.owner, label)
            under_way.append((bucket, flat, handle))

        def updates() -> dict[Block, Parts]:
            found: dict[Any, Parts] = {}
            for bucket, flat, handle in under_way:
                handle.wait()
                found.update(bucket.views(flat))
            return found

        return updates

    def settle(
        self, alignment: Tensor, verdicts: Sequence[Verdict]
    ) -> tuple[Tensor, list[Verdict]]:
        numbers = torch.tensor(
            [0.0, *(float(flag) for verdict in verdicts for flag in verdict)],
            dtype=torch.float64,
            device=alignment.device,
        )
        numbers[0] = alignment / self.comm.rows  # every row has come to the same sum
        self.comm.sum_of_all(numbers, "clip of all layers").wait()
        if not verdicts:
            return numbers[0], []
        flags = [flag > 0 for flag in numbers[1:].tolist()]
        return numbers[0], list(zip(flags[::2], flags[1::2], strict=True))

    # ---- outside of steps

    def sum(self, values: Sequence[float]) -> list[float]:
        numbers = torch.tensor(list(values), dtype=torch.float64, device=self._device())
        self.comm.sum_of_all(numbers, "diagnostics of all layers").wait()
        return [value / self.comm.rows for value in numbers.tolist()]

    def collect(self, mine: Any, to: int | None) -> list[Any] | None:
        # One row has everything.
        return self.collect_shards(mine if self.comm.row == 0 else None, to)

    def collect_shards(self, mine: Any, to: int | None) -> list[Any] | None:
        what = "the optimizer's state"
        self._meet_to_save()
        if to is None:
            return self.comm.gather_from_all(mine, what)
        return self.comm.gather_objects(mine, to, what)

    def _meet_to_save(self) -> None:
        """The first rank may have come alone; the others may wait for it, which often does more."""
        handle = self.comm.sum_of_all(torch.zeros((), device=self._device()), "start of saving")
        try:
            handle.wait(PATIENCE if self.index == 0 else None)
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self.index} of {self.ranks} is to save the optimizer's state, but others "
                f"have not come to do so within {PATIENCE.seconds} seconds: all ranks must call "
                "consolidate_state_dict(), or the trainer's method that saves, because each keeps "
                "a part of the state"
            ) from error

    def _device(self) -> torch.device:
        return next(iter(self._owners)).weight.device if self._owners else torch.device("cpu")


def _work_of(block: Block) -> Work:
    forms = block.capture.forms
    rows, columns = block.shape
    return Work(
        rows=rows,
        columns=columns,
        groups=block.layer.groups,
        diagonal_rows=forms.outputs.diagonal,
        diagonal_columns=forms.inputs.diagonal,
    )


def _pack_sums(block: Block, places: list[Tensor]) -> None:
    statistics = block.capture.statistics
    if not block.capture.has_moments:  # this rank did not use the layer
        for place_ in places:
            place_.zero_()
    else:
        for moment, place_ in zip(statistics.moments, places, strict=False):
            moment.pack(place_)
        if statistics.squares is not None:
            places[2].copy_(statistics.squares)


def _pack_gradients(block: Block, places: list[Tensor]) -> None:
    for part, place_ in zip(block.slices, places, strict=True):
        grad = part.parameter.grad
        copy_or_zero(None if grad is None else part.padded(local(grad)), place_)


def _pack_gradient(parameter: Tensor, places: list[Tensor]) -> None:
    copy_or_zero(parameter.grad, places[0])
