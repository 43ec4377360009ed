"""One process: everything is at hand, and every answer is the question's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fop.block import Block
from fop.capture import CapturePlan
from fop.distributed.base import (
    Counts,
    Gathered,
    Parts,
    Reading,
    Report,
    Request,
    Totals,
    Verdict,
)
from fop.moments import FactorSums
from fop.scaling import LossScale


@dataclass(frozen=True)
class _OwnTotals:
    report: Report

    @property
    def healthy(self) -> Tensor:
        captures = [block.capture for block in self.report.blocks]
        empty = any(c.saw_empty for c in captures) and not any(c.saw_examples for c in captures)
        return self.report.healthy.logical_and(self.report.healthy.new_tensor(not empty))

    def present(self, parameter: Tensor) -> None:
        return None

    def read(self) -> Reading:
        counts = {block: Counts.of(block) for block in self.report.blocks}
        return Reading(bool(self.healthy), counts)


@dataclass(frozen=True)
class _AtHand:
    loss_scale: LossScale | None

    def average(self, block: Block) -> Sequence[Tensor]:
        return block.gradients(self.gradients(block.parameters))

    def gradients(self, parameters: Iterable[Tensor]) -> Mapping[Tensor, Tensor]:
        return {p: p.grad for p in parameters if p.grad is not None}

    def signed(self, block: Block) -> Sequence[Tensor] | None:
        return block.capture.signed

    def examples(self, block: Block) -> tuple[int, int]:
        first, second = (0, 0) if block.capture.mismatch else block.capture.examples
        return first, second

    def rescaling(self, block: Block) -> Tensor:
        return block.rescaling(self.loss_scale)

    def sums(self, block: Block, counts: Counts) -> FactorSums:
        sums = block.capture.sums
        assert sums is not None
        return sums


class Local:
    ranks = 1
    index = 0
    sharded = has_shards = False

    def __init__(self) -> None:
        self._loss_scale: LossScale | None = None

    def place(self, blocks: Sequence[Block], plan: CapturePlan, interval: int) -> None:
        pass

    def owns(self, block: Block) -> bool:
        return True

    def trained(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        return [p for p in parameters if p.grad is not None]

    def total(self, report: Report) -> Totals:
        if report.problem is not None:
            raise report.problem
        return _OwnTotals(report)

    def gather(self, request: Request) -> Gathered:
        self._loss_scale = request.loss_scale
        return _AtHand(request.loss_scale)

    def recall(self, block: Block) -> Gathered | None:
        return None if block.weight.grad is None else _AtHand(self._loss_scale)

    def share(
        self, blocks: Sequence[Block], compute: Callable[[Block], Parts]
    ) -> Callable[[], dict[Block, Parts]]:
        updates = {block: compute(block) for block in blocks}
        return lambda: updates

    def settle(
        self, alignment: Tensor, verdicts: Sequence[Verdict]
    ) -> tuple[Tensor, list[Verdict]]:
        return alignment, list(verdicts)

    def sum(self, values: Sequence[float]) -> list[float]:
        return list(values)

    def collect(self, mine: Any, to: int | None) -> list[Any]:
        return [mine]

    def collect_shards(self, mine: Any, to: int | None) -> list[Any]:
        return [mine]

    def forget(self) -> None:
        pass
