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
from dataclasses import replace
from typing import Any

from torch import Tensor

from fop.capture import Eigenbasis, Statistics
from fop.curvature.base import (
    CurvatureState,
    RefreshJob,
    Requires,
    Shape,
    Spectrum,
    averaged,
    update_averages,
)
from fop.curvature.eigen import EigenKronecker
from fop.curvature.kronecker import to_basis
from fop.entries import AnyEntry, Entry
from fop.linalg import Diagonal


class EigenCorrected(EigenKronecker):
    requires = Requires(factors=True, squares=True)
    entries: Mapping[str, AnyEntry] = {
        **EigenKronecker.entries,
        **averaged({"corrected_eigenvalues": Entry(lambda size: [size], low=0.0)}),
    }

    def basis(self, state: CurvatureState) -> Eigenbasis | None:
        if "input_eigenvalues" not in state:
            return None
        return Eigenbasis(state.get("input_basis"), state.get("output_basis"))

    def update(self, state: CurvatureState, batch: Statistics, decay: float) -> None:
        super().update(state, batch, decay)
        if batch.squares is not None:
            update_averages(state, {"corrected_eigenvalues": Diagonal(batch.squares)}, decay)

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

    def eigenvalues(self, state: Mapping[str, Any]) -> Tensor:
        corrected: Tensor | None = state.get("corrected_eigenvalues")
        return super().eigenvalues(state) if corrected is None else corrected

    def spectrum(self, state: CurvatureState, shape: Shape) -> Spectrum:
        found = super().spectrum(state, shape)
        if "corrected_eigenvalues" not in state:
            return found
        # They belong to just the basis that they were measured in.
        fisher = state["corrected_eigenvalues"].double()
        stored = state.get("input_basis"), state.get("output_basis")
        bases = [None if basis is None else basis.double() for basis in stored]
        return replace(
            found,
            to_basis=lambda v: to_basis(v, *bases),
            fisher=fisher,
            damped=fisher + state["damping"],
        )


def carried_over(eigenvalues: Tensor, old: Eigenbasis, new: Eigenbasis) -> Tensor:
    """Diagonal of U diag(S) U^T in the new basis: (R_G^2) S (R_A^2)^T with R = U_new^T U_old."""
    of_outputs = _overlaps(old.outputs, new.outputs)
    of_inputs = _overlaps(old.inputs, new.inputs)
    carried = eigenvalues if of_outputs is None else of_outputs @ eigenvalues
    return carried if of_inputs is None else carried @ of_inputs.mT


def _overlaps(old: Tensor | None, new: Tensor | None) -> Tensor | None:
    """Squared cosines of new and old axes; None where neither factor has a basis of its own."""
    if old is None or new is None:
        only = new.mT if new is not None else old
        return None if only is None else only.square()
    return (new.mT @ old).square_()
