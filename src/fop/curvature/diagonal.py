"""F = diag(S), M = F + lambda I: the diagonal of the Fisher, entry by entry.

S = E[V_n^2]  [groups, o, i],  V_n the gradient of one example

The cheapest curvature: no decompositions, and memory of one more copy of the weights. It knows
nothing of how entries depend on each other, which is most of what Kronecker factors know.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from fop.capture import Eigenbasis, Statistics
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
from fop.curvature.eigen import EigenMetric
from fop.entries import AnyEntry, Entry, NumberEntry
from fop.linalg import Diagonal
from fop.projection import Metric


class DiagonalFisher(Curvature):
    requires = Requires(squares=True)
    entries: Mapping[str, AnyEntry] = {
        **averaged({"squares": Entry(lambda size: [size], low=0.0)}),
        "damping": NumberEntry(),
    }

    def basis(self, state: CurvatureState) -> Eigenbasis:
        return Eigenbasis(None, None)  # the axes themselves

    def update(self, state: CurvatureState, batch: Statistics, decay: float) -> None:
        assert batch.squares is not None
        update_averages(state, {"squares": Diagonal(batch.squares)}, decay)

    def refresh(self, jobs: Sequence[RefreshJob]) -> list[bool]:
        for job in jobs:
            job.state["damping"] = job.damping
        return [True] * len(jobs)

    def ready(self, state: CurvatureState, shape: Shape) -> bool:
        squares = state.get("squares")
        return "damping" in state and squares is not None and tuple(squares.shape[1:]) == shape

    def metric(self, state: Mapping[str, Any], shape: Shape) -> Metric:
        return EigenMetric(state["squares"], None, None, state["damping"])

    def mean_eigenvalue(self, state: CurvatureState, shape: Shape) -> Tensor:
        mean: Tensor = state["squares"].mean()
        return mean

    def spectrum(self, state: CurvatureState, shape: Shape) -> Spectrum:
        fisher = state["squares"].double()
        damped = fisher + state["damping"]
        return Spectrum(damped.amax(1), damped.amax(2), lambda v: v.clone(), fisher, damped)
