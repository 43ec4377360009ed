"""What backward passes leave behind for a layer: half-batch gradients and curvature sums.

What is captured counts only once it has reached `p.grad`: it is held back until the weight's
gradient is accumulated. So gradients that a user takes for another purpose (`torch.autograd.grad`
of an input, say) leave no trace. From then on it belongs to that `p.grad`, see captured.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fop.captured import Captured, Pending, norm_of
from fop.examples import Examples
from fop.layers import LayerAdapter
from fop.linalg import Form
from fop.moments import FactorSums, PassSums, SumForms, factor_dtype
from fop.shards import is_sharded, local
from fop.slices import ParameterSlice
from fop.squares import Eigenbasis, GradientSquares


@dataclass
class CapturePlan:
    """What all layers capture at present; the engine changes it between steps."""

    halves: str  # "samples", "microbatches", "ranks" or "none"
    sharing: str
    max_factor_size: int
    empirical: bool  # curvature sums come from the training loss's own backward
    curvature: bool  # curvature sums are wanted at all
    odd_rank: bool = False  # with halves="ranks": this rank belongs to half 2
    # During an extra backward for the Fisher: the training backward it runs inside, and whether
    # inputs still count.
    extra_pass_of: int | None = None
    extra_pass_first: bool = False
    passes: PassEnds = field(default_factory=lambda: PassEnds())
    examples: Examples = field(default_factory=Examples)
    # Set once another optimizer has taken the model over; `release` removes all hooks.
    retired: bool = False
    release: Callable[[], object] | None = None

    def retire(self) -> None:
        self.retired = True
        if self.release is not None:
            self.release()


class PassEnds:
    """Acts at the very end of backward passes that reached `p.grad` of watched layers."""

    def __init__(self) -> None:
        self._committed: dict[int, list[LayerCapture]] = {}  # by pass; they may be nested
        # For messages that leave while the pass is still running.
        self.on_commit: Callable[[LayerCapture], None] | None = None
        self.on_end: Callable[[], None] | None = None

    def note(self, capture: LayerCapture, task: int) -> None:
        """A layer's part of the running pass has reached `p.grad`."""
        if task not in self._committed:
            self._committed[task] = []
            # DistributedDataParallel writes averages to p.grad in a callback of its own. What is
            # queued by a callback runs after all that were queued before.
            _at_end_of_pass(lambda: _at_end_of_pass(lambda: self._finish(task)))
        self._committed[task].append(capture)
        if self.on_commit is not None:
            self.on_commit(capture)

    def forget(self) -> None:
        """Passes that failed never end."""
        self._committed.clear()

    def _finish(self, task: int) -> None:
        by_dtype: dict[torch.dtype, list[LayerCapture]] = {}
        for capture in self._committed.pop(task, []):
            if capture.end_pass():
                by_dtype.setdefault(factor_dtype(capture.weight.dtype), []).append(capture)
        with torch.no_grad():
            for dtype, captures in by_dtype.items():
                gradients = [local(c.weight.grad) for c in captures if c.weight.grad is not None]
                norms = torch._foreach_norm(gradients, 2, dtype=dtype)
                for capture, norm in zip(captures, norms, strict=True):
                    capture.see_gradient(norm)
        if self.on_end is not None:
            self.on_end()


def _at_end_of_pass(call: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(call)


class LayerCapture:
    """Collects for one layer. A step uses up the sums; the rest goes when gradients are zeroed."""

    def __init__(
        self,
        layer: LayerAdapter,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        plan: CapturePlan,
    ) -> None:
        self.layer = layer
        self.weight = weight
        self._bias = bias
        self.plan = plan
        self.weight_slice = ParameterSlice(weight, layer.weight_rows)
        self.bias_slice = None if bias is None else ParameterSlice(bias, layer.bias_rows)
        self.sharded = is_sharded(weight)
        # FSDP2 runs a module with a gathered parameter in the place of the shard.
        self.unsharded: nn.Parameter | None = None
        self.on_unsharded: Callable[[nn.Parameter], None] | None = None
        self._unreduced: Captured | None = None  # of a gradient still in the gathered parameter
        self.refresh_due = True  # on the next step; the engine decides
        self.curvature_shape: tuple[int, int] | None = None  # of the metric at hand, if any
        self.basis: Eigenbasis | None = None  # where squares of gradients are wanted (EKFAC)
        self._known: list[Captured] = []  # of p.grad, and of gradients that were set aside
        self._latest: Captured | None = None  # what the last pass added to
        self._begun = 0  # gradients that were begun since the last step
        self._with_bias: bool | None = None  # whether this step's gradient came with the bias
        self._pending: Pending | None = None
        self.given_up = False  # nothing sensible can be captured: the engine says why
        self.misfit: str | None = None  # why this rank left the layer to autograd; see disable()
        # Rows of a call that belong to no single example, and examples of its batch. Ranks agree on
        # what becomes of the layer when they next read counts.
        self.mismatch: tuple[int, int] | None = None
        self.saw_empty = self.saw_examples = False  # what calls since the last step brought
        self.replaced = False  # the module was called with another parameter in its place
        self.bypassed = False  # a gradient came without a call of the module
        self.foreign = False  # p.grad is not what backward passes left there
        self._unexplained: Tensor | None = None  # share of p.grad that no call accounts for
        # A user's compiled training step is not to be compiled into this.
        self._hold_sums = torch.compiler.disable(_hold_sums)

    @property
    def bias(self) -> nn.Parameter | None:
        """The bias, where it is trained.

        As torch's optimizers do, a step takes the gradients that are there: one that has come with
        the bias stays so, also if the bias is frozen meanwhile.
        """
        bias, latched = self._bias, self._with_bias
        if bias is None:
            return None
        if latched is None or (self.weight.grad is None and self._unreduced is None):
            latched = bias.requires_grad
        return bias if latched else None

    @property
    def captured(self) -> Captured | None:
        """What belongs to `p.grad`; while a pass is running, what it has added to so far."""
        captured = self._found()
        if captured is None and self._latest is not None and self._latest.running:
            return self._latest  # DistributedDataParallel puts views of its buckets there
        return captured

    def _found(self) -> Captured | None:
        """What belongs to `p.grad`, the tensor that it is now."""
        grad = self.weight.grad
        if grad is None:
            return self._unreduced
        for known in self._known:
            if known.belongs_to(grad):
                return known
        return None

    @property
    def signed(self) -> list[Tensor] | None:
        """H1 - H2, for the weight and a trained bias; None where that is not known of `p.grad`."""
        captured = self.captured
        if captured is None or captured.partial or captured.signed is None:
            return None
        parts = captured.signed[: 1 if self.bias is None else 2]
        if self.bias is not None and len(parts) == 1 and self.bias_slice is not None:
            parts = [*parts, parts[0].new_zeros(self.bias_slice.shape)]
        return parts

    @property
    def examples(self) -> tuple[int, int]:
        """In the two halves of what `signed` is the difference of."""
        captured = self.captured
        if captured is None or captured.partial:
            return 0, 0
        return captured.examples[0], captured.examples[1]

    @property
    def sums(self) -> FactorSums | None:
        captured = self.captured
        return None if captured is None else captured.sums

    def drop_sums(self) -> None:
        """A step has used them up."""
        captured = self.captured
        if captured is not None:
            captured.sums = None

    @property
    def all_parameters(self) -> list[nn.Parameter]:
        """The weight and the bias, trained or not."""
        return [self.weight] if self._bias is None else [self.weight, self._bias]

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the layer's matrix, as trained at present."""
        return self._shape(self.bias is not None)

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """With a trained bias and with a frozen one."""
        return [self._shape(True), self._shape(False)] if self._bias is not None else [self.shape]

    def _shape(self, has_bias: bool) -> tuple[int, int]:
        return self.layer.matrix_shape(self.weight_slice.like, has_bias)

    @property
    def wants_sums(self) -> bool:
        """When curvature is due, or the layer has none that fits it (yet, or after unfreezing)."""
        return self.plan.curvature and (self.refresh_due or self.curvature_shape != self.shape)

    def tracks(self, current: Tensor | None) -> bool:
        """Whether a call of the module has to be watched now, given what it has as its weight."""
        if self.sharded:
            return self._tracks_gathered(current)
        if current is not self.weight:  # torch.func.functional_call puts plain tensors there
            self.replaced = isinstance(current, nn.Parameter)
            return False
        if self._expecting and not self.weight.requires_grad:
            self._leave_to_bias()
        return self._expecting and self.weight.requires_grad

    def _leave_to_bias(self) -> None:
        """The weight is frozen: passes from now on add to the bias alone, and are not watched."""
        captured = self.captured
        if captured is not None and captured.signed is not None and self.bias is not None:
            captured.partial = self.foreign = True

    def _tracks_gathered(self, current: Tensor | None) -> bool:
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

    @property
    def disabled(self) -> bool:
        """Whether this rank captures nothing any more; autograd alone computes the gradient."""
        return self.given_up or self.misfit is not None

    @property
    def _expecting(self) -> bool:
        return not self.disabled and (self.plan.halves != "none" or self.wants_sums)

    def use(self, layer: LayerAdapter) -> None:
        """Go on with an adapter of changed geometry."""
        before = self.shape
        self.layer = layer
        if self.shape != before:
            self.drop_sums()

    def disable(self, reason: str) -> None:
        """Leave the layer to autograd from now on. The engine makes that known, and ranks agree."""
        self.misfit = reason
        self.forget()

    @property
    def square_shapes(self) -> list[tuple[int, ...]]:
        """Of the sum of squares; none if it is not wanted."""
        return [(self.layer.groups, *self.shape)] if self._wants_squares else []

    @property
    def _wants_squares(self) -> bool:
        return self.basis is not None and self.curvature_shape == self.shape

    def take_unexplained(self) -> Tensor | None:
        share, self._unexplained = self._unexplained, None
        return share

    def tensors(self) -> list[Tensor]:
        """Everything captured that a step rests on."""
        tensors = list(self.signed or [])
        sums = self.sums
        if sums is not None:
            tensors += sums.bounds()
        return tensors

    def reset(self) -> None:
        """Forget what belonged to `p.grad`, which is gone or zero from now on."""
        self._pending = self._latest = self._unreduced = self._unexplained = self._with_bias = None
        self._known = self._set_aside()
        if self.weight.grad is not None:
            self._keep(self._new())

    def forget(self) -> None:
        """Forget everything, also of gradients that live on."""
        self.reset()
        self._known = []

    def begin_step(self) -> None:
        """The last step is done: what follows is for the next one."""
        self.saw_empty = self.saw_examples = False
        self.replaced = self.bypassed = self.foreign = False
        self._begun, self._with_bias = 0, None

    def meet_gradient(self) -> None:
        """Before a step: drop what does not belong to the `p.grad` that the step finds."""
        grad, captured = self.weight.grad, self.captured
        if grad is None:
            return
        if captured is None or captured.running:
            # Without a call here, DistributedDataParallel may have brought it from other ranks.
            self.foreign |= self._expecting and self.saw_examples and self.mismatch is None
            dropped, captured = captured, self._new(partial=True)
            latest = self._latest
            # Instead of being changed in place, a gradient may have been replaced by what it was
            # to become, so the statistics are its own. Not if there are several it may come from.
            if dropped is None and latest is not None and not latest.running and self._begun == 1:
                captured.sums = latest.sums
            self._keep(captured)
        captured.follow(self.weight)

    def _new(self, *, partial: bool = False) -> Captured:
        return Captured((self.weight.dtype, self.weight.device), partial=partial)

    def _keep(self, captured: Captured) -> None:
        """It belongs to the present `p.grad` from now on."""
        grad = self.weight.grad
        assert grad is not None
        others = [c for c in self._set_aside() if c is not captured]
        captured.mark(grad)
        self._known = [*others, captured]

    def _set_aside(self) -> list[Captured]:
        """Of gradients that may come back, but are not `p.grad` at present."""
        grad = self.weight.grad
        return [c for c in self._known if c.returns and not c.belongs_to(grad)]

    def gradient_norms(self) -> tuple[Tensor, Tensor]:
        """Of `p.grad`, or this rank's rows of it: as its last backward left it, and as it is."""
        grad, captured = self.weight.grad, self.captured
        if grad is None or captured is None or captured.norm is None:
            nothing = torch.zeros((), device=self.weight.device)
            return nothing, nothing
        return captured.norm, norm_of(local(grad))

    def gradient_ratio(self) -> Tensor:
        """By how much `p.grad` was rescaled since its last backward: clipped, or unscaled.

        Measured, because not all who write to gradients leave a mark: GradScaler.unscale_ does not.
        """
        grad, captured = self.weight.grad, self.captured
        if grad is None or captured is None or captured.norm is None:
            return torch.ones((), device=self.weight.device)
        return captured.ratio(grad)

    def gradient_touched(self) -> bool:
        """Whether anybody but GradScaler.unscale_ has written to `p.grad` since its backward."""
        grad, captured = self.weight.grad, self.captured
        return grad is not None and captured is not None and not captured.unchanged(grad)

    # ---- called by the hooks, during backward

    def first_half(self, n: int) -> int:
        """How many of n examples belong to half 1; the odd one goes where fewer are."""
        first, second = self._current().captured.examples
        return n // 2 + (n % 2 if first <= second else 0)

    def hold_gradient(self, gradients: list[Tensor], first: int, second: int) -> None:
        """Keep a call's contribution to H1 - H2 (or, for micro-batches, to their one half)."""
        pending = self._current()
        if pending.signed is None:
            pending.signed = gradients
        else:
            torch._foreach_add_(pending.signed, gradients)
        pending.first, pending.second = max(pending.first, first), max(pending.second, second)

    def hold_total(self, gradient: Tensor) -> None:
        """Keep what a call gives the weight's gradient, to compare it with what arrives there."""
        pending = self._current()
        if pending.fresh:
            known = pending.total
            pending.total = gradient.detach() if known is None else known + gradient.detach()

    def hold_sums(self, layer: LayerAdapter, x: Tensor, grad: Tensor) -> None:
        """Keep a call's curvature sums."""
        self._hold_sums(self, layer, x, grad)

    @property
    def sum_forms(self) -> SumForms:
        """What the curvature sums look like; also without any."""
        widest, layer = self.plan.max_factor_size, self.layer
        rows, columns = self.shape
        return SumForms(
            dtype=factor_dtype(self.weight.dtype),
            has_bias=self.bias is not None and layer.homogeneous_bias,
            inputs=Form(layer.groups, columns, diagonal=layer.one_hot or columns > widest),
            outputs=Form(layer.groups, rows, diagonal=rows > widest),
        )

    def close_extra_pass(self) -> None:
        if self._pending is not None and self._pending.sums is not None:
            self._pending.sums.close_outputs()
            if self._pending.squares is not None:
                self._pending.squares.close_outputs()

    def _current(self) -> Pending:
        task = self.plan.extra_pass_of
        if task is None:
            task = torch._C._current_graph_task_id()
        if self._pending is None or self._pending.task != task:
            self._pending = self._begin(task)
        return self._pending

    def _begin(self, task: int) -> Pending:
        """What a pass is going to add to: what was captured with the present `p.grad`, if any."""
        pending = self._joined(task) or self._begun_anew(task)
        if self._with_bias is None or pending.captured.passes == 0:
            self._with_bias = self._bias is not None and self._bias.requires_grad
        pending.captured.follow(self.weight)
        return pending

    def _joined(self, task: int) -> Pending | None:
        """Adds to what was captured before; None where `p.grad` has nothing of it, or more."""
        grad, captured = self.weight.grad, self._found()
        if captured is None:
            return None
        if grad is None or captured.unchanged(grad):
            return Pending(task, captured, fresh=captured.passes == 0 and not captured.partial)
        if captured.norm is None or captured.running:
            return None
        if self.sharded:  # ranks would have to agree on what was done to their rows
            raise RuntimeError(
                f"the gradient of a sharded parameter of shape {tuple(self.weight.shape)} was "
                "changed in place between two backward passes: use optimizer.zero_grad() to zero "
                "it, and change it after the last pass only"
            )
        # Somebody wrote to p.grad between two backwards: zeroed in place, or scaled. Rare, so a
        # host read is fine.
        ratio = captured.ratio(grad)
        if float(ratio) == 0.0:
            return Pending(task, self._new(), fresh=True)
        return Pending(task, captured, rescale=ratio)

    def _begun_anew(self, task: int) -> Pending:
        empty = not self._holds_anything()
        captured = self._new(partial=not empty)
        # Without the passes of this step that were lost, statistics can't be scaled.
        captured.incomplete = not empty and self._begun > 0
        return Pending(task, captured, fresh=empty)

    def _holds_anything(self) -> bool:
        """Whether there is something in the gradients that nothing is known of."""
        bias = None if self._bias is None or not self._bias.requires_grad else self._bias.grad
        present = [grad for grad in (self.weight.grad, bias) if grad is not None]
        if not present or self.plan.halves == "none":
            return bool(present)
        return self.sharded or any(bool(grad.any()) for grad in present)

    def commit(self, weight: Tensor) -> None:
        """Called when the weight's gradient has been accumulated into `p.grad`."""
        pending, self._pending = self._pending, None
        if pending is None or pending.task != torch._C._current_graph_task_id():
            self._commit_unknown()
            return
        assert weight.grad is not None
        captured = pending.captured
        if captured.passes == 0:
            self._begun += 1
        self.foreign |= captured.partial and self.plan.halves != "none"
        if pending.total is not None:
            own = self.weight_slice.of(weight.grad.detach())
            strange = norm_of(own - pending.total)
            self._unexplained = strange / (norm_of(pending.total) + strange)
        captured.passes += 1
        if pending.rescale is not None and captured.signed is not None:
            torch._foreach_mul_(captured.signed, pending.rescale)
        if pending.signed is not None:
            self._commit_halves(captured, pending)
        sums = pending.finished_sums()
        if sums is not None and not captured.incomplete:
            captured.add_sums(sums)
        captured.running = True
        self._latest = captured
        if not self.sharded:
            self._keep(captured)
        self.plan.passes.note(self, pending.task)

    def _commit_unknown(self) -> None:
        """A gradient came from elsewhere than a watched call; on steps without need, from one."""
        if self.disabled or self.mismatch is not None:
            return  # autograd computes the gradient
        self.bypassed |= self._expecting and not self.saw_empty
        if self.sharded:
            return
        grad, captured = self.weight.grad, self._found()
        assert grad is not None
        if captured is not None and self.saw_empty:
            return  # nothing was added
        # Torch has added to it once, since it was seen last.
        if captured is None or grad._version - captured.version > 1:
            captured = self._new()
            self._with_bias = self._bias is not None and self._bias.requires_grad
        captured.partial |= not self.saw_empty
        self._keep(captured)

    def end_pass(self) -> bool:
        """Whether `p.grad` is there now: FSDP2 may keep it to reduce it after a later pass."""
        present = self.weight.grad is not None
        self._unreduced = self._latest if self.sharded and not present else None
        return present

    def see_gradient(self, norm: Tensor) -> None:
        """Remember `p.grad` as the pass leaves it."""
        if self._latest is not None:
            self._keep(self._latest)
            self._latest.norm, self._latest.running = norm, False

    def _commit_halves(self, captured: Captured, pending: Pending) -> None:
        assert pending.signed is not None
        first, second = pending.first, pending.second
        alternate = self.plan.halves == "microbatches" and captured.passes % 2 == 0
        if alternate or (self.plan.halves == "ranks" and self.plan.odd_rank):
            torch._foreach_neg_(pending.signed)
            first, second = second, first
        frozen = self._bias is not None and not self._bias.requires_grad
        captured.add_halves(pending.signed[: 1 if frozen else 2], first, second)


def _hold_sums(capture: LayerCapture, layer: LayerAdapter, x: Tensor, grad: Tensor) -> None:
    pending, plan = capture._current(), capture.plan
    if pending.sums is None:
        forms = capture.sum_forms
        pending.sums = PassSums(forms, plan.sharing)
        if capture.basis is not None and capture._wants_squares:
            pending.squares = GradientSquares(
                capture.basis, forms.inputs.width, forms.dtype, has_bias=forms.has_bias
            )
    outputs = layer.output_rows(grad)
    if plan.extra_pass_of is None or plan.extra_pass_first:
        if layer.one_hot:
            pending.sums.add_indices(layer.input_rows(x, grad))
        else:
            pending.sums.add_inputs(layer, x, grad, outputs.shape[2])
        if pending.squares is not None:
            add = pending.squares.add_indices if layer.one_hot else pending.squares.add_inputs
            add(layer.input_rows(x, grad))
    pending.sums.add_outputs(outputs)
    if pending.squares is not None:
        pending.squares.add_outputs(outputs)


def gradient_ratios(recorders: Sequence[LayerCapture]) -> Tensor:
    """`gradient_ratio` of several layers, [L], in few launches."""
    known = [
        (captured.norm, recorder.weight.grad)
        for recorder in recorders
        if (captured := recorder.captured) is not None
        and captured.norm is not None
        and recorder.weight.grad is not None
    ]
    if len(recorders) == 1 or len(known) < len(recorders):
        return torch.stack([recorder.gradient_ratio() for recorder in recorders])
    before = torch.stack([norm for norm, _ in known])
    now = torch.stack(torch._foreach_norm([grad for _, grad in known], 2, dtype=before.dtype))
    return torch.where(before > 0, now / before, 1.0)
