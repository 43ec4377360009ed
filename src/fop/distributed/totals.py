"""What all ranks must know about a step before it is taken, in one small message."""

from __future__ import annotations

from dataclasses import astuple, fields
from datetime import timedelta

import torch
from torch import Tensor

from fop.block import Block
from fop.distributed.base import Counts, Reading, Report
from fop.distributed.comm import Comm, Handle
from fop.scaling import Number

COUNTS = len(fields(Counts))
MISMATCHES = [field.name for field in fields(Counts)].index("mismatches")


class SummedTotals:
    """One vector: counts of each layer, presence of parameters if asked for, and five flags.

    Without `presence`, gradients are equal on all ranks but those that have none at all.

    Of sharded layers also the squared norms of gradients, as backward passes left them and at
    present: a rank can't tell from its own rows, which may be none, by how much they were clipped.
    """

    def __init__(
        self, report: Report, comm: Comm, *, presence: bool, sharded: bool = False
    ) -> None:
        self._report = report
        self._places = {block: COUNTS * i for i, block in enumerate(report.blocks)}
        numbers = [float(number) for block in report.blocks for number in astuple(Counts.of(block))]
        self._present: dict[Tensor, int] = {}
        if presence:
            self._present = {p: len(numbers) + i for i, p in enumerate(report.parameters)}
            numbers += [float(p in report.gradients) for p in report.parameters]
        self._norms = {
            b: len(numbers) + 2 * i for i, b in enumerate(report.blocks if sharded else ())
        }
        numbers += [0.0] * (2 * len(self._norms))
        captures = [block.capture for block in report.blocks]
        empty = any(c.seen.empty for c in captures)
        filled = any(c.seen.examples for c in captures)
        sick, problem = 0.0, float(report.problem is not None)
        self._vector = torch.tensor(
            [*numbers, empty, filled, not report.gradients, problem, sick],
            dtype=torch.float64,
            device=report.healthy.device,
        )
        self._vector[-1] = (~report.healthy).to(torch.float64)
        for block, at in self._norms.items():
            for place, norm in enumerate(block.capture.gradient_norms()):
                self._vector[at + place] = norm.to(self._vector) ** 2
        self._comm = comm
        self._handle: Handle | None = comm.sum_of_all(self._vector, "totals of all layers")

    def wait(self, limit: timedelta | None = None) -> None:
        if self._handle is not None:
            self._handle.wait(limit)
            self._handle = None

    @property
    def _totals(self) -> Tensor:
        self.wait()
        return self._vector

    @property
    def healthy(self) -> Tensor:
        empty, filled, _, problem, sick = self._totals[-5:].unbind()
        return (sick == 0) & (problem == 0) & ((filled > 0) | (empty == 0))

    def examples(self, block: Block) -> tuple[Number, Number]:
        at = self._places[block]
        known = self._totals[at + MISMATCHES] == 0  # else some call is in neither half
        return self._totals[at] * known, self._totals[at + 1] * known

    def gradient_ratio(self, block: Block) -> Tensor:
        """By how much a sharded layer's gradient was rescaled since its last backward."""
        seen, present = self._totals[self._norms[block] :][:2].unbind()
        return torch.where(seen > 0, present / seen, 1.0).sqrt()

    def taking_part(self) -> tuple[list[Block], list[Tensor]]:
        report, own = self._report, self._report.gradients
        if self._present:
            return list(report.blocks), list(report.parameters)
        if own:
            blocks = [block for block in report.blocks if block.weight in own]
        else:
            counts = self.read().counts
            blocks = [block for block in report.blocks if counts[block].gradients]
        return blocks, [parameter for parameter in report.parameters if parameter in own]

    def without_gradients(self) -> int:
        return int(self._totals[-3])

    def present(self, parameter: Tensor) -> Tensor | None:
        at = self._present.get(parameter)
        return None if at is None else self._totals[at] > 0

    def read(self) -> Reading:
        numbers = self._totals.tolist()
        empty, filled, _, problem, sick = numbers[-5:]
        if problem:
            raise RuntimeError(
                f"{int(problem)} of {self._comm.ranks} ranks can't take this step, so none does: "
                "their own errors tell why"
            )
        healthy = sick == 0 and (filled > 0 or empty == 0)
        counts = {block: Counts(*numbers[at : at + COUNTS]) for block, at in self._places.items()}
        return Reading(healthy, counts)
