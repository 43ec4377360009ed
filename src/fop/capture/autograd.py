"""The custom backward of a layer, and the hooks that put it there.

A forward hook replaces the graph of a module's output by `RecordedCall`, an autograd function with
the same values that owns the layer's backward: it computes the weight gradient by half-batches
(passes.py). No module is patched and nothing is computed twice.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.forward_ad import unpack_dual
from torch.utils.hooks import RemovableHandle

from fop._torch import innermost_transform
from fop.capture.examples import TRANSPOSED, Layout
from fop.capture.passes import Call, record
from fop.capture.plan import CapturePlan, RecordingHook
from fop.capture.recorder import Recorder
from fop.capture.verify import VerifiedAdapter
from fop.layers import LayerAdapter, NormAdapter, folded
from fop.linalg import on_host


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
    *,
    module: nn.Module | None = None,
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


def in_transform(*tensors: Tensor) -> bool:
    """Whether torch.func's transforms are at work, or forward-mode differentiation of a tensor.

    No gradient of the former reaches p.grad, and neither can go through `RecordedCall`.
    """
    if innermost_transform() is not None:
        return True
    return any(unpack_dual(tensor).tangent is not None for tensor in tensors)


class LayerHook(RecordingHook):
    """The forward hook on a module. Holds the recorder weakly.

    What is recorded is a Python side effect, which a compiled graph can't hold: torch.compile has
    to break its graph here. (Disabling is left to construction, because it makes torch import its
    compiler.)"""

    def __init__(
        self,
        recorder: Recorder | None = None,
        adapter: LayerAdapter | None = None,
        curvature: bool = True,
        sequence_first: bool = False,
    ) -> None:
        self._recorder = weakref.ref(recorder) if recorder is not None else None
        self._adapter = VerifiedAdapter(adapter) if adapter is not None else None
        self._curvature = curvature
        self._sequence_first = sequence_first
        self._record = torch.compiler.disable(_record_output) if recorder is not None else None

    @property
    def plan(self) -> CapturePlan | None:
        recorder = None if self._recorder is None else self._recorder()
        return None if recorder is None else recorder.plan

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Tensor | None:
        if self._record is None:
            return None
        if torch.compiler.is_compiling() and not torch.is_grad_enabled():  # compiled evaluation
            return None
        x = args[0] if args else kwargs.get("input")
        # Each by itself: torch.compile would pass a weak reference in a tuple without its wrapper.
        recorded: Tensor | None = self._record(
            self._recorder, self._adapter, self._curvature, self._sequence_first, module, x, output
        )
        return recorded


def _record_output(
    reference: weakref.ref[Recorder],
    verified: VerifiedAdapter,
    curvature: bool,
    sequence_first: bool,
    module: nn.Module,
    x: Any,
    output: Any,
) -> Tensor | None:
    recorder = reference()
    parameters = module._parameters.get("weight"), module._parameters.get("bias")
    if recorder is None or in_transform():
        return None
    if not (isinstance(x, Tensor) and isinstance(output, Tensor)):
        if torch.is_grad_enabled() and recorder.records(parameters[0]):
            recorder.disable("its forward does not take one tensor and return one")
        return None
    if not torch.is_grad_enabled():
        # Reentrant activation checkpointing, which runs this call again, or evaluation.
        if recorder.plan.examples.current is not None:
            _layout(recorder, verified, x, sequence_first)
        return None
    # Also of calls that are not recorded, for what they tell about others.
    layout = _layout(recorder, verified, x, sequence_first)
    if in_transform(output) or not recorder.wants_call(parameters[0], x):
        return None
    adapter = verified.at_call(module, x, output, recorder)
    if adapter is None:
        return None
    return record_call(
        recorder, adapter, layout, x, output, parameters, module=module, curvature=curvature
    )


def _layout(
    recorder: Recorder, verified: VerifiedAdapter, x: Tensor, sequence_first: bool
) -> Layout:
    examples, adapter = recorder.plan.examples, verified.adapter
    if sequence_first and x.dim() == 3:
        examples.declared(verified, x.transpose(0, 1), sequence_first=True)
        return TRANSPOSED
    read = adapter.one_hot and (recorder.wants_moments or on_host(x))
    return examples.layout(verified, adapter, x, read=read)


def hook_module(
    module: nn.Module,
    recorder: Recorder,
    adapter: LayerAdapter,
    curvature: bool,
    sequence_first: bool,
) -> RemovableHandle:
    """Start to record the calls of a module; the handle stops it."""
    hook = LayerHook(recorder, adapter, curvature, sequence_first)
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
        recorder.on_unsharded = lambda gathered: handles.add(
            gathered.register_post_accumulate_grad_hook(hook)
        )
        return handles
    weight, trained = recorder.weight, recorder.weight.requires_grad
    # Torch takes such a hook only while a parameter is trained; a frozen one may be trained later.
    weight.requires_grad_(True)
    handle: RemovableHandle = weight.register_post_accumulate_grad_hook(hook)
    weight.requires_grad_(trained)
    return handle
