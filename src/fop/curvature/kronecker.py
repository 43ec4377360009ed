"""F = G (x) A, so F V = G V A for V [groups, o, i]; damped factor by factor, or exactly.

A  input factor [groups, i, i]   G  output factor [groups, o, o]   diagonal: [groups, d]
factored:  M = (G + sqrt(lambda)/pi I) (x) (A + pi sqrt(lambda) I), by Cholesky,
           pi^2 = (tr A / dim A) / (tr G / dim G)
exact:     M = F + lambda I, by the eigenvectors of A and G
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from fop import linalg, symmetric
from fop.curvature.base import (
    CurvatureState,
    RefreshJob,
    WithoutSquares,
    averaged,
    moving_average,
)
from fop.entries import AnyEntry, Entry, NumberEntry
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


# Which of a layer's size (groups, rows, columns) is the width of its output and its input factor.
ROWS, COLUMNS = 1, 2


def _symmetric(side: int) -> Entry:
    """Symmetric matrices, or their diagonals where factors are wide."""
    return Entry(lambda size: [symmetric.stored_shape(size[0], size[side]), (size[0], size[side])])


def _diagonal(side: int) -> Entry:
    return Entry(lambda size: [(size[0], size[side])], low=0.0)


def _square(side: int) -> Entry:
    return Entry(lambda size: [(size[0], size[side], size[side])])


def _complete(state: CurvatureState, shape: tuple[int, int]) -> bool:
    """Whether both moving averages are there for a layer matrix of this shape, and a metric."""
    factors = [state.get(f"{name}_factor") for name in ("output", "input")]
    return "damping" in state and all(
        factor is not None and symmetric.matrix_width(factor.shape) == width
        for factor, width in zip(factors, shape, strict=True)
    )


FACTORS: Mapping[str, AnyEntry] = {
    **averaged("input_factor", _symmetric(COLUMNS)),
    **averaged("output_factor", _symmetric(ROWS)),
}


class _KroneckerFactors(WithoutSquares):
    """The moving averages, common to both ways of damping."""

    def absorb(self, state: CurvatureState, inputs: Tensor, outputs: Tensor, decay: float) -> None:
        moving_average(state, "input_factor", inputs, _mean_eigenvalue, decay)
        moving_average(state, "output_factor", outputs, _mean_eigenvalue, decay)


class FactoredKronecker(_KroneckerFactors):
    keys: Mapping[str, AnyEntry] = {
        **FACTORS,
        "input_inverse": _symmetric(COLUMNS),
        "input_root": _symmetric(COLUMNS),
        "output_inverse": _symmetric(ROWS),
        "output_root": _symmetric(ROWS),
        "damping": NumberEntry(),
    }

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
        return _complete(state, shape) and all(
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

    def along_fisher(self, a: Gradient, d: Gradient) -> tuple[Tensor, Tensor]:
        product = symmetric.from_left(self.output_factor, a.given)
        product = symmetric.from_right(product, self.input_factor)
        return inner(a.given, product), inner(d.given, product)


class EigenKronecker(_KroneckerFactors):
    keys: Mapping[str, AnyEntry] = {
        **FACTORS,
        "input_eigenvalues": _diagonal(COLUMNS),
        "input_basis": _square(COLUMNS),
        "output_eigenvalues": _diagonal(ROWS),
        "output_basis": _square(ROWS),
        "damping": NumberEntry(),
    }

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
        return _complete(state, shape) and all(
            _has_basis(state, name, width)
            for name, width in zip(("output", "input"), shape, strict=True)
        )

    def metric(self, state: CurvatureState) -> Metric:
        eigenvalues = state["output_eigenvalues"].unsqueeze(-1) * state[
            "input_eigenvalues"
        ].unsqueeze(-2)
        return EigenMetric(
            eigenvalues, state.get("input_basis"), state.get("output_basis"), state["damping"]
        )


def _has_basis(state: CurvatureState, name: str, width: int) -> bool:
    eigenvalues, basis = state.get(f"{name}_eigenvalues"), state.get(f"{name}_basis")
    if eigenvalues is None or eigenvalues.shape[-1] != width:
        return False
    if basis is None:  # as it must be for a diagonal factor
        return bool(state[f"{name}_factor"].dim() == 2)
    return bool(basis.shape[-1] == width)


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

    def along_fisher(self, a: Gradient, d: Gradient) -> tuple[Tensor, Tensor]:
        product = self.eigenvalues * a.entered
        return inner(a.entered, product), inner(d.entered, product)

    def solve(self, v: Tensor) -> Tensor:
        return v / (self.eigenvalues + self.damping)
