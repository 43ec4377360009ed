"""Checks of a layer's adapter, for those who write one: `check_layer` runs them all.

    fop.register_layer(Conv1D, Conv1DAdapter)
    fop.testing.check_layer(Conv1D(3, 4), torch.randn(6, 5, 4))

What is expected comes from the module and autograd alone (`fop/testing/dense.py`).
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fop.api import FOP, KFAC
from fop.layers import LayerAdapter, NormAdapter, adapter_for
from fop.testing.dense import DAMPING, DenseLayer, direction, parameters_of, second_moment

__all__ = ["check_layer"]


def check_layer(
    module: nn.Module,
    inputs: Tensor,
    *,
    tolerance: float = 1e-8,
    dtypes: Iterable[torch.dtype] = (torch.float32, torch.bfloat16),
) -> None:
    """Raise an AssertionError that names what the adapter of the module's type gets wrong.

    Compared with autograd on `inputs`, with two or more examples in dimension 0: output, gradients
    (also of single examples, of half-batches, second ones, and in the given dtypes to the square
    root of their precision), rows, the matrix, second moments, and a step of `FOP` and of `KFAC`.
    `tolerance` is the largest relative difference in float64. The module itself stays as it is; it
    should be small, since its outputs are differentiated one by one.
    """
    module = copy.deepcopy(module).double().requires_grad_()
    adapter = adapter_for(module, norms=True)
    if adapter is None:
        raise ValueError(f"{type(module).__name__} has no adapter: call fop.register_layer first")
    reason = adapter.unsupported_reason(module)
    if reason is not None or inputs.dim() == 0 or len(inputs) < 2:
        problem = reason or f"the inputs are no batch of 2 examples or more: {tuple(inputs.shape)}"
        raise ValueError(f"there is nothing to check in this {type(module).__name__}: {problem}")
    with torch.no_grad():
        for parameter in module.parameters():  # a bias of zeros would hide that it is left out
            parameter.add_(direction(parameter), alpha=0.1)
    x = inputs.double() if inputs.is_floating_point() else inputs
    expect = _Expectation(type(adapter).__name__, tolerance)
    _check_matrix(expect, adapter, module)
    _check_gradients(expect, adapter, module, x)
    if adapter.free_dimensions(x[0]) == 0:
        _check_gradients(expect.of("an unbatched call"), adapter, module, x[0])
    for dtype in dtypes:
        rounded = _Expectation(expect.name, torch.finfo(dtype).eps ** 0.5, f"in {dtype}")
        _check_gradients(rounded, adapter, copy.deepcopy(module).to(dtype).double(), x, dtype)
    _check_half_batches(expect, adapter, module, x)
    dense = DenseLayer(adapter, module, x)
    _check_rows(expect, adapter, module, x, dense)
    _check_second_derivatives(expect, module, x)
    for sharing in ("expand", "reduce"):
        for kind in (FOP, KFAC):
            named = expect.of(f"{kind.__name__} with sharing={sharing!r}")
            _check_step(named, module, x, dense, kind, sharing)


class _Expectation:
    def __init__(self, name: str, tolerance: float, where: str = "") -> None:
        self.name, self._tolerance, self._where = name, tolerance, where

    def of(self, where: str) -> _Expectation:
        return _Expectation(self.name, self._tolerance, where)

    def true(self, what: str, condition: bool, found: object) -> None:
        if not condition:
            where = f" ({self._where})" if self._where else ""
            raise AssertionError(f"{self.name}: {what}{where}: {found}")

    def equal(self, what: str, found: Tensor, wanted: Tensor) -> None:
        shapes = f"its shape is {tuple(found.shape)} instead of {tuple(wanted.shape)}"
        self.true(what, found.shape == wanted.shape, shapes)
        found, wanted = found.detach().double(), wanted.detach()
        error = float((found - wanted).norm() / wanted.norm().clamp(min=1e-30))
        allowed = f"relative difference {error:.1e}, and {self._tolerance:.1e} is allowed"
        self.true(what, error <= self._tolerance, allowed)


# ---- one call


def _check_matrix(expect: _Expectation, adapter: LayerAdapter, module: nn.Module) -> None:
    weight, bias = parameters_of(module)
    matrix = adapter.to_matrix(weight, bias)
    shape = (adapter.groups, *adapter.matrix_shape(weight, bias is not None))
    expect.true("matrix_shape is not that of to_matrix", matrix.shape == shape, shape)
    for name, back, parameter in zip(
        ("weight", "bias"), adapter.from_matrix(matrix, weight, bias), (weight, bias), strict=False
    ):
        assert parameter is not None
        expect.equal(f"the {name} that from_matrix makes of to_matrix", back, parameter)


def _check_gradients(
    expect: _Expectation,
    adapter: LayerAdapter,
    module: nn.Module,
    x: Tensor,
    dtype: torch.dtype = torch.float64,
) -> None:
    """Output and gradients of the adapter in `dtype`, and of the module in float64."""
    weight, bias = parameters_of(module)
    x = adapter.cast(adapter.cast(x, dtype), torch.float64)
    x = x.detach().requires_grad_(x.is_floating_point())
    y = module(x)
    v = direction(y).to(dtype)
    wanted = {"weight": weight, "bias": bias, "input": x if x.requires_grad else None}
    tensors = {name: tensor for name, tensor in wanted.items() if tensor is not None}
    gradients = torch.autograd.grad(y, list(tensors.values()), v.double())
    with torch.no_grad():
        known: dict[str, Any] = {}
        if isinstance(adapter, NormAdapter):
            known = {"statistics": adapter.statistics(module)}
        inputs, outputs = adapter.batched(adapter.cast(x, dtype), y)
        biases = None if bias is None else bias.to(dtype)
        output = adapter.forward(inputs, weight.to(dtype), biases, outputs, **known)
        expect.equal("the output of forward", output.reshape(y.shape), y)
        found = _own_gradients(adapter, module, x, v)
    for name, gradient in zip(tensors, gradients, strict=True):
        if name in found:
            expect.equal(f"{name}_gradient", found[name], gradient)


def _own_gradients(
    adapter: LayerAdapter, module: nn.Module, x: Tensor, v: Tensor
) -> dict[str, Tensor]:
    """The adapter's, for an output gradient v and in its precision."""
    weight, bias = parameters_of(module)
    weight = weight.to(v.dtype)
    inputs, outputs = _prepared(adapter, module, x, v)
    found = {"weight": adapter.weight_gradient(outputs, inputs, weight)}
    if bias is not None:
        found["bias"] = adapter.bias_gradient(outputs)
    if x.requires_grad and not isinstance(adapter, NormAdapter):
        with torch.enable_grad():
            prepared = adapter.prepare(x)
        of_input = adapter.input_gradient(outputs, inputs, weight).reshape(prepared.shape)
        if prepared is not x:
            (of_input,) = torch.autograd.grad(prepared, x, of_input.to(prepared.dtype))
        found["input"] = of_input
    return found


def _prepared(
    adapter: LayerAdapter, module: nn.Module, x: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """The input and the output gradient as the adapter takes them."""
    if isinstance(adapter, NormAdapter):
        has_bias = parameters_of(module)[1] is not None
        examples = adapter.example_gradients(x, v, adapter.statistics(module), has_bias)
        return examples, examples
    return adapter.batched(adapter.cast(adapter.prepare(x), v.dtype), v)


def _check_half_batches(
    expect: _Expectation, adapter: LayerAdapter, module: nn.Module, x: Tensor
) -> None:
    weight, bias = parameters_of(module)
    with torch.no_grad():
        x, v = _prepared(adapter, module, x, direction(module(x)))
        one, two = slice(0, len(x) // 2), slice(len(x) // 2, None)
        total = adapter.weight_gradient(v, x, weight)
        first = adapter.weight_gradient(v[one], x[one], weight)
        second = adapter.weight_gradient(v[two], x[two], weight)
        both = adapter._add_weight_gradient(first, v[two], x[two], weight)
        expect.equal("weight_gradient summed over the half-batches", first + second, total)
        expect.equal("weight_gradient added to that of a half-batch", both, total)
        if bias is not None:
            first, second, total = (adapter.bias_gradient(part) for part in (v[one], v[two], v))
            expect.equal("bias_gradient summed over the half-batches", first + second, total)


def _check_second_derivatives(expect: _Expectation, module: nn.Module, x: Tensor) -> None:
    """Of a gradient penalty, through the layer that an optimizer has its hooks on."""
    if not x.is_floating_point():
        return  # indices
    found = []
    for hooked in (False, True):
        model, leaf = copy.deepcopy(module), x.clone().requires_grad_()
        optimizer = FOP(model, norms="unitwise") if hooked else None
        (slope,) = torch.autograd.grad(model(leaf).pow(3).sum(), leaf, create_graph=True)
        slope.square().sum().backward()
        found.append([slope.detach(), model.weight.grad, leaf.grad])
        del optimizer
    names = ("input's gradient", "second derivative by the weight", "second one by the input")
    for name, wanted, ours in zip(names, *found, strict=True):
        expect.equal(f"the {name} of a layer with hooks", ours, wanted)


# ---- rows, and the step that follows from them


class _Sum:
    """The `Gram` that adapters leave their second moments in, dense."""

    def __init__(self, like: Tensor, groups: int, width: int) -> None:
        self.total = like.new_zeros(groups, width, width)

    def add_rows(self, rows: Tensor) -> None:
        self.total += second_moment(rows)

    def add_columns(self, vectors: Tensor) -> None:
        self.total += vectors @ vectors.mT

    def write_rows(self, values: Tensor, start: int, step: int) -> None:
        self.total[:, start::step] = values


def _check_rows(
    expect: _Expectation, adapter: LayerAdapter, module: nn.Module, x: Tensor, dense: DenseLayer
) -> None:
    _, bias = parameters_of(module)
    with torch.no_grad():
        gradient = module(x) - dense.target
        x, v = _prepared(adapter, module, x, gradient)
        outputs = adapter.output_rows(v)
        inputs = plain = adapter.input_rows(x, v)
        if adapter.one_hot:
            indices = plain.unsqueeze(1)  # -1 for a row of zeros
            one_hot = F.one_hot(indices.clamp(min=0), dense.inputs.shape[-1])
            inputs = (one_hot * (indices >= 0).unsqueeze(-1)).double()
        elif not isinstance(adapter, NormAdapter):
            _check_input_rows(expect, adapter, x, v, plain)
        if bias is not None and adapter.homogeneous_bias:
            inputs = F.pad(inputs, (0, 1), value=1.0)
    gradients = torch.einsum("ngso,ngsi->ngoi", outputs, inputs)
    expect.equal("the sum of g x^T over each example's rows", gradients, dense.example_gradients)
    for name, rows, wanted in (
        ("input_rows", inputs, dense.inputs),
        ("output_rows", outputs, dense.outputs),
    ):
        expect.equal(f"the second moment of {name}", _up_to_scale(rows), _up_to_scale(wanted))


def _up_to_scale(rows: Tensor) -> Tensor:
    """Second moments of trace 1: a factor in the layer's formula may be with either rows."""
    moment = second_moment(rows)
    return moment / moment.diagonal(dim1=1, dim2=2).sum(1).clamp(min=1e-30).view(-1, 1, 1)


def _check_input_rows(
    expect: _Expectation, adapter: LayerAdapter, x: Tensor, v: Tensor, rows: Tensor
) -> None:
    """What the library makes use of to get their moments without writing them out."""
    moment = _Sum(rows, adapter.groups, rows.shape[-1])
    adapter.input_moment(x, v, moment)
    expect.equal("input_moment", moment.total, second_moment(rows))
    expect.equal("input_totals", adapter.input_totals(x, v), rows.sum(2))
    summed = adapter.input_rows(x.sum(0, keepdim=True), v[:1])[0]
    expect.equal("the input rows of a sum of examples", summed, rows.sum(0))
    expect.equal("the input rows of squares", adapter.input_rows(x.square(), v), rows.square())


def _check_step(
    expect: _Expectation,
    module: nn.Module,
    x: Tensor,
    dense: DenseLayer,
    kind: type[FOP] | type[KFAC],
    sharing: Any,
) -> None:
    model, adapter = copy.deepcopy(module), dense.adapter
    options: dict[str, Any] = {"lr": 1.0, "momentum": 0.0, "kl_clip": None, "sharing": sharing}
    options |= {"damping": DAMPING, "damping_mode": "exact", "norms": "unitwise"}
    optimizer = kind(model, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        try:
            ((model(x) - dense.target).square().sum() / (2 * len(x))).backward()
            optimizer.step()
        except RuntimeWarning as warning:
            raise AssertionError(
                f"{expect.name}: the optimizer did not use it: {warning}"
            ) from None
    with torch.no_grad():
        before, after = (adapter.to_matrix(*parameters_of(one)) for one in (module, model))
    expect.equal("the step", before - after, dense.step(sharing, project=kind is FOP))
