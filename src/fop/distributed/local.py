"""One process: everything is at hand, and every answer is the question's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from fop.block import Block
from fop.capture import CapturePlan, Statistics
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
from fop.scaling import LossScale


@dataclass(frozen=True)
class _OwnTotals:
    report: Report

    @property
    def healthy(self) -> Tensor:
        captures = [block.capture for block in self.report.blocks]
        empty = any(c.seen.empty for c in captures) and not any(c.seen.examples for c in captures)
        return self.report.healthy.logical_and(self.report.healthy.new_tensor(not empty))

    def taking_part(self) -> tuple[list[Block], list[Tensor]]:
        return list(self.report.blocks), list(self.report.parameters)

    def without_gradients(self) -> int:
        return int(not self.report.gradients)

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
        return block.capture.difference

    def examples(self, block: Block) -> tuple[int, int]:
        first, second = (0, 0) if block.capture.mismatch else block.capture.half_sizes
        return first, second

    def rescaling(self, block: Block) -> Tensor:
        return block.rescaling(self.loss_scale)

    def sums(self, block: Block, counts: Counts) -> Statistics:
        return block.capture.statistics


class Local:
    ranks = 1
    index = 0
    sharded = has_shards = False

    def __init__(self, *, grouped: bool = False) -> None:
        self._grouped = grouped  # alone because its process group has one rank
        self._loss_scale: LossScale | None = None

    def place(self, blocks: Sequence[Block], plan: CapturePlan, interval: int) -> None:
        pass

    def owns(self, block: Block) -> bool:
        return True

    def trained(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        return [p for p in parameters if p.grad is not None]

    def total(self, report: Report) -> Totals:
        if not self._grouped:
            _check_alone()
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


def _check_alone() -> None:
    """Raise where other ranks train the same model: each alone, they would drift apart."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise RuntimeError(
            f"this optimizer was built before the process group of {dist.get_world_size()} ranks "
            "was initialized, so it would train on this rank alone: build it after "
            "init_process_group(), which Accelerator() and TrainingArguments() call too. To train "
            "on each rank alone, pass a process_group of that rank"
        )
