"""F = G (x) A, so F V = G V A for V [groups, o, i], damped factor by factor.

A  input factor [groups, i, i]   G  output factor [groups, o, o]   in any form of `linalg.Factor`
M = (G + sqrt(lambda)/pi I) (x) (A + pi sqrt(lambda) I), by Cholesky,
    pi^2 = (tr A / i) / (tr G / o)

Example: A = [[4]], G = [[1]] and lambda = 1 give pi = 2 and M = (1 + 1/2) (4 + 2) = 9, where F = 4.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
    update_averages,
)
from fop.entries import AnyEntry, Entry, NumberEntry
from fop.linalg import (
    Blocked,
    Cholesky,
    Factor,
    Form,
    How,
    decomposed,
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

# A and G: the name of each in a state, and which of a matrix's shape (o, i) is its width.
SIDES = (("input", 1), ("output", 0))
Pair = Sequence[Factor]  # A and G

# What is kept of each decomposition, after the name of the side.
KEPT: Mapping[How, Sequence[str]] = {
    "inverse": ("inverse",),  # dense, also where the factor is packed, or diagonal
    "cholesky": ("cholesky",),
    "eigenbasis": ("eigenvalues", "basis"),  # a diagonal factor has no basis but the axes
}
ALL_KEPT = [name for names in KEPT.values() for name in names]


def of_sides(
    name: str, shapes: Callable[[int, int], list[tuple[int, ...]]], low: float = -math.inf
) -> dict[str, Entry]:
    """An entry for A and one for G, of shapes that depend on groups and width."""

    def entry(axis: int) -> Entry:
        return Entry(lambda size: shapes(size[0], size[1 + axis]), low)

    return {f"{side}_{name}": entry(axis) for side, axis in SIDES}


FACTORS = averaged(of_sides("factor", state_shapes))


def factors(state: Mapping[str, Any], shape: Shape) -> list[Factor]:
    """A and G of a layer, or of stacked ones."""
    return [from_state(state[f"{side}_factor"], shape[axis]) for side, axis in SIDES]


def factored_shifts(pair: Pair, damping: float) -> list[Tensor]:
    """What to add to the diagonals of A and G: pi sqrt(lambda), sqrt(lambda) / pi [groups]."""
    # Roots before the quotient, which could overflow.
    of_inputs, of_outputs = [
        factor.mean_eigenvalue().clamp(min=SMALLEST_MEAN_EIGENVALUE).sqrt() for factor in pair
    ]
    pi, root = of_inputs / of_outputs, damping**0.5
    return [pi * root, root / pi]


def to_basis(v: Tensor, input_basis: Tensor | None, output_basis: Tensor | None) -> Tensor:
    """U_G^T v U_A; None is the identity."""
    v = v if output_basis is None else output_basis.mT @ v
    return v if input_basis is None else v @ input_basis


def outer(inputs: Tensor, outputs: Tensor) -> Tensor:
    """Eigenvalues [groups, o, i] of G (x) A, from those of A and G."""
    return outputs.unsqueeze(-1) * inputs.unsqueeze(-2)


class Kronecker(Curvature):
    """The moving averages of A and G and their decompositions; the way of damping is left open."""

    requires = Requires(factors=True)

    @abstractmethod
    def plan(self, pair: Pair, job: RefreshJob) -> tuple[list[How], list[Tensor]]:
        """How to decompose A and G, and with which shifts."""

    @abstractmethod
    def damped(self, values: list[Tensor], pair: Pair, damping: float) -> tuple[Tensor, ...]:
        """Eigenvalues of A and G as they are damped, and of M, from those of A and G."""

    def update(self, state: CurvatureState, batch: Statistics, decay: float) -> None:
        assert batch.inputs is not None
        assert batch.outputs is not None
        found = {"input_factor": batch.inputs, "output_factor": batch.outputs}
        update_averages(state, found, decay)

    def refresh(self, jobs: Sequence[RefreshJob]) -> list[bool]:
        matrices: list[Factor] = []
        hows: list[How] = []
        shifts: list[Tensor] = []
        for job in jobs:
            pair = factors(job.state, job.shape)
            ways, amounts = self.plan(pair, job)
            matrices += pair
            hows += ways
            shifts += amounts
        found = list(zip(hows, decomposed(matrices, hows, shifts), strict=True))
        outcome = []
        for job, *both in zip(jobs, found[::2], found[1::2], strict=True):
            outcome.append(None not in [result for _, result in both])
            if outcome[-1]:
                job.state["damping"] = job.damping
                for (side, _), (how, result) in zip(SIDES, both, strict=True):
                    _keep(job.state, side, how, result or ())
        return outcome

    def ready(self, state: CurvatureState, shape: Shape) -> bool:
        """Whether both averages are there for a layer of this shape, and a metric."""
        for side, axis in SIDES:
            values = state.get(f"{side}_factor")
            if values is None or not fits(values, shape[axis]):
                return False
        return "damping" in state

    def mean_eigenvalue(self, state: CurvatureState, shape: Shape) -> Tensor:
        inputs, outputs = (factor.mean_eigenvalue() for factor in factors(state, shape))
        return (inputs * outputs).mean()

    def spectrum(self, state: CurvatureState, shape: Shape) -> Spectrum:
        pair = [factor.to(dtype=torch.float64) for factor in factors(state, shape)]
        found = [factor.eigenbasis(factor.values.new_zeros(1))[0] for factor in pair]
        values = [eigenvalues for eigenvalues, *_ in found]
        bases = [basis[0] if basis else None for _, *basis in found]
        inputs, outputs, damped = self.damped(values, pair, state["damping"])
        return Spectrum(inputs, outputs, lambda v: to_basis(v, *bases), outer(*values), damped)


def _keep(state: CurvatureState, side: str, how: How, result: Sequence[Tensor]) -> None:
    for name in ALL_KEPT:  # of the last refresh
        state.pop(f"{side}_{name}", None)
    for name, tensor in zip(KEPT[how], result, strict=False):
        state[f"{side}_{name}"] = tensor


class FactoredKronecker(Kronecker):
    entries: Mapping[str, AnyEntry] = {
        **FACTORS,
        **of_sides("inverse", lambda groups, width: [(groups, width, width), (groups, width)]),
        **of_sides("cholesky", lambda groups, width: [Form(groups, width).shape]),
        "damping": NumberEntry(),
    }

    def plan(self, pair: Pair, job: RefreshJob) -> tuple[list[How], list[Tensor]]:
        hows: list[How] = []
        for factor, (_, axis) in zip(pair, SIDES, strict=True):
            width, vectors = job.shape[axis], job.uses * job.shape[1 - axis]
            # Accelerators make one large product much faster than many small ones.
            possible = isinstance(factor, Blocked) and on_host(factor.values)
            hows.append("cholesky" if possible and solve_pays(width, vectors) else "inverse")
        return hows, factored_shifts(pair, job.damping)

    def damped(self, values: list[Tensor], pair: Pair, damping: float) -> tuple[Tensor, ...]:
        shifts = factored_shifts(pair, damping)
        sides = [one + shift.unsqueeze(-1) for one, shift in zip(values, shifts, strict=True)]
        return *sides, outer(*sides)

    def ready(self, state: CurvatureState, shape: Shape) -> bool:
        if not super().ready(state, shape):
            return False
        for side, axis in SIDES:
            cholesky, inverse = state.get(f"{side}_cholesky"), state.get(f"{side}_inverse")
            if cholesky is not None:
                if not fits(cholesky, shape[axis]):
                    return False
            elif inverse is None or inverse.shape[-1] != shape[axis]:  # never packed
                return False
        return True

    def metric(self, state: Mapping[str, Any], shape: Shape) -> Metric:
        pair: list[Factor] = []
        solvers: list[Solver] = []
        for side, axis in SIDES:
            pair.append(from_state(state[f"{side}_factor"], shape[axis]))
            if f"{side}_cholesky" in state:
                solvers.append(Cholesky(state[f"{side}_cholesky"], shape[axis]))
            else:
                solvers.append(unpacked(state[f"{side}_inverse"]))
        return _FactoredMetric(*pair, *solvers)


# Solves with a damped factor: its inverse, or its Cholesky factor.
Solver = Factor | Cholesky


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
