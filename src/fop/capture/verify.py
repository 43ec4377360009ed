"""Whether an adapter computes what its module computes: asked of the module's own calls.

The library owns the backward of a layer, so an adapter that does not fit the module would corrupt
training without a word. Therefore nothing is trusted. On a module's first recorded call, and when
its code or geometry has changed since, the adapter's output is compared with the module's on one
example, and the adapter's gradients with those of the graph that torch has just built. Where they
differ, the layer is disabled: torch's own graph stays, for this call and all later ones.

At all other calls this costs a few microseconds and reads no tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import get_gradient_edge

from fop._torch import gradient_metadata, may_recompute_saved
from fop.capture.recorder import Recorder
from fop.layers import LayerAdapter, NormAdapter, supported_type

# The relative error of two ways to compute the same is a small power of the precision.
TOLERANCE = 0.4
# Accelerators may round the inputs of float32 products to so many bits (TF32).
ACCELERATOR_EPS = 2.0**-10


class UnsupportedError(Exception):
    """The module computes something else than its adapter; the message says what."""


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
        except UnsupportedError as error:
            recorder.disable(str(error))
        except Exception as error:  # whatever an adapter does on a module that it was not made for
            kind = type(self.adapter).__name__
            recorder.disable(f"its adapter {kind} failed with {type(error).__name__}: {error}")
        return None

    def _verified(self, module: nn.Module, x: Any, output: Any, recorder: Recorder) -> LayerAdapter:
        code, adapter = _code(module), type(self.adapter)(module)
        reason = adapter.unsupported_reason(module)
        if reason is not None:
            raise UnsupportedError(reason)
        unchanged = code == self._code and vars(adapter) == vars(self.adapter)
        # Nobody knows what code of others will do next: it is verified again with every refresh.
        if unchanged and not (self._foreign and recorder.wants_moments):
            return self.adapter
        self._foreign = _foreign(module)
        conclusive = verify(adapter, module, x, output, foreign=self._foreign)
        if recorder.adapter is self.adapter:
            recorder.use(adapter)
        self.adapter, self._code = adapter, code if conclusive else None
        return adapter


def _code(module: nn.Module) -> tuple[Any, ...]:
    """What decides which code a call of the module runs."""
    kind, own = type(module), module.__dict__
    methods = (kind.forward, getattr(kind, "_conv_forward", None))
    return (kind, *methods, own.get("forward"), own.get("_conv_forward"))


def _foreign(module: nn.Module) -> bool:
    """Whether a call runs other code than that of the type the adapter was made for."""
    kind = supported_type(type(module))
    return kind is None or _code(module)[1:] != (
        kind.forward,
        getattr(kind, "_conv_forward", None),
        None,
        None,
    )


def verify(
    adapter: LayerAdapter, module: nn.Module, x: Tensor, output: Tensor, *, foreign: bool
) -> bool:
    """Raise `UnsupportedError` unless the adapter gives this output and its gradients.

    False if that can't be told, because a number is not finite or there are none.
    """
    parameters = module._parameters
    weight, bias = parameters["weight"], parameters.get("bias")
    assert weight is not None
    if not output.requires_grad:
        raise UnsupportedError("its output does not depend on its weight")
    if output.is_meta:
        return False
    with torch.no_grad(), torch.autocast(output.device.type, enabled=False):
        conclusive = _same_output(adapter, module, x, weight, bias, output)
        if conclusive and not adapter.autograd_backward:
            conclusive = _same_gradients(adapter, x, weight, bias, output, foreign=foreign)
    return conclusive


def _same_output(
    adapter: LayerAdapter,
    module: nn.Module,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    output: Tensor,
) -> bool:
    dtype = output.dtype  # as autocast does
    inputs, outputs = adapter.batched(adapter.cast(x, dtype), output)
    forward: Any = adapter.forward
    if isinstance(adapter, NormAdapter):  # may normalise over the batch, and costs little
        forward = partial(forward, statistics=adapter.statistics(module))
    elif len(inputs) == len(outputs):
        inputs, outputs = inputs[:1], outputs[:1]
    expected = forward(inputs, weight.to(dtype), None if bias is None else bias.to(dtype), outputs)
    what = f"its output is not that of a {_name(module)}"
    if expected.shape != outputs.shape:
        found, wanted = tuple(outputs.shape), tuple(expected.shape)
        raise UnsupportedError(f"{what}: for one example its shape is {found} instead of {wanted}")
    return _same(expected, outputs, dtype, what)


def _same_gradients(
    adapter: LayerAdapter,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    output: Tensor,
    *,
    foreign: bool,
) -> bool:
    """Equal outputs may have other gradients: a rounded or detached weight, say."""
    if _hides_graph(output):
        if foreign:
            raise UnsupportedError(
                "it has a forward of its own, whose gradients can't be compared under "
                "torch.compile or activation checkpointing"
            )
        return True
    tensors = {"input": x, "weight": weight, "bias": bias}
    wanted = {k: t for k, t in tensors.items() if t is not None and t.requires_grad}
    # Any direction will do, but for the generator of random numbers, which is the user's.
    steps = torch.arange(output.numel(), dtype=torch.float32, device=output.device)
    vector = steps.cos_().view(output.shape).to(output.dtype)
    theirs = _local_gradients(output, vector, list(wanted.values()))
    ours = _adapter_gradients(adapter, x, weight, vector, wanted)
    conclusive = True
    for name, found in zip(wanted, theirs, strict=True):
        what = f"the gradient of its {name} is not the adapter's"
        if found is None:
            raise UnsupportedError(f"its output does not depend on its {name}")
        conclusive &= _same(ours[name], found, output.dtype, what)
    return conclusive


def _adapter_gradients(
    adapter: LayerAdapter, x: Tensor, weight: Tensor, vector: Tensor, wanted: Any
) -> dict[str, Tensor]:
    leaf = x.detach()
    with torch.enable_grad():
        prepared = adapter.prepare(leaf.requires_grad_("input" in wanted))
    inputs, outputs = adapter.batched(adapter.cast(prepared.detach(), vector.dtype), vector)
    weights = weight.to(vector.dtype)
    found = {}
    if "weight" in wanted:
        found["weight"] = adapter.weight_gradient(outputs, inputs, weights)
    if "bias" in wanted:
        found["bias"] = adapter.bias_gradient(outputs)
    if "input" in wanted:
        of_input = adapter.input_gradient(outputs, inputs, weights).reshape(prepared.shape)
        if prepared is not leaf:
            (of_input,) = torch.autograd.grad(prepared, leaf, of_input.to(prepared.dtype))
        found["input"] = of_input
    return found


def _local_gradients(
    output: Tensor, vector: Tensor, tensors: Sequence[Tensor]
) -> list[Tensor | None]:
    """Gradients along the part of the graph that lies between these tensors and the output.

    Torch's engine would go on beyond the input, where that depends on the same weight, and call the
    hooks of users. Nodes that are called directly do neither, and keep what they have saved.
    """
    ends = [get_gradient_edge(tensor) for tensor in tensors]
    root: Any = output.grad_fn
    callers = _callers(root, {end.node for end in ends})
    given: dict[Any, dict[int, Tensor]] = {root: {output.output_nr: vector}}
    ready = [root]
    while ready:
        node = ready.pop()
        if any(node is end.node for end in ends):
            continue
        grads = given.pop(node, {})
        results = node(*(grads.get(i) for i in range(len(gradient_metadata(node)))))
        results = results if isinstance(results, tuple) else (results,)
        for (before, place), grad in zip(node.next_functions, results, strict=True):
            if before is None:
                continue
            if grad is not None:
                # Torch's engine, too, undoes broadcasts and casts for the nodes.
                sizes = gradient_metadata(before)[place]
                grad = grad.sum_to_size(sizes.shape).to(sizes.dtype)
                own = given.setdefault(before, {})
                own[place] = grad if place not in own else own[place] + grad
            callers[before] -= 1
            if callers[before] == 0:
                ready.append(before)
    return [given.get(end.node, {}).get(end.output_nr) for end in ends]


def _callers(root: Any, ends: set[Any]) -> dict[Any, int]:
    """How many nodes hand a gradient to each node between the root and the ends."""
    callers = {root: 0}
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if node in ends:
            continue
        if hasattr(node, "variable"):
            shape = tuple(node.variable.shape)
            raise UnsupportedError(f"its output depends on another parameter too, of shape {shape}")
        if isinstance(node, BackwardCFunction):
            raise UnsupportedError(f"its backward is a function of its own, {type(node).__name__}")
        for before, _ in node.next_functions:
            if before is not None:
                if before not in callers:
                    waiting.append(before)
                callers[before] = callers.get(before, 0) + 1
    return callers


def _hides_graph(output: Tensor) -> bool:
    """Whether the nodes of the graph can't be called without running the model again.

    A compiled graph is one node, for more than this module; what is saved for backward under
    activation checkpointing is computed again when it is asked for.
    """
    if may_recompute_saved():
        return True
    nodes: list[Any] = [output.grad_fn]
    nodes += [node for node, _ in nodes[0].next_functions]  # it may be a view of the output
    return any(type(node).__name__.startswith("CompiledFunction") for node in nodes)


def _same(expected: Tensor, found: Tensor, dtype: torch.dtype, what: str) -> bool:
    """A host read; False if a number is not finite."""
    precise = torch.promote_types(dtype, torch.float32)
    expected, found = expected.to(precise), found.to(precise)
    norms = [torch.linalg.vector_norm(t) for t in (expected - found, expected, found)]
    error, *sizes = torch.stack(norms).tolist()
    if not math.isfinite(error):
        return False
    eps = torch.finfo(dtype).eps
    if found.device.type != "cpu":
        eps = max(eps, ACCELERATOR_EPS if dtype == torch.float32 else 0.0)
    if error > eps**TOLERANCE * max(sizes):
        raise UnsupportedError(f"{what} (relative difference {error / max(sizes):.1e})")
    return True


def _name(module: nn.Module) -> str:
    return (supported_type(type(module)) or type(module)).__name__
