"""The ranks that share a step. On one process, which is this file, every answer is the identity.

A step knows these two types alone. `Ranks` has the verbs: who owns a layer, reduce a batch to the
owners, broadcast their results, sum over all, gather objects. `Batch` is what one step rests on:
this rank's contribution before the reduce, that of all ranks after it. `group.py` has both for a
process group. Whatever shapes a later message is equal on all ranks, or agreed by counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fop.capture import CapturePlan, Statistics, gradient_ratios
from fop.layer import Layer, Parts
from fop.scaling import LossScale, Number, unscaled
from fop.slices import local

# In place of a count, so that the total is negative and no rank takes the halves for known.
NO_HALVES = -(2.0**40)


@dataclass(frozen=True)
class Contribution:
    """What one rank brings to a step."""

    layers: Sequence[Layer]  # that may take part; equal on all ranks
    parameters: Sequence[nn.Parameter]  # that the step may change; equal on all ranks
    gradients: Mapping[Tensor, Tensor]  # this rank's; none without a backward pass
    finite: Tensor  # 0-dimensional flag on the device: all of the above is finite
    loss_scale: LossScale | None
    problem: Exception | None  # why this rank can't take the step


@dataclass(frozen=True)
class Counts:
    """Of one layer, over all ranks."""

    first: float  # examples in each half-batch
    second: float
    examples: float  # what the second moments are over
    rows: float
    passes: float
    empty: float  # ranks that called it without examples, and with
    filled: float
    gradients: float  # ranks that have one
    unsupported: float  # ranks that found that its adapter does not fit
    mismatches: float  # ranks where a call had no single examples

    @staticmethod
    def of(layer: Layer) -> Counts:
        recorder = layer.recorder
        sample, statistics = layer.sample, layer.sample.statistics
        first, second = (NO_HALVES, 0.0) if recorder.seen.foreign else sample.half_sizes
        return Counts(
            first,
            second,
            examples=statistics.examples,
            rows=statistics.rows,
            passes=statistics.passes,
            empty=recorder.seen.empty,
            filled=recorder.seen.examples,
            gradients=layer.weight.grad is not None,
            unsupported=recorder.unsupported is not None,
            mismatches=recorder.mismatch is not None,
        )


@dataclass(frozen=True)
class Updates:
    """Of layers, as their owners have computed them."""

    parts: Mapping[Layer, Parts]
    memory: Sequence[Tensor]  # all tensors that hold them
    preconditioned: Sequence[Tensor] | None  # those for layers with curvature, if apart

    def of(self, layers: Iterable[Layer]) -> Sequence[Tensor]:
        """What to change in place to change the updates of these, which have curvature."""
        if self.preconditioned is not None:
            return self.preconditioned
        return [part for layer in layers for part in self.parts[layer]]


class Batch:
    """One step's gradients, half-gradient differences and second moments."""

    def __init__(self, contribution: Contribution) -> None:
        self._own = contribution

    # ---- before the reduce: what all ranks know

    @property
    def finite(self) -> Tensor:
        """Whether the step may be taken: a 0-dimensional flag on the device."""
        recorders = [layer.recorder for layer in self._own.layers]
        empty = any(r.seen.empty for r in recorders) and not any(r.seen.examples for r in recorders)
        return torch.zeros_like(self._own.finite) if empty else self._own.finite

    def taking_part(self) -> tuple[list[Layer], list[nn.Parameter]]:
        """The layers of the step, equal on all ranks, and the parameters that this rank changes."""
        return list(self._own.layers), list(self._own.parameters)

    def without_gradients(self) -> int:
        """How many ranks have no gradient at all. A host read."""
        return int(not self._own.gradients)

    def present(self, parameter: Tensor) -> Tensor | None:
        """Flag: some rank has a gradient. None where that is known anyway."""
        return None

    def counts(self) -> Mapping[Layer, Counts]:
        """A host read. Raises on all ranks if one can't take the step."""
        return {layer: Counts.of(layer) for layer in self._own.layers}

    # ---- the reduce, and what there is after it: of the layers that this rank owns

    def reduce(self, with_moments: Sequence[Layer], others: Sequence[nn.Parameter]) -> None:
        """Bring everything to the owners; of `others`, which are in no layer, to all ranks."""

    def average(self, layer: Layer) -> Parts:
        """The gradient, averaged over the ranks, by the layer's slices; zeros where none is."""
        return [part.of(self.gradient(part.parameter)) for part in layer.sample.slices]

    def gradient(self, parameter: nn.Parameter) -> Tensor:
        """The same of a parameter in no layer: this rank's rows of it."""
        grad = parameter.grad
        return torch.zeros_like(local(parameter)) if grad is None else local(grad)

    def difference(self, layer: Layer) -> Parts | None:
        """H1 - H2, by the layer's slices."""
        return layer.sample.difference

    def half_sizes(self, layer: Layer) -> tuple[Number, Number]:
        """Examples in each half-batch, without a host read."""
        return (0, 0) if layer.recorder.mismatch else layer.sample.half_sizes

    def rescaling(self, layers: Sequence[Layer]) -> Tensor | None:
        """What their differences are still to be multiplied with, [L]."""
        ratios = gradient_ratios([layer.recorder.gradients for layer in layers])
        return unscaled([ratios], self._own.loss_scale)[0]

    def moments(self, layer: Layer, counts: Counts) -> Statistics:
        return layer.sample.statistics

    def has(self, layer: Layer) -> bool:
        """Whether gradient and difference are still there, after the step."""
        return layer.weight.grad is not None


class Ranks:
    """One process."""

    size = 1
    index = 0  # of this rank
    partial_curvature = False  # whether some of it is kept by other ranks only
    partial_rows = False  # whether this rank has some rows of each parameter only

    def __init__(self, *, grouped: bool = False) -> None:
        self._grouped = grouped  # alone because its process group has one rank

    def assign(self, layers: Sequence[Layer], plan: CapturePlan, interval: int) -> None:
        """Share out the layers; `plan` is what they record, `interval` that of refreshes."""

    def owns(self, layer: Layer) -> bool:
        return True

    def trained(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """The parameters that a step may change: equal on all ranks, whatever their gradients."""
        return [p for p in parameters if p.grad is not None]

    def batch(self, contribution: Contribution) -> Batch:
        """What all ranks bring together. Raises the contribution's problem, if it has one."""
        if not self._grouped:
            _check_alone()
        if contribution.problem is not None:
            raise contribution.problem
        return Batch(contribution)

    def broadcast(
        self, layers: Sequence[Layer], compute: Callable[[Sequence[Layer]], Updates]
    ) -> Callable[[], Updates]:
        """Have updates computed by the layers' owners; the call that is returned waits for all."""
        updates = compute(layers)
        return lambda: updates

    def all_sum(self, values: Tensor, what: str) -> Tensor:
        """Numbers over the layers of all owners, each layer once."""
        return values

    def sum_of_ranks(self, values: Tensor) -> Tensor:
        """Numbers of each rank's own examples, summed."""
        return values

    def any_rank(self, flags: Sequence[bool]) -> list[bool]:
        """Which of these are true on one of the ranks at least. A host read."""
        if not flags:
            return []
        totals = self.all_sum(torch.tensor(flags, dtype=torch.float64), "clip")
        return [total > 0 for total in totals.tolist()]

    def gather_objects(self, mine: Any, to: int | None, *, once: bool = False) -> list[Any] | None:
        """Of all ranks on rank `to`, or on all; None elsewhere. `once`: of one owner per layer."""
        return [mine]

    def reset(self) -> None:
        """Drop what was sent ahead of a step that will not come."""


def _check_alone() -> None:
    """Raise where other ranks train the same model: each alone, they would drift apart."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise RuntimeError(
            f"this optimizer was built before the process group of {dist.get_world_size()} ranks "
            "was initialized, so it would train on this rank alone: build it after "
            "init_process_group(), which Accelerator() and TrainingArguments() call too. To train "
            "on each rank alone, pass a process_group of that rank"
        )
