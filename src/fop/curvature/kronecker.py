"""F = G (x) A, so F V = G V A for V [groups, o, i]; damped factor by factor, or exactly.

A  input factor [groups, i, i]   G  output factor [groups, o, o]   diagonal: [groups, d]
factored:  M = (G + sqrt(lambda)/pi I) (x) (A + pi sqrt(lambda) I), by Cholesky,
           pi^2 = (tr A / dim A) / (tr G / dim G)
exact:     M = F + lambda I, by the eigenvectors of A and G
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fop import linalg, symmetric
from fop.curvature.base import (
    CurvatureState,
    RefreshJob,
    WithoutSquares,
    average_keys,
    moving_average,
)
from fop.projection import Gradient, Metric, inner

# A mean eigenvalue below this counts as this, so that a factor of zeros does not make pi infinite.
SMALLEST_MEAN_EIGENVALUE = 1e-20


def factored_shifts(inputs: Tensor, outputs: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    """What to add to the diagonals of A and G: pi sqrt(lambda), sqrt(lambda) / pi [groups]."""
    root = damping**0.5
    # Roots before the quotient, which could overflow.
    of_inputs, of_outputs = (
        _mean_eigenvalue(factor).clamp(min=SMALLEST_MEAN_EIGENVALUE).sqrt()
        for factor in (inputs, outputs)
    )
    pi = of_inputs / of_outputs
    return pi * root, root / pi


def _mean_eigenvalue(factor: Tensor) -> Tensor:
    return symmetric.diagonal(factor).mean(-1)


def _fits(state: CurvatureState, left: str, right: str, shape: tuple[int, int]) -> bool:
    """Whether the state holds both sides for a layer matrix of this shape."""
    if left not in state or right not in state:
        return False
    return (state[left].shape[-1], state[right].shape[-1]) == shape


FACTOR_KEYS = average_keys("input_factor", "output_factor")


class _KroneckerFactors(WithoutSquares):
    """The moving averages, common to both ways of damping."""

    def absorb(self, state: CurvatureState, inputs: Tensor, outputs: Tensor, decay: float) -> None:
        moving_average(state, "input_factor", inputs, _mean_eigenvalue, decay)
        moving_average(state, "output_factor", outputs, _mean_eigenvalue, decay)


class FactoredKronecker(_KroneckerFactors):
    keys: tuple[str, ...] = (
        *FACTOR_KEYS,
        "input_inverse",
        "input_root",
        "output_inverse",
        "output_root",
        "damping",
    )

    def refresh(self, jobs: Sequence[RefreshJob]) -> list[bool]:
        factors: list[Tensor] = []
        shifts: list[Tensor] = []
        roots: list[bool] = []
        for job in jobs:
            pair = (job.state["input_factor"], job.state["output_factor"])
            factors += pair
            shifts += factored_shifts(*pair, job.damping)
            widths = [symmetric.matrix_width(factor.shape) for factor in pair]
            for factor, width, other in zip(pair, widths, reversed(widths), strict=True):
                # Accelerators make one large product much faster than many small ones.
                halved = symmetric.is_halved(factor.shape) and linalg.on_host(factor)
                roots.append(halved and linalg.solve_pays(width, job.uses * other))
        found = linalg.damped_inverses(factors, shifts, roots)
        outcome = []
        for index, job in enumerate(jobs):
            pair_found = found[2 * index : 2 * index + 2]
            outcome.append(all(part is not None for part in pair_found))
            if outcome[-1]:
                for name, part, is_root in zip(
                    ("input", "output"), pair_found, roots[2 * index :], strict=False
                ):
                    kept, dropped = ("root", "inverse") if is_root else ("inverse", "root")
                    job.state[f"{name}_{kept}"] = part
                    job.state.pop(f"{name}_{dropped}", None)
                job.state["damping"] = job.damping
        return outcome

    def ready(self, state: CurvatureState, shape: tuple[int, int]) -> bool:
        sides = [_Solver.of(state, name) for name in ("output", "input")]
        return all(
            side is not None and side.width == width
            for side, width in zip(sides, shape, strict=True)
        )

    def metric(self, state: CurvatureState) -> Metric:
        of_input, of_output = _Solver.of(state, "input"), _Solver.of(state, "output")
        assert of_input is not None
        assert of_output is not None
        return _FactoredMetric(state["input_factor"], state["output_factor"], of_input, of_output)


@dataclass(frozen=True)
class _Solver:
    """What solves with a damped factor S: its inverse, or a root L with L L^T = S.

    S^-1 = L^-T L^-1 by a root, in two halves; the inverse stands between halves that do nothing.
    """

    matrix: Tensor
    is_root: bool

    @staticmethod
    def of(state: CurvatureState, name: str) -> _Solver | None:
        for form in ("inverse", "root"):
            if f"{name}_{form}" in state:
                return _Solver(state[f"{name}_{form}"], form == "root")
        return None

    @property
    def width(self) -> int:
        return symmetric.matrix_width(self.matrix.shape)


@dataclass(frozen=True)
class _FactoredMetric:
    input_factor: Tensor
    output_factor: Tensor
    input_solver: _Solver
    output_solver: _Solver

    def enter(self, v: Tensor) -> Tensor:
        if self.input_solver.is_root:
            v = symmetric.half_solve_right(v, self.input_solver.matrix)
        if self.output_solver.is_root:
            v = symmetric.half_solve_left(self.output_solver.matrix, v)
        return v

    def solve(self, v: Tensor) -> Tensor:
        if not self.input_solver.is_root:
            v = symmetric.from_right(v, self.input_solver.matrix)
        if not self.output_solver.is_root:
            v = symmetric.from_left(self.output_solver.matrix, v)
        return v

    def leave(self, v: Tensor) -> Tensor:
        if self.output_solver.is_root:
            v = symmetric.finish_solve_left(self.output_solver.matrix, v)
        if self.input_solver.is_root:
            v = symmetric.finish_solve_right(v, self.input_solver.matrix)
        return v

    def along_fisher(
        self, a: Gradient, d: Gradient, dtype: torch.dtype | None
    ) -> tuple[Tensor, Tensor]:
        dtype = dtype or a.given.dtype
        product = symmetric.from_left(self.output_factor.to(dtype), a.given.to(dtype))
        product = symmetric.from_right(product, self.input_factor.to(dtype)).to(a.given.dtype)
        return inner(a.given, product), inner(d.given, product)


class EigenKronecker(_KroneckerFactors):
    keys: tuple[str, ...] = (
        *FACTOR_KEYS,
        "input_eigenvalues",
        "input_basis",
        "output_eigenvalues",
        "output_basis",
        "damping",
    )

    def refresh(self, jobs: Sequence[RefreshJob]) -> list[bool]:
        names = ("input", "output")
        bases = linalg.eigenbases([job.state[f"{name}_factor"] for job in jobs for name in names])
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

    def ready(self, state: CurvatureState, shape: tuple[int, int]) -> bool:
        return _fits(state, "output_eigenvalues", "input_eigenvalues", shape)

    def metric(self, state: CurvatureState) -> Metric:
        eigenvalues = state["output_eigenvalues"].unsqueeze(-1) * state[
            "input_eigenvalues"
        ].unsqueeze(-2)
        return EigenMetric(
            eigenvalues, state.get("input_basis"), state.get("output_basis"), state["damping"]
        )


@dataclass(frozen=True)
class EigenMetric:
    """In the Kronecker eigenbasis F and M are elementwise."""

    eigenvalues: Tensor  # [groups, o, i]
    input_basis: Tensor | None  # None for a diagonal factor
    output_basis: Tensor | None
    damping: float

    def enter(self, v: Tensor) -> Tensor:
        v = v if self.output_basis is None else self.output_basis.mT @ v
        return v if self.input_basis is None else v @ self.input_basis

    def leave(self, v: Tensor) -> Tensor:
        v = v if self.output_basis is None else self.output_basis @ v
        return v if self.input_basis is None else v @ self.input_basis.mT

    def along_fisher(
        self, a: Gradient, d: Gradient, dtype: torch.dtype | None
    ) -> tuple[Tensor, Tensor]:
        product = self.eigenvalues * a.entered
        return inner(a.entered, product), inner(d.entered, product)

    def solve(self, v: Tensor) -> Tensor:
        return v / (self.eigenvalues + self.damping)
