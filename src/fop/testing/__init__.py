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
    check = _Check(adapter, module, tolerance)
    check.matrix()
    check.gradients(x)
    if adapter.free_dimensions(x[0]) == 0:
        _Check(adapter, module, tolerance, "an unbatched call").gradients(x[0])
    for dtype in dtypes:
        rounded = copy.deepcopy(module).to(dtype).double()
        allowed = torch.finfo(dtype).eps ** 0.5
        _Check(adapter, rounded, allowed, f"in {dtype}").gradients(x, dtype)
    check.half_batches(x)
    dense = DenseLayer(adapter, module, x)
    check.rows(x, dense)
    check.second_derivatives(x)
    for sharing in ("expand", "reduce"):
        for kind in (FOP, KFAC):
            where = f"{kind.__name__} with sharing={sharing!r}"
            _Check(adapter, module, tolerance, where).step(x, dense, kind, sharing)


class _Check:
    """An adapter, held to its module. `where` is named when something differs."""

    def __init__(
        self, adapter: LayerAdapter, module: nn.Module, tolerance: float, where: str = ""
    ) -> None:
        self._adapter, self._module, self._tolerance = adapter, module, tolerance
        self._where = f" ({where})" if where else ""
        self._weight, self._bias = parameters_of(module)

    def _true(self, what: str, condition: bool, found: object) -> None:
        if not condition:
            name = type(self._adapter).__name__
            raise AssertionError(f"{name}: {what}{self._where}: {found}")

    def _equal(self, what: str, found: Tensor, wanted: Tensor) -> None:
        shapes = f"its shape is {tuple(found.shape)} instead of {tuple(wanted.shape)}"
        self._true(what, found.shape == wanted.shape, shapes)
        found, wanted = found.detach().double(), wanted.detach()
        error = float((found - wanted).norm() / wanted.norm().clamp(min=1e-30))
        allowed = f"relative difference {error:.1e}, and {self._tolerance:.1e} is allowed"
        self._true(what, error <= self._tolerance, allowed)

    def matrix(self) -> None:
        adapter, weight, bias = self._adapter, self._weight, self._bias
        matrix = adapter.to_matrix(weight, bias)
        shape = (adapter.groups, *adapter.matrix_shape(weight, bias is not None))
        self._true("matrix_shape is not that of to_matrix", matrix.shape == shape, shape)
        of_weight, *of_bias = adapter.from_matrix(matrix, weight, bias)
        self._equal("the weight that from_matrix makes of to_matrix", of_weight, weight)
        if bias is not None:
            self._equal("the bias that from_matrix makes of to_matrix", of_bias[0], bias)

    def gradients(self, x: Tensor, dtype: torch.dtype = torch.float64) -> None:
        """Output and gradients of the adapter in `dtype`, and of the module in float64."""
        adapter, weight, bias = self._adapter, self._weight, self._bias
        x = adapter.cast(adapter.cast(x, dtype), torch.float64)
        x = x.detach().requires_grad_(x.is_floating_point())
        y = self._module(x)
        v = direction(y).to(dtype)
        with torch.no_grad():
            known: dict[str, Any] = {}
            if isinstance(adapter, NormAdapter):
                known = {"statistics": adapter.statistics(self._module)}
            inputs, outputs = adapter.batched(adapter.cast(x, dtype), y)
            biases = None if bias is None else bias.to(dtype)
            output = adapter.forward(inputs, weight.to(dtype), biases, outputs, **known)
            self._equal("the output of forward", output.reshape(y.shape), y)
            found = self._gradients(x, v)
        tensors: dict[str, Any] = {"weight": weight, "bias": bias, "input": x}
        wanted = torch.autograd.grad(y, [tensors[name] for name in found], v.double())
        for (name, gradient), expected in zip(found.items(), wanted, strict=True):
            self._equal(f"{name}_gradient", gradient, expected)

    def _gradients(self, x: Tensor, v: Tensor) -> dict[str, Tensor]:
        """The adapter's, for an output gradient v and in its precision."""
        adapter, weight = self._adapter, self._weight.to(v.dtype)
        inputs, outputs = self._prepared(x, v)
        found = {"weight": adapter.weight_gradient(outputs, inputs, weight)}
        if self._bias is not None:
            found["bias"] = adapter.bias_gradient(outputs)
        if x.requires_grad and not isinstance(adapter, NormAdapter):
            with torch.enable_grad():
                prepared = adapter.prepare(x)
            of_input = adapter.input_gradient(outputs, inputs, weight).reshape(prepared.shape)
            if prepared is not x:
                (of_input,) = torch.autograd.grad(prepared, x, of_input.to(prepared.dtype))
            found["input"] = of_input
        return found

    def _prepared(self, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The input and the output gradient as the adapter takes them."""
        adapter, has_bias = self._adapter, self._bias is not None
        if isinstance(adapter, NormAdapter):
            examples = adapter.example_gradients(x, v, adapter.statistics(self._module), has_bias)
            return examples, examples
        return adapter.batched(adapter.cast(adapter.prepare(x), v.dtype), v)

    @torch.no_grad()
    def half_batches(self, x: Tensor) -> None:
        adapter, weight = self._adapter, self._weight
        x, v = self._prepared(x, direction(self._module(x)))
        one, two = slice(0, len(x) // 2), slice(len(x) // 2, None)
        total, first, second = (
            adapter.weight_gradient(v[part], x[part], weight) for part in (slice(None), one, two)
        )
        both = adapter._add_weight_gradient(first, v[two], x[two], weight)
        self._equal("weight_gradient summed over the half-batches", first + second, total)
        self._equal("weight_gradient added to that of a half-batch", both, total)
        if self._bias is not None:
            total, first, second = (adapter.bias_gradient(part) for part in (v, v[one], v[two]))
            self._equal("bias_gradient summed over the half-batches", first + second, total)

    def second_derivatives(self, x: Tensor) -> None:
        """Of a gradient penalty, through the layer that an optimizer has its hooks on."""
        if not x.is_floating_point():
            return  # indices
        found = []
        for hooked in (False, True):
            model, leaf = copy.deepcopy(self._module), x.clone().requires_grad_()
            optimizer = FOP(model, norms="unitwise") if hooked else None
            (slope,) = torch.autograd.grad(model(leaf).pow(3).sum(), leaf, create_graph=True)
            slope.square().sum().backward()
            found.append([slope.detach(), model.weight.grad, leaf.grad])
            del optimizer
        names = ("input's gradient", "second derivative by the weight", "second one by the input")
        for name, wanted, ours in zip(names, *found, strict=True):
            self._equal(f"the {name} of a layer with hooks", ours, wanted)

    @torch.no_grad()
    def rows(self, x: Tensor, dense: DenseLayer) -> None:
        adapter = self._adapter
        x, v = self._prepared(x, self._module(x) - dense.target)
        inputs, outputs = adapter.input_rows(x, v), adapter.output_rows(v)
        if adapter.one_hot:
            indices = inputs.unsqueeze(1)  # -1 for a row of zeros
            one_hot = F.one_hot(indices.clamp(min=0), dense.inputs.shape[-1])
            inputs = (one_hot * (indices >= 0).unsqueeze(-1)).double()
        elif not isinstance(adapter, NormAdapter):
            self._without_rows(x, v, inputs)
        if self._bias is not None and adapter.homogeneous_bias:
            inputs = F.pad(inputs, (0, 1), value=1.0)
        gradients = torch.einsum("ngso,ngsi->ngoi", outputs, inputs)
        self._equal("the sum of g x^T over each example's rows", gradients, dense.example_gradients)
        pairs = {"input": (inputs, dense.inputs), "output": (outputs, dense.outputs)}
        for name, pair in pairs.items():
            self._equal(f"the second moment of {name}_rows", *map(_unit_moment, pair))

    def _without_rows(self, x: Tensor, v: Tensor, rows: Tensor) -> None:
        """What the library makes use of to get moments of rows without writing them out."""
        adapter = self._adapter
        moment = _Sum(rows, adapter.groups, rows.shape[-1])
        adapter.input_moment(x, v, moment)
        self._equal("input_moment", moment.total, second_moment(rows))
        self._equal("input_totals", adapter.input_totals(x, v), rows.sum(2))
        summed = adapter.input_rows(x.sum(0, keepdim=True), v[:1])[0]
        self._equal("the input rows of a sum of examples", summed, rows.sum(0))
        self._equal("the input rows of squares", adapter.input_rows(x.square(), v), rows.square())

    def step(self, x: Tensor, dense: DenseLayer, kind: type[FOP | KFAC], sharing: Any) -> None:
        model = copy.deepcopy(self._module)
        options: dict[str, Any] = {"lr": 1.0, "momentum": 0.0, "kl_clip": None, "sharing": sharing}
        options |= {"damping": DAMPING, "damping_mode": "exact", "norms": "unitwise"}
        optimizer = kind(model, **options)
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            try:
                ((model(x) - dense.target).square().sum() / (2 * len(x))).backward()
                optimizer.step()
            except RuntimeWarning as warning:
                name = type(self._adapter).__name__
                raise AssertionError(f"{name}: the optimizer did not use it: {warning}") from None
        to_matrix = self._adapter.to_matrix
        before, after = to_matrix(self._weight, self._bias), to_matrix(*parameters_of(model))
        self._equal("the step", before - after, dense.step(sharing, project=kind is FOP))


class _Sum:
    """The `Gram` that adapters leave their second moments in, dense."""

    def __init__(self, like: Tensor, groups: int, width: int) -> None:
        self.total = like.new_zeros(groups, width, width)

    def add_rows(self, rows: Tensor) -> None:
        self.total += second_moment(rows)

    def write_rows(self, values: Tensor, start: int, step: int) -> None:
        self.total[:, start::step] = values


def _unit_moment(rows: Tensor) -> Tensor:
    """Of trace 1: a factor in the layer's formula may be with either rows."""
    moment = second_moment(rows)
    return moment / moment.diagonal(dim1=1, dim2=2).sum(1).clamp(min=1e-30).view(-1, 1, 1)
