"""EKFAC: the Kronecker eigenbasis, with the eigenvalues that fit best in it (George et al. 2018).

    F = U diag(S) U^T,  U = U_G (x) U_A,  S = E[(U_G^T V_n U_A)^2],  V_n one example's gradient
    M = F + lambda I

For a given basis this S is the diagonal closest to the true Fisher in the Frobenius norm, where
that of KFAC is the product of the factors' eigenvalues. It is measured in the present basis while
the backward pass runs, so that no activations have to be kept. When the basis is refreshed, S is
carried over: the diagonal, in the new basis, of what it stood for in the old one. Until the first
measurement (the second refresh) the factors' eigenvalues stand in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from fop.capture import Eigenbasis, Statistics
from fop.curvature.base import (
    CurvatureState,
    RefreshJob,
    Requires,
    Shape,
    Spectrum,
    averaged,
    moving_average,
    stacked,
    stacked_damping,
)
from fop.curvature.eigen import EigenKronecker, EigenMetric, stacked_basis, to_basis
from fop.entries import AnyEntry, Entry
from fop.projection import Metric


class EigenCorrected(EigenKronecker):
    requires = Requires(factors=True, squares=True)
    entries: Mapping[str, AnyEntry] = {
        **EigenKronecker.entries,
        **averaged("corrected_eigenvalues", Entry(lambda size: [size], low=0.0)),
    }

    def basis(self, state: CurvatureState) -> Eigenbasis | None:
        if "input_eigenvalues" not in state:
            return None
        return Eigenbasis(state.get("input_basis"), state.get("output_basis"))

    def update(self, state: CurvatureState, batch: Statistics, decay: float) -> None:
        super().update(state, batch, decay)
        if batch.squares is not None:
            moving_average(state, "corrected_eigenvalues", batch.squares, _mean, decay)

    def refresh(self, jobs: Sequence[RefreshJob]) -> list[bool]:
        # The bases that corrected eigenvalues were measured in. None where the matrix had another
        # shape then, before a bias was frozen or unfrozen.
        before = [
            self.basis(job.state)
            if (corrected := job.state.get("corrected_eigenvalues")) is not None
            and self.ready(job.state, tuple(corrected.shape[-2:]))
            else None
            for job in jobs
        ]
        outcome = super().refresh(jobs)
        for job, old, refreshed in zip(jobs, before, outcome, strict=True):
            if refreshed:
                corrected = job.state.pop("corrected_eigenvalues", None)
                new = self.basis(job.state)
                if old is not None and new is not None:
                    job.state["corrected_eigenvalues"] = carried_over(corrected, old, new)
        return outcome

    def ready(self, state: CurvatureState, shape: Shape) -> bool:
        corrected = state.get("corrected_eigenvalues")
        fitting = corrected is None or tuple(corrected.shape[-2:]) == shape
        return fitting and super().ready(state, shape)

    def metric(self, states: Sequence[CurvatureState], shape: Shape) -> Metric:
        if "corrected_eigenvalues" not in states[0]:
            return super().metric(states, shape)
        corrected = stacked(states, "corrected_eigenvalues")
        damping = stacked_damping(states, len(corrected) // len(states), corrected)
        return EigenMetric(corrected, *stacked_basis(states), damping)

    def spectrum(self, state: CurvatureState, shape: Shape) -> Spectrum:
        found = super().spectrum(state, shape)
        if "corrected_eigenvalues" not in state:
            return found
        # They belong to just the basis that they were measured in.
        fisher = state["corrected_eigenvalues"].double()
        bases = [
            None if basis is None else basis.double()
            for basis in (state.get("input_basis"), state.get("output_basis"))
        ]
        factors = found.input_values, found.output_values
        damped = fisher + state["damping"]
        return Spectrum(*factors, lambda v: to_basis(v, *bases), fisher, damped)


def carried_over(eigenvalues: Tensor, old: Eigenbasis, new: Eigenbasis) -> Tensor:
    """Diagonal of U diag(S) U^T in the new basis: (R_G^2) S (R_A^2)^T with R = U_new^T U_old."""
    of_outputs, of_inputs = (
        _overlaps(before, after)
        for before, after in ((old.outputs, new.outputs), (old.inputs, new.inputs))
    )
    carried = eigenvalues if of_outputs is None else of_outputs @ eigenvalues
    return carried if of_inputs is None else carried @ of_inputs.mT


def _overlaps(old: Tensor | None, new: Tensor | None) -> Tensor | None:
    """Squared cosines of new and old axes; None where neither factor has a basis of its own."""
    if old is None or new is None:
        only = new.mT if new is not None else old
        return None if only is None else only.square()
    return (new.mT @ old).square_()


def _mean(eigenvalues: Tensor) -> Tensor:
    return eigenvalues.mean((-2, -1))
