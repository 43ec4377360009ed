"""Several ranks: totals are summed, moments and gradients go to owners, updates come back.

A step's messages, in the order all ranks send them:

    curvature sums  packed sums of x x^T and g g^T to the owners, when due
    averages        p.grad to the owners, unless DistributedDataParallel has averaged it; of FSDP2's
                    averages, the ranks' rows
    differences     H1 - H2 to the owners (FOP)
    totals          counts, finiteness and problems: one small all-reduce
    gradients       all-reduce of p.grad of parameters in no layer, unless averaged
    updates         from the owners to their rows, each while the next is computed
    clip            the step rule's sums and, when curvature was due, what became of it: all-reduce

Under DistributedDataParallel the first three leave during the backward pass that it synchronises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fop.capture import CapturePlan, Recorder, gradient_ratios
from fop.costs import owner_cost
from fop.distributed.batch import AVERAGES, DIFFERENCES, GRADIENTS, MOMENTS, GroupBatch
from fop.distributed.buckets import Item, Quantity, ReduceQueue, Reduction, into_buckets
from fop.distributed.comm import Comm
from fop.distributed.placement import assign_owners
from fop.distributed.ranks import Batch, Contribution, Ranks, Updates
from fop.layer import Layer, Parts
from fop.linalg import on_host
from fop.scaling import LossScale, unscaled
from fop.slices import ParameterSlice

# With other ranks, where they may wait elsewhere for this one: much less than usual time-outs.
PATIENCE = timedelta(seconds=120)


class Group(Ranks):
    """The ranks of a process group that train one model.

    With a `wrapper`, p.grad is equal on all ranks at step(); without, it is averaged here. Of a
    `sharded` model, each rank has its own rows of the averaged p.grad, and changes its own rows.
    """

    def __init__(
        self, comm: Comm, wrapper: DistributedDataParallel | None, *, sharded: bool = False
    ) -> None:
        super().__init__()
        self.comm = comm
        self.size, self.index = comm.ranks, comm.index
        self.partial_curvature, self.partial_rows = comm.row_size > 1, sharded
        self._wrapper = wrapper
        self._averaged = sharded or wrapper is not None
        self._owners: dict[Layer, int] = {}
        self._of_recorder: dict[Recorder, Layer] = {}
        self._plan: CapturePlan | None = None
        self._loss_scale: LossScale | None = None
        self._queue: ReduceQueue | None = None
        # What backward passes have sent since the last step, whatever became of their gradients.
        self._sent: ReduceQueue | None = None
        self._during_backward = True

    # ---- who has what

    def assign(self, layers: Sequence[Layer], plan: CapturePlan, interval: int) -> None:
        costs = [owner_cost(layer.work, interval) for layer in layers]
        self._owners = dict(zip(layers, assign_owners(costs, self.comm.row_size), strict=True))
        self._of_recorder = {layer.recorder: layer for layer in layers}
        self._plan = plan
        if self._wrapper is not None:
            plan.passes.on_commit, plan.passes.on_end = self._layer_complete, self._pass_complete

    def owns(self, layer: Layer) -> bool:
        return self._owners[layer] == self.comm.column

    def trained(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        # Another rank may have a gradient where this one has none.
        return [p for p in parameters if p.requires_grad or p.grad is not None]

    # ---- during backward passes

    def _layer_complete(self, recorder: Recorder) -> None:
        assert self._wrapper is not None
        if self._queue is not None and self._queue.closed:
            # A loop that synchronises every micro-batch: from now on, step() sends, and once.
            self._during_backward = False
        synchronising = self._during_backward and self._wrapper.require_backward_grad_sync
        if self._queue is None and synchronising:
            self._queue = self._sent = self._new_queue()
        if self._queue is not None:
            self._queue.complete(self._of_recorder[recorder])

    def _pass_complete(self) -> None:
        if self._queue is not None:
            self._queue.close()

    def _new_queue(self) -> ReduceQueue:
        """Of all trained layers, whether this rank uses them or not: the same on all ranks."""
        assert self._plan is not None
        trained = [layer for layer in self._owners if self.trained([layer.weight])]
        enabled = [layer for layer in reversed(trained) if not layer.recorder.disabled]
        due = [layer for layer in enabled if layer.recorder.refresh_due]
        quantities = []
        if self._plan.curvature and due:
            quantities.append(Quantity(MOMENTS, self._moments(due), _pack_moments))
        if self.partial_rows or not self._averaged:
            quantities.append(Quantity(AVERAGES, self._items(reversed(trained)), _pack_gradients))
        if self._plan.halves != "none":
            quantities.append(Quantity(DIFFERENCES, self._items(enabled), self._pack_difference))
        return ReduceQueue(self.comm, trained, quantities)

    def _moments(self, layers: Iterable[Layer]) -> list[Item]:
        items = []
        for layer in layers:
            forms, squares = layer.recorder.forms, layer.recorder.square_shapes
            factors = [forms.inputs, forms.outputs] if layer.recorder.factors else []
            shapes = (*(form.message_shape for form in factors), *squares)
            owner, device = self._owners[layer], layer.weight.device
            items.append(Item(layer, owner, shapes, forms.dtype, device))
        return items

    def _items(self, layers: Iterable[Layer], *, float16: bool = True) -> list[Item]:
        """Tensors shaped like the layers' slices; in float32 where float16 can't hold them."""
        items = []
        for layer in layers:
            weight, shapes = layer.weight, tuple(tuple(part.shape) for part in layer.slices)
            narrow = weight.dtype == torch.float16 and not float16
            dtype = torch.float32 if narrow else weight.dtype
            items.append(Item(layer, self._owners[layer], shapes, dtype, weight.device))
        return items

    def _pack_difference(self, layer: Layer, tensors: list[Tensor]) -> None:
        difference = layer.recorder.sample().difference
        _copy_or_zero(difference, tensors)
        if difference is not None and not self._averaged:
            # Each rank may have clipped its own gradient.
            ratios = gradient_ratios([layer.recorder.gradients])
            [ratio] = unscaled([ratios[0]], self._loss_scale)
            torch._foreach_mul_(tensors, ratio.to(tensors[0]))

    # ---- one step

    def batch(self, contribution: Contribution) -> Batch:
        self._loss_scale = contribution.loss_scale
        if self.partial_rows and contribution.loss_scale is not None:
            raise NotImplementedError(
                "GradScaler is not supported with fully_shard, because each rank would find the "
                "overflows of its own rows only: use bfloat16 (MixedPrecisionPolicy)"
            )
        sent, self._sent = self._sent, None
        if self._queue is None and not contribution.gradients:
            self._queue = sent  # this rank has zeroed its gradients, the others have not
        if self._queue is None or self._queue.outdated:
            self._queue = self._new_queue()
        self._queue.close()
        batch = GroupBatch(
            contribution,
            self.comm,
            self._start_reductions,
            averaged=self._averaged,
            sharded=self.partial_rows,
        )
        if self._averaged and not contribution.gradients:
            self._meet(batch)
        if contribution.problem is not None:
            batch.wait()  # so that the others don't wait for this rank
            raise contribution.problem
        if on_host(contribution.finite):  # elsewhere problems are read on curvature steps
            batch.counts()
        return batch

    def _meet(self, batch: GroupBatch) -> None:
        """Wait, without a gradient, for the others to come to step().

        They never do if they wait for this rank in a backward pass that averages gradients.
        """
        try:
            batch.wait(PATIENCE)
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self.index} of {self.size} called step() without a gradient, and the "
                f"others have not come to theirs within {PATIENCE.seconds} seconds: they wait for "
                "this rank in their backward pass. Run backward() on every rank before step(); a "
                "rank without data runs the model on an empty batch: (model(x).sum() * "
                "0).backward()"
            ) from error

    def _start_reductions(
        self, with_moments: Sequence[Layer], others: Sequence[nn.Parameter]
    ) -> dict[str, list[Reduction]]:
        """All that was sent during the backward pass, and what else a step needs."""
        assert self._queue is not None
        started, self._queue = dict(self._queue.started), None
        known = {item.key for r in started.get(MOMENTS, ()) for item in r.bucket.items}
        # Layers without curvature that fits them, on a step on which theirs is not due.
        missing = self._moments(layer for layer in reversed(with_moments) if layer not in known)
        further = [Quantity(MOMENTS, missing, _pack_moments)]
        if not self._averaged:
            items = [Item(p, 0, (tuple(p.shape),), p.dtype, p.device) for p in others]
            further.append(Quantity(GRADIENTS, items, _pack_gradients, to_all=True))
        for quantity in further:
            more = [Reduction.start(self.comm, b, quantity) for b in into_buckets(quantity.items)]
            started[quantity.name] = started.get(quantity.name, []) + more
        return started

    def reset(self) -> None:
        self._queue = None

    def broadcast(
        self, layers: Sequence[Layer], compute: Callable[[Sequence[Layer]], Updates]
    ) -> Callable[[], Updates]:
        under_way = []
        # Updates travel before they are clipped, and float16 could not hold them.
        for bucket in into_buckets(self._items(layers, float16=False)):
            flat = bucket.empty()
            if bucket.owner == self.comm.column:
                views = bucket.views(flat)
                for layer, parts in compute(list(views)).parts.items():
                    _copy_or_zero(parts, views[layer])
            handle = self.comm.broadcast_in_row(flat, bucket.owner, bucket.label("updates"))
            under_way.append((bucket, flat, handle))

        def updates() -> Updates:
            found: dict[Layer, Parts] = {}
            for bucket, flat, handle in under_way:
                handle.wait()
                found.update(bucket.views(flat))
            return Updates(found, [flat for _, flat, _ in under_way], None)

        return updates

    def all_sum(self, values: Tensor, what: str) -> Tensor:
        device = next(iter(self._owners)).weight.device if self._owners else values.device
        # Every row has come to the same numbers.
        numbers = values.to(device, torch.float64) / self.comm.rows
        self.comm.sum_of_all(numbers, f"{what} of all layers").wait()
        return numbers

    def sum_of_ranks(self, values: Tensor) -> Tensor:
        device = next(iter(self._owners)).weight.device if self._owners else values.device
        numbers = values.to(device, torch.float64, copy=True)
        self.comm.sum_of_all(numbers, "step of all examples").wait()
        return numbers

    # ---- outside of steps

    def gather_objects(self, mine: Any, to: int | None, *, once: bool = False) -> list[Any] | None:
        self._meet_to_save()
        mine = None if once and self.comm.row else mine  # one row has everything
        return self.comm.gather(mine, "the optimizer's state", to) or None

    def _meet_to_save(self) -> None:
        """The first rank may have come alone; the others may wait for it, which often does more."""
        device = next(iter(self._owners)).weight.device if self._owners else None
        handle = self.comm.sum_of_all(torch.zeros((), device=device), "start of saving")
        try:
            handle.wait(PATIENCE if self.index == 0 else None)
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self.index} of {self.size} is to save the optimizer's state, but others "
                f"have not come to do so within {PATIENCE.seconds} seconds: all ranks must call "
                "consolidate_state_dict(), or the trainer's method that saves, because each keeps "
                "a part of the state"
            ) from error


def _copy_or_zero(sources: Sequence[Tensor | None] | None, targets: Sequence[Tensor]) -> None:
    for source, target in zip(sources or [None] * len(targets), targets, strict=True):
        if source is None:
            target.zero_()
        else:
            target.copy_(source)


def _pack_moments(layer: Layer, tensors: list[Tensor]) -> None:
    statistics = layer.recorder.sample().statistics
    if statistics.passes == 0:  # this rank did not use the layer
        _copy_or_zero(None, tensors)
        return
    for factor, tensor in zip(statistics.factors, tensors, strict=False):
        factor.pack(tensor)
    if statistics.squares is not None:
        tensors[-1].copy_(statistics.squares)


def _pack_gradients(key: Layer | nn.Parameter, tensors: list[Tensor]) -> None:
    """Of a layer, or of a parameter in none."""
    slices = key.slices if isinstance(key, Layer) else [ParameterSlice(key)]
    grads = [(part, part.parameter.grad) for part in slices]
    _copy_or_zero([None if grad is None else part.padded(grad) for part, grad in grads], tensors)
