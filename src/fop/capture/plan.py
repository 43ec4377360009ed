"""What all layers of a model record at present."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from fop.capture.belongs import PassEnds
from fop.capture.examples import Examples


@dataclass
class CapturePlan:
    """What all layers record; the engine changes it between steps."""

    halves: str  # "samples", "microbatches", "ranks" or "none"
    sharing: str
    max_factor_size: int
    empirical: bool  # moments come from the training loss's own backward
    curvature: bool  # moments are wanted at all
    odd_rank: bool = False  # with halves="ranks": this rank belongs to half-batch 2
    # During an extra backward for the Fisher: the training backward it runs inside, and whether
    # inputs still count.
    extra_pass_of: int | None = None
    extra_pass_first: bool = False
    # Extra passes carry the scale that the user's own loss has, instead of that of examples.
    scaled_by_loss: bool = False
    passes: PassEnds = field(default_factory=PassEnds)
    examples: Examples = field(default_factory=Examples)
    # Set once another optimizer has taken the model over; `release` removes all hooks.
    retired: bool = False
    release: Callable[[], object] | None = None

    def retire(self) -> None:
        self.retired = True
        if self.release is not None:
            self.release()
