"""Curvature approximations: how a layer's statistics become a metric."""

from __future__ import annotations

from fop.curvature.base import Curvature, CurvatureState, Requires
from fop.curvature.diagonal import DiagonalFisher
from fop.curvature.eigen import EigenKronecker
from fop.curvature.ekfac import EigenCorrected
from fop.curvature.identity import Identity
from fop.curvature.kronecker import FactoredKronecker

KINDS: dict[str, type[EigenCorrected | DiagonalFisher | Identity]] = {
    "ekfac": EigenCorrected,
    "diagonal": DiagonalFisher,
    "identity": Identity,
}


def make_curvature(curvature: str | Curvature, damping_mode: str) -> Curvature:
    """What the optimizer's `curvature` and `damping_mode` arguments stand for."""
    if isinstance(curvature, Curvature):
        return curvature
    if curvature == "kronecker":
        return FactoredKronecker() if damping_mode == "factored" else EigenKronecker()
    return KINDS[curvature]()


__all__ = ["Curvature", "CurvatureState", "Requires", "make_curvature"]
