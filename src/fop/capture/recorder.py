"""What backward passes leave behind for one layer, as calls and steps ask for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fop.capture.belongs import GradientRecord, Seen, norm_of
from fop.capture.passes import PassRecorder
from fop.capture.statistics import Statistics
from fop.layers import LayerAdapter
from fop.slices import ParameterSlice, is_sharded, local


@dataclass
class Sample:
    """What one layer brings to a step, on this rank."""

    slices: list[ParameterSlice]  # of the weight and, where it is trained, the bias
    shape: tuple[int, int]  # rows and columns of its matrix
    difference: list[Tensor] | None  # H1 - H2 by slices; None where it is not known of `p.grad`
    half_sizes: tuple[int, int]  # examples in the two half-batches that it is about
    statistics: Statistics  # second moments, until they are used up
    wants_moments: bool


class Recorder(PassRecorder):
    """Records one layer. A step uses up the moments; the rest goes when gradients are zeroed."""

    # FSDP2 runs a module with a gathered parameter in the place of the shard.
    unsharded: nn.Parameter | None = None
    on_unsharded: Callable[[nn.Parameter], None] | None = None

    # ---- calls of the module

    def wants_call(self, current: Tensor | None, x: Tensor) -> bool:
        """Whether a call with this weight and input has to be recorded; notes what it was like."""
        empty = x.numel() == 0
        self.seen.empty |= empty
        self.seen.examples |= not empty
        return not empty and self.records(current)

    def records(self, current: Tensor | None) -> bool:
        """Whether a call of the module has to be recorded, given what it has as its weight."""
        if self.sharded:
            return self._records_gathered(current)
        if current is not self.weight:  # torch.func.functional_call puts plain tensors there
            self.seen.replaced = isinstance(current, nn.Parameter)
            return False
        if not self._expecting:
            return False
        if not self.weight.requires_grad:  # passes add to the bias alone, and are not recorded
            record, bias = self.record, self.bias_slice
            if record is not None and record.statistics.difference is not None and bias is not None:
                record.partial = self.seen.foreign = True
        return self.weight.requires_grad

    def _records_gathered(self, current: Tensor | None) -> bool:
        # Before each call FSDP2 puts its own parameter into the module, so that a user's can't be
        # there; functional_call's tensors are no parameters.
        if not isinstance(current, nn.Parameter) or current.shape != self.weight.shape:
            return False
        if not (self._expecting and current.requires_grad) or is_sharded(current):
            return False
        if current is not self.unsharded:
            if current.device.type != self.weight.device.type:
                raise NotImplementedError(
                    f"a sharded parameter of shape {tuple(self.weight.shape)} is kept on "
                    f"{self.weight.device} and used on {current.device}: CPUOffloadPolicy is not "
                    "supported, leave offload_policy out of fully_shard"
                )
            self.unsharded = current
            if self.on_unsharded is not None:
                self.on_unsharded(current)
        return True

    @property
    def in_graph(self) -> nn.Parameter:
        """The weight that the model's calls have computed with."""
        return self.weight if self.unsharded is None else self.unsharded

    # ---- what a step uses

    @property
    def bias(self) -> nn.Parameter | None:
        bias = self.bias_slice
        return None if bias is None else bias.parameter

    @property
    def all_parameters(self) -> list[nn.Parameter]:
        """The weight and the bias, trained or not."""
        bias = self._bias_slice
        return [self.weight] if bias is None else [self.weight, bias.parameter]

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """With a trained bias and with a frozen one."""
        return self._shapes[::-1] if self._bias_slice is not None else [self.shape]

    @property
    def square_shapes(self) -> list[tuple[int, ...]]:
        """Of the sum of squares; none if it is not wanted."""
        return [] if self.present_basis is None else [(self.adapter.groups, *self.shape)]

    @property
    def record(self) -> GradientRecord | None:
        """What belongs to `p.grad`; while a pass is running, what it has added to so far."""
        record = self._found()
        if record is None and self._latest is not None and self._latest.running:
            return self._latest  # DistributedDataParallel puts views of its buckets there
        return record

    @property
    def statistics(self) -> Statistics:
        """All that belongs to `p.grad`; empty where nothing does."""
        record = self.record
        return Statistics() if record is None else record.statistics

    @property
    def has_moments(self) -> bool:
        return self.statistics.passes > 0

    def drop_moments(self) -> None:
        """A step has used them up."""
        record = self.record
        if record is not None:
            record.statistics = record.statistics.without_moments()

    def sample(self) -> Sample:
        """All that belongs to `p.grad`, as a step takes it."""
        record, bias = self.record, self.bias_slice
        found = Sample(
            slices=[self.weight_slice] if bias is None else [self.weight_slice, bias],
            shape=self._shapes[bias is not None],
            difference=None,
            half_sizes=(0, 0),
            statistics=Statistics() if record is None else record.statistics,
            wants_moments=self.wants_moments and not self.disabled,
        )
        if record is not None and not record.partial:
            found.half_sizes = record.statistics.first, record.statistics.second
            parts = record.statistics.difference
            if parts is not None:
                parts = parts[: len(found.slices)]
                missing = found.slices[len(parts) :]  # the bias was frozen so far
                found.difference = parts + [parts[0].new_zeros(part.shape) for part in missing]
        return found

    @property
    def difference(self) -> list[Tensor] | None:
        return self.sample().difference

    @property
    def half_sizes(self) -> tuple[int, int]:
        return self.sample().half_sizes

    # ---- what others do to p.grad

    def gradient_norms(self) -> tuple[Tensor, Tensor]:
        """Of `p.grad`, or this rank's rows of it: as its last backward left it, and as it is."""
        grad, record = self.weight.grad, self.record
        if grad is None or record is None or record.norm is None:
            nothing = torch.zeros((), device=self.weight.device)
            return nothing, nothing
        return record.norm, norm_of(local(grad))

    def gradient_ratio(self) -> Tensor:
        """By how much `p.grad` was rescaled since its last backward: clipped, or unscaled.

        Measured, because not all who write to gradients leave a mark: GradScaler.unscale_ does not.
        """
        grad, record = self.weight.grad, self.record
        if grad is None or record is None or record.norm is None:
            return torch.ones((), device=self.weight.device)
        return record.ratio(grad)

    def gradient_touched(self) -> bool:
        """Whether anybody but GradScaler.unscale_ has written to `p.grad` since its backward."""
        grad, record = self.weight.grad, self.record
        return grad is not None and record is not None and not record.unchanged(grad)

    def reset(self) -> None:
        """Forget what belonged to `p.grad`, which is gone or zero from now on."""
        self._running = self._latest = self._unreduced = self._unaccounted = None
        self.seen.with_bias = None
        grad = self.weight.grad
        self._known = [known for known in self._known if known.may_return(grad)]
        if grad is not None:
            self._keep(self._new())

    def forget(self) -> None:
        """Forget everything, also of gradients that live on."""
        self.reset()
        self._known = []

    # ---- between passes

    def use(self, adapter: LayerAdapter) -> None:
        """Go on with an adapter of changed geometry."""
        before = self.shape
        self._set_adapter(adapter)
        if self.shape != before:
            self.drop_moments()

    def disable(self, reason: str) -> None:
        """Leave the layer to autograd from now on. The engine makes that known, and ranks agree."""
        self.unsupported = reason
        self.forget()

    def take_unaccounted(self) -> Tensor | None:
        share, self._unaccounted = self._unaccounted, None
        return share

    def begin_step(self) -> None:
        """The last step is done: what follows is for the next one."""
        self.seen = Seen()

    def meet_gradient(self) -> None:
        """Before a step: drop what does not belong to the `p.grad` that the step finds."""
        record, latest = self.record, self._latest
        if self.weight.grad is None:
            return
        if record is None or record.running:
            # Without a call here, DistributedDataParallel may have brought it from other ranks.
            self.seen.foreign |= self._expecting and self.seen.examples and self.mismatch is None
            dropped, record = record, self._new(partial=True)
            # Instead of being changed in place, a gradient may have been replaced by what it was
            # to become, so the moments are its own. Not if there are several it may come from.
            replaced = dropped is None and self.seen.gradients == 1
            if replaced and latest is not None and not latest.running:
                record.statistics = latest.statistics.only_moments()
            self._keep(record)
        record.follow(self.weight)


def gradient_ratios(recorders: Sequence[Recorder]) -> Tensor:
    """`gradient_ratio` of several layers, [L], in few launches."""
    known = [
        (record.norm, recorder.weight.grad)
        for recorder in recorders
        if (record := recorder.record) is not None
        and record.norm is not None
        and recorder.weight.grad is not None
    ]
    if len(recorders) == 1 or len(known) < len(recorders):
        return torch.stack([recorder.gradient_ratio() for recorder in recorders])
    before = torch.stack([norm for norm, _ in known])
    now = torch.stack(torch._foreach_norm([grad for _, grad in known], 2, dtype=before.dtype))
    return torch.where(before > 0, now / before, 1.0)
