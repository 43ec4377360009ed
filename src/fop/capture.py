"""What the backward pass leaves behind: half-batch gradients and curvature sums.

A forward hook replaces the graph of a supported layer's output by `TrackedCall`, an autograd
function with the same values that owns the layer's backward. It computes the weight gradient as two
half-batch products, which together cost what the one full product costs, hands their sum on as the
ordinary gradient, and keeps their difference. No module is patched and nothing is computed twice.

What is captured counts only once it has reached `p.grad`: it is held back until the weight's
gradient is accumulated. So gradients that a user takes for another purpose (`torch.autograd.grad`
of an input, say) leave no trace, and the captured difference lives exactly as long as the `p.grad`
it belongs to.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fop.layers import Layer, NormLayer
from fop.moments import FactorForm, FactorSums, PassSums, factor_dtype


@dataclass
class CapturePlan:
    """What all layers capture at present; the engine changes it between steps."""

    halves: str  # "samples", "microbatches" or "none"
    sharing: str
    max_factor_size: int
    empirical: bool  # curvature sums come from the training loss's own backward
    curvature: bool  # curvature sums are wanted at all
    refresh_due: bool = True
    # During an extra backward for the Fisher: the training backward it runs inside, and whether
    # inputs still count.
    extra_pass_of: int | None = None
    extra_pass_first: bool = False


@dataclass
class _Pending:
    """One layer's part of one backward pass, until it is known to have reached `p.grad`."""

    task: int
    fresh: bool
    signed: list[Tensor] | None = None
    first: int = 0
    second: int = 0
    sums: PassSums | None = None


@dataclass(frozen=True)
class _SeenGradient:
    """`p.grad` as a backward pass left it, to notice what others do to it."""

    address: int
    version: int
    norm: Tensor

    @staticmethod
    def of(grad: Tensor) -> _SeenGradient:
        return _SeenGradient(grad.data_ptr(), grad._version, _norm(grad))

    def unchanged(self, grad: Tensor) -> bool:
        return (self.address, self.version) == (grad.data_ptr(), grad._version)

    def ratio(self, grad: Tensor) -> Tensor:
        """By how much the gradient was scaled since."""
        return torch.where(self.norm > 0, _norm(grad) / self.norm, 1.0)


def _norm(grad: Tensor) -> Tensor:
    # Half precision would overflow.
    norm: Tensor = torch.linalg.vector_norm(grad, dtype=factor_dtype(grad.dtype))
    return norm


class LayerCapture:
    """Collects for one layer. A step takes the sums; the rest goes when gradients are zeroed."""

    def __init__(
        self, layer: Layer, weight: nn.Parameter, bias: nn.Parameter | None, plan: CapturePlan
    ) -> None:
        self.layer = layer
        self.weight = weight
        self._bias = bias
        self.plan = plan
        self.curvature_shape: tuple[int, int] | None = None  # of the metric at hand, if any
        self.signed: list[Tensor] | None = None  # H1 - H2, for the weight and a trainable bias
        self.examples = [0, 0]
        self._passes = 0  # backward passes that reached p.grad since it was zeroed
        self._sums: FactorSums | None = None
        self._pending: _Pending | None = None
        self._seen: _SeenGradient | None = None

    @property
    def bias(self) -> nn.Parameter | None:
        """The bias, where it is trained."""
        return self._bias if self._bias is not None and self._bias.requires_grad else None

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the layer's matrix, as trained at present."""
        return self.layer.matrix_shape(self.weight, self.bias is not None)

    @property
    def wants_sums(self) -> bool:
        """When curvature is due, or the layer has none that fits it (yet, or after unfreezing)."""
        return self.plan.curvature and (self.plan.refresh_due or self.curvature_shape != self.shape)

    def tracks(self, module: nn.Module) -> bool:
        """Whether a call of the module has to be watched now."""
        return (
            (self.plan.halves != "none" or self.wants_sums)
            and self.weight.requires_grad
            and module._parameters.get("weight") is self.weight
        )

    def call(
        self, module: nn.Module, layer: Layer, curvature: bool, x: Tensor, output: Tensor
    ) -> Tensor:
        """The output of a module that uses the weight, with the tracked backward."""
        if isinstance(layer, NormLayer):
            statistics = layer.statistics(module)
            observed: Tensor = ObservedCall.apply(  # type: ignore[no-untyped-call]
                output, x.detach(), layer, statistics, weakref.ref(self)
            )
            return observed
        x = layer.prepare(x)
        bias = module._parameters.get("bias")
        result: Tensor = TrackedCall.apply(  # type: ignore[no-untyped-call]
            x, self.weight, bias, layer, curvature, weakref.ref(self), (output,)
        )
        return result

    def take_sums(self) -> FactorSums | None:
        sums, self._sums = self._sums, None
        return sums

    def has_sums(self) -> bool:
        return self._sums is not None

    def tensors(self) -> list[Tensor]:
        """Everything captured that a step rests on."""
        tensors = list(self.signed or [])
        if self._sums is not None:
            tensors += [self._sums.inputs, self._sums.outputs]
        return tensors

    def reset(self) -> None:
        self.signed = self._sums = self._pending = self._seen = None
        self.examples = [0, 0]
        self._passes = 0

    def gradient_ratio(self) -> Tensor:
        """By how much `p.grad` was rescaled since its last backward: clipped, or unscaled.

        Measured, because not all who write to gradients leave a mark: GradScaler.unscale_ does not.
        """
        if self._seen is None or self.weight.grad is None:
            return torch.ones((), device=self.weight.device)
        return self._seen.ratio(self.weight.grad)

    # ---- called from TrackedCall.backward and the accumulation hook

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

    def hold_sums(self, layer: Layer, x: Tensor, grad: Tensor) -> None:
        """Keep a call's curvature sums."""
        pending = self._current()
        if pending.sums is None:
            pending.sums = PassSums(self._factor_form(), self.plan.sharing)
        if self.plan.extra_pass_of is None or self.plan.extra_pass_first:
            rows = layer.input_rows(x, grad)
            if layer.indexed:
                pending.sums.add_indices(rows, self.shape[1])
            else:
                pending.sums.add_inputs(rows)
        pending.sums.add_outputs(layer.output_rows(grad))

    def _factor_form(self) -> FactorForm:
        widest = self.plan.max_factor_size
        rows, columns = self.shape
        return FactorForm(
            dtype=factor_dtype(self.weight.dtype),
            has_bias=self.bias is not None and self.layer.bias_column,
            diagonal_inputs=self.layer.indexed or columns > widest,
            diagonal_outputs=rows > widest,
        )

    def close_extra_pass(self) -> None:
        if self._pending is not None and self._pending.sums is not None:
            self._pending.sums.close_outputs()

    def _current(self) -> _Pending:
        task = self.plan.extra_pass_of
        if task is None:
            task = torch._C._current_graph_task_id()
        if self._pending is None or self._pending.task != task:
            self._pending = _Pending(task, fresh=self._gradient_starts_anew())
        return self._pending

    def _gradient_starts_anew(self) -> bool:
        """Whether `p.grad` holds nothing of what was captured; else both get the same scale."""
        if self.weight.grad is None or self._seen is None:
            return True
        if self._seen.unchanged(self.weight.grad):
            return False
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
            return
        assert weight.grad is not None
        if pending.fresh:
            self.reset()
        if pending.signed is not None:
            self._commit_halves(pending)
        if pending.sums is not None:
            sums = pending.sums.finish()
            if self._sums is None:
                self._sums = sums
            else:
                self._sums.add(sums)
        self._seen = _SeenGradient.of(weight.grad.detach())

    def _commit_halves(self, pending: _Pending) -> None:
        assert pending.signed is not None
        self._passes += 1
        if self.plan.halves == "microbatches" and self._passes % 2 == 0:
            torch._foreach_neg_(pending.signed)
            pending.first, pending.second = pending.second, pending.first
        if self.signed is None:
            self.signed = pending.signed
        else:
            torch._foreach_add_(self.signed, pending.signed)
        self.examples[0] += pending.first
        self.examples[1] += pending.second


class TrackedCall(torch.autograd.Function):
    """One call of a layer: hands the output on, and owns all gradients of the layer."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        layer: Layer,
        curvature: bool,
        capture: weakref.ref[LayerCapture],
        output: tuple[Tensor],
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer, ctx.curvature, ctx.capture = layer, curvature, capture
        return output[0].detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        layer: Layer = ctx.layer
        capture: LayerCapture | None = ctx.capture()  # None once the optimizer is gone
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        # Like the operation itself, the backward runs in the precision of the output, whatever
        # autocast is about.
        with torch.autocast(grad.device.type, enabled=False):
            inputs, outputs = layer.batched(layer.cast(x, grad.dtype), grad)
            weights = weight.to(grad.dtype)
            of_input = None
            if needs_input:
                of_input = (
                    layer.input_gradient(outputs, inputs, weights).reshape(x.shape).to(x.dtype)
                )
            if capture is not None and capture.plan.extra_pass_of is not None:
                if ctx.curvature and capture.wants_sums:
                    with torch.no_grad():
                        capture.hold_sums(layer, inputs, outputs)
                return of_input, None, None, None, None, None, None
            parts = _Gradients(layer, inputs, outputs, weights, weight, needs_weight, needs_bias)
            if capture is None:
                gradients = parts.total()
            else:
                gradients = _capture(capture, parts, curvature=ctx.curvature)
            of_weight = gradients[0] if needs_weight else None
            of_bias = gradients[-1] if needs_bias else None
        return of_input, of_weight, of_bias, None, None, None, None


class ObservedCall(torch.autograd.Function):
    """One call of a layer whose backward stays autograd's: hands output and gradient on."""

    @staticmethod
    def forward(
        ctx: Any,
        output: Tensor,
        x: Tensor,
        layer: NormLayer,
        statistics: Any,
        capture: weakref.ref[LayerCapture],
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.layer, ctx.statistics, ctx.capture = layer, statistics, capture
        return output.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        capture: LayerCapture | None = ctx.capture()
        if capture is not None:
            with torch.no_grad(), torch.autocast(grad.device.type, enabled=False):
                layer, weight, has_bias = ctx.layer, capture.weight, capture.bias is not None
                examples = layer.example_gradients(
                    *ctx.saved_tensors, grad, ctx.statistics, has_bias
                )
                if capture.plan.extra_pass_of is None:
                    parts = _Gradients(layer, examples, examples, weight, weight, True, has_bias)
                    _capture(capture, parts, curvature=True)
                elif capture.wants_sums:
                    capture.hold_sums(layer, examples, examples)
        return grad, None, None, None, None


@dataclass
class _Gradients:
    """A call's parameter gradients, for all of its examples or a slice of them."""

    layer: Layer
    inputs: Tensor
    outputs: Tensor
    weights: Tensor  # in the precision of the outputs
    parameter: Tensor
    needs_weight: bool
    needs_bias: bool

    def total(self, examples: slice = slice(None)) -> list[Tensor]:
        inputs, outputs = self.inputs[examples], self.outputs[examples]
        gradients = []
        if self.needs_weight:
            gradients.append(self.layer.weight_gradient(outputs, inputs, self.weights))
        if self.needs_bias:
            gradients.append(self.layer.bias_gradient(outputs))
        return [gradient.to(self.parameter.dtype) for gradient in gradients]


def _capture(capture: LayerCapture, parts: _Gradients, *, curvature: bool) -> list[Tensor]:
    """The parameter gradients of a call, leaving in `capture` what it wants of it."""
    plan = capture.plan
    n = parts.inputs.shape[0]
    first = capture.first_half(n) if plan.halves == "samples" else n
    # A bias that belongs to this module alone is not part of a tied block.
    count = 1 if capture.bias is None else 2
    if plan.halves == "samples" and 0 < first < n:
        one, two = parts.total(slice(0, first)), parts.total(slice(first, n))
        gradients = [a + b for a, b in zip(one, two, strict=True)]
        with torch.no_grad():
            signed = [a.detach().sub_(b) for a, b in zip(one[:count], two[:count], strict=True)]
            capture.hold_gradient(signed, first, n - first)
    else:
        gradients = parts.total()
        if plan.halves != "none":
            sign = 1 if first == n else -1
            copies = [gradient.detach() * sign for gradient in gradients[:count]]
            capture.hold_gradient(copies, first, n - first)
    if curvature and plan.empirical and capture.wants_sums:
        with torch.no_grad():
            capture.hold_sums(parts.layer, parts.inputs, parts.outputs)
    return gradients


class LayerHook:
    """The forward hook on a module. Holds the capture weakly; a copied or pickled hook is inert.

    What is captured is a Python side effect, which a compiled graph can't hold: torch.compile has
    to break its graph here. (Disabling is left to construction, because it makes torch import its
    compiler.)"""

    def __init__(
        self,
        capture: LayerCapture | None = None,
        layer: Layer | None = None,
        curvature: bool = True,
    ) -> None:
        self._capture = weakref.ref(capture) if capture is not None else None
        self._layer = layer
        self._curvature = curvature
        self._track = torch.compiler.disable(_track) if capture is not None else None

    @property
    def alive(self) -> bool:
        return self._capture is not None and self._capture() is not None

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> Tensor | None:
        if self._track is None or not torch.is_grad_enabled():
            return None
        tracked: Tensor | None = self._track(
            self._capture, self._layer, self._curvature, module, args, kwargs, output
        )
        return tracked

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerHook:
        return LayerHook()

    def __reduce__(self) -> tuple[Any, ...]:
        return LayerHook, ()


def _track(
    reference: weakref.ref[LayerCapture],
    layer: Layer,
    curvature: bool,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: Tensor,
) -> Tensor | None:
    capture = reference()
    if capture is None or not capture.tracks(module):
        return None
    return capture.call(module, layer, curvature, args[0] if args else kwargs["input"], output)


def watch_module(
    module: nn.Module, capture: LayerCapture, layer: Layer, curvature: bool
) -> RemovableHandle:
    """Start watching the calls of a module; the handle stops it."""
    hook = LayerHook(capture, layer, curvature)
    # First in line, so that hooks of the user that change the output stay part of the graph after
    # the layer's own.
    return module.register_forward_hook(hook, prepend=True, with_kwargs=True)


def watch_gradient(capture: LayerCapture) -> RemovableHandle:
    """Start watching what reaches the gradient of a weight; the handle stops it."""
    reference = weakref.ref(capture)

    def commit(weight: Tensor) -> None:
        alive = reference()
        if alive is not None:
            alive.commit(weight)

    weight, trained = capture.weight, capture.weight.requires_grad
    # Torch takes such a hook only while a parameter is trained; a frozen one may be thawed later.
    weight.requires_grad_(True)
    handle: RemovableHandle = weight.register_post_accumulate_grad_hook(commit)
    weight.requires_grad_(trained)
    return handle


def is_watched(module: nn.Module) -> bool:
    """Whether a living optimizer captures from this module already."""
    return any(
        isinstance(hook, LayerHook) and hook.alive for hook in module._forward_hooks.values()
    )
