"""F = G (x) A, so F V = G V A for V [groups, o, i], damped factor by factor.

A  input factor [groups, i, i]   G  output factor [groups, o, o]   in any form of `linalg.Factor`
M = (G + sqrt(lambda)/pi I) (x) (A + pi sqrt(lambda) I), by Cholesky,
    pi^2 = (tr A / i) / (tr G / o)

Example: A = [[4]], G = [[1]] and lambda = 1 give pi = 2 and M = (1 + 1/2) (4 + 2) = 9, where F = 4.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fop.capture import Statistics
from fop.curvature.base import (
    Curvature,
    CurvatureState,
    RefreshJob,
    Requires,
    Shape,
    Spectrum,
    averaged,
    moving_average,
    stacked,
)
from fop.entries import AnyEntry, Entry, NumberEntry
from fop.linalg import (
    Blocked,
    Cholesky,
    Factor,
    Form,
    Solver,
    damped_solvers,
    fits,
    from_state,
    on_host,
    solve_pays,
    state_shapes,
    unpacked,
)
from fop.projection import Metric

# A mean eigenvalue below this counts as this, so that a factor of zeros does not make pi infinite.
SMALLEST_MEAN_EIGENVALUE = 1e-20

# Which of a layer's size (groups, rows, columns) is the width of its output and its input factor.
ROWS, COLUMNS = 1, 2


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


def _factor(side: int) -> Entry:
    return Entry(lambda size: state_shapes(size[0], size[side]))


def _inverse(side: int) -> Entry:
    """Dense, also where the factor is packed, or diagonal."""
    return Entry(lambda size: [(size[0], size[side], size[side]), (size[0], size[side])])


def _cholesky(side: int) -> Entry:
    return Entry(lambda size: [Form(size[0], size[side]).shape])


FACTORS: Mapping[str, AnyEntry] = {
    **averaged("input_factor", _factor(COLUMNS)),
    **averaged("output_factor", _factor(ROWS)),
}


class Kronecker(Curvature):
    """The moving averages of A and G, common to both ways of damping."""

    requires = Requires(factors=True)

    def update(self, state: CurvatureState, batch: Statistics, decay: float) -> None:
        for name, factor in zip(("input_factor", "output_factor"), batch.factors, strict=True):
            moving_average(state, name, factor.values, partial(_mean_eigenvalue, factor), decay)

    def ready(self, state: CurvatureState, shape: Shape) -> bool:
        """Whether both averages are there for a layer of this shape, and a metric."""
        return "damping" in state and all(
            (values := state.get(f"{name}_factor")) is not None and fits(values, width)
            for name, width in zip(("output", "input"), shape, strict=True)
        )

    def mean_eigenvalue(self, state: CurvatureState, shape: Shape) -> Tensor:
        inputs, outputs = (f.mean_eigenvalue() for f in stored_factors([state], shape))
        return (inputs * outputs).mean()

    @abstractmethod
    def spectrum(self, state: CurvatureState, shape: Shape) -> Spectrum: ...


def _mean_eigenvalue(form: Factor, values: Tensor) -> Tensor:
    return form.like(values).mean_eigenvalue()


def stored_factors(states: Sequence[CurvatureState], shape: Shape) -> tuple[Factor, Factor]:
    """A and G of stacked layers of this shape."""
    rows, columns = shape
    inputs, outputs = stacked(states, "input_factor"), stacked(states, "output_factor")
    return from_state(inputs, columns), from_state(outputs, rows)


class FactoredKronecker(Kronecker):
    entries: Mapping[str, AnyEntry] = {
        **FACTORS,
        "input_inverse": _inverse(COLUMNS),
        "input_cholesky": _cholesky(COLUMNS),
        "output_inverse": _inverse(ROWS),
        "output_cholesky": _cholesky(ROWS),
        "damping": NumberEntry(),
    }

    def refresh(self, jobs: Sequence[RefreshJob]) -> list[bool]:
        factors: list[Factor] = []
        shifts: list[Tensor] = []
        cholesky: list[bool] = []
        for job in jobs:
            pair = stored_factors([job.state], job.shape)
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
                    kept, dropped = "inverse", "cholesky"
                    if isinstance(solver, Cholesky):
                        kept, dropped = dropped, kept
                    job.state[f"{name}_{kept}"] = solver.values
                    job.state.pop(f"{name}_{dropped}", None)
                job.state["damping"] = job.damping
        return outcome

    def ready(self, state: CurvatureState, shape: Shape) -> bool:
        return super().ready(state, shape) and all(
            _has_solver(state, name, width)
            for name, width in zip(("output", "input"), shape, strict=True)
        )

    def metric(self, states: Sequence[CurvatureState], shape: Shape) -> Metric:
        rows, columns = shape
        solvers = _solver(states, "input", columns), _solver(states, "output", rows)
        return _FactoredMetric(*stored_factors(states, shape), *solvers)

    def spectrum(self, state: CurvatureState, shape: Shape) -> Spectrum:
        inputs, outputs = (f.to(dtype=torch.float64) for f in stored_factors([state], shape))
        shifts = factored_shifts(inputs, outputs, state["damping"])
        (of_inputs, *right), (of_outputs, *left) = (
            factor.eigenbasis(torch.zeros_like(shift))[0]
            for factor, shift in zip((inputs, outputs), shifts, strict=True)
        )
        fisher = of_outputs.unsqueeze(-1) * of_inputs.unsqueeze(-2)
        of_inputs, of_outputs = (
            values + shift.unsqueeze(-1)
            for values, shift in zip((of_inputs, of_outputs), shifts, strict=True)
        )
        damped = of_outputs.unsqueeze(-1) * of_inputs.unsqueeze(-2)

        def to_basis(v: Tensor) -> Tensor:
            v = left[0].mT @ v if left else v
            return v @ right[0] if right else v

        return Spectrum(of_inputs, of_outputs, to_basis, fisher, damped)


def _by_cholesky(pair: tuple[Factor, Factor], job: RefreshJob) -> Iterator[bool]:
    """Whether to solve with each of A and G by its Cholesky factor, not by its inverse."""
    rows, columns = job.shape
    for factor, width, vectors in zip(pair, (columns, rows), (rows, columns), strict=True):
        # Accelerators make one large product much faster than many small ones.
        possible = isinstance(factor, Blocked) and on_host(factor.values)
        yield possible and solve_pays(width, job.uses * vectors)


def _has_solver(state: CurvatureState, name: str, width: int) -> bool:
    if f"{name}_cholesky" in state:
        return fits(state[f"{name}_cholesky"], width)
    inverse = state.get(f"{name}_inverse")  # never packed
    return inverse is not None and bool(inverse.shape[-1] == width)


def _solver(states: Sequence[CurvatureState], name: str, width: int) -> Solver:
    if f"{name}_cholesky" in states[0]:
        return Cholesky(stacked(states, f"{name}_cholesky"), width)
    return unpacked(stacked(states, f"{name}_inverse"))


@dataclass(frozen=True)
class _FactoredMetric:
    """M^-1 = R^T S R: by Cholesky factors in R, by inverses in S."""

    input_factor: Factor
    output_factor: Factor
    input_solver: Solver
    output_solver: Solver

    def to_basis(self, v: Tensor) -> Tensor:
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

    def from_basis(self, v: Tensor) -> Tensor:
        if isinstance(self.output_solver, Cholesky):
            v = self.output_solver.solve_transposed_left(v)
        if isinstance(self.input_solver, Cholesky):
            v = self.input_solver.solve_transposed_right(v)
        return v

    def fisher_product(self, a: Tensor, a_in_basis: Tensor) -> tuple[Tensor, bool]:
        return self.input_factor.rmatmul(self.output_factor.matmul(a)), False
