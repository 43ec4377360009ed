"""What backward passes leave behind for one layer, and when.

What is recorded counts only once it has reached `p.grad`: it is held back until the weight's
gradient is accumulated. So gradients that a user takes for another purpose (`torch.autograd.grad`
of an input, say) leave no trace. From then on it belongs to that `p.grad`, see belongs.py.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fop._torch import current_pass, version_of
from fop.capture.belongs import Belonging, GradientRecord, Seen, norm_of
from fop.capture.moments import MomentForms, PassMoments
from fop.capture.plan import CapturePlan
from fop.capture.squares import Eigenbasis, GradientSquares
from fop.capture.statistics import Statistics, factor_dtype
from fop.layers import Layer
from fop.linalg import Form
from fop.shards import is_sharded
from fop.slices import ParameterSlice


class Recorder(Belonging):
    """Records one layer. A step uses up the moments; the rest goes when gradients are zeroed."""

    def __init__(
        self,
        adapter: Layer,
        weight: ParameterSlice,
        bias: ParameterSlice | None,
        plan: CapturePlan,
    ) -> None:
        super().__init__(weight, bias, plan)
        self.adapter = adapter
        # FSDP2 runs a module with a gathered parameter in the place of the shard.
        self.unsharded: nn.Parameter | None = None
        self.on_unsharded: Callable[[nn.Parameter], None] | None = None
        self.refresh_due = True  # on the next step; the engine decides
        self.curvature_shape: tuple[int, int] | None = None  # of the layer's metric, if any
        self.basis: Eigenbasis | None = None  # where squares of gradients are wanted (EKFAC)
        self.disabled = False  # the fallback optimizer trains the layer, on all ranks
        self.unsupported: str | None = None  # why this rank left the layer to autograd
        # Rows of a call that belong to no single example, and examples of its batch. Ranks agree on
        # what becomes of the layer when they next read counts.
        self.mismatch: tuple[int, int] | None = None
        self._unaccounted: Tensor | None = None  # share of p.grad that no call accounts for
        # A user's compiled training step is not to be compiled into this.
        self._record_moments = torch.compiler.disable(_record_moments)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the layer's matrix, as trained at present."""
        return self._shape(self.bias_slice is not None)

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """With a trained bias and with a frozen one."""
        has_bias = self._bias_slice is not None
        return [self._shape(True), self._shape(False)] if has_bias else [self.shape]

    def _shape(self, has_bias: bool) -> tuple[int, int]:
        return self.adapter.matrix_shape(self.weight_slice, has_bias)

    @property
    def forms(self) -> MomentForms:
        """What the moments look like; also without any."""
        widest, adapter = self.plan.max_factor_size, self.adapter
        rows, columns = self.shape
        return MomentForms(
            dtype=factor_dtype(self.weight.dtype),
            has_bias=self.bias_slice is not None and adapter.bias_column,
            inputs=Form(adapter.groups, columns, diagonal=adapter.indexed or columns > widest),
            outputs=Form(adapter.groups, rows, diagonal=rows > widest),
        )

    @property
    def square_shapes(self) -> list[tuple[int, ...]]:
        """Of the sum of squares; none if it is not wanted."""
        wanted = self.basis is not None and self.curvature_shape == self.shape
        return [(self.adapter.groups, *self.shape)] if wanted else []

    # ---- what is wanted

    @property
    def wants_moments(self) -> bool:
        """When curvature is due, or the layer has none that fits it (yet, or after unfreezing)."""
        return self.plan.curvature and (self.refresh_due or self.curvature_shape != self.shape)

    @property
    def inactive(self) -> bool:
        """Whether this rank records nothing any more; autograd alone computes the gradient."""
        return self.disabled or self.unsupported is not None

    @property
    def _expecting(self) -> bool:
        return not self.inactive and (self.plan.halves != "none" or self.wants_moments)

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

    # ---- between passes

    def use(self, adapter: Layer) -> None:
        """Go on with an adapter of changed geometry."""
        before = self.shape
        self.adapter = adapter
        if self.shape != before:
            self.drop_moments()

    def disable(self, reason: str) -> None:
        """Leave the layer to autograd from now on. The engine makes that known, and ranks agree."""
        self.unsupported = reason
        self.forget()

    def take_unaccounted(self) -> Tensor | None:
        share, self._unaccounted = self._unaccounted, None
        return share

    def reset(self) -> None:
        super().reset()
        self._unaccounted = None

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

    # ---- called by the hooks, during backward

    def first_half(self, n: int) -> int:
        """How many of n examples belong to half-batch 1; the odd one goes where fewer are."""
        known = self._current().record.statistics
        return n // 2 + (n % 2 if known.first <= known.second else 0)

    def record_difference(self, gradients: list[Tensor], first: int, second: int) -> None:
        """Keep a call's part of H1 - H2 (or, for micro-batches, of their one half-batch)."""
        halves = self._current().halves
        halves += Statistics(gradients)
        # All calls of a pass are about the same examples.
        halves.first, halves.second = max(halves.first, first), max(halves.second, second)

    def record_total(self, gradient: Tensor) -> None:
        """Keep what a call gives the weight's gradient, to compare it with what arrives there."""
        running = self._current()
        if running.fresh:
            known = running.total
            running.total = gradient.detach() if known is None else known + gradient.detach()

    def record_moments(self, adapter: Layer, x: Tensor, grad: Tensor) -> None:
        """Keep a call's second moments; of an extra pass's inputs, once."""
        self._record_moments(self, adapter, x, grad)

    def close_extra_pass(self) -> None:
        if self._running is not None and self._running.moments is not None:
            self._running.moments.close_outputs()

    def commit(self, weight: Tensor) -> None:
        """Called when the weight's gradient has been accumulated into `p.grad`."""
        running, self._running = self._running, None
        if running is None or running.task != current_pass():
            self._commit_unknown()
            return
        assert weight.grad is not None
        record = running.record
        if record.passes == 0:
            self.seen.gradients += 1
        self.seen.foreign |= record.partial and self.plan.halves != "none"
        if running.total is not None:
            own = self.weight_slice.of(weight.grad.detach())
            strange = norm_of(own - running.total)
            self._unaccounted = strange / (norm_of(running.total) + strange)
        record.passes += 1
        if running.rescale is not None and record.statistics.difference is not None:
            torch._foreach_mul_(record.statistics.difference, running.rescale)
        record.statistics += self._of_half_batches(record, running.halves)
        if running.moments is not None and not record.incomplete:
            record.statistics += running.moments.finish()
        record.running = True
        self._latest = record
        if not self.sharded:
            self._keep(record)
        self.plan.passes.note(self, running.task)

    def _of_half_batches(self, record: GradientRecord, halves: Statistics) -> Statistics:
        """The pass's part of H1 - H2: all of it may belong to half-batch 2."""
        if halves.difference is None:
            return halves
        alternate = self.plan.halves == "microbatches" and record.passes % 2 == 0
        if alternate or (self.plan.halves == "ranks" and self.plan.odd_rank):
            torch._foreach_neg_(halves.difference)
            halves.first, halves.second = halves.second, halves.first
        if self._bias_slice is not None and not self._bias_slice.parameter.requires_grad:
            del halves.difference[1:]
        return halves

    def _commit_unknown(self) -> None:
        """A gradient without a recorded call: none was made, or none needed."""
        if self.inactive or self.mismatch is not None:
            return  # autograd computes the gradient
        empty = self.seen.empty
        self.seen.without_forward |= self._expecting and not empty
        if self.sharded:
            return
        grad, record = self.weight.grad, self._found()
        assert grad is not None
        if record is not None and empty:
            return  # nothing was added
        # Torch has added to it once, since it was seen last.
        if record is None or version_of(grad) - record.version > 1:
            record = self._new()
            self._latch_bias()
        record.partial |= not empty
        self._keep(record)


def _record_moments(recorder: Recorder, adapter: Layer, x: Tensor, grad: Tensor) -> None:
    running, plan = recorder._current(), recorder.plan
    if running.moments is None:
        running.moments = _new_moments(recorder)
    with_inputs = plan.extra_pass_of is None or plan.extra_pass_first
    running.moments.add(adapter, x, grad, with_inputs=with_inputs)


def _new_moments(recorder: Recorder) -> PassMoments:
    forms, squares = recorder.forms, None
    if recorder.basis is not None and recorder.curvature_shape == recorder.shape:
        squares = GradientSquares(
            recorder.basis, forms.inputs.width, forms.dtype, has_bias=forms.has_bias
        )
    return PassMoments(forms, recorder.plan.sharing, squares)
