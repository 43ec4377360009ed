"""Steps that were skipped because something was non-finite: counted, and said if it goes on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fop.linalg import all_finite, on_host
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
    weights, gradients, seen = [], [], 0
    names = {
        parameter: name
        for group in {id(group): group for group in groups.values()}.values()
        for parameter, name in zip(group["params"], group["param_names"], strict=True)
    }
    for parameter, name in names.items():
        if not bool(all_finite([local(parameter.detach())])):
            weights.append(name)
        if parameter.grad is not None:
            seen += 1
            if not bool(all_finite([local(parameter.grad)])):
                gradients.append(name)
    if weights:
        return f"parameters are non-finite already ({_listed(weights)})"
    if len(gradients) == seen > 0:
        return "all gradients are non-finite, as after a non-finite loss"
    if gradients:
        return f"the gradients of {_listed(gradients)} are non-finite"
    return (
        "gradients are finite, but the loss, half-batch gradients or curvature statistics are not"
    )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(map(repr, names[:3])) + more
