"""What a step tells the user about: warnings that name the layer and what to do, most of them once.

A problem that stops the step is an error, and lives in checks.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fop.block import Block
from fop.scaling import Number

# From here to the caller of step(): this file, two of the engine, the optimizer, torch's wrapper.
CALLER_OF_STEP = 6


class Notices:
    """The warnings of one optimizer, and which of them have been given."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def _once(self, topic: str, message: str) -> None:
        if topic not in self._said:
            self._said.add(topic)
            warnings.warn(f"{message} (Said once.)", RuntimeWarning, stacklevel=CALLER_OF_STEP)

    def not_inverted(self, blocks: Sequence[Block]) -> None:
        """Said every time, because it may pass or get worse."""
        warnings.warn(
            f"the curvature of {', '.join(repr(block.name) for block in blocks)} could not be "
            "inverted, not even in float64 with more damping: the previous inverse is used where "
            "there is one, else the plain gradient. If this repeats, raise damping.",
            RuntimeWarning,
            stacklevel=CALLER_OF_STEP - 1,
        )

    def given_up(self, block: Block) -> None:
        self._once(
            f"given up {block.name}",
            f"embedding {block.name!r} is called with one row of indices for the whole batch, so "
            "it sees no single examples: it follows its plain gradient with momentum. Pass "
            f"skip=[{block.name!r}] to train it by the fallback rule.",
        )

    def unknown_scale(self) -> None:
        self._once(
            "unknown scale",
            "gradients were changed (clipped, say) after GradScaler.unscale_(), so the loss scale "
            "of this step can't be told from the change, and the curvature shrinks with the "
            "square of a clip. Set optimizer.grad_scaler = scaler once, where optimizer is the "
            "fop optimizer itself.",
        )

    def bypassed(self, block: Block) -> None:
        self._once(
            "bypassed",
            f"layer {block.name!r} has a gradient that came without a call of the module (its "
            "weight was used directly, or is now computed by a parametrization or pruning), so its "
            "curvature is not renewed and its halves are not known: call the module, or build the "
            f"optimizer again, with skip=[{block.name!r}] if need be.",
        )

    def foreign(self, block: Block) -> None:
        self._once(
            "foreign",
            f"the gradient of layer {block.name!r} is not the one that its backward passes have "
            "left: it was replaced by another tensor, holds something from before them, or a pass "
            "failed before its end. So its halves are not known, and this is a KFAC step for the "
            "layer. Change gradients in place (p.grad.mul_(...)), and call optimizer.zero_grad() "
            "after a pass that failed.",
        )

    def unexplained(self, shares: Mapping[Block, Tensor]) -> None:
        """`shares` of the layers' gradients that calls of their modules don't account for."""
        if "unexplained" in self._said or not shares:
            return
        values = torch.stack([share.cpu() for share in shares.values()]).tolist()
        for block, share in zip(shares, values, strict=True):
            # Several calls may be added up in another order than autograd's.
            if share > torch.finfo(block.weight.dtype).eps ** 0.4:
                self._once(
                    "unexplained",
                    f"the gradient of layer {block.name!r} is not what the calls of its module "
                    "gave it: its weight is also used without the module (F.linear(x, "
                    "layer.weight), say), or a hook changes its gradient. Curvature and halves "
                    "know the calls alone. Call a module that shares the weight instead, or pass "
                    f"skip=[{block.name!r}].",
                )

    def no_halves(self, block: Block, first: Number, second: Number) -> None:
        if "no halves" in self._said or block.capture.given_up or max(first, second) <= 0:
            return
        self._once(
            "no halves",
            f"layer {block.name!r} saw {int(first)} and {int(second)} examples in the two halves "
            "of this step's batch: with an empty half there is nothing to project, and such steps "
            'are KFAC steps. Use at least two examples a step, or, with halves="microbatches", two '
            'backward passes, or, with halves="ranks", examples on even and on odd ranks.',
        )
