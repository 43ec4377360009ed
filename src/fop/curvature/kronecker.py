"""F = G (x) A, so F V = G V A for V [groups, o, i]; damped factor by factor, or exactly.

A  input factor [groups, i, i]   G  output factor [groups, o, o]   in any form of `linalg.Factor`
factored:  M = (G + sqrt(lambda)/pi I) (x) (A + pi sqrt(lambda) I), by Cholesky,
           pi^2 = (tr A / i) / (tr G / o)
exact:     M = F + lambda I, by the eigenvectors of A and G
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from fop.curvature.base import (
    CurvatureState,
    RefreshJob,
    WithoutSquares,
    averaged,
    moving_average,
)
from fop.entries import AnyEntry, Entry, NumberEntry
from fop.linalg import (
    Blocked,
    Cholesky,
    Diagonal,
    Factor,
    Form,
    Solver,
    damped_solvers,
    eigenbases,
    fits,
    from_state,
    on_host,
    solve_pays,
    state_shapes,
    unpacked,
)
from fop.projection import Gradient, Metric, inner

# A mean eigenvalue below this counts as this, so that a factor of zeros does not make pi infinite.
SMALLEST_MEAN_EIGENVALUE = 1e-20


def factored_shifts(inputs: Factor, outputs: Factor, damping: float) -> tuple[Tensor, Tensor]:
    """What to add to the diagonals of A and G: pi sqrt(lambda), sqrt(lambda) / pi [groups]."""
    root = damping**0.5
    # Roots before the quotient, which could overflow.
    of_inputs, of_outputs = (
        factor.mean_eigenvalue().clamp(min=SMALLEST_MEAN_EIGENVALUE).sqrt()
        for factor in (inputs, outputs)
    )
    pi = of_inputs / of_outputs
    return pi * root, root / pi


# Which of a layer's size (groups, rows, columns) is the width of its output and its input factor.
ROWS, COLUMNS = 1, 2


def _factor(side: int) -> Entry:
    return Entry(lambda size: state_shapes(size[0], size[side]))


def _inverse(side: int) -> Entry:
    """Dense, also where the factor is packed, or diagonal."""
    return Entry(lambda size: [(size[0], size[side], size[side]), (size[0], size[side])])


def _cholesky(side: int) -> Entry:
    return Entry(lambda size: [Form(size[0], size[side]).shape])


def _diagonal(side: int) -> Entry:
    return Entry(lambda size: [(size[0], size[side])], low=0.0)


def _square(side: int) -> Entry:
    return Entry(lambda size: [(size[0], size[side], size[side])])


FACTORS: Mapping[str, AnyEntry] = {
    **averaged("input_factor", _factor(COLUMNS)),
    **averaged("output_factor", _factor(ROWS)),
}


class _KroneckerFactors(WithoutSquares):
    """The moving averages, common to both ways of damping."""

    def absorb(self, state: CurvatureState, inputs: Factor, outputs: Factor, decay: float) -> None:
        for name, batch in (("input_factor", inputs), ("output_factor", outputs)):
            moving_average(state, name, batch.values, partial(_mean_eigenvalue, batch), decay)

    def ready(self, state: CurvatureState, shape: tuple[int, int]) -> bool:
        """Whether both averages are there for a layer matrix of this shape, and a metric."""
        return "damping" in state and all(
            (values := state.get(f"{name}_factor")) is not None and fits(values, width)
            for name, width in zip(("output", "input"), shape, strict=True)
        )


def _mean_eigenvalue(form: Factor, values: Tensor) -> Tensor:
    return form.like(values).mean_eigenvalue()


def stored_factors(state: Mapping[str, Any], shape: tuple[int, int]) -> tuple[Factor, Factor]:
    """A and G, of a layer matrix of this shape."""
    rows, columns = shape
    inputs, outputs = state["input_factor"], state["output_factor"]
    return from_state(inputs, columns), from_state(outputs, rows)


class FactoredKronecker(_KroneckerFactors):
    # A Cholesky factor is kept as a "root".
    keys: Mapping[str, AnyEntry] = {
        **FACTORS,
        "input_inverse": _inverse(COLUMNS),
        "input_root": _cholesky(COLUMNS),
        "output_inverse": _inverse(ROWS),
        "output_root": _cholesky(ROWS),
        "damping": NumberEntry(),
    }

    def refresh(self, jobs: Sequence[RefreshJob]) -> list[bool]:
        factors: list[Factor] = []
        shifts: list[Tensor] = []
        cholesky: list[bool] = []
        for job in jobs:
            pair = stored_factors(job.state, job.shape)
            factors += pair
            shifts += factored_shifts(*pair, job.damping)
            cholesky += _by_cholesky(pair, job)
        solvers = iter(damped_solvers(factors, shifts, cholesky))
        outcome = []
        for job, pair_found in zip(jobs, zip(solvers, solvers, strict=True), strict=True):
            outcome.append(None not in pair_found)
            if outcome[-1]:
                for name, solver in zip(("input", "output"), pair_found, strict=True):
                    assert solver is not None
                    kept, dropped = "inverse", "root"
                    if isinstance(solver, Cholesky):
                        kept, dropped = dropped, kept
                    job.state[f"{name}_{kept}"] = solver.values
                    job.state.pop(f"{name}_{dropped}", None)
                job.state["damping"] = job.damping
        return outcome

    def ready(self, state: CurvatureState, shape: tuple[int, int]) -> bool:
        return super().ready(state, shape) and all(
            _has_solver(state, name, width)
            for name, width in zip(("output", "input"), shape, strict=True)
        )

    def metric(self, state: CurvatureState, shape: tuple[int, int]) -> Metric:
        rows, columns = shape
        solvers = _solver(state, "input", columns), _solver(state, "output", rows)
        return _FactoredMetric(*stored_factors(state, shape), *solvers)


def _by_cholesky(pair: tuple[Factor, Factor], job: RefreshJob) -> Iterator[bool]:
    """Whether to solve with each of A and G by its Cholesky factor, not by its inverse."""
    rows, columns = job.shape
    for factor, width, vectors in zip(pair, (columns, rows), (rows, columns), strict=True):
        # Accelerators make one large product much faster than many small ones.
        possible = isinstance(factor, Blocked) and on_host(factor.values)
        yield possible and solve_pays(width, job.uses * vectors)


def _has_solver(state: CurvatureState, name: str, width: int) -> bool:
    if f"{name}_root" in state:
        return fits(state[f"{name}_root"], width)
    inverse = state.get(f"{name}_inverse")  # never packed
    return inverse is not None and bool(inverse.shape[-1] == width)


def _solver(state: CurvatureState, name: str, width: int) -> Solver:
    if f"{name}_root" in state:
        return Cholesky(state[f"{name}_root"], width)
    return unpacked(state[f"{name}_inverse"])


@dataclass(frozen=True)
class _FactoredMetric:
    """M^-1 = R^T S R: by Cholesky factors in R, by inverses in S."""

    input_factor: Factor
    output_factor: Factor
    input_solver: Solver
    output_solver: Solver

    def enter(self, v: Tensor) -> Tensor:
        if isinstance(self.input_solver, Cholesky):
            v = self.input_solver.solve_right(v)
        if isinstance(self.output_solver, Cholesky):
            v = self.output_solver.solve_left(v)
        return v

    def solve(self, v: Tensor) -> Tensor:
        if isinstance(self.input_solver, Factor):
            v = self.input_solver.rmatmul(v)
        if isinstance(self.output_solver, Factor):
            v = self.output_solver.matmul(v)
        return v

    def leave(self, v: Tensor) -> Tensor:
        if isinstance(self.output_solver, Cholesky):
            v = self.output_solver.solve_transposed_left(v)
        if isinstance(self.input_solver, Cholesky):
            v = self.input_solver.solve_transposed_right(v)
        return v

    def along_fisher(self, a: Gradient, d: Gradient) -> tuple[Tensor, Tensor]:
        product = self.input_factor.rmatmul(self.output_factor.matmul(a.given))
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
        factors = [factor for job in jobs for factor in stored_factors(job.state, job.shape)]
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

    def ready(self, state: CurvatureState, shape: tuple[int, int]) -> bool:
        return super().ready(state, shape) and all(
            _has_basis(state, name, factor, width)
            for name, factor, width in zip(
                ("input", "output"), stored_factors(state, shape), reversed(shape), strict=True
            )
        )

    def metric(self, state: CurvatureState, shape: tuple[int, int]) -> Metric:
        eigenvalues = state["output_eigenvalues"].unsqueeze(-1) * state[
            "input_eigenvalues"
        ].unsqueeze(-2)
        return EigenMetric(
            eigenvalues, state.get("input_basis"), state.get("output_basis"), state["damping"]
        )


def _has_basis(state: CurvatureState, name: str, factor: Factor, width: int) -> bool:
    eigenvalues, basis = state.get(f"{name}_eigenvalues"), state.get(f"{name}_basis")
    if eigenvalues is None or eigenvalues.shape[-1] != width:
        return False
    if basis is None:  # as it must be for a diagonal factor
        return isinstance(factor, Diagonal)
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
