"""Every option of the optimizers that is not per parameter group, checked in one place.

What may differ between parameter groups (lr, momentum, weight decay, damping) lives in
`param_groups`, where learning-rate schedulers expect it; `check_group` holds its rules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal

import torch

Interval = int | Callable[[int], int]
Coefficient = float | Literal["adaptive"]

# Curvature of the very first batch is a poor guide for a whole interval, so it is renewed on these
# steps too.
EARLY_REFRESH_STEPS = frozenset({1, 2, 4})


@dataclass(frozen=True)
class Settings:
    """Options shared by all parameter groups; see `fop.FOP` for what each means."""

    damping_mode: str = "factored"
    factor_decay: float = 0.95
    update_every: Interval = 10
    fisher: str = "empirical"
    likelihood: str = "categorical"
    model_output: Callable[[Any], Any] | None = None
    sharing: str = "expand"
    max_factor_size: int = 8192
    beta: Coefficient = "adaptive"
    eta: Coefficient = "adaptive"
    total: str = "mean"
    kl_clip: float | None = 1e-3
    loss_reduction: str = "mean"
    halves: str = "auto"
    curvature: str = "kronecker"
    fallback: str = "adamw"
    norms: str = "fallback"
    decoupled_weight_decay: bool = False
    stagger: bool = False
    strategy: str | int = "owner"

    def __post_init__(self) -> None:
        _one_of("damping_mode", self.damping_mode, ("factored", "exact"))
        _one_of("fisher", self.fisher, ("empirical", "mc", "exact"))
        _one_of("likelihood", self.likelihood, ("categorical", "gaussian", "bernoulli"))
        _one_of("sharing", self.sharing, ("expand", "reduce"))
        _one_of("total", self.total, ("mean", "sum"))
        _one_of("loss_reduction", self.loss_reduction, ("mean", "sum"))
        _one_of("halves", self.halves, ("auto", "samples", "microbatches", "ranks"))
        _one_of("curvature", self.curvature, ("kronecker", "ekfac", "identity"))
        _one_of("fallback", self.fallback, ("sgd", "adamw"))
        _one_of("norms", self.norms, ("fallback", "unitwise"))
        _flag("decoupled_weight_decay", self.decoupled_weight_decay)
        _flag("stagger", self.stagger)
        _number("factor_decay", self.factor_decay, low=0.0, high=1.0, high_open=True)
        if self.kl_clip is not None:
            _number(
                "kl_clip", self.kl_clip, low=0.0, low_open=True, hint=" or None to switch it off"
            )
        for name, value in (("beta", self.beta), ("eta", self.eta)):
            if value != "adaptive":
                _number(name, value, hint=' or "adaptive"')
        if not callable(self.update_every):
            _whole(self.update_every, "update_every", "steps or a function of the step")
        if self.model_output is not None and not callable(self.model_output):
            raise TypeError(
                "model_output must be a function of what the model returns, or None, got "
                f"{self.model_output!r}"
            )
        _whole(self.max_factor_size, "max_factor_size", "rows")
        if isinstance(self.strategy, str):
            _one_of("strategy", self.strategy, ("owner", "all"))
        else:
            _whole(self.strategy, "strategy", 'ranks, or "owner" or "all"')

    @property
    def needs_halves(self) -> bool:
        """Whether the update depends on the two half-batch gradients at all."""
        return self.beta != 0

    @property
    def total_weight(self) -> float:
        """k of algorithm's eta: 1 when g_tot is the mean gradient, 2 when it is g1 + g2."""
        return 1.0 if self.total == "mean" else 2.0

    def described(self) -> str:
        """What most depends on, and what was chosen otherwise than by default."""
        shown = {"kl_clip", "update_every", "fisher"}
        shown |= {f.name for f in fields(self) if getattr(self, f.name) != f.default}
        chosen = ((f.name, getattr(self, f.name)) for f in fields(self) if f.name in shown)
        return ", ".join(f"{name}: {value}" for name, value in chosen)

    def interval(self, step: int) -> int:
        """Steps between renewals of curvature, as of `step`."""
        if callable(self.update_every):
            return _whole(self.update_every(step), f"update_every({step})", "steps")
        return self.update_every

    def refresh_due(self, step: int, phase: int = 0) -> bool:
        """Whether a layer's curvature is renewed on `step`, counted from 1."""
        if self.curvature == "identity":
            return False
        return step in EARLY_REFRESH_STEPS or (step - 1 - phase) % self.interval(step) == 0


def check_group(group: Mapping[str, Any]) -> None:
    """Raise where one of a parameter group's own options is of the wrong type or range."""
    for name, check in GROUP_CHECKS.items():
        if name in group:
            check(name, group[name])
    if group.get("nesterov") and group.get("momentum") == 0:
        raise ValueError(
            "nesterov=True needs momentum > 0, but momentum is 0: set momentum, or drop nesterov"
        )


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        choices = ", ".join(repr(choice) for choice in allowed)
        raise ValueError(f"{name} must be one of {choices}, got {value!r}")


def _flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")


def _number(
    name: str,
    value: object,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    low_open: bool = False,
    high_open: bool = False,
    hint: str = "",
) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(
            f"{name} must be a number{hint}, got {value!r} of type {type(value).__name__}"
        )
    inside = (value > low if low_open else value >= low) and (
        value < high if high_open else value <= high
    )
    if not (inside and math.isfinite(value)):
        bounds = []
        if low > -math.inf:
            bounds.append(f"{'>' if low_open else '>='} {low:g}")
        if high < math.inf:
            bounds.append(f"{'<' if high_open else '<='} {high:g}")
        wanted = " and ".join(bounds) or "finite"
        raise ValueError(f"{name} must be {wanted}{hint}, got {value!r}")


def _whole(value: object, name: str, unit: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number of {unit}, got {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be >= 1, got {value!r}")
    return value


def _learning_rate(name: str, value: object) -> None:
    if isinstance(value, torch.Tensor) and value.dim() == 0:
        value = value.item()
    _number(name, value, low=0.0)


def _optional_rate(name: str, value: object) -> None:
    if value is not None:
        _number(name, value, low=0.0)


def _count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number, got {value!r}")
    if value < 0:
        raise ValueError(f"{name} must be >= 0, got {value!r}")


def _betas(name: str, value: object) -> None:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise TypeError(f"{name} must be two numbers, got {value!r}")
    for index, beta in enumerate(value):
        _number(f"{name}[{index}]", beta, low=0.0, high=1.0, high_open=True)


# What a parameter group may hold, the user's options and the library's own marks. A new one needs a
# line here, and is then checked when an optimizer is built and when a state is loaded.
GROUP_CHECKS: Mapping[str, Callable[[str, Any], None]] = {
    "lr": _learning_rate,
    "reference_lr": _learning_rate,
    "fallback_lr": _optional_rate,
    "momentum": partial(_number, low=0.0),
    "weight_decay": partial(_number, low=0.0),
    "nesterov": _flag,
    "damping": partial(_number, low=0.0, low_open=True),
    "betas": _betas,
    "eps": partial(_number, low=0.0),
    "rule": partial(_one_of, allowed=("curvature", "sgd", "adamw")),
    "steps": _count,
    "skipped_steps": _count,
    "refresh_overdue": _flag,
}
