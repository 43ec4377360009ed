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


def _both_sides(left: Tensor, v: Tensor, right: Tensor) -> Tensor:
    return linalg.from_right(linalg.from_left(left, v), right)


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
        "output_inverse",
        "damping",
    )

    def refresh(self, jobs: Sequence[RefreshJob]) -> list[bool]:
        factors: list[Tensor] = []
        shifts: list[Tensor] = []
        for job in jobs:
            pair = (job.state["input_factor"], job.state["output_factor"])
            factors += pair
            shifts += factored_shifts(*pair, job.damping)
        inverses = linalg.damped_inverses(factors, shifts)
        outcome = []
        for index, job in enumerate(jobs):
            of_input, of_output = inverses[2 * index], inverses[2 * index + 1]
            outcome.append(of_input is not None and of_output is not None)
            if outcome[-1]:
                job.state.update(
                    input_inverse=of_input, output_inverse=of_output, damping=job.damping
                )
        return outcome

    def ready(self, state: CurvatureState, shape: tuple[int, int]) -> bool:
        return _fits(state, "output_inverse", "input_inverse", shape)

    def metric(self, state: CurvatureState) -> Metric:
        return _FactoredMetric(
            state["input_factor"],
            state["output_factor"],
            state["input_inverse"],
            state["output_inverse"],
        )


@dataclass(frozen=True)
class _FactoredMetric:
    input_factor: Tensor
    output_factor: Tensor
    input_inverse: Tensor
    output_inverse: Tensor

    def enter(self, v: Tensor) -> Tensor:
        return v

    def leave(self, v: Tensor) -> Tensor:
        return v

    def fisher(self, v: Tensor) -> Tensor:
        return _both_sides(self.output_factor, v, self.input_factor)

    def solve(self, v: Tensor) -> Tensor:
        return _both_sides(self.output_inverse, v, self.input_inverse)


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
