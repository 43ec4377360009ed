"""F = G (x) A with exact damping, M = F + lambda I, by the eigenvectors of A and G.

A = U_A diag(a) U_A^T  [groups, i, i]     G = U_G diag(g) U_G^T  [groups, o, o]
In the basis, V' = U_G^T V U_A, both F and M act elementwise: F V' = (g a^T) * V'.

Example: A = G = [[2]] and lambda = 1 give F = 4, M = 5.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fop.curvature.base import (
    CurvatureState,
    RefreshJob,
    Shape,
    Spectrum,
    stacked,
    stacked_damping,
)
from fop.curvature.kronecker import COLUMNS, FACTORS, ROWS, Kronecker, stored_factors
from fop.entries import AnyEntry, Entry, NumberEntry
from fop.linalg import Diagonal, Factor, eigenbases
from fop.projection import Metric


def _diagonal(side: int) -> Entry:
    return Entry(lambda size: [(size[0], size[side])], low=0.0)


def _square(side: int) -> Entry:
    return Entry(lambda size: [(size[0], size[side], size[side])])


class EigenKronecker(Kronecker):
    entries: Mapping[str, AnyEntry] = {
        **FACTORS,
        "input_eigenvalues": _diagonal(COLUMNS),
        "input_basis": _square(COLUMNS),
        "output_eigenvalues": _diagonal(ROWS),
        "output_basis": _square(ROWS),
        "damping": NumberEntry(),
    }

    def refresh(self, jobs: Sequence[RefreshJob]) -> list[bool]:
        names = ("input", "output")
        factors = [factor for job in jobs for factor in stored_factors([job.state], job.shape)]
        bases = eigenbases(factors)
        outcome = []
        for index, job in enumerate(jobs):
            found = dict(zip(names, bases[2 * index : 2 * index + 2], strict=True))
            outcome.append(all(pair is not None for pair in found.values()))
            if outcome[-1]:
                for name, pair in found.items():
                    assert pair is not None
                    # A diagonal factor is its own eigenbasis and has none to keep.
                    job.state.pop(f"{name}_basis", None)
                    keys = (f"{name}_eigenvalues", f"{name}_basis")
                    job.state.update(zip(keys, pair, strict=False))
                job.state["damping"] = job.damping
        return outcome

    def ready(self, state: CurvatureState, shape: Shape) -> bool:
        return super().ready(state, shape) and all(
            _has_basis(state, name, factor, width)
            for name, factor, width in zip(
                ("input", "output"), stored_factors([state], shape), reversed(shape), strict=True
            )
        )

    def metric(self, states: Sequence[CurvatureState], shape: Shape) -> Metric:
        of_outputs = stacked(states, "output_eigenvalues").unsqueeze(-1)
        eigenvalues = of_outputs * stacked(states, "input_eigenvalues").unsqueeze(-2)
        damping = stacked_damping(states, len(eigenvalues) // len(states), eigenvalues)
        return EigenMetric(eigenvalues, *stacked_basis(states), damping)

    def spectrum(self, state: CurvatureState, shape: Shape) -> Spectrum:
        inputs, outputs = (f.to(dtype=torch.float64) for f in stored_factors([state], shape))
        (input_values, *input_basis), (output_values, *output_basis) = (
            factor.eigenbasis(torch.zeros_like(factor.mean_eigenvalue()))[0]
            for factor in (inputs, outputs)
        )
        fisher = output_values.unsqueeze(-1) * input_values.unsqueeze(-2)
        bases = [basis[0] if basis else None for basis in (input_basis, output_basis)]
        damped = fisher + state["damping"]
        return Spectrum(input_values, output_values, lambda v: to_basis(v, *bases), fisher, damped)


def _has_basis(state: CurvatureState, name: str, factor: Factor, width: int) -> bool:
    eigenvalues, basis = state.get(f"{name}_eigenvalues"), state.get(f"{name}_basis")
    if eigenvalues is None or eigenvalues.shape[-1] != width:
        return False
    if basis is None:  # as it must be for a diagonal factor
        return isinstance(factor, Diagonal)
    return bool(basis.shape[-1] == width)


def stacked_basis(states: Sequence[CurvatureState]) -> tuple[Tensor | None, Tensor | None]:
    """U_A and U_G of stacked layers; None for diagonal factors."""
    return _stacked_or_none(states, "input_basis"), _stacked_or_none(states, "output_basis")


def _stacked_or_none(states: Sequence[CurvatureState], name: str) -> Tensor | None:
    return stacked(states, name) if name in states[0] else None


def to_basis(v: Tensor, input_basis: Tensor | None, output_basis: Tensor | None) -> Tensor:
    """U_G^T v U_A"""
    v = v if output_basis is None else output_basis.mT @ v
    return v if input_basis is None else v @ input_basis


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
