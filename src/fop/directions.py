"""The update of each layer: KFAC's or FOP's, for stacks of layers of one shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fop.context import Context
from fop.curvature.base import StackedState
from fop.distributed import Batch, Updates
from fop.layer import Layer, Parts, from_matrices, stacks, to_matrices
from fop.projection import Coefficients, fop_update
from fop.scaling import LossScale, Number, half_difference, unscaled


def gradients(
    stack: Sequence[Layer], batch: Batch, loss_scale: LossScale | None, *, halves: bool
) -> tuple[Tensor, Tensor | None]:
    """a and d [L groups, o, i] of layers of one shape; no d where a half-batch is empty."""
    averages: list[Parts] = []
    differences: list[Parts] = []
    sizes: list[tuple[Number, Number]] = []
    for layer in stack:
        averages.append(batch.average(layer))
        if halves and (difference := batch.difference(layer)) is not None:
            differences.append(difference)
            sizes.append(batch.half_sizes(layer))
    average = to_matrices(stack, averages)
    if len(differences) < len(stack):
        return unscaled([average], loss_scale)[0], None
    d, rescale = to_matrices(stack, differences), batch.rescaling(stack)
    average = unscaled([average], loss_scale)[0]
    first, second = sizes[0]
    if isinstance(first, Tensor):
        first, second = (torch.stack(numbers) for numbers in zip(*sizes, strict=True))
    return average, half_difference(average, d, first, second, rescale)


@dataclass
class Directions:
    """Computes them for one step, and keeps what else there is to know of them."""

    context: Context
    batch: Batch
    usable: Mapping[Layer, bool]  # whether there is curvature for it on this rank
    host: bool  # computed while the host waits, which then may skip the step: no masks, no stacks
    coefficients: dict[Layer, tuple[Coefficients, int]] = field(default_factory=dict)
    terms: list[Tensor] = field(default_factory=list)  # of the step rule

    def compute(self, layers: Sequence[Layer]) -> Updates:
        usable = [layer for layer in layers if self.usable[layer]]
        parts = {layer: self._plain(layer) for layer in layers if not self.usable[layer]}
        plain = [part for own in parts.values() for part in own]
        memory: list[Tensor] = []
        alike = (
            [[x] for x in usable] if self.host else stacks(usable, self.context.state, self._look)
        )
        for stack in alike:
            pieces, tensors = from_matrices(stack, self._update(stack))
            parts.update(zip(stack, pieces, strict=True))
            memory += tensors
        return Updates({layer: parts[layer] for layer in layers}, [*memory, *plain], memory)

    def total_terms(self) -> Tensor:
        """The step rule's terms of the layers that this rank owns, [k]."""
        if not self.terms:
            columns = getattr(self.context.settings.step_rule, "columns", 1)
            return torch.zeros(columns, device=self.batch.finite.device)
        device = self.terms[0].device  # a model may be spread over several
        return torch.stack([term.to(device) for term in self.terms]).sum(0)

    def _plain(self, layer: Layer) -> Parts:
        """The gradient of a layer without curvature; a copy where it will be masked."""
        found = unscaled(self.batch.average(layer), self.context.loss_scale)
        return found if self.host else [part.clone() for part in found]

    def _update(self, stack: Sequence[Layer]) -> Tensor:
        context, settings, first = self.context, self.context.settings, stack[0]
        halves = settings.needs_halves
        average, difference = gradients(stack, self.batch, context.loss_scale, halves=halves)
        if settings.projects and difference is None:
            self.context.messages.no_halves(stack, *self.batch.half_sizes(first))
        curvature, state = first.curvature, context.state
        if curvature.requires.gradients:
            for layer, gradient in zip(stack, average.chunk(len(stack)), strict=True):
                state[layer.weight]  # exists from now on: state is a defaultdict, as torch's
                curvature.watch(layer.state_in(state), gradient)
        own = [layer.state_in(state) for layer in stack]
        metric = curvature.metric(
            StackedState(own, average) if len(own) > 1 else own[0], first.sample.shape
        )
        options = settings.beta, settings.eta, settings.total_weight
        update, found = fop_update(average, difference, metric, *options, layers=len(stack))
        lr = self.context.options[first.weight]["reference_lr"]
        self.terms.append(settings.step_rule.terms(found, lr).sum(0))
        self.coefficients |= {layer: (found, index) for index, layer in enumerate(stack)}
        return update

    def _look(self, layer: Layer) -> object:
        """What stacked layers must have in common, besides their shapes."""
        sizes, lr = self.batch.half_sizes(layer), self.context.options[layer.weight]["reference_lr"]
        known = None if isinstance(sizes[0], Tensor) else sizes
        return known, self.batch.difference(layer) is None, id(lr) if isinstance(lr, Tensor) else lr
