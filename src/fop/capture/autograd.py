"""The custom backward of a layer, and the hooks that put it there.

A forward hook replaces the graph of a module's output by `RecordedCall`, an autograd function with
the same values that owns the layer's backward: it computes the weight gradient by half-batches. No
module is patched and nothing is computed twice.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.forward_ad import unpack_dual
from torch.utils.hooks import RemovableHandle

from fop._torch import innermost_transform
from fop.capture import verify
from fop.capture.examples import TRANSPOSED, Layout
from fop.capture.hooks import InertHook, RemovableHandles
from fop.capture.recorder import Recorder
from fop.layers import LayerAdapter, NormAdapter, folded, supported_type
from fop.linalg import on_host


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
        inputs, outputs, found = self.inputs[examples], self.outputs[examples], []
        if self.needs_weight:
            gradient = self.adapter.weight_gradient(outputs, inputs, self.weights)
            found.append(gradient.to(self.dtype))
        if self.needs_bias:
            found.append(self.adapter.bias_gradient(outputs).to(self.dtype))
        return found

    def sum_and_difference(self, first: int) -> tuple[list[Tensor], list[Tensor]]:
        """The total gradients; and, detached, those of the first examples minus the others."""
        n, difference = len(self.inputs), []
        if first in (0, n):
            total = self.gradients()
            return total, [gradient.detach() * (1 if first else -1) for gradient in total]
        one, rest = self.gradients(slice(0, first)), slice(first, None)
        if self.needs_weight and one[0].dtype == self.outputs.dtype:
            inputs, outputs = self.inputs[rest], self.outputs[rest]
            total = [self.adapter._add_weight_gradient(one[0], outputs, inputs, self.weights)]
            if self.needs_bias:
                total.append(one[1] + self.adapter.bias_gradient(outputs))
        else:  # sums are more precise in the parameter's type than in the one of autocast
            total = [a + b for a, b in zip(one, self.gradients(rest), strict=True)]
        with torch.no_grad():
            for half, both in zip(one, total, strict=True):
                difference.append(half.detach().mul_(2).sub_(both))
        return total, difference


def record(recorder: Recorder | None, call: Call, *, curvature: bool) -> list[Tensor]:
    """The gradients of a call, leaving with the recorder what it wants of it.

    An extra pass for the Fisher is about second moments alone: no gradients.
    """
    if recorder is None or recorder.inactive:
        return call.gradients()
    plan, n, gradients = recorder.plan, len(call.inputs), []
    if plan.extra_pass_of is None:
        if plan.halves == "none":
            gradients = call.gradients()
        else:
            first, known = n, recorder.running_pass().record.statistics
            if plan.halves == "samples":  # the odd example goes where fewer are
                first = n // 2 + (n % 2 if known.first <= known.second else 0)
            gradients, difference = call.sum_and_difference(first)
            recorder.record_difference(difference, first, n - first)
        if call.needs_weight and not call.adapter.autograd_backward and recorder.wants_moments:
            recorder.record_total(gradients[0])
        curvature = curvature and plan.empirical
    if curvature and recorder.wants_moments:
        with torch.no_grad():
            recorder.record_moments(call.adapter, call.inputs, call.outputs)
    return gradients


class RecordedCall(torch.autograd.Function):
    """One call of a layer: hands the output on, and owns all gradients of the layer."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        adapter: LayerAdapter,
        curvature: bool,
        recorder: weakref.ref[Recorder],
        output: tuple[Tensor],  # where autograd does not see it: this replaces its graph
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.adapter, ctx.curvature, ctx.recorder = adapter, curvature, recorder
        return output[0].detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        adapter: LayerAdapter = ctx.adapter
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        # Like the operation itself, the backward runs in the precision of the output, whatever
        # autocast is about.
        with torch.autocast(grad.device.type, enabled=False):
            prepared = x if x.dtype == grad.dtype else adapter.cast(x, grad.dtype)
            inputs, outputs = adapter.batched(prepared, grad)
            weights = weight.to(grad.dtype)
            of_input = None
            if needs_input:
                of_input = adapter.input_gradient(outputs, inputs, weights)
                of_input = of_input.reshape(x.shape).to(x.dtype)
            call = Call(adapter, inputs, outputs, weights, weight.dtype, needs_weight, needs_bias)
            gradients = record(ctx.recorder(), call, curvature=ctx.curvature)
        of_weight = gradients[0] if gradients and needs_weight else None
        of_bias = gradients[-1] if gradients and needs_bias else None
        return of_input, of_weight, of_bias, None, None, None, None


class AutogradCall(torch.autograd.Function):
    """One call of a layer whose backward stays autograd's: hands output and gradient on."""

    @staticmethod
    def forward(
        ctx: Any,
        output: Tensor,
        x: Tensor,
        adapter: NormAdapter,
        statistics: Any,
        recorder: weakref.ref[Recorder],
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.adapter, ctx.statistics, ctx.recorder = adapter, statistics, recorder
        return output.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        recorder = ctx.recorder()  # None once the optimizer is gone
        if recorder is not None and not recorder.inactive:
            with torch.no_grad(), torch.autocast(grad.device.type, enabled=False):
                weight, has_bias = recorder.in_graph, recorder.bias_slice is not None
                (x,) = ctx.saved_tensors
                rows = ctx.adapter.example_gradients(x, grad, ctx.statistics, has_bias)
                call = Call(ctx.adapter, rows, rows, weight, weight.dtype, True, has_bias)
                record(recorder, call, curvature=True)
        return grad, None, None, None, None


def record_call(
    recorder: Recorder,
    adapter: LayerAdapter,
    layout: Layout,
    x: Tensor,
    output: Tensor,
    parameters: tuple[Tensor | None, Tensor | None],
    module: nn.Module | None = None,
    *,
    curvature: bool = True,
) -> Tensor | None:
    """The output with a recorded backward; None, and noted, if the call has no single examples."""
    if layout.mismatch is not None:
        recorder.mismatch = layout.mismatch
        return None
    if layout.rows != 1:
        adapter = folded(adapter, layout.rows)
    if layout.sequence_first:
        x, output = x.transpose(0, 1), output.transpose(0, 1)
    recorded: Tensor
    reference = weakref.ref(recorder)
    if isinstance(adapter, NormAdapter):
        assert module is not None
        recorded = AutogradCall.apply(  # type: ignore[no-untyped-call]
            output, x.detach(), adapter, adapter.statistics(module), reference
        )
    else:
        recorded = RecordedCall.apply(  # type: ignore[no-untyped-call]
            adapter.prepare(x), *parameters, adapter, curvature, reference, (output,)
        )
    return recorded.transpose(0, 1) if layout.sequence_first else recorded


class VerifiedAdapter:
    """The adapter of one module, as it was when the module was last called."""

    def __init__(self, adapter: LayerAdapter) -> None:
        self.adapter = adapter
        self._code: tuple[Any, ...] | None = None  # None: not verified
        self._foreign = False

    def at_call(
        self, module: nn.Module, x: Any, output: Any, recorder: Recorder
    ) -> LayerAdapter | None:
        """The adapter for this call; None if it does not fit, and the layer is disabled."""
        try:
            return self._verified(module, x, output, recorder)
        except torch.OutOfMemoryError:
            raise
        except verify.UnsupportedError as error:
            recorder.disable(str(error))
        except Exception as error:  # whatever an adapter does on a module that it was not made for
            kind = type(self.adapter).__name__
            recorder.disable(f"its adapter {kind} failed with {type(error).__name__}: {error}")
        return None

    def _verified(self, module: nn.Module, x: Any, output: Any, recorder: Recorder) -> LayerAdapter:
        code, adapter = _code(module), type(self.adapter)(module)
        reason = adapter.unsupported_reason(module)
        if reason is not None:
            raise verify.UnsupportedError(reason)
        unchanged = code == self._code and vars(adapter) == vars(self.adapter)
        # Nobody knows what code of others will do next: it is verified again with every refresh.
        if unchanged and not (self._foreign and recorder.wants_moments):
            return self.adapter
        self._foreign = _foreign(module)
        conclusive = verify.verify(adapter, module, x, output, foreign=self._foreign)
        if recorder.adapter is self.adapter:
            recorder.use(adapter)
        self.adapter, self._code = adapter, code if conclusive else None
        return adapter


def _code(module: nn.Module) -> tuple[Any, ...]:
    """What decides which code a call of the module runs."""
    kind, own = type(module), module.__dict__
    return (kind, *_methods(kind), own.get("forward"), own.get("_conv_forward"))


def _methods(kind: Any) -> tuple[Any, Any]:
    return kind.forward, getattr(kind, "_conv_forward", None)


def _foreign(module: nn.Module) -> bool:
    """Whether a call runs other code than that of the type the adapter was made for."""
    kind = supported_type(type(module))
    return kind is None or _code(module)[1:] != (*_methods(kind), None, None)


class LayerHook(InertHook):
    """The forward hook on a module, for the recorder of its layer."""

    def __init__(
        self,
        recorder: Recorder | None = None,
        adapter: LayerAdapter | None = None,
        curvature: bool = True,
        sequence_first: bool = False,
    ) -> None:
        super().__init__(recorder)
        self._adapter = VerifiedAdapter(adapter) if adapter is not None else None
        self._curvature = curvature
        self._sequence_first = sequence_first

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Tensor | None:
        compiling = torch.compiler.is_compiling()
        if self._run is None or (compiling and not torch.is_grad_enabled()):
            return None  # in the latter case it is compiled evaluation
        x = args[0] if args else kwargs.get("input")
        recorded: Tensor | None = self._run(self, module, x, output)
        return recorded

    def run(self, module: nn.Module, x: Any, output: Any) -> Tensor | None:
        recorder, verified = self._owner(), self._adapter
        if recorder is None or verified is None or innermost_transform() is not None:
            return None
        parameters = module._parameters.get("weight"), module._parameters.get("bias")
        if not (isinstance(x, Tensor) and isinstance(output, Tensor)):
            if torch.is_grad_enabled() and recorder.records(parameters[0]):
                recorder.disable("its forward does not take one tensor and return one")
            return None
        if not torch.is_grad_enabled():
            # Reentrant activation checkpointing, which runs this call again, or evaluation.
            if recorder.plan.examples.current is not None:
                self._layout(recorder, verified, x)
            return None
        # Also of calls that are not recorded, for what they tell about others.
        layout = self._layout(recorder, verified, x)
        differentiated_forward = unpack_dual(output).tangent is not None
        if differentiated_forward or not recorder.wants_call(parameters[0], x):
            return None
        adapter = verified.at_call(module, x, output, recorder)
        if adapter is None:
            return None
        return record_call(
            recorder, adapter, layout, x, output, parameters, module, curvature=self._curvature
        )

    def _layout(self, recorder: Recorder, verified: VerifiedAdapter, x: Tensor) -> Layout:
        examples, adapter = recorder.plan.examples, verified.adapter
        if self._sequence_first and x.dim() == 3:
            examples.layout(verified, adapter, x.transpose(0, 1), sequence_first=True)
            return TRANSPOSED
        read = adapter.one_hot and (recorder.wants_moments or on_host(x))
        return examples.layout(verified, adapter, x, read=read)


def hook_module(module: nn.Module, *hook: Any) -> RemovableHandle:
    """Start to record the calls of a module by a `LayerHook`; the handle stops it."""
    # First in line, so that hooks of the user that change the output stay part of the graph after
    # the layer's own.
    return module.register_forward_hook(LayerHook(*hook), prepend=True, with_kwargs=True)


def hook_gradient(recorder: Recorder) -> RemovableHandle | RemovableHandles:
    """Start to record what reaches the gradient of a weight; the handle stops it.

    A sharded weight's reaches the gathered parameter first, which is known from its first call on.
    """
    reference = weakref.ref(recorder)

    def commit(weight: Tensor) -> None:
        alive = reference()
        if alive is not None:
            alive.commit(weight)

    # A compiled training step would trace it, down to the engine's own methods.
    hook = torch.compiler.disable(commit)
    if recorder.sharded:
        handles = RemovableHandles()
        recorder.on_gathered = lambda gathered: handles.add(
            gathered.register_post_accumulate_grad_hook(hook)
        )
        return handles
    weight, trained = recorder.weight, recorder.weight.requires_grad
    # Torch takes such a hook only while a parameter is trained; a frozen one may be trained later.
    weight.requires_grad_(True)
    handle: RemovableHandle = weight.register_post_accumulate_grad_hook(hook)
    weight.requires_grad_(trained)
    return handle
