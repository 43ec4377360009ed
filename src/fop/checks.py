"""Why a step can't be taken: found before anything is changed, and named."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fop.layer import Layer


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


def find_problem(
    layers: Sequence[Layer],
    gradients: Mapping[Tensor, Tensor],
    options: Mapping[Tensor, Mapping[str, Any]],
    tree: ModuleTree,
) -> Exception | None:
    """The first problem of this rank: returned, not raised, so that other ranks can be told."""
    return _sparse(gradients, options) or _replaced(layers, gradients) or tree.replaced(options)


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
        if layer.recorder.replaced and trained and layer.weight not in gradients:
            return RuntimeError(
                f"the weight of layer {layer.name!r} was replaced by another parameter after "
                "the optimizer was built, so the new one would not be trained: build the "
                "optimizer again, or change the weight in place (weight.data.copy_(...))"
            )
    return None
