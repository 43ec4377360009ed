"""What all layers of a model record at present, and what happens when a backward pass ends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fop._torch import at_end_of_pass, forward_hooks
from fop.capture.examples import Examples, InertInCopies
from fop.capture.statistics import factor_dtype

if TYPE_CHECKING:
    from fop.capture.passes import PassRecorder


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
    passes: PassEnds = field(default_factory=lambda: PassEnds())
    examples: Examples = field(default_factory=Examples)
    # Set once another optimizer has taken the model over; `release` removes all hooks.
    retired: bool = False
    release: Callable[[], object] | None = None

    def retire(self) -> None:
        self.retired = True
        if self.release is not None:
            self.release()


class PassEnds:
    """Acts at the very end of backward passes that reached `p.grad` of recorded layers."""

    def __init__(self) -> None:
        self._committed: dict[int, list[PassRecorder]] = {}  # by pass; they may be nested
        # Called with the recorder, for messages that leave while the pass is still running.
        self.on_commit: Callable[[Any], None] | None = None
        self.on_end: Callable[[], None] | None = None

    def note(self, recorder: PassRecorder, task: int) -> None:
        """A layer's part of the running pass has reached `p.grad`."""
        if task not in self._committed:
            self._committed[task] = []
            # DistributedDataParallel writes averages to p.grad in a callback of its own. What is
            # queued by a callback runs after all that were queued before.
            at_end_of_pass(lambda: at_end_of_pass(lambda: self._finish(task)))
        self._committed[task].append(recorder)
        if self.on_commit is not None:
            self.on_commit(recorder)

    def forget(self) -> None:
        """Passes that failed never end."""
        self._committed.clear()

    def _finish(self, task: int) -> None:
        by_dtype: dict[torch.dtype, list[tuple[PassRecorder, Tensor]]] = {}
        for recorder in self._committed.pop(task, []):
            grad = recorder.end_pass()
            if grad is not None:
                by_dtype.setdefault(grad.dtype, []).append((recorder, grad))
        with torch.no_grad():
            for dtype, pairs in by_dtype.items():
                gradients = [grad for _, grad in pairs]
                norms = torch._foreach_norm(gradients, 2, dtype=factor_dtype(dtype))
                for (recorder, _), norm in zip(pairs, norms, strict=True):
                    recorder.see_gradient(norm)
        if self.on_end is not None:
            self.on_end()


class RecordingHook(InertInCopies, ABC):
    """What an optimizer puts on a module to record its calls."""

    @property
    @abstractmethod
    def plan(self) -> CapturePlan | None:
        """Of the optimizer that it works for, while that is there."""


def take_over(modules: Iterable[nn.Module]) -> None:
    """Retire the optimizers that record these modules already: the newest one wins."""
    for module in modules:
        for plan in hooked_by(module):
            plan.retire()


def hooked_by(module: nn.Module) -> list[CapturePlan]:
    """The plans of the living optimizers that record this module."""
    hooks = (hook for hook in forward_hooks(module) if isinstance(hook, RecordingHook))
    plans = (hook.plan for hook in hooks)
    return [plan for plan in plans if plan is not None]
