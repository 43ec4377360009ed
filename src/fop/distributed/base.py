"""What a step asks of the ranks it is shared with.

The engine knows this protocol alone. On one process `Local` answers from what is at hand; `Shared`
answers the same questions by messages. What a rank may decide on its own, and what must be agreed,
is therefore settled here: everything that shapes a later message is equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from fop.block import Block
from fop.capture import CapturePlan, Statistics
from fop.scaling import LossScale, Number

Parts = Sequence[Tensor]  # a layer's, of the weight and the bias

# In place of a count, so that the total is negative and no rank takes the halves for known.
NO_HALVES = -(2.0**40)


@dataclass(frozen=True)
class Report:
    """What one rank brings to a step."""

    blocks: Sequence[Block]  # that may take part; equal on all ranks
    parameters: Sequence[Tensor]  # that the step may change; equal on all ranks
    gradients: Mapping[Tensor, Tensor]  # this rank's; none without a backward pass
    healthy: Tensor  # 0-dimensional flag on the device: all of the above is finite
    loss_scale: LossScale | None
    problem: Exception | None  # why this rank can't take the step


@dataclass(frozen=True)
class Counts:
    """Of one layer, over all ranks."""

    first: float  # examples in each half
    second: float
    examples: float  # what the curvature sums are over
    rows: float
    passes: float
    empty: float  # ranks that called it without examples, and with
    filled: float
    gradients: float  # ranks that have one
    misfits: float  # ranks that found that its adapter does not fit
    mismatches: float  # ranks where a call had no single examples

    @staticmethod
    def of(block: Block) -> Counts:
        capture = block.capture
        first, second = (NO_HALVES, 0.0) if capture.seen.foreign else capture.half_sizes
        statistics = capture.statistics
        return Counts(
            first,
            second,
            examples=statistics.examples,
            rows=statistics.rows,
            passes=statistics.passes,
            empty=capture.seen.empty,
            filled=capture.seen.examples,
            gradients=block.weight.grad is not None,
            misfits=capture.unsupported is not None,
            mismatches=capture.mismatch is not None,
        )


@dataclass(frozen=True)
class Reading:
    """The totals of a step on the host."""

    healthy: bool
    counts: Mapping[Block, Counts]


class Totals(Protocol):
    """Reports summed over all ranks."""

    @property
    def healthy(self) -> Tensor:
        """Whether the step may be taken: a 0-dimensional flag on the device."""
        ...

    def taking_part(self) -> tuple[list[Block], list[Tensor]]:
        """The layers of the step, equal on all ranks, and the parameters that this rank changes."""
        ...

    def without_gradients(self) -> int:
        """How many ranks have no gradient at all. A host read."""
        ...

    def present(self, parameter: Tensor) -> Tensor | None:
        """Flag: some rank has a gradient. None where that is known anyway."""
        ...

    def read(self) -> Reading:
        """A host read. Raises on all ranks if one can't take the step."""
        ...


class Gathered(Protocol):
    """Gradients and sums of all ranks together, of the layers that this rank owns."""

    def average(self, block: Block) -> Sequence[Tensor]:
        """The gradient's parts of an owned layer, averaged over the ranks."""
        ...

    def gradients(self, parameters: Iterable[Tensor]) -> Mapping[Tensor, Tensor]:
        """Of parameters in no layer, averaged over the ranks."""
        ...

    def signed(self, block: Block) -> Sequence[Tensor] | None:
        """H1 - H2 of the weight and the bias."""
        ...

    def examples(self, block: Block) -> tuple[Number, Number]:
        """In each half, without a host read."""
        ...

    def rescaling(self, block: Block) -> Tensor | None:
        """What `signed` is still to be multiplied with."""
        ...

    def sums(self, block: Block, counts: Counts) -> Statistics: ...


@dataclass(frozen=True)
class Request:
    """What is to be gathered."""

    blocks: Sequence[Block]
    with_sums: Sequence[Block]
    others: Sequence[Tensor]  # trained parameters in no layer
    totals: Totals
    halves: bool
    loss_scale: LossScale | None


# Of a layer, by whether its curvature could not be renewed, and whether it has any that fits.
Verdict = tuple[bool, bool]


class Exchange(Protocol):
    ranks: int
    index: int  # of this rank

    def place(self, blocks: Sequence[Block], plan: CapturePlan, interval: int) -> None:
        """Share out the layers; `plan` is what they capture, `interval` that of renewals."""
        ...

    def owns(self, block: Block) -> bool: ...

    @property
    def sharded(self) -> bool:
        """Whether some curvature is kept by other ranks only."""
        ...

    @property
    def has_shards(self) -> bool:
        """Whether this rank has some rows of each parameter only, and of what goes with it."""
        ...

    def trained(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """The parameters that a step may change: equal on all ranks, whatever their gradients."""
        ...

    def total(self, report: Report) -> Totals: ...
    def gather(self, request: Request) -> Gathered: ...

    def recall(self, block: Block) -> Gathered | None:
        """What was last gathered, until gradients are zeroed; None where this rank has nothing."""
        ...

    def share(
        self, blocks: Sequence[Block], compute: Callable[[Block], Parts]
    ) -> Callable[[], dict[Block, Parts]]:
        """Have each layer's update computed by its owner; the call that is returned waits."""
        ...

    def settle(
        self, alignment: Tensor, verdicts: Sequence[Verdict]
    ) -> tuple[Tensor, list[Verdict]]:
        """The sum that the KL clip rests on, and the verdicts of all owners.

        A host read, if there are verdicts.
        """
        ...

    def sum(self, values: Sequence[float]) -> list[float]:
        """Plain numbers over the layers of all owners, each layer once."""
        ...

    def collect(self, mine: Any, to: int | None) -> list[Any] | None:
        """Plain objects of all owners on the given rank, or on all; None elsewhere."""
        ...

    def collect_shards(self, mine: Any, to: int | None) -> list[Any] | None:
        """The same of all ranks, in their order."""
        ...

    def forget(self) -> None:
        """Drop what was gathered."""
        ...
