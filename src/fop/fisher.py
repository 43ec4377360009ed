"""The Fisher by extra backwards: labels drawn from the model ("mc") or all of them ("exact").

They run inside the user's own backward, before it goes on from the model's output, and only on
steps that renew curvature. They go through the same layers and leave curvature sums, but no
gradients.

Likelihoods match torch's losses, and the Fisher at the output is the expected Hessian of the loss
that is trained. An example's own loss is a sum over its positions (categorical) or features, each
with weight w: one over their number for a mean loss, 1 for a sum loss. So gradients carry sqrt(w).
    categorical  cross_entropy: classes last in [n, c] and [n, s, c], dimension 1 of [n, c, h, w]
    bernoulli    binary_cross_entropy_with_logits
    gaussian     mse_loss, (o - y)^2, whose Hessian is 2
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fop.capture import CapturePlan, LayerCapture


def sampled_gradient(output: Tensor, likelihood: str, reduction: str, rows: int = 1) -> Tensor:
    """Gradient at the output [n, ...] with labels drawn from the model itself.

    `rows` of dimension 0 belong to each example, one after the other.
    """
    weight = math.sqrt(_term_weight(output, likelihood, reduction, rows))
    if likelihood == "gaussian":
        return torch.randn_like(output) * (math.sqrt(2) * weight)
    if likelihood == "bernoulli":
        probability = output.sigmoid()
        return (probability - torch.bernoulli(probability)) * weight
    probability = _classes_last(output).softmax(-1)
    # An exponential race draws from the classes without the host read of torch.multinomial.
    label = (probability / torch.empty_like(probability).exponential_()).argmax(-1, keepdim=True)
    gradient = probability.scatter_add(
        -1, label, probability.new_full((), -1.0).expand(label.shape)
    )
    return _classes_back(gradient * weight, output)


def all_gradients(
    output: Tensor, likelihood: str, reduction: str, rows: int = 1
) -> Iterator[Tensor]:
    """Gradients at the output [n, ...] whose g g^T add up to each example's exact Fisher.

    One for every class of every position, or for every feature: as many backwards.
    """
    weight = math.sqrt(_term_weight(output, likelihood, reduction, rows))
    examples = output.shape[0] // rows
    if likelihood == "categorical":
        logits = _classes_last(output)
        probability = logits.softmax(-1).reshape(examples, -1, logits.shape[-1])
        positions, classes = probability.shape[1:]
        for position in range(positions):
            for label in range(classes):
                gradient = torch.zeros_like(probability)
                score = probability[:, position].clone()
                score[:, label] -= 1
                gradient[:, position] = (
                    score * probability[:, position, label : label + 1].sqrt() * weight
                )
                yield _classes_back(gradient.reshape(logits.shape), output)
        return
    if likelihood == "gaussian":
        deviation = torch.full_like(output, math.sqrt(2) * weight)
    else:
        probability = output.sigmoid()
        deviation = (probability * (1 - probability)).sqrt() * weight
    flat = deviation.reshape(examples, -1)
    for feature in range(flat.shape[1]):
        gradient = torch.zeros_like(flat)
        gradient[:, feature] = flat[:, feature]
        yield gradient.reshape(output.shape)


def _term_weight(output: Tensor, likelihood: str, reduction: str, rows: int) -> float:
    terms = output[0].numel() * rows
    if likelihood == "categorical":
        terms //= _classes_last(output).shape[-1]
    return 1.0 / terms if reduction == "mean" else 1.0


def _classes_last(output: Tensor) -> Tensor:
    if output.dim() < 2:
        raise ValueError(
            'likelihood="categorical" needs model outputs [n, classes, ...], got shape '
            f"{tuple(output.shape)}: "
            'choose likelihood="bernoulli" or "gaussian", or fisher="empirical"'
        )
    return output if output.dim() <= 3 else output.movedim(1, -1)


def _classes_back(gradient: Tensor, output: Tensor) -> Tensor:
    return gradient if output.dim() <= 3 else gradient.movedim(-1, 1)


class ExtraPass:
    """Runs the extra backwards for one model."""

    def __init__(
        self,
        plan: CapturePlan,
        captures: Sequence[LayerCapture],
        fisher: str,
        likelihood: str,
        reduction: str,
    ) -> None:
        self._plan = plan
        self._captures = captures
        self._exact = fisher == "exact"
        self._likelihood = likelihood
        self._reduction = reduction

    def wanting(self) -> list[LayerCapture]:
        return [
            capture
            for capture in self._captures
            if capture.wants_sums and capture.weight.requires_grad
        ]

    def rows(self, output: Tensor) -> int:
        """Of dimension 0 of the model's output, for each example of its inputs."""
        forward = self._plan.examples.current
        size = None if forward is None else forward.size
        return output.shape[0] // size if size and output.shape[0] % size == 0 else 1

    def run(self, output: Tensor, rows: int) -> None:
        captures = self.wanting()
        weights = list(dict.fromkeys(capture.in_graph for capture in captures))  # may be shared
        if not weights:
            return
        plan = self._plan
        plan.extra_pass_of, plan.extra_pass_first = torch._C._current_graph_task_id(), True
        try:
            for gradient in self._gradients(output.detach(), rows):
                torch.autograd.grad(output, weights, gradient, retain_graph=True, allow_unused=True)
                plan.extra_pass_first = False
                for capture in captures:
                    capture.close_extra_pass()
        finally:
            plan.extra_pass_of = None

    def _gradients(self, output: Tensor, rows: int) -> Iterator[Tensor]:
        if self._exact:
            yield from all_gradients(output, self._likelihood, self._reduction, rows)
        else:
            yield sampled_gradient(output, self._likelihood, self._reduction, rows)


class _OutputProbe(torch.autograd.Function):
    """Hands the model's output on; its backward starts the extra passes from there.

    A tensor hook would have to hold the output itself, a cycle that is never freed; saved tensors
    don't.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, extra_pass: weakref.ref[ExtraPass], rows: int) -> Tensor:
        ctx.save_for_backward(output)
        ctx.extra_pass, ctx.rows = extra_pass, rows
        return output.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        extra_pass = ctx.extra_pass()
        if extra_pass is not None:
            extra_pass.run(ctx.saved_tensors[0], ctx.rows)
        return grad, None, None


class OutputHook:
    """The forward hook on the model; like `LayerHook` it is inert in a copy and never compiled."""

    def __init__(self, extra_pass: ExtraPass | None = None) -> None:
        self._extra_pass = weakref.ref(extra_pass) if extra_pass is not None else None
        self._probe = torch.compiler.disable(_probe) if extra_pass is not None else None

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Tensor | None:
        if self._probe is None or not torch.is_grad_enabled():
            return None
        probed: Tensor | None = self._probe(self._extra_pass, module, output)
        return probed

    def __deepcopy__(self, memo: dict[int, Any]) -> OutputHook:
        return OutputHook()

    def __reduce__(self) -> tuple[Any, ...]:
        return OutputHook, ()


def _probe(reference: weakref.ref[ExtraPass], module: nn.Module, output: Any) -> Tensor | None:
    extra_pass = reference()
    if extra_pass is None or not extra_pass.wanting():
        return None
    if isinstance(output, Tensor) and output.numel() == 0:
        return None
    if not isinstance(output, Tensor):
        raise TypeError(
            'fisher="mc" and "exact" need a model that returns one tensor, but '
            f"{type(module).__name__} returned {type(output).__name__}: wrap the model so "
            'that it returns its logits, or use fisher="empirical"'
        )
    probed: Tensor = _OutputProbe.apply(  # type: ignore[no-untyped-call]
        output, reference, extra_pass.rows(output)
    )
    return probed


def attach_output(model: nn.Module, extra_pass: ExtraPass) -> RemovableHandle:
    return model.register_forward_hook(OutputHook(extra_pass), prepend=True)
