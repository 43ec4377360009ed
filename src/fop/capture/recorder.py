"""How one layer is recorded: its calls, the backward passes through them, what a step takes.

The weight gradient of a call is computed as two half-batch products, which together cost what the
one full product costs: their sum H1 + H2 is the ordinary gradient, their difference stays here.
It is held back until the weight's gradient is accumulated: so gradients that a user takes for
another purpose (`torch.autograd.grad` of an input, say) leave nothing behind. From then on it
belongs to that `p.grad`, see belongs.py.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fop._torch import current_pass, version_of
from fop.capture.belongs import GradientRecords, RunningPass, Seen
from fop.capture.plan import CapturePlan
from fop.capture.squares import Eigenbasis
from fop.capture.statistics import MomentForms, PassMoments, Sample, Statistics, factor_dtype
from fop.layers import LayerAdapter
from fop.linalg import Form
from fop.slices import ParameterSlice, is_sharded


class Recorder:
    """Records one layer. A step uses up the moments; the rest goes when gradients are zeroed."""

    def __init__(
        self,
        adapter: LayerAdapter,
        weight: ParameterSlice,
        bias: ParameterSlice | None,
        plan: CapturePlan,
    ) -> None:
        self.plan = plan
        self.weight_slice, self._bias_slice = weight, bias
        self.weight = weight.parameter
        self.all_parameters = [part.parameter for part in (weight, bias) if part is not None]
        self.sharded = weight.sharded
        self.refresh_due = True  # on the next step; the engine decides
        self.curvature_shape: tuple[int, int] | None = None  # of the layer's metric, if any
        # What the layer's curvature requires: second moments, and squares of gradients in a basis.
        self.factors = True
        self.basis: Eigenbasis | None = None
        self.disabled = False  # the fallback optimizer trains the layer, on all ranks
        self.unsupported: str | None = None  # why this rank left the layer to autograd
        # Rows of a call that belong to no single example, and examples of its batch. Ranks agree on
        # what becomes of the layer when they next read counts.
        self.mismatch: tuple[int, int] | None = None
        self.seen = Seen()
        self.gradients = GradientRecords(weight, bias)
        self._running: RunningPass | None = None
        self._unaccounted: Tensor | None = None  # share of p.grad that no call accounts for
        # What calls compute with: FSDP2 puts a gathered parameter in the place of the shard.
        self.in_graph = self.weight
        self.on_gathered: Callable[[nn.Parameter], None] | None = None
        # A user's compiled training step is not to be compiled into this.
        self._record_moments = torch.compiler.disable(_record_moments)
        self._shapes: list[tuple[int, int]] = []  # of the matrix, without and with a bias
        self.use(adapter)

    # ---- the layer as it is trained at present

    def use(self, adapter: LayerAdapter) -> None:
        """Go on with an adapter, which may be of changed geometry."""
        before, like, self.adapter = self._shapes, self.weight_slice.like, adapter
        self._shapes = [adapter.matrix_shape(like, has_bias) for has_bias in (False, True)]
        if before != self._shapes:
            self.drop_moments()

    @property
    def bias_slice(self) -> ParameterSlice | None:
        """The bias, where it is trained.

        As torch's optimizers do, a step takes the gradients that are there: one that has come with
        the bias stays so, also if the bias is frozen meanwhile.
        """
        bias, latched = self._bias_slice, self.seen.with_bias
        if bias is None:
            return None
        if latched is None or (self.weight.grad is None and self.gradients.unreduced is None):
            latched = bias.parameter.requires_grad
        return bias if latched else None

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the layer's matrix."""
        return self._shapes[self.bias_slice is not None]

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """With a trained bias and with a frozen one."""
        return self._shapes[::-1] if self._bias_slice is not None else [self.shape]

    @property
    def forms(self) -> MomentForms:
        """What the moments look like; also without any."""
        widest, adapter, has_bias = self.plan.max_factor_size, self.adapter, self.bias_slice
        rows, columns = self._shapes[has_bias is not None]
        return MomentForms(
            dtype=factor_dtype(self.weight.dtype),
            has_bias=has_bias is not None and adapter.homogeneous_bias,
            inputs=Form(adapter.groups, columns, diagonal=adapter.one_hot or columns > widest),
            outputs=Form(adapter.groups, rows, diagonal=rows > widest),
        )

    @property
    def present_basis(self) -> Eigenbasis | None:
        """The basis, where it fits the layer."""
        basis = self.basis
        fits = basis is not None and (basis.axes or self.curvature_shape == self.shape)
        return basis if fits else None

    @property
    def square_shapes(self) -> list[tuple[int, ...]]:
        """Of the sum of squares; none if it is not wanted."""
        return [] if self.present_basis is None else [(self.adapter.groups, *self.shape)]

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

    def disable(self, reason: str) -> None:
        """Leave the layer to autograd from now on. The engine makes that known, and ranks agree."""
        self.unsupported = reason
        self.forget()

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
            record, bias = self.gradients.present, self.bias_slice
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
        if current is not self.in_graph:
            if current.device.type != self.weight.device.type:
                raise NotImplementedError(
                    f"a sharded parameter of shape {tuple(self.weight.shape)} is kept on "
                    f"{self.weight.device} and used on {current.device}: CPUOffloadPolicy is not "
                    "supported, leave offload_policy out of fully_shard"
                )
            self.in_graph = current
            if self.on_gathered is not None:
                self.on_gathered(current)
        return True

    # ---- backward passes

    def running_pass(self) -> RunningPass:
        """Of the layer, begun by its first call that is differentiated."""
        task = current_pass() if self.plan.extra_pass_of is None else self.plan.extra_pass_of
        running = self._running
        if running is None or running.task != task:
            may_read = self.plan.halves != "none" and not self.sharded
            self._running = running = self.gradients.begin_pass(task, may_read=may_read)
            if self.seen.with_bias is None or running.record.passes == 0:
                self._latch_bias()
            if running.record.passes:
                running.record.follow(self.weight)
        return running

    def _latch_bias(self) -> None:
        bias = self._bias_slice
        self.seen.with_bias = bias is not None and bias.parameter.requires_grad

    def record_difference(self, difference: list[Tensor], first: int, second: int) -> None:
        """Keep a call's part of H1 - H2 (or, for micro-batches, of their one half-batch)."""
        known = self.running_pass().difference
        # A bias that belongs to this module alone is not part of a tied layer.
        known += Statistics(difference[: 1 if self.bias_slice is None else 2])
        # All calls of a pass are about the same examples.
        known.first, known.second = max(known.first, first), max(known.second, second)

    def record_total(self, gradient: Tensor) -> None:
        """Keep what a call gives the weight's gradient, to compare it with what arrives there."""
        running, gradient = self.running_pass(), gradient.detach()
        if running.fresh:
            running.total = gradient if running.total is None else running.total + gradient

    def record_moments(self, adapter: LayerAdapter, x: Tensor, grad: Tensor) -> None:
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
            self.gradients.begun += 1
        self.seen.foreign |= record.partial and self.plan.halves != "none"
        if running.total is not None:
            own = self.weight_slice.of(weight.grad.detach())
            pair = [own - running.total, running.total]
            strange, known = torch._foreach_norm(pair, 2, dtype=factor_dtype(own.dtype))
            self._unaccounted = strange / (known + strange)
        record.passes += 1
        if running.rescale is not None and record.statistics.difference is not None:
            torch._foreach_mul_(record.statistics.difference, running.rescale)
        found = running.difference
        if found.difference is not None:
            alternate = self.plan.halves == "microbatches" and record.passes % 2 == 0
            if alternate or (self.plan.halves == "ranks" and self.plan.odd_rank):
                torch._foreach_neg_(found.difference)  # all of it belongs to half-batch 2
                found.first, found.second = found.second, found.first
            if self._bias_slice is not None and not self._bias_slice.parameter.requires_grad:
                del found.difference[1:]
        record.statistics += found
        if running.moments is not None and not record.incomplete:
            record.statistics += running.moments.finish()
        record.running = True
        self.gradients.latest = record
        if not self.sharded:
            self.gradients.keep(record)
        self.plan.passes.note(self, running.task)

    def _commit_unknown(self) -> None:
        """A gradient without a recorded call: none was made, or none needed."""
        if self.inactive or self.mismatch is not None:
            return  # autograd computes the gradient
        empty = self.seen.empty
        self.seen.without_forward |= self._expecting and not empty
        grad, record = self.weight.grad, self.gradients.found()
        if self.sharded or (record is not None and empty):
            return  # in the latter case nothing was added
        assert grad is not None
        # Torch has added to it once, since it was seen last.
        if record is None or version_of(grad) - record.version > 1:
            record = self.gradients.new()
            self._latch_bias()
        record.partial |= not empty
        self.gradients.keep(record)

    # ---- steps

    def meet_gradient(self) -> None:
        """Before a step: drop what does not belong to the `p.grad` that the step finds."""
        record, latest = self.gradients.present, self.gradients.latest
        if self.weight.grad is None:
            return
        if record is None or record.running:
            # Without a call here, DistributedDataParallel may have brought it from other ranks.
            self.seen.foreign |= self._expecting and self.seen.examples and self.mismatch is None
            dropped, record = record, self.gradients.new(partial=True)
            # Instead of being changed in place, a gradient may have been replaced by what it was
            # to become, so the moments are its own. Not if there are several it may come from.
            replaced = dropped is None and self.gradients.begun == 1
            if replaced and latest is not None and not latest.running:
                record.statistics = latest.statistics.only_moments()
            self.gradients.keep(record)
        record.follow(self.weight)

    def sample(self) -> Sample:
        """All that belongs to `p.grad`, as a step takes it."""
        record, bias = self.gradients.present, self.bias_slice
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

    def take_unaccounted(self) -> Tensor | None:
        share, self._unaccounted = self._unaccounted, None
        return share

    def drop_moments(self) -> None:
        """A step has used them up."""
        record = self.gradients.present
        if record is not None:
            record.statistics = record.statistics.without_moments()

    def begin_step(self) -> None:
        """The last step is done: what follows is for the next one."""
        self.seen, self.gradients.begun = Seen(), 0

    def reset(self) -> None:
        """Forget what belonged to `p.grad`, which is gone or zero from now on."""
        self._running = self._unaccounted = self.seen.with_bias = None
        self.gradients.reset()

    def forget(self) -> None:
        """Forget everything, also of gradients that live on."""
        self.reset()
        self.gradients.forget()


def _record_moments(recorder: Recorder, adapter: LayerAdapter, x: Tensor, grad: Tensor) -> None:
    running, plan = recorder.running_pass(), recorder.plan
    if running.moments is None:
        basis, factors = recorder.present_basis, recorder.factors
        running.moments = PassMoments(recorder.forms, plan.sharing, basis, factors=factors)
    with_inputs = plan.extra_pass_of is None or plan.extra_pass_first
    running.moments.add(adapter, x, grad, with_inputs=with_inputs)
