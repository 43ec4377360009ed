"""Statistics belong to one gradient: they are found by that tensor, and live as long.

Not by its address or its norm, which another gradient may have too. So a `p.grad` that is set aside
and put back brings its own, and one that came from elsewhere has none.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fop._torch import current_pass, is_view, version_of
from fop.capture.moments import PassMoments
from fop.capture.plan import CapturePlan
from fop.capture.statistics import Statistics, factor_dtype
from fop.shards import local
from fop.slices import ParameterSlice


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

    def belongs_to(self, grad: Tensor | None) -> bool:
        return self.gradient is not None and grad is not None and self.gradient() is grad

    def may_return(self, grad: Tensor | None) -> bool:
        """Whether its gradient is not the present `grad`, but may be put back there.

        DistributedDataParallel puts the same view of a bucket there over and over, for new ones.
        """
        own = None if self.gradient is None else self.gradient()
        return own is not None and own is not grad and not is_view(own)

    def unchanged(self, grad: Tensor) -> bool:
        """GradScaler.unscale_ leaves no mark, all others who write to a gradient do."""
        return self.version == version_of(grad)

    def ratio(self, grad: Tensor) -> Tensor:
        """By how much the gradient was scaled since."""
        now = norm_of(grad)
        if self.norm is None:
            return torch.ones_like(now)
        before = self.norm.to(now)
        return torch.where(before > 0, now / before, 1.0)

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
    halves: Statistics = field(default_factory=Statistics)  # the difference, and what it is over
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
    gradients: int = 0  # that were begun
    with_bias: bool | None = None  # whether the gradient came with the bias


class Belonging:
    """A weight and its bias, and the statistics that belong to their `p.grad`."""

    def __init__(
        self, weight: ParameterSlice, bias: ParameterSlice | None, plan: CapturePlan
    ) -> None:
        self.plan = plan
        self.weight_slice, self._bias_slice = weight, bias
        self.weight = weight.parameter
        self.sharded = weight.sharded
        self.seen = Seen()
        self._known: list[GradientRecord] = []  # of p.grad, and of gradients that were set aside
        self._latest: GradientRecord | None = None  # what the last pass added to
        # FSDP2 keeps a gradient in the gathered parameter until it reduces it.
        self._unreduced: GradientRecord | None = None
        self._running: RunningPass | None = None

    @property
    def bias_slice(self) -> ParameterSlice | None:
        """The bias, where it is trained.

        As torch's optimizers do, a step takes the gradients that are there: one that has come with
        the bias stays so, also if the bias is frozen meanwhile.
        """
        bias, latched = self._bias_slice, self.seen.with_bias
        if bias is None:
            return None
        if latched is None or (self.weight.grad is None and self._unreduced is None):
            latched = bias.parameter.requires_grad
        return bias if latched else None

    @property
    def bias(self) -> nn.Parameter | None:
        bias = self.bias_slice
        return None if bias is None else bias.parameter

    @property
    def all_parameters(self) -> list[nn.Parameter]:
        """The weight and the bias, trained or not."""
        bias = self._bias_slice
        return [self.weight] if bias is None else [self.weight, bias.parameter]

    @property
    def record(self) -> GradientRecord | None:
        """What belongs to `p.grad`; while a pass is running, what it has added to so far."""
        record = self._found()
        if record is None and self._latest is not None and self._latest.running:
            return self._latest  # DistributedDataParallel puts views of its buckets there
        return record

    def _found(self) -> GradientRecord | None:
        """What belongs to `p.grad`, the tensor that it is now."""
        grad = self.weight.grad
        if grad is None:
            return self._unreduced
        return next((known for known in self._known if known.belongs_to(grad)), None)

    @property
    def statistics(self) -> Statistics:
        """All that belongs to `p.grad`; empty where nothing does.

        Of the difference, `difference` and `half_sizes` tell what a step can use.
        """
        record = self.record
        return Statistics() if record is None else record.statistics

    @property
    def has_moments(self) -> bool:
        return self.statistics.inputs is not None

    def drop_moments(self) -> None:
        """A step has used them up."""
        record = self.record
        if record is not None:
            record.statistics = record.statistics.without_moments()

    @property
    def difference(self) -> list[Tensor] | None:
        """H1 - H2, for the weight and a trained bias; None where that is not known of `p.grad`."""
        record = self.record
        if record is None or record.partial or record.statistics.difference is None:
            return None
        bias = self.bias_slice
        parts = record.statistics.difference[: 1 if bias is None else 2]
        if bias is not None and len(parts) == 1:
            parts = [*parts, parts[0].new_zeros(bias.shape)]
        return parts

    @property
    def half_sizes(self) -> tuple[int, int]:
        """Examples in the two half-batches that `difference` is about."""
        record = self.record
        if record is None or record.partial:
            return 0, 0
        return record.statistics.first, record.statistics.second

    def tensors(self) -> list[Tensor]:
        """What must be finite for a step."""
        return [*(self.difference or []), *self.statistics.bounds()]

    # ---- what others do to p.grad

    def gradient_norms(self) -> tuple[Tensor, Tensor]:
        """Of `p.grad`, or this rank's rows of it: as its last backward left it, and as it is."""
        grad, record = self.weight.grad, self.record
        if grad is None or record is None or record.norm is None:
            nothing = torch.zeros((), device=self.weight.device)
            return nothing, nothing
        return record.norm, norm_of(local(grad))

    def gradient_ratio(self) -> Tensor:
        """By how much `p.grad` was rescaled since its last backward: clipped, or unscaled.

        Measured, because not all who write to gradients leave a mark: GradScaler.unscale_ does not.
        """
        grad, record = self.weight.grad, self.record
        if grad is None or record is None or record.norm is None:
            return torch.ones((), device=self.weight.device)
        return record.ratio(grad)

    def gradient_touched(self) -> bool:
        """Whether anybody but GradScaler.unscale_ has written to `p.grad` since its backward."""
        grad, record = self.weight.grad, self.record
        return grad is not None and record is not None and not record.unchanged(grad)

    def reset(self) -> None:
        """Forget what belonged to `p.grad`, which is gone or zero from now on."""
        self._running = self._latest = self._unreduced = self.seen.with_bias = None
        grad = self.weight.grad
        self._known = [known for known in self._known if known.may_return(grad)]
        if grad is not None:
            self._keep(self._new())

    def forget(self) -> None:
        """Forget everything, also of gradients that live on."""
        self.reset()
        self._known = []

    # ---- during backward

    def _new(self, *, partial: bool = False) -> GradientRecord:
        return GradientRecord((self.weight.dtype, self.weight.device), partial=partial)

    def _keep(self, record: GradientRecord) -> None:
        """It belongs to the present `p.grad` from now on."""
        grad = self.weight.grad
        assert grad is not None
        others = [c for c in self._known if c is not record and c.may_return(grad)]
        record.gradient, record.version = weakref.ref(grad), version_of(grad)
        self._known = [*others, record]

    def _current(self) -> RunningPass:
        """The running pass; it adds to what was recorded with the present `p.grad`, if any."""
        task = self.plan.extra_pass_of
        if task is None:
            task = current_pass()
        if self._running is None or self._running.task != task:
            self._running = running = self._joined(task) or self._begun(task)
            if self.seen.with_bias is None or running.record.passes == 0:
                self._latch_bias()
            running.record.follow(self.weight)
        return self._running

    def _latch_bias(self) -> None:
        bias = self._bias_slice
        self.seen.with_bias = bias is not None and bias.parameter.requires_grad

    def _joined(self, task: int) -> RunningPass | None:
        """Adds to what was recorded before; None where `p.grad` has nothing of it, or more."""
        grad, record = self.weight.grad, self._found()
        if record is None:
            return None
        if grad is None or record.unchanged(grad):
            return RunningPass(task, record, fresh=record.passes == 0 and not record.partial)
        if record.norm is None or record.running:
            return None
        if self.sharded:  # ranks would have to agree on what was done to their rows
            raise RuntimeError(
                f"the gradient of a sharded parameter of shape {tuple(self.weight.shape)} was "
                "changed in place between two backward passes: use optimizer.zero_grad() to zero "
                "it, and change it after the last pass only"
            )
        # Somebody wrote to p.grad between two backwards: zeroed in place, or scaled. Rare, so a
        # host read is fine.
        ratio = record.ratio(grad)
        if float(ratio) == 0.0:
            return RunningPass(task, self._new(), fresh=True)
        return RunningPass(task, record, rescale=ratio)

    def _begun(self, task: int) -> RunningPass:
        """Adds to nothing, or to a gradient that nothing is known of."""
        bias = None if self._bias_slice is None else self._bias_slice.parameter
        both = [self.weight.grad, bias.grad if bias is not None and bias.requires_grad else None]
        present = [grad for grad in both if grad is not None]
        holds = bool(present)
        if holds and self.plan.halves != "none" and not self.sharded:
            holds = any(bool(grad.any()) for grad in present)
        record = self._new(partial=holds)
        # Without the passes of this step that were lost, statistics can't be scaled.
        record.incomplete = holds and self.seen.gradients > 0
        return RunningPass(task, record, fresh=not holds)

    def end_pass(self) -> bool:
        """Whether `p.grad` is there now: FSDP2 may keep it to reduce it after a later pass."""
        present = self.weight.grad is not None
        self._unreduced = self._latest if self.sharded and not present else None
        return present

    def see_gradient(self, norm: Tensor) -> None:
        """Remember `p.grad` as the pass leaves it."""
        if self._latest is not None:
            self._keep(self._latest)
            self._latest.norm, self._latest.running = norm, False


def norm_of(grad: Tensor) -> Tensor:
    # Half precision would overflow.
    norm: Tensor = torch.linalg.vector_norm(grad, dtype=factor_dtype(grad.dtype))
    return norm
