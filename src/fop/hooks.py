"""How backward passes are captured: autograd functions behind the outputs of watched modules.

A forward hook replaces the graph of a module's output by `TrackedCall`, an autograd function with
the same values that owns the layer's backward. It computes the weight gradient as two half-batch
products, which together cost what the one full product costs, hands their sum on as the ordinary
gradient, and keeps their difference. No module is patched and nothing is computed twice.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.forward_ad import unpack_dual
from torch.utils.hooks import RemovableHandle

from fop.capture import CapturePlan, LayerCapture
from fop.examples import TRANSPOSED, Layout
from fop.layers import LayerAdapter, NormLayer, folded
from fop.linalg import on_host
from fop.verify import VerifiedLayer


class TrackedCall(torch.autograd.Function):
    """One call of a layer: hands the output on, and owns all gradients of the layer."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        layer: LayerAdapter,
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
        layer: LayerAdapter = ctx.layer
        capture = _collecting(ctx.capture)
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
        capture = _collecting(ctx.capture)
        if capture is not None:
            with torch.no_grad(), torch.autocast(grad.device.type, enabled=False):
                layer, weight, has_bias = ctx.layer, capture.in_graph, capture.bias is not None
                examples = layer.example_gradients(
                    *ctx.saved_tensors, grad, ctx.statistics, has_bias
                )
                if capture.plan.extra_pass_of is None:
                    parts = _Gradients(layer, examples, examples, weight, weight, True, has_bias)
                    _capture(capture, parts, curvature=True)
                elif capture.wants_sums:
                    capture.hold_sums(layer, examples, examples)
        return grad, None, None, None, None


def _collecting(reference: weakref.ref[LayerCapture]) -> LayerCapture | None:
    """The capture; None once the optimizer is gone, or the layer is disabled."""
    capture = reference()
    return capture if capture is not None and not capture.disabled else None


@dataclass
class _Gradients:
    """A call's parameter gradients, for all of its examples or a slice of them."""

    layer: LayerAdapter
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

    def both(self, first: int) -> tuple[list[Tensor], list[Tensor]]:
        """The total gradients; and, detached, those of the first examples minus the others."""
        one = self.total(slice(0, first))
        rest = slice(first, None)
        if self.needs_weight and one[0].dtype == self.outputs.dtype:
            inputs, outputs = self.inputs[rest], self.outputs[rest]
            total = [self.layer._add_weight_gradient(one[0], outputs, inputs, self.weights)]
            if self.needs_bias:
                total.append(one[1] + self.layer.bias_gradient(outputs))
        else:  # sums are more precise in the parameter's type than in the one of autocast
            total = [a + b for a, b in zip(one, self.total(rest), strict=True)]
        with torch.no_grad():
            signed = [a.detach().mul_(2).sub_(t) for a, t in zip(one, total, strict=True)]
        return total, signed


def _capture(capture: LayerCapture, parts: _Gradients, *, curvature: bool) -> list[Tensor]:
    """The parameter gradients of a call, leaving in `capture` what it wants of it."""
    plan = capture.plan
    n = parts.inputs.shape[0]
    first = capture.first_half(n) if plan.halves == "samples" else n
    # A bias that belongs to this module alone is not part of a tied block.
    count = 1 if capture.bias is None else 2
    if plan.halves == "samples" and 0 < first < n:
        gradients, signed = parts.both(first)
        capture.hold_gradient(signed[:count], first, n - first)
    else:
        gradients = parts.total()
        if plan.halves != "none":
            sign = 1 if first == n else -1
            copies = [gradient.detach() * sign for gradient in gradients[:count]]
            capture.hold_gradient(copies, first, n - first)
    if capture.wants_sums and not parts.layer.autograd_backward and parts.needs_weight:
        capture.hold_total(gradients[0])
    if curvature and plan.empirical and capture.wants_sums:
        with torch.no_grad():
            capture.hold_sums(parts.layer, parts.inputs, parts.outputs)
    return gradients


class WatchingHook(ABC):
    """What an optimizer puts on a module to capture from it."""

    @property
    @abstractmethod
    def plan(self) -> CapturePlan | None:
        """Of the optimizer that it works for, while that is there."""


class LayerHook(WatchingHook):
    """The forward hook on a module. Holds the capture weakly; a copied or pickled hook is inert.

    What is captured is a Python side effect, which a compiled graph can't hold: torch.compile has
    to break its graph here. (Disabling is left to construction, because it makes torch import its
    compiler.)"""

    def __init__(
        self,
        capture: LayerCapture | None = None,
        layer: LayerAdapter | None = None,
        curvature: bool = True,
        sequence_first: bool = False,
    ) -> None:
        self._capture = weakref.ref(capture) if capture is not None else None
        self._adapter = VerifiedLayer(layer) if layer is not None else None
        self._curvature = curvature
        self._sequence_first = sequence_first
        self._track = torch.compiler.disable(_track) if capture is not None else None

    @property
    def plan(self) -> CapturePlan | None:
        capture = None if self._capture is None else self._capture()
        return None if capture is None else capture.plan

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Tensor | None:
        if self._track is None:
            return None
        if torch.compiler.is_compiling() and not torch.is_grad_enabled():  # compiled evaluation
            return None
        x = args[0] if args else kwargs.get("input")
        tracked: Tensor | None = self._track(
            self._capture, self._adapter, self._curvature, self._sequence_first, module, x, output
        )
        return tracked

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerHook:
        return LayerHook()

    def __reduce__(self) -> tuple[Any, ...]:
        return LayerHook, ()


def in_transform(*tensors: Tensor) -> bool:
    """Whether torch.func's transforms are at work, or forward-mode differentiation of a tensor.

    No gradient of the former reaches p.grad, and neither can go through `TrackedCall`.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    return any(unpack_dual(tensor).tangent is not None for tensor in tensors)


def wanted(reference: weakref.ref[LayerCapture], weight: Tensor | None, x: Tensor) -> bool:
    """Whether a call with this weight and input has to be tracked."""
    capture = reference()
    if capture is None:
        return False
    capture.saw_empty |= x.numel() == 0
    capture.saw_examples |= x.numel() > 0
    return x.numel() > 0 and capture.tracks(weight)


def _track(
    reference: weakref.ref[LayerCapture],
    adapter: VerifiedLayer,
    curvature: bool,
    sequence_first: bool,
    module: nn.Module,
    x: Any,
    output: Any,
) -> Tensor | None:
    capture, weight = reference(), module._parameters.get("weight")
    if capture is None or in_transform():
        return None
    if not (isinstance(x, Tensor) and isinstance(output, Tensor)):
        if torch.is_grad_enabled() and capture.tracks(weight):
            capture.disable("its forward does not take one tensor and return one")
        return None
    if not torch.is_grad_enabled():
        # Reentrant activation checkpointing, which runs this call again, or evaluation.
        if capture.plan.examples.current is not None:
            _layout(capture, adapter, x, sequence_first)
        return None
    # Also of calls that are not tracked, for what they tell about others.
    layout = _layout(capture, adapter, x, sequence_first)
    if in_transform(output) or not wanted(reference, weight, x):
        return None
    verified = adapter.at_call(module, x, output, capture)
    layer = None if verified is None else fit(capture, verified, layout)
    if layer is None:
        return None
    if layout.sequence_first:
        x, output = x.transpose(0, 1), output.transpose(0, 1)
    tracked: Tensor
    if isinstance(layer, NormLayer):
        statistics = layer.statistics(module)
        tracked = ObservedCall.apply(  # type: ignore[no-untyped-call]
            output, x.detach(), layer, statistics, reference
        )
    else:
        x, bias = layer.prepare(x), module._parameters.get("bias")
        tracked = TrackedCall.apply(  # type: ignore[no-untyped-call]
            x, weight, bias, layer, curvature, reference, (output,)
        )
    return tracked.transpose(0, 1) if layout.sequence_first else tracked


def _layout(
    capture: LayerCapture, adapter: VerifiedLayer, x: Tensor, sequence_first: bool
) -> Layout:
    examples = capture.plan.examples
    if sequence_first and x.dim() == 3:
        examples.declared(adapter, x.transpose(0, 1), sequence_first=True)
        return TRANSPOSED
    return examples.layout(adapter, adapter.layer, x, read=capture.wants_sums or on_host(x))


def fit(capture: LayerCapture, layer: LayerAdapter, layout: Layout) -> LayerAdapter | None:
    """The layer for such a call; None, and noted, where the call has no single examples."""
    if layout.mismatch is not None:
        capture.mismatch = layout.mismatch
        return None
    return folded(layer, layout.rows)


def watch_module(
    module: nn.Module,
    capture: LayerCapture,
    layer: LayerAdapter,
    curvature: bool,
    sequence_first: bool,
) -> RemovableHandle:
    """Start watching the calls of a module; the handle stops it."""
    hook = LayerHook(capture, layer, curvature, sequence_first)
    # First in line, so that hooks of the user that change the output stay part of the graph after
    # the layer's own.
    return module.register_forward_hook(hook, prepend=True, with_kwargs=True)


class RemovableHandles:
    """Handles of hooks that are placed one after the other, to be removed together."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []

    def add(self, handle: RemovableHandle) -> None:
        self._handles.append(handle)

    def remove(self) -> None:
        while self._handles:
            self._handles.pop().remove()


def watch_gradient(capture: LayerCapture) -> RemovableHandle | RemovableHandles:
    """Start watching what reaches the gradient of a weight; the handle stops it.

    A sharded weight's reaches the gathered parameter first, which is known from its first call on.
    """
    reference = weakref.ref(capture)

    def commit(weight: Tensor) -> None:
        alive = reference()
        if alive is not None:
            alive.commit(weight)

    if capture.sharded:
        watched = RemovableHandles()
        capture.on_unsharded = lambda gathered: watched.add(
            gathered.register_post_accumulate_grad_hook(commit)
        )
        return watched
    weight, trained = capture.weight, capture.weight.requires_grad
    # Torch takes such a hook only while a parameter is trained; a frozen one may be thawed later.
    weight.requires_grad_(True)
    handle: RemovableHandle = weight.register_post_accumulate_grad_hook(commit)
    weight.requires_grad_(trained)
    return handle


def take_over(modules: Iterable[nn.Module]) -> None:
    """Retire the optimizers that capture from these modules already: the newest one wins."""
    for module in modules:
        for plan in watched_by(module):
            plan.retire()


def watched_by(module: nn.Module) -> list[CapturePlan]:
    """The plans of the living optimizers that capture from this module."""
    hooks: list[object] = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    plans = [hook.plan for hook in hooks if isinstance(hook, WatchingHook)]
    return [plan for plan in plans if plan is not None]
