"""F = G (x) A with exact damping, M = F + lambda I, by the eigenvectors of A and G.

A = U_A diag(a) U_A^T  [groups, i, i]     G = U_G diag(g) U_G^T  [groups, o, o]
In the basis, V' = U_G^T V U_A, both F and M act elementwise: F V' = (g a^T) * V'.

Example: A = G = [[2]] and lambda = 1 give F = 4, M = 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fop.curvature.base import CurvatureState, RefreshJob, Shape
from fop.curvature.kronecker import FACTORS, SIDES, Kronecker, Pair, of_sides, outer, to_basis
from fop.entries import AnyEntry, NumberEntry
from fop.linalg import How
from fop.projection import Metric

# Of the mean eigenvalue: what is added to the diagonal where the iteration for eigenvectors fails.
RETRY_SHIFT = 1e-6


class EigenKronecker(Kronecker):
    entries: Mapping[str, AnyEntry] = {
        **FACTORS,
        **of_sides("eigenvalues", lambda groups, width: [(groups, width)], low=0.0),
        **of_sides("basis", lambda groups, width: [(groups, width, width)]),
        "damping": NumberEntry(),
    }

    def plan(self, pair: Pair, job: RefreshJob) -> tuple[list[How], list[Tensor]]:
        shifts = [factor.mean_eigenvalue() * RETRY_SHIFT for factor in pair]
        return ["eigenbasis", "eigenbasis"], shifts

    def damped(self, values: list[Tensor], pair: Pair, damping: float) -> tuple[Tensor, ...]:
        return *values, outer(*values) + damping

    def ready(self, state: CurvatureState, shape: Shape) -> bool:
        if not super().ready(state, shape):
            return False
        for side, axis in SIDES:
            eigenvalues, basis = state.get(f"{side}_eigenvalues"), state.get(f"{side}_basis")
            if eigenvalues is None or eigenvalues.shape[-1] != shape[axis]:
                return False
            if basis is None:
                if state[f"{side}_factor"].dim() != 2:  # only a diagonal factor has none
                    return False
            elif basis.shape[-1] != shape[axis]:
                return False
        return True

    def eigenvalues(self, state: Mapping[str, Any]) -> Tensor:
        """Of F, in the basis: [groups, o, i]."""
        return outer(state["input_eigenvalues"], state["output_eigenvalues"])

    def metric(self, state: Mapping[str, Any], shape: Shape) -> Metric:
        bases = state.get("input_basis"), state.get("output_basis")
        return EigenMetric(self.eigenvalues(state), *bases, state["damping"])


@dataclass(frozen=True)
class EigenMetric:
    """Curvature that acts elementwise in a basis."""

    eigenvalues: Tensor  # [groups, o, i]
    input_basis: Tensor | None  # None where the basis is the axes themselves
    output_basis: Tensor | None
    damping: Tensor | float

    def to_basis(self, v: Tensor) -> Tensor:
        return to_basis(v, self.input_basis, self.output_basis)

    def from_basis(self, v: Tensor) -> Tensor:
        v = v if self.output_basis is None else self.output_basis @ v
        return v if self.input_basis is None else v @ self.input_basis.mT

    def fisher_product(self, a: Tensor, a_in_basis: Tensor) -> tuple[Tensor, bool]:
        return self.eigenvalues * a_in_basis, True

    def solve(self, v: Tensor) -> Tensor:
        return v / (self.eigenvalues + self.damping)
