"""Why a step can't be taken: found before anything is changed, and named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fop.block import Block
from fop.distributed import Counts


def find_problem(
    blocks: Sequence[Block],
    gradients: Mapping[Tensor, Tensor],
    options: Mapping[Tensor, Mapping[str, Any]],
) -> Exception | None:
    """The first problem of this rank: returned, not raised, so that other ranks can be told."""
    return _sparse(gradients, options) or _replaced(blocks, gradients)


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
        if block.capture.replaced and trained and block.weight not in gradients:
            return RuntimeError(
                f"the weight of layer {block.name!r} was replaced by another parameter after "
                "the optimizer was built, so the new one would not be trained: build the "
                "optimizer again, or change the weight in place (weight.data.copy_(...))"
            )
    return None


def check_captured(counts: Mapping[Block, Counts]) -> None:
    """Raise where a layer is to have its first curvature and has a gradient, but no statistics."""
    for block, count in counts.items():
        excused = (
            block.capture.given_up or block.capture.foreign or (count.empty and not count.filled)
        )
        if count.gradients and not (count.examples or excused or block.ready):
            raise RuntimeError(
                f"layer {block.name!r} has a gradient, but no backward pass through the module "
                "was seen, so there is no curvature to precondition it with. Either the model "
                "was compiled by torch.compile and called before the optimizer was built, or "
                "one like it was, and its graph has no hooks (build the optimizer first, or "
                "call torch.compiler.reset()), or its weight is used without the module "
                "(F.linear(x, layer.weight), a fused kernel), or .grad was set by hand, or, "
                'with fisher="mc" or "exact", the model given to the optimizer was not called. '
                f"Call the module, or pass skip=[{block.module_name!r}] to use the fallback "
                "rule."
            )
