"""What backward passes leave behind for a layer: half-batch gradients and curvature sums.

What is captured counts only once it has reached `p.grad`: it is held back until the weight's
gradient is accumulated. So gradients that a user takes for another purpose (`torch.autograd.grad`
of an input, say) leave no trace, and the captured difference lives exactly as long as the `p.grad`
it belongs to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fop.layers import Layer
from fop.moments import FactorForm, FactorSums, PassSums, factor_dtype
from fop.shards import is_sharded, local, stand_in
from fop.squares import Eigenbasis, GradientSquares
from fop.symmetric import stored_shape


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


@dataclass
class _Pending:
    """One layer's part of one backward pass, until it is known to have reached `p.grad`."""

    task: int
    fresh: bool
    signed: list[Tensor] | None = None
    first: int = 0
    second: int = 0
    sums: PassSums | None = None
    squares: GradientSquares | None = None
    total: Tensor | None = None  # the weight's gradient by all calls of its modules

    def finished_sums(self) -> FactorSums | None:
        if self.sums is None:
            return None
        sums = self.sums.finish()
        if self.squares is not None:
            sums.squares = self.squares.finish()
        return sums


@dataclass(frozen=True)
class _SeenGradient:
    """`p.grad` as a backward pass left it, to notice what others do to it."""

    address: int
    version: int
    norm: Tensor  # of a shard: of the rank's own rows

    @staticmethod
    def of(grad: Tensor, norm: Tensor) -> _SeenGradient:
        return _SeenGradient(_address(grad), grad._version, norm)

    def unchanged(self, grad: Tensor) -> bool:
        return (self.address, self.version) == (_address(grad), grad._version)

    def ratio(self, grad: Tensor) -> Tensor:
        """By how much the gradient was scaled since."""
        return torch.where(self.norm > 0, _norm(grad) / self.norm, 1.0)


def _address(grad: Tensor) -> int:
    return local(grad).data_ptr()


def _norm(grad: Tensor) -> Tensor:
    # Half precision would overflow.
    norm: Tensor = torch.linalg.vector_norm(grad, dtype=factor_dtype(grad.dtype))
    return norm


class LayerCapture:
    """Collects for one layer. A step uses up the sums; the rest goes when gradients are zeroed."""

    def __init__(
        self, layer: Layer, weight: nn.Parameter, bias: nn.Parameter | None, plan: CapturePlan
    ) -> None:
        self.layer = layer
        self.weight = weight
        self._bias = bias
        self.plan = plan
        # To ask for shapes: the parameters, or what stands in for those that ranks have in parts.
        self.whole_weight = stand_in(weight)
        self.whole_bias = None if bias is None else stand_in(bias)
        self.sharded = is_sharded(weight)
        # FSDP2 runs a module with a gathered parameter in the place of the shard.
        self.unsharded: nn.Parameter | None = None
        self.on_unsharded: Callable[[nn.Parameter], None] | None = None
        self._unreduced = False  # the gradient is still in the gathered parameter
        self.refresh_due = True  # on the next step; the engine decides
        self.curvature_shape: tuple[int, int] | None = None  # of the metric at hand, if any
        self.basis: Eigenbasis | None = None  # where squares of gradients are wanted (EKFAC)
        self.signed: list[Tensor] | None = None  # H1 - H2, for the weight and a trainable bias
        self.examples = [0, 0]
        self._passes = 0  # backward passes that reached p.grad since it was zeroed
        self.sums: FactorSums | None = None
        self._pending: _Pending | None = None
        self._seen: _SeenGradient | None = None
        self.given_up = False  # nothing sensible can be captured: the engine says why
        self.saw_empty = self.saw_examples = False  # what calls since the last step brought
        self.replaced = False  # the module was called with another parameter in its place
        self.bypassed = False  # a gradient came without a call of the module
        self._unexplained: Tensor | None = None  # share of p.grad that no call accounts for
        # A user's compiled training step is not to be compiled into this.
        self._hold_sums = torch.compiler.disable(_hold_sums)

    @property
    def bias(self) -> nn.Parameter | None:
        """The bias, where it is trained."""
        return self._bias if self._bias is not None and self._bias.requires_grad else None

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the layer's matrix, as trained at present."""
        return self._shape(self.bias is not None)

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """With a trained bias and with a frozen one."""
        return [self._shape(True), self._shape(False)] if self._bias is not None else [self.shape]

    def _shape(self, has_bias: bool) -> tuple[int, int]:
        return self.layer.matrix_shape(self.layer.own_weight(self.whole_weight), has_bias)

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
        return self._expecting and self.weight.requires_grad

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
    def _expecting(self) -> bool:
        return not self.given_up and (self.plan.halves != "none" or self.wants_sums)

    def sum_shapes(self) -> list[tuple[int, ...]]:
        """Of the curvature sums of inputs, outputs and, if wanted, squares; also without any."""
        form, groups = self._factor_form(), self.layer.groups
        outputs, inputs = self.shape
        shapes: list[tuple[int, ...]] = [
            (groups, inputs) if form.diagonal_inputs else stored_shape(groups, inputs),
            (groups, outputs) if form.diagonal_outputs else stored_shape(groups, outputs),
        ]
        return [*shapes, (groups, outputs, inputs)] if self._wants_squares else shapes

    @property
    def _wants_squares(self) -> bool:
        return self.basis is not None and self.curvature_shape == self.shape

    def take_unexplained(self) -> Tensor | None:
        share, self._unexplained = self._unexplained, None
        return share

    def tensors(self) -> list[Tensor]:
        """Everything captured that a step rests on."""
        tensors = list(self.signed or [])
        if self.sums is not None:
            tensors += self.sums.bounds()
        return tensors

    def reset(self) -> None:
        self.signed = self.sums = self._pending = self._seen = self._unexplained = None
        self.examples = [0, 0]
        self._passes = 0
        self._unreduced = False

    def gradient_norms(self) -> tuple[Tensor, Tensor]:
        """Of `p.grad`, or this rank's rows of it: as its last backward left it, and as it is."""
        grad = self.weight.grad
        if self._seen is None or grad is None:
            nothing = torch.zeros((), device=self.weight.device)
            return nothing, nothing
        return self._seen.norm, _norm(local(grad))

    def gradient_ratio(self) -> Tensor:
        """By how much `p.grad` was rescaled since its last backward: clipped, or unscaled.

        Measured, because not all who write to gradients leave a mark: GradScaler.unscale_ does not.
        """
        if self._seen is None or self.weight.grad is None:
            return torch.ones((), device=self.weight.device)
        return self._seen.ratio(self.weight.grad)

    def gradient_touched(self) -> bool:
        """Whether anybody but GradScaler.unscale_ has written to `p.grad` since its backward."""
        grad = self.weight.grad
        return self._seen is not None and grad is not None and not self._seen.unchanged(grad)

    # ---- called by the hooks, during backward

    def first_half(self, n: int) -> int:
        """How many of n examples belong to half 1; the odd one goes where fewer are."""
        return n // 2 + (n % 2 if self.examples[0] <= self.examples[1] else 0)

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

    def hold_sums(self, layer: Layer, x: Tensor, grad: Tensor) -> None:
        """Keep a call's curvature sums."""
        self._hold_sums(self, layer, x, grad)

    def _factor_form(self) -> FactorForm:
        widest = self.plan.max_factor_size
        rows, columns = self.shape
        return FactorForm(
            dtype=factor_dtype(self.weight.dtype),
            width=columns,
            has_bias=self.bias is not None and self.layer.bias_column,
            diagonal_inputs=self.layer.indexed or columns > widest,
            diagonal_outputs=rows > widest,
        )

    def close_extra_pass(self) -> None:
        if self._pending is not None and self._pending.sums is not None:
            self._pending.sums.close_outputs()
            if self._pending.squares is not None:
                self._pending.squares.close_outputs()

    def _current(self) -> _Pending:
        task = self.plan.extra_pass_of
        if task is None:
            task = torch._C._current_graph_task_id()
        if self._pending is None or self._pending.task != task:
            self._pending = _Pending(task, fresh=self._gradient_starts_anew())
        return self._pending

    def _gradient_starts_anew(self) -> bool:
        """Whether `p.grad` holds nothing of what was captured; else both get the same scale."""
        if self._unreduced:
            return False
        if self.weight.grad is None or self._seen is None:
            return True
        if self._seen.unchanged(self.weight.grad):
            return False
        if self.sharded:  # ranks would have to agree on what was done to their rows
            raise RuntimeError(
                f"the gradient of a sharded parameter of shape {tuple(self.weight.shape)} was "
                "changed in place between two backward passes: use optimizer.zero_grad() to zero "
                "it, and change it after the last pass only"
            )
        ratio = self.gradient_ratio()
        # Somebody wrote to p.grad between two backwards: zeroed in place, or scaled. Rare, so a
        # host read is fine.
        if float(ratio) == 0.0:
            return True
        if self.signed is not None:
            torch._foreach_mul_(self.signed, ratio)
        return False

    def commit(self, weight: Tensor) -> None:
        """Called when the weight's gradient has been accumulated into `p.grad`."""
        pending, self._pending = self._pending, None
        if pending is None or pending.task != torch._C._current_graph_task_id():
            self.bypassed |= self._expecting and not self.saw_empty
            return
        assert weight.grad is not None
        if pending.fresh:
            self.reset()
            if pending.total is not None:
                own = self.layer.own_weight(weight.grad.detach())
                strange = _norm(own - pending.total)
                self._unexplained = strange / (_norm(pending.total) + strange)
        if pending.signed is not None:
            self._commit_halves(pending)
        sums = pending.finished_sums()
        if sums is not None:
            if self.sums is None:
                self.sums = sums
            else:
                self.sums.add(sums)
        self.plan.passes.note(self, pending.task)

    def end_pass(self) -> bool:
        """Whether `p.grad` is there now: FSDP2 may keep it to reduce it after a later pass."""
        self._unreduced = self.sharded and self.weight.grad is None
        return self.weight.grad is not None

    def see_gradient(self, norm: Tensor) -> None:
        """Remember `p.grad` as the pass leaves it."""
        grad = self.weight.grad
        assert grad is not None
        self._seen = _SeenGradient.of(grad, norm)

    def _commit_halves(self, pending: _Pending) -> None:
        assert pending.signed is not None
        self._passes += 1
        alternate = self.plan.halves == "microbatches" and self._passes % 2 == 0
        if alternate or (self.plan.halves == "ranks" and self.plan.odd_rank):
            torch._foreach_neg_(pending.signed)
            pending.first, pending.second = pending.second, pending.first
        if self.signed is None:
            self.signed = pending.signed
        else:
            torch._foreach_add_(self.signed, pending.signed)
        self.examples[0] += pending.first
        self.examples[1] += pending.second


def _hold_sums(capture: LayerCapture, layer: Layer, x: Tensor, grad: Tensor) -> None:
    pending, plan = capture._current(), capture.plan
    if pending.sums is None:
        form = capture._factor_form()
        pending.sums = PassSums(form, plan.sharing)
        if capture.basis is not None and capture._wants_squares:
            pending.squares = GradientSquares(
                capture.basis, form.width, form.dtype, has_bias=form.has_bias
            )
    outputs = layer.output_rows(grad)
    if plan.extra_pass_of is None or plan.extra_pass_first:
        if layer.indexed:
            pending.sums.add_indices(layer.input_rows(x, grad))
        else:
            pending.sums.add_inputs(layer, x, grad, outputs.shape[2])
        if pending.squares is not None:
            add = pending.squares.add_indices if layer.indexed else pending.squares.add_inputs
            add(layer.input_rows(x, grad))
    pending.sums.add_outputs(outputs)
    if pending.squares is not None:
        pending.squares.add_outputs(outputs)
