"""A step's batch on several ranks: totals that all of them know, and what was reduced to owners.

The totals are one vector, in one all-reduce: counts of each layer, presence of parameters if asked
for, and five flags. Of sharded layers also the squared norms of gradients, as backward passes left
them and at present: a rank can't tell from its own rows, which may be none, by how much they were
clipped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, fields
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

from fop.capture import Statistics, gradient_norms
from fop.distributed.buckets import Reduction
from fop.distributed.comm import Comm, Handle
from fop.distributed.ranks import Batch, Contribution, Counts
from fop.layer import Layer, Parts
from fop.scaling import Number, mean_over_ranks

COUNTS = [field.name for field in fields(Counts)]

# What is reduced: raw sums of second moments; gradients and half-gradient differences of layers;
# gradients of parameters in no layer.
MOMENTS, AVERAGES, DIFFERENCES, GRADIENTS = "curvature sums", "averages", "differences", "gradients"


class GroupBatch(Batch):
    """`averaged`: p.grad is equal on all ranks, or of a `sharded` model each rank's rows of it."""

    def __init__(
        self,
        contribution: Contribution,
        comm: Comm,
        start: Callable[[Sequence[Layer], Sequence[nn.Parameter]], dict[str, list[Reduction]]],
        *,
        averaged: bool,
        sharded: bool,
    ) -> None:
        super().__init__(contribution)
        self._comm, self._start, self._averaged, self._sharded = comm, start, averaged, sharded
        self._offsets: dict[Any, int] = {}  # in the totals: of layers, parameters and norms
        self._totals = self._vector()
        self._waiting: Handle | None = comm.sum_of_all(self._totals, "totals of all layers")
        self._started: dict[str, list[Reduction]] = {}
        self._reduced: dict[str, dict[Any, list[Tensor]]] = {}

    def _vector(self) -> Tensor:
        own, layers, offsets = self._own, self._own.layers, self._offsets
        numbers: list[float] = []
        for layer in layers:
            offsets[layer] = len(numbers)
            numbers += astuple(Counts.of(layer))
        # Averaged ones are equal on all ranks but those that have no gradient at all.
        for parameter in () if self._averaged else own.parameters:
            offsets[parameter] = len(numbers)
            numbers.append(parameter in own.gradients)
        for layer in layers if self._sharded else ():
            offsets[layer, "norms"] = len(numbers)
            numbers += [0.0, 0.0]
        seen = [layer.recorder.seen for layer in layers]
        empty, filled = any(s.empty for s in seen), any(s.examples for s in seen)
        numbers += [empty, filled, not own.gradients, own.problem is not None, 0.0]
        vector = torch.tensor(numbers, dtype=torch.float64, device=own.finite.device)
        vector[-1] = (~own.finite).to(torch.float64)
        for layer in layers if self._sharded else ():
            norms = torch.cat(
                [norm.to(vector) for norm in gradient_norms([layer.recorder.gradients])]
            )
            vector[offsets[layer, "norms"] :][:2] = norms.square()
        return vector

    def wait(self, limit: timedelta | None = None) -> Tensor:
        """The totals, once they are there."""
        if self._waiting is not None:
            self._waiting.wait(limit)
            self._waiting = None
        return self._totals

    @property
    def finite(self) -> Tensor:
        empty, filled, _, problem, non_finite = self.wait()[-5:].unbind()
        return (non_finite == 0) & (problem == 0) & ((filled > 0) | (empty == 0))

    def taking_part(self) -> tuple[list[Layer], list[nn.Parameter]]:
        own = self._own
        if not self._averaged:
            return super().taking_part()
        if own.gradients:
            layers = [layer for layer in own.layers if layer.weight in own.gradients]
        else:
            layers = [layer for layer, counts in self.counts().items() if counts.gradients]
        return layers, [p for p in own.parameters if p in own.gradients]

    def without_gradients(self) -> int:
        return int(self.wait()[-3])

    def present(self, parameter: Tensor) -> Tensor | None:
        at = self._offsets.get(parameter)
        return None if at is None else self.wait()[at] > 0

    def counts(self) -> Mapping[Layer, Counts]:
        numbers = self.wait().tolist()
        problems = int(numbers[-2])
        if problems:
            raise RuntimeError(
                f"{problems} of {self._comm.ranks} ranks can't take this step, so none does: "
                "their own errors tell why"
            )
        starts = {layer: self._offsets[layer] for layer in self._own.layers}
        return {layer: Counts(*numbers[at : at + len(COUNTS)]) for layer, at in starts.items()}

    # ---- what was reduced; waits where something is first asked for

    def reduce(self, with_moments: Sequence[Layer], others: Sequence[nn.Parameter]) -> None:
        self._started = self._start(with_moments, others)

    def _arrived(self, what: str) -> dict[Any, list[Tensor]]:
        """By layer, or parameter; those of a row's owners are summed over the other rows first."""
        if what not in self._reduced:
            comm, mine = self._comm, []
            for bucket, flat, handle in self._started.pop(what, []):
                handle.wait()
                if what == GRADIENTS:  # on all ranks already
                    mine.append((bucket, flat, handle))
                elif bucket.owner == comm.column:
                    mine.append((bucket, flat, comm.sum_of_column(flat, bucket.label(what))))
            self._reduced[what] = found = {}
            for bucket, flat, handle in mine:
                handle.wait()
                if what != MOMENTS and not (what == AVERAGES and self._sharded):
                    mean_over_ranks(flat, comm.ranks)
                found.update(bucket.views(flat))
        return self._reduced[what]

    def average(self, layer: Layer) -> Parts:
        if self._averaged and not self._sharded:
            return super().average(layer)
        return self._arrived(AVERAGES)[layer]

    def gradient(self, parameter: nn.Parameter) -> Tensor:
        if self._averaged:  # a rank without a backward pass has zeros to bring
            return super().gradient(parameter)
        return self._arrived(GRADIENTS)[parameter][0]

    def difference(self, layer: Layer) -> Parts | None:
        return self._arrived(DIFFERENCES).get(layer)

    def half_sizes(self, layer: Layer) -> tuple[Number, Number]:
        totals = self.wait()[self._offsets[layer] :]
        known = totals[COUNTS.index("mismatches")] == 0  # else some call is in neither half-batch
        return totals[0] * known, totals[1] * known

    def rescaling(self, layers: Sequence[Layer]) -> Tensor | None:
        if self._sharded:
            squares = [self.wait()[self._offsets[layer, "norms"] :][:2] for layer in layers]
            before, present = torch.stack(squares).unbind(1)
            return torch.where(before > 0, present / before, 1.0).sqrt()
        # The gradient is the same on all ranks, and so is what was done to it; or each rank has
        # rescaled its own difference.
        return super().rescaling(layers) if self._averaged else None

    def moments(self, layer: Layer, counts: Counts) -> Statistics:
        recorder, tensors = layer.recorder, iter(self._arrived(MOMENTS)[layer])
        found = Statistics(
            examples=int(counts.examples), rows=int(counts.rows), passes=int(counts.passes)
        )
        if recorder.factors:
            found.inputs = recorder.forms.inputs.unpack(next(tensors))
            found.outputs = recorder.forms.outputs.unpack(next(tensors))
        if recorder.square_shapes:
            found.squares = next(tensors).clone()
        return found

    def has(self, layer: Layer) -> bool:
        return True
