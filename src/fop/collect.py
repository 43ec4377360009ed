"""What this rank brings to a step, and why it can't be taken: found before anything is changed."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fop.capture import factor_dtype
from fop.distributed import Contribution, Ranks
from fop.layer import Layer, State
from fop.linalg import all_finite
from fop.scaling import LossScale
from fop.slices import local

Options = Mapping[Any, Mapping[str, Any]]  # by parameter


def collect(
    layers: Sequence[Layer],
    options: Options,
    ranks: Ranks,
    tree: ModuleTree,
    loss: Tensor | None,
    loss_scale: LossScale | None,
) -> Contribution:
    """This rank's gradients, whether all is finite, and what is wrong."""
    for layer in layers:
        layer.recorder.meet_gradient()
        layer.sample = layer.recorder.sample()
    trained = ranks.trained(options)
    gradients: dict[Tensor, Tensor] = {p: p.grad for p in trained if p.grad is not None}
    problem = _sparse(gradients, options) or _replaced(layers, gradients) or tree.replaced(options)
    device = trained[0].device if trained else torch.device("cpu")
    changing = set(trained)
    active = [layer for layer in layers if layer.weight in changing]
    finite = torch.zeros((), dtype=torch.bool, device=device)
    if problem is None and gradients:
        tensors = [local(gradient) for gradient in gradients.values()]
        tensors += [loss] if loss is not None else []
        for layer in active:
            tensors += layer.sample.difference or []
            tensors += layer.sample.statistics.bounds()
        finite = all_finite(tensors).to(device)
        if loss_scale is not None:
            finite = finite & (loss_scale.found_inf.to(device) == 0)
    return Contribution(active, trained, gradients, finite, loss_scale, problem)


def follow_parameters(trained: Sequence[Tensor], layers: Sequence[Layer], state: State) -> None:
    """Move state along with a model that was moved or cast after the optimizer was built."""
    precise = {key for layer in layers for key in layer.keys}
    for parameter in trained:
        own = state.get(parameter, {})
        for key, value in own.items():
            if not isinstance(value, Tensor) or key == "step":
                continue
            dtype = factor_dtype(parameter.dtype) if key in precise else parameter.dtype
            if value.device != parameter.device or value.dtype != dtype:
                own[key] = value.to(parameter.device, dtype)


class ModuleTree:
    """Where the modules with parameters were when the optimizer was built."""

    def __init__(self, model: nn.Module) -> None:
        self._places = [
            (f"{name}.{key}" if name else key, parent._modules, key, child)
            for name, parent in model.named_modules()
            for key, child in parent._modules.items()
            if child is not None and next(child.parameters(), None) is not None
        ]

    def replaced(self, known: Container[Tensor]) -> Exception | None:
        """An error that names a module in the place of another, with parameters to train."""
        for name, modules, key, child in self._places:
            module = modules.get(key)
            if module is child or module is None:
                continue
            # It may be around the other one, or frozen.
            if any(p.grad is not None and p not in known for p in module.parameters()):
                return RuntimeError(
                    f"module {name!r} was replaced by another {type(module).__name__} after the "
                    "optimizer was built, so the new one would not be trained: build the "
                    "optimizer again, or load new values into the old module "
                    "(module.load_state_dict(...))"
                )
        return None


def _sparse(
    gradients: Mapping[Tensor, Tensor], options: Mapping[Tensor, Mapping[str, Any]]
) -> Exception | None:
    for parameter, gradient in gradients.items():
        if gradient.layout != torch.strided:
            group = options[parameter]
            index = next(i for i, member in enumerate(group["params"]) if member is parameter)
            return RuntimeError(
                f"parameter {group['param_names'][index]!r} has a sparse gradient, which is not "
                "supported: build its layer with sparse=False"
            )
    return None


def _replaced(layers: Sequence[Layer], gradients: Mapping[Tensor, Tensor]) -> Exception | None:
    for layer in layers:
        # A frozen weight has no gradient either, and may be stood in for by functional_call.
        trained = layer.weight.requires_grad
        if layer.recorder.seen.replaced and trained and layer.weight not in gradients:
            return RuntimeError(
                f"the weight of layer {layer.name!r} was replaced by another parameter after "
                "the optimizer was built, so the new one would not be trained: build the "
                "optimizer again, or change the weight in place (weight.data.copy_(...))"
            )
    return None
