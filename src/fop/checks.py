"""Why a step can't be taken: found before anything is changed, and named."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fop.block import Block
from fop.distributed import Counts


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
    blocks: Sequence[Block],
    gradients: Mapping[Tensor, Tensor],
    options: Mapping[Tensor, Mapping[str, Any]],
    tree: ModuleTree,
) -> Exception | None:
    """The first problem of this rank: returned, not raised, so that other ranks can be told."""
    return _sparse(gradients, options) or _replaced(blocks, gradients) or tree.replaced(options)


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


def _replaced(blocks: Sequence[Block], gradients: Mapping[Tensor, Tensor]) -> Exception | None:
    for block in blocks:
        # A frozen weight has no gradient either, and may be stood in for by functional_call.
        trained = block.weight.requires_grad
        if block.capture.seen.replaced and trained and block.weight not in gradients:
            return RuntimeError(
                f"the weight of layer {block.name!r} was replaced by another parameter after "
                "the optimizer was built, so the new one would not be trained: build the "
                "optimizer again, or change the weight in place (weight.data.copy_(...))"
            )
    return None


def bypassed_layers(counts: Mapping[Block, Counts], blocks: Sequence[Block]) -> list[Block]:
    """The layers that are to have their first curvature and have a gradient, but no statistics.

    Raises if that is so of every layer: then the hooks don't work at all.
    """
    bypassed = [
        block
        for block, count in counts.items()
        if count.gradients and not (count.examples or block.ready or _excused(block, count))
    ]
    works = any(count.examples for count in counts.values()) or any(b.ready for b in blocks)
    if not bypassed or works:
        return bypassed
    names = ", ".join(repr(block.name) for block in bypassed[:3])
    more = f" and {len(bypassed) - 3} more" if len(bypassed) > 3 else ""
    raise RuntimeError(
        f"no backward pass through any layer was seen, but {names}{more} have gradients: there is "
        "nothing to make curvature of. Either the model was called by torch.compile before the "
        "optimizer was built, or one like it was, and its graph has no hooks (build the optimizer "
        "first, or call torch.compiler.reset()), or weights are used without their modules "
        '(F.linear(x, layer.weight)), or .grad was set by hand, or, with fisher="mc" or '
        '"exact", the model given to the optimizer was not called'
    )


def _excused(block: Block, count: Counts) -> bool:
    """Whether this step's gradient alone is without statistics."""
    return block.capture.seen.foreign or bool(count.empty and not count.filled)
