"""How one layer is recorded while backward passes run.

The weight gradient of a call is computed as two half-batch products, which together cost what the
one full product costs: their sum H1 + H2 is the ordinary gradient, their difference stays here.
What is recorded counts only once it has reached `p.grad`: it is held back until the weight's
gradient is accumulated. So gradients that a user takes for another purpose (`torch.autograd.grad`
of an input, say) leave no trace. From then on it belongs to that `p.grad`, see belongs.py.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from fop._torch import current_pass, version_of
from fop.capture.belongs import GradientRecord, RunningPass, Seen
from fop.capture.moments import MomentForms, PassMoments
from fop.capture.plan import CapturePlan
from fop.capture.squares import Eigenbasis
from fop.capture.statistics import Statistics, factor_dtype
from fop.layers import LayerAdapter
from fop.linalg import Form
from fop.slices import ParameterSlice, local


@dataclass
class Call:
    """What one call gives its parameters, for all of its examples or a slice of them."""

    adapter: LayerAdapter
    inputs: Tensor  # examples in dimension 0
    outputs: Tensor  # their gradients
    weights: Tensor  # in the precision of the outputs
    dtype: torch.dtype  # of the parameters
    needs_weight: bool
    needs_bias: bool

    def gradients(self, examples: slice = slice(None)) -> list[Tensor]:
        inputs, outputs = self.inputs[examples], self.outputs[examples]
        gradients = []
        if self.needs_weight:
            gradients.append(self.adapter.weight_gradient(outputs, inputs, self.weights))
        if self.needs_bias:
            gradients.append(self.adapter.bias_gradient(outputs))
        return [gradient.to(self.dtype) for gradient in gradients]

    def sum_and_difference(self, first: int) -> tuple[list[Tensor], list[Tensor]]:
        """The total gradients; and, detached, those of the first examples minus the others."""
        one, rest = self.gradients(slice(0, first)), slice(first, None)
        if self.needs_weight and one[0].dtype == self.outputs.dtype:
            inputs, outputs = self.inputs[rest], self.outputs[rest]
            total = [self.adapter._add_weight_gradient(one[0], outputs, inputs, self.weights)]
            if self.needs_bias:
                total.append(one[1] + self.adapter.bias_gradient(outputs))
        else:  # sums are more precise in the parameter's type than in the one of autocast
            total = [a + b for a, b in zip(one, self.gradients(rest), strict=True)]
        with torch.no_grad():
            difference = [a.detach().mul_(2).sub_(t) for a, t in zip(one, total, strict=True)]
        return total, difference


def record(recorder: PassRecorder | None, call: Call, *, curvature: bool) -> list[Tensor]:
    """The gradients of a call, leaving with the recorder what it wants of it.

    An extra pass for the Fisher is about second moments alone: no gradients.
    """
    if recorder is None or recorder.inactive:
        return call.gradients()
    plan, gradients = recorder.plan, []
    if plan.extra_pass_of is None:
        gradients = recorder.half_batches(call)
        if recorder.wants_moments and not call.adapter.autograd_backward and call.needs_weight:
            recorder.record_total(gradients[0])
        curvature = curvature and plan.empirical
    if curvature and recorder.wants_moments:
        with torch.no_grad():
            recorder.record_moments(call.adapter, call.inputs, call.outputs)
    return gradients


class PassRecorder:
    """The part of a `Recorder` that hooks call during backward."""

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
        self.sharded = weight.sharded
        self._set_adapter(adapter)
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
        self._known: list[GradientRecord] = []  # of p.grad, and of gradients that were set aside
        self._latest: GradientRecord | None = None  # what the last pass added to
        # FSDP2 keeps a gradient in the gathered parameter until it reduces it.
        self._unreduced: GradientRecord | None = None
        self._running: RunningPass | None = None
        self._unaccounted: Tensor | None = None  # share of p.grad that no call accounts for
        # A user's compiled training step is not to be compiled into this.
        self._record_moments = torch.compiler.disable(_record_moments)

    def _set_adapter(self, adapter: LayerAdapter) -> None:
        self.adapter = adapter
        like = self.weight_slice.like
        self._shapes = [adapter.matrix_shape(like, has_bias) for has_bias in (False, True)]

    @property
    def bias_slice(self) -> ParameterSlice | None:
        """The bias, where it is trained.

        As torch's optimizers do, a step takes the gradients that are there: one that has come with
        the bias stays so, also if the bias is frozen meanwhile.
        """
        bias, latched = self._bias_slice, self.seen.with_bias
        if bias is None:
            return None
        if latched is None or (self.weight.grad is None and self._unreduced is None):
            latched = bias.parameter.requires_grad
        return bias if latched else None

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the layer's matrix, as trained at present."""
        return self._shapes[self.bias_slice is not None]

    @property
    def forms(self) -> MomentForms:
        """What the moments look like; also without any."""
        widest, adapter = self.plan.max_factor_size, self.adapter
        rows, columns = self.shape
        return MomentForms(
            dtype=factor_dtype(self.weight.dtype),
            has_bias=self.bias_slice is not None and adapter.homogeneous_bias,
            inputs=Form(adapter.groups, columns, diagonal=adapter.one_hot or columns > widest),
            outputs=Form(adapter.groups, rows, diagonal=rows > widest),
        )

    @property
    def wants_moments(self) -> bool:
        """When curvature is due, or the layer has none that fits it (yet, or after unfreezing)."""
        return self.plan.curvature and (self.refresh_due or self.curvature_shape != self.shape)

    @property
    def present_basis(self) -> Eigenbasis | None:
        """The basis, where it fits the layer as it is trained at present."""
        basis = self.basis
        fits = basis is not None and (basis.axes or self.curvature_shape == self.shape)
        return basis if fits else None

    @property
    def inactive(self) -> bool:
        """Whether this rank records nothing any more; autograd alone computes the gradient."""
        return self.disabled or self.unsupported is not None

    @property
    def _expecting(self) -> bool:
        return not self.inactive and (self.plan.halves != "none" or self.wants_moments)

    def _found(self) -> GradientRecord | None:
        """What belongs to `p.grad`, the tensor that it is now."""
        grad = self.weight.grad
        if grad is None:
            return self._unreduced
        found = [k for k in self._known if k.gradient is not None and k.gradient() is grad]
        return found[0] if found else None

    def half_batches(self, call: Call) -> list[Tensor]:
        """The gradients of a call, leaving their difference between the two half-batches."""
        n = first = len(call.inputs)
        if self.plan.halves == "none":
            return call.gradients()
        running = self._current()
        if self.plan.halves == "samples":  # the odd example goes where fewer are
            known = running.record.statistics
            first = n // 2 + (n % 2 if known.first <= known.second else 0)
        if 0 < first < n:
            total, difference = call.sum_and_difference(first)
        else:
            total, sign = call.gradients(), 1 if first == n else -1
            difference = [gradient.detach() * sign for gradient in total]
        # A bias that belongs to this module alone is not part of a tied layer.
        self.record_difference(difference[: 1 if self.bias_slice is None else 2], first, n - first)
        return total

    def record_difference(self, difference: list[Tensor], first: int, second: int) -> None:
        """Keep a call's part of H1 - H2 (or, for micro-batches, of their one half-batch)."""
        halves = self._current().halves
        halves += Statistics(difference)
        # All calls of a pass are about the same examples.
        halves.first, halves.second = max(halves.first, first), max(halves.second, second)

    def record_total(self, gradient: Tensor) -> None:
        """Keep what a call gives the weight's gradient, to compare it with what arrives there."""
        running = self._current()
        if running.fresh:
            known = running.total
            running.total = gradient.detach() if known is None else known + gradient.detach()

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
            self.seen.gradients += 1
        self.seen.foreign |= record.partial and self.plan.halves != "none"
        if running.total is not None:
            own = self.weight_slice.of(weight.grad.detach())
            pair = [own - running.total, running.total]
            strange, known = torch._foreach_norm(pair, 2, dtype=factor_dtype(own.dtype))
            self._unaccounted = strange / (known + strange)
        record.passes += 1
        if running.rescale is not None and record.statistics.difference is not None:
            torch._foreach_mul_(record.statistics.difference, running.rescale)
        moments = None if record.incomplete else running.moments
        of_pass = Statistics() if moments is None else moments.finish()
        of_pass += self._of_half_batches(record, running.halves)
        record.statistics += of_pass
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

    def _new(self, *, partial: bool = False) -> GradientRecord:
        return GradientRecord((self.weight.dtype, self.weight.device), partial=partial)

    def _keep(self, record: GradientRecord) -> None:
        """It belongs to the present `p.grad` from now on."""
        grad = self.weight.grad
        assert grad is not None
        others = [c for c in self._known if c is not record and c.may_return(grad)]
        record.gradient, record.version = weakref.ref(grad), version_of(grad)
        self._known = [*others, record]

    def _current(self) -> RunningPass:
        """The running pass; it adds to what was recorded with the present `p.grad`, if any."""
        task = current_pass() if self.plan.extra_pass_of is None else self.plan.extra_pass_of
        if self._running is None or self._running.task != task:
            self._running = running = self._joined(task) or self._begun(task)
            if self.seen.with_bias is None or running.record.passes == 0:
                self._latch_bias()
            if running.record.passes:
                running.record.follow(self.weight)
        return self._running

    def _latch_bias(self) -> None:
        bias = self._bias_slice
        self.seen.with_bias = bias is not None and bias.parameter.requires_grad

    def _joined(self, task: int) -> RunningPass | None:
        """Adds to what was recorded before; None where `p.grad` has nothing of it, or more."""
        grad, record = self.weight.grad, self._found()
        if record is None:
            return None
        if grad is None or record.unchanged(grad):
            return RunningPass(task, record, fresh=record.passes == 0 and not record.partial)
        if record.norm is None or record.running:
            return None
        if self.sharded:  # ranks would have to agree on what was done to their rows
            raise RuntimeError(
                f"the gradient of a sharded parameter of shape {tuple(self.weight.shape)} was "
                "changed in place between two backward passes: use optimizer.zero_grad() to zero "
                "it, and change it after the last pass only"
            )
        # Somebody wrote to p.grad between two backwards: zeroed in place, or scaled. Rare, so a
        # host read is fine.
        ratio = record.ratio(grad)
        if float(ratio) == 0.0:
            return RunningPass(task, self._new(), fresh=True)
        return RunningPass(task, record, rescale=ratio)

    def _begun(self, task: int) -> RunningPass:
        """Adds to nothing, or to a gradient that nothing is known of."""
        bias = None if self._bias_slice is None else self._bias_slice.parameter
        both = [self.weight.grad, bias.grad if bias is not None and bias.requires_grad else None]
        present = [grad for grad in both if grad is not None]
        unread = self.plan.halves == "none" or self.sharded
        holds = any(unread or bool(grad.any()) for grad in present)
        record = self._new(partial=holds)
        # Without the passes of this step that were lost, statistics can't be scaled.
        record.incomplete = holds and self.seen.gradients > 0
        return RunningPass(task, record, fresh=not holds)

    def end_pass(self) -> Tensor | None:
        """`p.grad`, or this rank's rows of it; FSDP2 may keep it to reduce it in a later pass."""
        grad = self.weight.grad
        self._unreduced = self._latest if self.sharded and grad is None else None
        return local(grad) if self.sharded and grad is not None else grad

    def see_gradient(self, norm: Tensor) -> None:
        """Remember `p.grad` as the pass leaves it."""
        if self._latest is not None:
            self._keep(self._latest)
            self._latest.norm, self._latest.running = norm, False


def _record_moments(recorder: PassRecorder, adapter: LayerAdapter, x: Tensor, grad: Tensor) -> None:
    running, plan = recorder._current(), recorder.plan
    if running.moments is None:
        basis, factors = recorder.present_basis, recorder.factors
        running.moments = PassMoments(recorder.forms, plan.sharing, basis, factors=factors)
    with_inputs = plan.extra_pass_of is None or plan.extra_pass_first
    running.moments.add(adapter, x, grad, with_inputs=with_inputs)
