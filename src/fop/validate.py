"""Checks of single values: each raises, with the name, what was expected and what was found."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

Check = Callable[[str, Any], object]  # of a name and its value


def one_of(*allowed: str) -> Check:
    def check(name: str, value: object) -> None:
        if not isinstance(value, str) or value not in allowed:
            raise ValueError(f"{name} must be one of {_listed(allowed)}, got {value!r}")

    return check


def flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")


def number(
    *,
    low: float = -math.inf,
    high: float = math.inf,
    low_open: bool = False,
    high_open: bool = False,
    hint: str = "",
) -> Check:
    """A finite number from `low` to `high`; an open end is not allowed itself."""
    above = [f"{'>' if low_open else '>='} {low:g}"] if low > -math.inf else []
    below = [f"{'<' if high_open else '<='} {high:g}"] if high < math.inf else []
    wanted = " and ".join(above + below) or "finite"

    def check(name: str, value: object) -> None:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(
                f"{name} must be a number{hint}, got {value!r} of type {type(value).__name__}"
            )
        outside = value < low or value > high or (low_open and value == low)
        if outside or (high_open and value == high) or not math.isfinite(value):
            raise ValueError(f"{name} must be {wanted}{hint}, got {value!r}")

    return check


def integer(unit: str, *, low: int = 1) -> Check:
    def check(name: str, value: object) -> None:
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be a whole number{unit}, got {value!r}")
        if value < low:
            raise ValueError(f"{name} must be >= {low}, got {value!r}")

    return check


def function(of: str) -> Check:
    def check(name: str, value: object) -> None:
        if not callable(value):
            raise TypeError(f"{name} must be a function of {of}, or None, got {value!r}")

    return check


def learning_rate(name: str, value: object) -> None:
    """A number or a tensor with one."""
    if isinstance(value, torch.Tensor) and value.dim() == 0:
        value = value.item()
    number(low=0.0)(name, value)


def betas(name: str, value: object) -> None:
    """Of AdamW."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise TypeError(f"{name} must be two numbers, got {value!r}")
    for index, beta in enumerate(value):
        number(low=0.0, high=1.0, high_open=True)(f"{name}[{index}]", beta)


def unless(exempt: object, check: Check) -> Check:
    """A check that one value passes, or every object of a type."""
    kind = exempt if isinstance(exempt, type) else type(exempt)

    def other(name: str, value: object) -> None:
        fits = isinstance(value, kind) and not isinstance(value, type)
        if not (fits and (exempt is kind or value == exempt)):
            check(name, value)

    return other


def keys(name: str, value: Mapping[str, Any], checks: Mapping[str, Check], owner: str) -> None:
    """The entries of a dict; `owner` is what takes them."""
    for key, entry in value.items():
        if key not in checks:
            takes = f"takes {_listed(checks)}" if checks else "takes none"
            raise ValueError(f"{name} has the option {key!r}, but {owner} {takes}")
        checks[key](f"{name}[{key!r}]", entry)


def _listed(names: tuple[str, ...] | Mapping[str, Any]) -> str:
    return ", ".join(map(repr, names))
