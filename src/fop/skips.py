"""Steps that were skipped because something was non-finite: counted, and said if it goes on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fop.linalg import all_finite, on_host
from fop.messages import listed
from fop.scaling import Number
from fop.slices import local

# Skipped steps in a row before the user is told. GradScaler starts with a scale that may overflow
# sixteen times before it is down to 1.
PATIENCE = 5
PATIENCE_WITH_SCALER = 20


class SkippedSteps:
    """On accelerators the counts stay there, and are read on steps that read anyway."""

    def __init__(self) -> None:
        self.total: Number = 0
        self._in_a_row: Number = 0
        self._told = False

    def count(self, taken: Tensor) -> None:
        """`taken` is a 0-dimensional flag: whether the step changed anything."""
        skipped: Number = int(not taken) if on_host(taken) else (~taken).to(torch.int64)
        self.total = self.total + skipped
        self._in_a_row = (self._in_a_row + skipped) * skipped

    def overdue(self, *, scaled: bool, may_read: bool) -> int:
        """How many in a row, if the user is to be told now; else 0."""
        if isinstance(self._in_a_row, Tensor) and not may_read:
            return 0
        in_a_row = int(self._in_a_row)
        if in_a_row < (PATIENCE_WITH_SCALER if scaled else PATIENCE):
            self._told = self._told and in_a_row > 0
            return 0
        first, self._told = not self._told, True
        return in_a_row if first else 0


def name_non_finite(groups: Mapping[Tensor, Mapping[str, Any]]) -> str:
    """Which parameters and gradients are non-finite, of a step that was skipped. Reads them all."""
    names = {
        parameter: name
        for group in {id(group): group for group in groups.values()}.values()
        for parameter, name in zip(group["params"], group["param_names"], strict=True)
    }
    weights = _non_finite({name: p.detach() for p, name in names.items()})
    present = {name: p.grad for p, name in names.items() if p.grad is not None}
    gradients = _non_finite(present)
    if weights:
        return f"parameters are non-finite already ({listed(weights, limit=3)})"
    if gradients and len(gradients) == len(present):
        return "all gradients are non-finite, as after a non-finite loss"
    if gradients:
        return f"the gradients of {listed(gradients, limit=3)} are non-finite"
    return (
        "gradients are finite, but the loss, half-batch gradients or curvature statistics are not"
    )


def _non_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    return [name for name, tensor in tensors.items() if not bool(all_finite([local(tensor)]))]
