"""Learning rates over a run: warm-up, then one of the paper's schedules, and how settings follow
the batch size.

A schedule is asked for the rate before every step and told the training loss after every epoch.
Only "plateau" remembers anything; the rest are functions of the epoch (Appendix C.2, C.3).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import fop
from fop_bench.schema import NonNegative, Positive, Whole, check_fields

ScheduleName = Literal["constant", "plateau", "cosine", "power", "step"]
LrRule = Literal["linear", "none"]
IntervalRule = Literal["shrink", "none"]


@dataclass(frozen=True)
class ScheduleConfig:
    """`warmup_epochs` apply to every schedule; other fields to those that their comment names."""

    name: ScheduleName = "constant"
    warmup_epochs: NonNegative = 0.0
    patience: Whole = 5  # plateau: epochs without improvement
    factor: Positive = 0.1  # plateau, step: what the rate is multiplied by
    threshold: NonNegative = 1e-4  # plateau: relative improvement that counts
    floor: NonNegative = 1e-3  # cosine: the paper's smallest rate
    exponent: NonNegative = 5.0  # power: E of the paper, 4, 5 or 6
    milestones: tuple[Whole, ...] = (160, 180)  # step: epochs at which the rate drops

    def __post_init__(self) -> None:
        check_fields(self, "schedule.")
        object.__setattr__(self, "milestones", tuple(self.milestones))

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def cosine(epoch: int, epochs: int, peak: float, floor: float = 1e-3) -> float:
    """Eq. cosine: 0.47 rather than 0.5 of a turn, so that the last epoch still moves.

    The floor is never above the peak: the formula would otherwise raise small rates, such as
    AdamW's.
    """
    floor = min(floor, peak)
    return floor + 0.5 * (peak - floor) * (1 + math.cos(2 * 0.47 * math.pi * epoch / epochs))


def power(epoch: int, epochs: int, peak: float, exponent: float) -> float:
    """The paper's "exponential" schedule, in truth a power: peak * (1 - t / epochs) ** E."""
    return float(peak * (1 - epoch / epochs) ** exponent)


def step_decay(epoch: int, peak: float, milestones: tuple[int, ...], factor: float) -> float:
    return float(peak * factor ** sum(epoch >= milestone for milestone in milestones))


@dataclass
class Plateau:
    """ReduceLROnPlateau (mode "min", threshold mode "rel") on the training loss: the test split
    stays unseen.
    """

    patience: int
    factor: float
    threshold: float
    scale: float = 1.0
    best: float = math.inf
    bad_epochs: int = 0

    def observe(self, loss: float) -> None:
        if loss < self.best * (1 - self.threshold):
            self.best, self.bad_epochs = loss, 0
            return
        self.bad_epochs += 1
        if self.bad_epochs > self.patience:
            self.scale *= self.factor
            self.bad_epochs = 0


@dataclass
class Schedule:
    """The rate of one run, whose peak (after scaling to the batch size) is `peak`."""

    config: ScheduleConfig
    peak: float
    epochs: int
    plateau: Plateau = field(init=False)

    def __post_init__(self) -> None:
        self.plateau = Plateau(self.config.patience, self.config.factor, self.config.threshold)

    def lr(self, step: int, steps_per_epoch: int) -> float:
        """The rate of `step`, counted from 0.

        Warm-up rises with every step and reaches the peak with its last one; what follows changes
        from epoch to epoch, as in the paper.
        """
        rate = self._after_warmup(step // steps_per_epoch)
        warmup_steps = self.config.warmup_epochs * steps_per_epoch
        return rate * (step + 1) / warmup_steps if step + 1 < warmup_steps else rate

    def _after_warmup(self, epoch: int) -> float:
        config = self.config
        if config.name == "plateau":
            return self.peak * self.plateau.scale
        if config.name == "cosine":
            return cosine(epoch, self.epochs, self.peak, config.floor)
        if config.name == "power":
            return power(epoch, self.epochs, self.peak, config.exponent)
        if config.name == "step":
            return step_decay(epoch, self.peak, config.milestones, config.factor)
        return self.peak

    def end_epoch(self, train_loss: float) -> None:
        self.plateau.observe(train_loss)

    def state_dict(self) -> dict[str, float]:
        return {
            "scale": self.plateau.scale,
            "best": self.plateau.best,
            "bad_epochs": self.plateau.bad_epochs,
        }

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.plateau.scale = float(state["scale"])
        self.plateau.best = float(state["best"])
        self.plateau.bad_epochs = int(state["bad_epochs"])


def scaled_options(
    options: Mapping[str, Any],
    batch_size: int,
    base_batch: int,
    lr_rule: str = "linear",
    interval_rule: str = "shrink",
) -> dict[str, Any]:
    """A method's options at another batch size: lr grows with it, the curvature interval shrinks,
    to 5 at least.
    """
    interval = options.get("update_every", 1)
    rule = fop.scale_to_batch(batch_size, base_batch, lr=options["lr"], update_every=interval)
    scaled = dict(options)
    if lr_rule == "linear":
        scaled["lr"] = rule["lr"]
    if interval_rule == "shrink" and "update_every" in options:
        scaled["update_every"] = rule["update_every"]
    return scaled
