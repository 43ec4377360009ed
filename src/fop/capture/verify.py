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
from collections.abc import Container, Iterable, Sequence
from functools import partial
from graphlib import TopologicalSorter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import get_gradient_edge

from fop._torch import gradient_metadata, may_recompute_saved
from fop.layers import LayerAdapter, NormAdapter, supported_type

# The relative error of two ways to compute the same is a small power of the precision.
TOLERANCE = 0.4
# Accelerators may round the inputs of float32 products to so many bits (TF32).
ACCELERATOR_EPS = 2.0**-10


class UnsupportedError(Exception):
    """The module computes something else than its adapter; the message says what."""


def verify(
    adapter: LayerAdapter, module: nn.Module, x: Tensor, output: Tensor, *, foreign: bool
) -> bool:
    """Raise `UnsupportedError` unless the adapter gives this output and its gradients.

    False if that can't be told, because a number is not finite or there are none.
    """
    if not output.requires_grad:
        raise UnsupportedError("its output does not depend on its weight")
    if output.is_meta:
        return False
    with torch.no_grad(), torch.autocast(output.device.type, enabled=False):
        if not _same_output(adapter, module, x, output):
            return False
        if adapter.autograd_backward:
            return True
        if not _hides_graph(output):
            return _same_gradients(adapter, module, x, output)
    if foreign:
        raise UnsupportedError(
            "it has a forward of its own, whose gradients can't be compared under "
            "torch.compile or activation checkpointing"
        )
    return True


def _same_output(adapter: LayerAdapter, module: nn.Module, x: Tensor, output: Tensor) -> bool:
    dtype = output.dtype  # as autocast does
    inputs, outputs = adapter.batched(adapter.cast(x, dtype), output)
    forward: Any = adapter.forward
    if isinstance(adapter, NormAdapter):  # may normalise over the batch, and costs little
        forward = partial(forward, statistics=adapter.statistics(module))
    elif len(inputs) == len(outputs):
        inputs, outputs = inputs[:1], outputs[:1]
    own = (module._parameters.get(name) for name in ("weight", "bias"))
    weight, bias = (None if parameter is None else parameter.to(dtype) for parameter in own)
    expected = forward(inputs, weight, bias, outputs)
    kind = (supported_type(type(module)) or type(module)).__name__
    what = f"its output is not that of a {kind}"
    if expected.shape != outputs.shape:
        found, wanted = tuple(outputs.shape), tuple(expected.shape)
        raise UnsupportedError(f"{what}: for one example its shape is {found} instead of {wanted}")
    return _same(expected, outputs, dtype, what)


def _same_gradients(adapter: LayerAdapter, module: nn.Module, x: Tensor, output: Tensor) -> bool:
    """Equal outputs may have other gradients: a rounded or detached weight, say."""
    tensors = {"input": x, **module._parameters}
    wanted = {
        name: tensor
        for name in ("input", "weight", "bias")
        if (tensor := tensors.get(name)) is not None and tensor.requires_grad
    }
    # Any direction will do, but for the generator of random numbers, which is the user's.
    steps = torch.arange(output.numel(), dtype=torch.float32, device=output.device)
    vector = steps.cos_().view(output.shape).to(output.dtype)
    theirs = _local_gradients(output, vector, list(wanted.values()))
    weight = module._parameters["weight"]
    assert weight is not None
    ours = _adapter_gradients(adapter, x, weight, vector, wanted)
    conclusive = True
    for name, found in zip(wanted, theirs, strict=True):
        if found is None:
            raise UnsupportedError(f"its output does not depend on its {name}")
        what = f"the gradient of its {name} is not the adapter's"
        conclusive &= _same(ours[name], found, output.dtype, what)
    return conclusive


def _adapter_gradients(
    adapter: LayerAdapter, x: Tensor, weight: Tensor, vector: Tensor, wanted: Container[str]
) -> dict[str, Tensor]:
    leaf, weights = x.detach(), weight.to(vector.dtype)
    with torch.enable_grad():
        prepared = adapter.prepare(leaf.requires_grad_("input" in wanted))
    inputs, outputs = adapter.batched(adapter.cast(prepared.detach(), vector.dtype), vector)
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
    stops = {end.node for end in ends}
    given: dict[Any, dict[int, Tensor]] = {output.grad_fn: {output.output_nr: vector}}
    for node in _in_order(output.grad_fn, stops):
        if node in stops:
            continue
        grads = given.pop(node, {})
        results = node(*(grads.get(i) for i in range(len(gradient_metadata(node)))))
        results = results if isinstance(results, tuple) else (results,)
        for (before, place), grad in zip(node.next_functions, results, strict=True):
            if before is not None and grad is not None:
                # Torch's engine, too, undoes broadcasts and casts for the nodes.
                sizes = gradient_metadata(before)[place]
                grad = grad.sum_to_size(sizes.shape).to(sizes.dtype)
                own = given.setdefault(before, {})
                own[place] = grad if place not in own else own[place] + grad
    return [given.get(end.node, {}).get(end.output_nr) for end in ends]


def _in_order(root: Any, stops: Container[Any]) -> Iterable[Any]:
    """The nodes from the root to where it stops, each after all that hand it a gradient."""
    order: TopologicalSorter[Any] = TopologicalSorter({root: ()})
    seen, waiting = {root}, [root]
    while waiting:
        node = waiting.pop()
        if node in stops:
            continue
        if hasattr(node, "variable"):
            shape = tuple(node.variable.shape)
            raise UnsupportedError(f"its output depends on another parameter too, of shape {shape}")
        if isinstance(node, BackwardCFunction):
            raise UnsupportedError(f"its backward is a function of its own, {type(node).__name__}")
        for before, _ in node.next_functions:
            if before is not None:
                order.add(before, node)
                if before not in seen:
                    seen.add(before)
                    waiting.append(before)
    return order.static_order()


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
