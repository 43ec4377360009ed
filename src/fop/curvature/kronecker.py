"""F = G (x) A, so F V = G V A for V [groups, o, i]; damped factor by factor, or exactly.

A  input factor [groups, i, i]   G  output factor [groups, o, o]   diagonal: [groups, d]
factored:  M = (G + sqrt(lambda)/pi I) (x) (A + pi sqrt(lambda) I), by Cholesky,
           pi^2 = (tr A / dim A) / (tr G / dim G)
exact:     M = F + lambda I, by the eigenvectors of A and G
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from fop import linalg
from fop.curvature.base import CurvatureState, RefreshJob, WithoutSquares, moving_average
from fop.projection import Metric

# A mean eigenvalue below this counts as this, so that a factor of zeros does not make pi infinite.
SMALLEST_MEAN_EIGENVALUE = 1e-20


def factored_shifts(inputs: Tensor, outputs: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    """What to add to the diagonals of A and G: pi sqrt(lambda), sqrt(lambda) / pi [groups]."""
    root = damping**0.5
    # Roots before the quotient, which could overflow.
    pi = _mean_eigenvalue(inputs).sqrt() / _mean_eigenvalue(outputs).sqrt()
    return pi * root, root / pi


def _mean_eigenvalue(factor: Tensor) -> Tensor:
    return linalg.diagonal(factor).mean(-1).clamp(min=SMALLEST_MEAN_EIGENVALUE)


def _fits(state: CurvatureState, left: str, right: str, shape: tuple[int, int]) -> bool:
    """Whether the state holds both sides for a layer matrix of this shape."""
    if left not in state or right not in state:
        return False
    return (state[left].shape[-1], state[right].shape[-1]) == shape


class _KroneckerFactors(WithoutSquares):
    """The moving averages, common to both ways of damping."""

    def absorb(self, state: CurvatureState, inputs: Tensor, outputs: Tensor, decay: float) -> None:
        moving_average(state, "input_factor", inputs, decay)
        moving_average(state, "output_factor", outputs, decay)


class FactoredKronecker(_KroneckerFactors):
    keys: tuple[str, ...] = (
        "input_factor",
        "output_factor",
        "input_inverse",
        "input_triangle",
        "output_inverse",
        "output_triangle",
        "damping",
    )

    def refresh(self, jobs: Sequence[RefreshJob]) -> list[bool]:
        factors: list[Tensor] = []
        shifts: list[Tensor] = []
        triangular: list[bool] = []
        for job in jobs:
            pair = (job.state["input_factor"], job.state["output_factor"])
            factors += pair
            shifts += factored_shifts(*pair, job.damping)
            widths = [factor.shape[-1] for factor in pair]
            for factor, width, other in zip(pair, widths, reversed(widths), strict=True):
                # Accelerators multiply much faster than they solve.
                on_host = factor.dim() == 3 and factor.device.type == "cpu"
                triangular.append(on_host and linalg.solve_pays(width, job.solves * other))
        found = linalg.damped_inverses(factors, shifts, triangular)
        outcome = []
        for index, job in enumerate(jobs):
            pair_found = found[2 * index : 2 * index + 2]
            outcome.append(all(part is not None for part in pair_found))
            if outcome[-1]:
                for name, part, alone in zip(
                    ("input", "output"), pair_found, triangular[2 * index :], strict=False
                ):
                    kept, dropped = ("triangle", "inverse") if alone else ("inverse", "triangle")
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
    """The inverse of a damped factor, or what solves with it: U with U^T U the damped factor."""

    matrix: Tensor
    triangular: bool

    @staticmethod
    def of(state: CurvatureState, name: str) -> _Solver | None:
        for form in ("inverse", "triangle"):
            if f"{name}_{form}" in state:
                return _Solver(state[f"{name}_{form}"], form == "triangle")
        return None

    @property
    def width(self) -> int:
        return self.matrix.shape[-1]

    def from_left(self, v: Tensor) -> Tensor:
        if self.triangular:
            return linalg.solve_from_right(v.mT, self.matrix).mT
        return linalg.from_left(self.matrix, v)

    def from_right(self, v: Tensor) -> Tensor:
        if self.triangular:
            return linalg.solve_from_right(v, self.matrix)
        return linalg.from_right(v, self.matrix)


@dataclass(frozen=True)
class _FactoredMetric:
    input_factor: Tensor
    output_factor: Tensor
    input_solver: _Solver
    output_solver: _Solver

    def enter(self, v: Tensor) -> Tensor:
        return v

    def leave(self, v: Tensor) -> Tensor:
        return v

    def fisher(self, v: Tensor) -> Tensor:
        return linalg.from_right(linalg.from_left(self.output_factor, v), self.input_factor)

    def solve(self, v: Tensor) -> Tensor:
        return self.output_solver.from_left(self.input_solver.from_right(v))


class EigenKronecker(_KroneckerFactors):
    keys: tuple[str, ...] = (
        "input_factor",
        "output_factor",
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

    def fisher(self, v: Tensor) -> Tensor:
        return self.eigenvalues * v

    def solve(self, v: Tensor) -> Tensor:
        return v / (self.eigenvalues + self.damping)
