"""Statistics belong to one gradient: they are found by that tensor, and live as long.

Not by its address or its norm, which another gradient may have too. So a `p.grad` that is set aside
and put back brings its own, and one that came from elsewhere has none. What passes record counts
only once it has reached `p.grad`; at the end of the pass, `p.grad` is noted as it is then.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fop._torch import at_end_of_pass, is_view, version_of
from fop.capture.statistics import PassMoments, Statistics, factor_dtype
from fop.slices import ParameterSlice, local

if TYPE_CHECKING:
    from fop.capture.recorder import Recorder


@dataclass(eq=False)
class GradientRecord:
    """What backward passes into one gradient have left behind."""

    kind: tuple[torch.dtype, torch.device]  # of the weight, when it was recorded
    statistics: Statistics = field(default_factory=Statistics)
    passes: int = 0  # with and without moments
    partial: bool = False  # the gradient holds more than this: its half-batches are not known
    incomplete: bool = False  # passes that belong to the same step are missing
    running: bool = False  # a pass has added to it that has not ended, or never will
    # The gradient as the last pass left it, to notice what others do to it.
    gradient: weakref.ref[Tensor] | None = None
    version: int = -1
    norm: Tensor | None = None  # of a shard: of the rank's own rows

    def may_return(self, grad: Tensor | None) -> bool:
        """Whether its gradient is not the present `grad`, but may be put back there.

        DistributedDataParallel puts the same view of a bucket there over and over, for new ones.
        """
        own = None if self.gradient is None else self.gradient()
        return own is not None and own is not grad and not is_view(own)

    def unchanged(self, grad: Tensor) -> bool:
        """GradScaler.unscale_ does not count as a write, all others who write to a gradient do."""
        return self.version == version_of(grad)

    def follow(self, weight: Tensor) -> None:
        """Move along with a model that was moved or cast between a backward pass and its step."""
        if self.kind != (weight.dtype, weight.device):
            self.kind = weight.dtype, weight.device
            self.statistics = self.statistics.to(weight.device, weight.dtype)


@dataclass
class RunningPass:
    """One layer's part of one backward pass, until it is known to have reached `p.grad`."""

    task: int
    record: GradientRecord  # what it will be added to
    fresh: bool = False  # p.grad holds nothing yet
    rescale: Tensor | None = None  # what became of p.grad since the last pass
    difference: Statistics = field(default_factory=Statistics)  # H1 - H2, and what it is over
    moments: PassMoments | None = None
    total: Tensor | None = None  # the weight's gradient by all calls of its modules


@dataclass
class Seen:
    """What the calls and passes since the last step were like."""

    empty: bool = False  # a call without examples
    examples: bool = False  # a call with some
    replaced: bool = False  # the module was called with another parameter in its place
    without_forward: bool = False  # a gradient came without a call of the module
    foreign: bool = False  # p.grad is not what backward passes left there
    with_bias: bool | None = None  # whether the gradient came with the bias


class GradientRecords:
    """The records of one weight: that of `p.grad`, and those of gradients that were set aside."""

    def __init__(self, weight: ParameterSlice, bias: ParameterSlice | None) -> None:
        self._weight = weight.parameter
        self._bias = None if bias is None else bias.parameter
        self._sharded = weight.sharded
        self._known: list[GradientRecord] = []
        self.latest: GradientRecord | None = None  # what the last pass added to
        # FSDP2 keeps a gradient in the gathered parameter until it reduces it.
        self.unreduced: GradientRecord | None = None
        self.begun = 0  # gradients since the last step

    def found(self) -> GradientRecord | None:
        """What belongs to `p.grad`, the tensor that it is now."""
        grad = self._weight.grad
        if grad is None:
            return self.unreduced
        for record in self._known:
            if record.gradient is not None and record.gradient() is grad:
                return record
        return None

    @property
    def present(self) -> GradientRecord | None:
        """What belongs to `p.grad`; while a pass is running, what it has added to so far."""
        record = self.found()
        if record is None and self.latest is not None and self.latest.running:
            return self.latest  # DistributedDataParallel puts views of its buckets there
        return record

    def new(self, *, partial: bool = False) -> GradientRecord:
        return GradientRecord((self._weight.dtype, self._weight.device), partial=partial)

    def keep(self, record: GradientRecord) -> None:
        """It belongs to the present `p.grad` from now on."""
        grad = self._weight.grad
        assert grad is not None
        others = [known for known in self._known if known is not record and known.may_return(grad)]
        record.gradient, record.version = weakref.ref(grad), version_of(grad)
        self._known = [*others, record]

    def begin_pass(self, task: int, *, may_read: bool) -> RunningPass:
        """It adds to what was recorded with the present `p.grad`, if anything was."""
        grad, record = self._weight.grad, self.found()
        if record is not None:
            if grad is None or record.unchanged(grad):
                return RunningPass(task, record, fresh=record.passes == 0 and not record.partial)
            if record.norm is not None and not record.running:
                return self._begin_changed(task, record)
        bias = self._bias
        both = [grad, bias.grad if bias is not None and bias.requires_grad else None]
        present = [grad for grad in both if grad is not None]
        holds = any(not may_read or bool(grad.any()) for grad in present)
        record = self.new(partial=holds)
        # Without the passes of this step that were lost, statistics can't be scaled.
        record.incomplete = holds and self.begun > 0
        return RunningPass(task, record, fresh=not holds)

    def _begin_changed(self, task: int, record: GradientRecord) -> RunningPass:
        """After somebody wrote to `p.grad` between two passes: zeroed it in place, or scaled it."""
        if self._sharded:  # ranks would have to agree on what was done to their rows
            raise RuntimeError(
                f"the gradient of a sharded parameter of shape {tuple(self._weight.shape)} was "
                "changed in place between two backward passes: use optimizer.zero_grad() to zero "
                "it, and change it after the last pass only"
            )
        ratio = gradient_ratios([self])[0]
        if float(ratio) == 0.0:  # a host read; this is rare
            return RunningPass(task, self.new(), fresh=True)
        return RunningPass(task, record, rescale=ratio)

    def end_pass(self) -> Tensor | None:
        """`p.grad`, or this rank's rows of it; FSDP2 may keep it to reduce it in a later pass."""
        grad = self._weight.grad
        self.unreduced = self.latest if self._sharded and grad is None else None
        return local(grad) if self._sharded and grad is not None else grad

    def see_gradient(self, norm: Tensor) -> None:
        """Remember `p.grad` as the pass leaves it."""
        if self.latest is not None:
            self.keep(self.latest)
            self.latest.norm, self.latest.running = norm, False

    def measured(self) -> tuple[Tensor, Tensor]:
        """The norm that the last pass left, and `p.grad` (this rank's rows); zeros if unknown."""
        grad, record = self._weight.grad, self.present
        if grad is None or record is None or record.norm is None:
            dtype = factor_dtype(self._weight.dtype)
            nothing = torch.zeros((), dtype=dtype, device=self._weight.device)
            return nothing, nothing
        return record.norm.to(grad.device, factor_dtype(grad.dtype)), local(grad)

    def touched(self) -> bool:
        """Whether anybody but GradScaler.unscale_ has written to `p.grad` since its pass."""
        grad, record = self._weight.grad, self.present
        return grad is not None and record is not None and not record.unchanged(grad)

    def reset(self) -> None:
        """`p.grad` is gone or zero from now on."""
        self.latest = self.unreduced = None
        grad = self._weight.grad
        self._known = [known for known in self._known if known.may_return(grad)]
        if grad is not None:
            self.keep(self.new())

    def forget(self) -> None:
        """Also of gradients that live on."""
        self.reset()
        self._known = []


def gradient_norms(records: Sequence[GradientRecords]) -> tuple[Tensor, Tensor]:
    """Of each `p.grad`, [L]: as its last pass left it, and as it is; 0 where nothing is known."""
    pairs = [each.measured() for each in records]
    if len(pairs) == 1:  # two launches less
        norm, grad = pairs[0]
        return norm[None], torch.linalg.vector_norm(grad, dtype=norm.dtype)[None]
    before = torch.stack([norm for norm, _ in pairs])
    now = torch._foreach_norm([grad for _, grad in pairs], 2, dtype=before.dtype)
    return before, torch.stack(now)


def gradient_ratios(records: Sequence[GradientRecords]) -> Tensor:
    """By how much each `p.grad` was rescaled since its last pass, [L]: clipped, or unscaled.

    Measured, because not every write to a gradient can be told: GradScaler.unscale_'s can't.
    """
    before, now = gradient_norms(records)
    return torch.where(before > 0, now / before, 1.0)


class PassEnds:
    """Acts at the very end of backward passes that reached `p.grad` of recorded layers."""

    def __init__(self) -> None:
        self._committed: dict[int, list[GradientRecords]] = {}  # by pass; they may be nested
        # Called with the recorder, for messages that leave while the pass is still running.
        self.on_commit: Callable[[Recorder], None] | None = None
        self.on_end: Callable[[], None] | None = None

    def note(self, recorder: Recorder, task: int) -> None:
        """A layer's part of the running pass has reached `p.grad`."""
        if task not in self._committed:
            self._committed[task] = []
            # DistributedDataParallel writes averages to p.grad in a callback of its own. What is
            # queued by a callback runs after all that were queued before.
            at_end_of_pass(lambda: at_end_of_pass(lambda: self._finish(task)))
        self._committed[task].append(recorder.gradients)
        if self.on_commit is not None:
            self.on_commit(recorder)

    def forget(self) -> None:
        """Passes that failed never end."""
        self._committed.clear()

    def _finish(self, task: int) -> None:
        by_dtype: dict[torch.dtype, list[tuple[GradientRecords, Tensor]]] = {}
        for records in self._committed.pop(task, []):
            grad = records.end_pass()
            if grad is not None:
                by_dtype.setdefault(grad.dtype, []).append((records, grad))
        with torch.no_grad():
            for dtype, pairs in by_dtype.items():
                gradients = [grad for _, grad in pairs]
                # Half precision would overflow.
                norms = torch._foreach_norm(gradients, 2, dtype=factor_dtype(dtype))
                for (records, _), norm in zip(pairs, norms, strict=True):
                    records.see_gradient(norm)
        if self.on_end is not None:
            self.on_end()
