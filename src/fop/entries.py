"""What may lie under a name in the optimizer's state, declared by those who put it there.

Loading checks every value against its declaration, so nothing else in fop has to doubt a state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fop.linalg import all_finite

Shape = tuple[int, ...]

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Entry:
    """A tensor of finite numbers.

    `shapes` tells the shapes it may have, from the size of what it belongs to: a parameter's shape,
    or (groups, rows, columns) of a layer's matrix.
    """

    shapes: Callable[[Shape], Iterable[Shape]]
    low: float = -math.inf  # no number in it is smaller
    dtype: torch.dtype | None = None  # where it is not that of what it belongs to

    def read(
        self, what: str, value: Any, sizes: Iterable[Shape], dtype: torch.dtype, device: Any
    ) -> Tensor:
        """A copy of the value for use here; raises, naming `what` it is, where it does not fit."""
        if not isinstance(value, Tensor):
            raise _wrong_type(what, "a tensor", value)
        if value.layout != torch.strided or value.dtype not in DTYPES or value.is_meta:
            raise TypeError(
                f"{what} should be a dense tensor of {', '.join(map(_name, DTYPES))}, but is "
                f"{_name(value.layout)} of {_name(value.dtype)} on {value.device} in the state"
            )
        shapes = list(dict.fromkeys(shape for size in sizes for shape in self.shapes(size)))
        if tuple(value.shape) not in shapes:
            expected = " or ".join(" x ".join(map(str, shape)) or "one number" for shape in shapes)
            raise ValueError(
                f"{what} should be {expected}, but has shape {tuple(value.shape)} in the state: it "
                "is the state of another model"
            )
        copied = value.detach().to(device, self.dtype or dtype, copy=True)
        if not bool(all_finite([copied])):
            raise ValueError(
                f"{what} has numbers that are not finite in the state"
                f"{_after_cast(value, copied)}: load an earlier one"
            )
        if copied.numel() and float(copied.min()) < self.low:
            raise ValueError(
                f"{what} should be at least {self.low:g} everywhere, but has {float(copied.min())} "
                "in the state: load an earlier one"
            )
        return copied


@dataclass(frozen=True)
class NumberEntry:
    """A positive number of Python's."""

    def read(
        self, what: str, value: Any, sizes: Iterable[Shape], dtype: torch.dtype, device: Any
    ) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise _wrong_type(what, "a number", value)
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{what} should be positive, but is {value!r} in the state")
        return value


AnyEntry = Entry | NumberEntry


def _after_cast(value: Tensor, copied: Tensor) -> str:
    if value.dtype == copied.dtype or not bool(all_finite([value])):
        return ""
    return f" once they are {_name(copied.dtype)}, which is what the parameter asks for"


def _name(kind: object) -> str:
    return str(kind).removeprefix("torch.")


def _wrong_type(what: str, wanted: str, value: object) -> TypeError:
    text, kind = repr(value), type(value).__name__
    shown = text if len(text) <= 40 else f"{text[:37]}..."
    return TypeError(f"{what} should be {wanted}, but is {shown} of type {kind} in the state")
