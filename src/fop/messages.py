"""What a step tells the user about: warnings that name the layer and what to do, most of them once.

A problem that stops the step is an error, and lives in checks.py.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from fop.layer import Layer
from fop.scaling import Number

logger = logging.getLogger("fop")

# Whose lines are not the user's.
LIBRARIES = frozenset(
    {"fop", "torch", "lightning", "pytorch_lightning", "transformers", "accelerate"}
)


def warn(message: str) -> None:
    """A warning that points at the user's own line, however many calls of libraries are between."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and _package(frame.f_globals) in LIBRARIES:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, RuntimeWarning, stacklevel=level)


def _package(module: Mapping[str, object]) -> str:
    return str(module.get("__name__", "")).partition(".")[0]


def listed(names: Iterable[str], limit: int | None = None) -> str:
    """Names in quotes; of more than `limit`, the first ones and how many more there are."""
    found = [repr(name) for name in names]
    more = 0 if limit is None else len(found) - limit
    return ", ".join(found[:limit]) + (f" and {more} more" if more > 0 else "")


class Messages:
    """The warnings of one optimizer, and which of them have been given."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def _once(self, topic: str, message: str) -> None:
        if topic not in self._said:
            self._said.add(topic)
            warn(f"{message} (Said once.)")

    def _unsaid(self, topic: str, numbers: Mapping[Layer, str]) -> dict[Layer, str]:
        """Of layers that have not been named for this; from now on they have."""
        new = {x: text for x, text in numbers.items() if f"{topic} {x.name}" not in self._said}
        self._said |= {f"{topic} {layer.name}" for layer in new}
        return new

    # ---- steps

    def skipped(self, in_a_row: int, what: str) -> None:
        """Said each time that it starts."""
        warn(
            f"the last {in_a_row} steps were skipped because something was non-finite: {what}. "
            "Nothing is learned until that ends. optimizer.skipped_steps counts such steps; look "
            "for bad data, a loss that overflows, or a learning rate that is too large."
        )

    def fixed_rule(self, why: str) -> None:
        topic = "fixed rule"
        if topic not in self._said:
            self._said.add(topic)
            logger.warning(
                "steps have a fixed size (a KL clip of 1e-3), because a model of the loss can't be "
                "had: %s. optimizer.last_step tells of each step. (Said once.)",
                why,
            )

    def no_gradients(self, rank: int, missing: int, ranks: int) -> None:
        self._once(
            "no gradients",
            f"rank {rank} called step() without a gradient ({missing} of {ranks} ranks did), so "
            "all ranks skip the step. Run backward() on every rank before step(); a rank without "
            "data runs the model on an empty batch: (model(x).sum() * 0).backward().",
        )

    def unknown_scale(self) -> None:
        self._once(
            "unknown scale",
            "gradients were changed (clipped, say) after GradScaler.unscale_(), so the loss scale "
            "of this step can't be told from the change, and the curvature shrinks with the "
            "square of a clip. Set optimizer.grad_scaler = scaler once, where optimizer is the "
            "fop optimizer itself.",
        )

    # ---- layers that a step found to be other than they seemed; each is disabled once

    def never_called(self, layers: Sequence[Layer]) -> None:
        warn(
            "some layers use the fallback optimizer, because they have gradients, but no call of "
            "their modules was seen: their weights are used directly (F.linear(x, layer.weight), a "
            "fused kernel). Call the modules to give them curvature, or list them in skip: "
            f"{listed(layer.name for layer in layers)}"
        )

    def unsupported(self, layers: Sequence[Layer]) -> None:
        reasons = "; ".join(f"{layer.name!r}: {layer.recorder.unsupported}" for layer in layers)
        warn(
            "some layers use the fallback optimizer, because their modules compute something else "
            "than fop knows how to precondition. Their gradients are torch's own. List them in "
            f"skip to choose that from the start. {reasons}"
        )

    def no_examples(self, numbers: Mapping[Layer, tuple[float, float] | None]) -> None:
        """Of layers whose calls had no single examples: rows of a call, examples of its batch."""
        pairs = {layer: pair for layer, pair in numbers.items() if pair is not None}
        texts = {layer: f"{rows:.15g} and {size:.15g}" for layer, (rows, size) in pairs.items()}
        new = self._unsaid("no examples", texts)
        tables = {layer: text for layer, text in new.items() if layer.adapter.one_hot}
        if tables:  # nothing to worry about
            logger.info(
                "uses the fallback optimizer (looked up once for the whole batch, as position "
                "embeddings are; rows of a call, and examples of its batch): %s",
                _with_names(tables),
            )
        others = {layer: text for layer, text in new.items() if layer not in tables}
        if others:
            warn(
                "some layers are called with rows that don't belong to single examples: once for "
                "the whole batch, say, or with a selection of rows. Their half-batch gradients and "
                "curvature can't be known, so they use the fallback optimizer. Rows of a call, and "
                f"examples of its batch: {_with_names(others)}. List them in skip to choose that "
                "from the start. (Said once.)"
            )

    # ---- layers that a step handles, but not as their user may think

    def other_counts(self, seen: Mapping[Layer, float], usual: float) -> None:
        new = self._unsaid("other count", {layer: f"{number:g}" for layer, number in seen.items()})
        if new:
            warn(
                f"some layers saw another number of examples than most: {_with_names(new)}, where "
                f"most saw {usual:g} per backward pass. The inputs of the model don't tell how "
                "many there are (not all have as many rows in dimension 0), so dimension 0 of a "
                "layer's input was counted, and half-batches and curvature of these layers may be "
                "wrong. Keep the examples in dimension 0, or list the layers in skip to use the "
                "fallback optimizer. (Said once.)"
            )

    def not_inverted(self, layers: Sequence[Layer]) -> None:
        """Said every time, because it may pass or get worse."""
        warn(
            f"the curvature of {listed(layer.name for layer in layers)} could not be "
            "inverted, not even in float64 with more damping: the previous inverse is used where "
            "there is one, else the plain gradient. If this repeats, raise damping."
        )

    def about_gradients(self, layers: Sequence[Layer]) -> None:
        """Of layers whose gradient is not what backward passes through them have left."""
        for layer in layers:
            seen = layer.recorder.seen
            if layer.recorder.disabled:
                continue
            if seen.without_forward and layer.ready:
                self._once(
                    "gradient without forward",
                    f"layer {layer.name!r} has a gradient that came without a call of the module "
                    "(its weight was used directly, or is now computed by a parametrization or "
                    "pruning), so its curvature is not refreshed and its half-batches are not "
                    "known: call the module, or build the optimizer again, with "
                    f"skip=[{layer.name!r}] if need be.",
                )
            elif seen.foreign:
                self._once(
                    "foreign gradient",
                    f"the gradient of layer {layer.name!r} is not the one that its backward passes "
                    "have left: it was replaced by another tensor, holds something from before "
                    "them, or a pass failed before its end. So its half-batches are not known, and "
                    "this is a KFAC step for the layer. Change gradients in place "
                    "(p.grad.mul_(...)), and call optimizer.zero_grad() after a pass that failed.",
                )

    def unaccounted(self, shares: Mapping[Layer, Tensor]) -> None:
        """`shares` of the layers' gradients that calls of their modules don't account for."""
        if "unaccounted gradient" in self._said:  # spares the host read
            return
        values = torch.stack([share.cpu() for share in shares.values()]).tolist()
        for layer, share in zip(shares, values, strict=True):
            # Several calls may be added up in another order than autograd's.
            if share > torch.finfo(layer.weight.dtype).eps ** 0.4:
                self._once(
                    "unaccounted gradient",
                    f"the gradient of layer {layer.name!r} is not what the calls of its module "
                    "gave it: its weight is also used without the module (F.linear(x, "
                    "layer.weight), say), or a hook changes its gradient. Curvature and "
                    "half-batches know the calls alone. Call a module that shares the weight "
                    f"instead, or pass skip=[{layer.name!r}].",
                )

    def no_halves(self, layers: Sequence[Layer], first: Number, second: Number) -> None:
        """Of layers with an empty half-batch, though there are examples."""
        named = [layer.name for layer in layers if not layer.recorder.disabled]
        if "no half-batches" in self._said or not named or max(first, second) <= 0:
            return
        self._once(
            "no half-batches",
            f"{'layer' if len(named) == 1 else 'layers'} {listed(named)} saw {int(first)} and "
            f"{int(second)} examples in the two halves of this step's batch: with an empty half "
            "there is nothing to project, and such steps are KFAC steps. Use at least two examples "
            'per step, or, with halves="microbatches", two backward passes, or, with '
            'halves="ranks", examples on even and on odd ranks.',
        )


def _with_names(numbers: Mapping[Layer, str]) -> str:
    return ", ".join(f"{layer.name!r} {text}" for layer, text in numbers.items())
