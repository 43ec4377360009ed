"""Curvature approximations: how a layer's statistics become a metric."""

from __future__ import annotations

from fop.curvature.base import Curvature, CurvatureState
from fop.curvature.ekfac import EigenCorrected
from fop.curvature.identity import Identity
from fop.curvature.kronecker import EigenKronecker, FactoredKronecker


def make_curvature(name: str, damping_mode: str) -> Curvature:
    """The curvature that the optimizer's `curvature` and `damping_mode` arguments name."""
    if name == "identity":
        return Identity()
    if name == "ekfac":
        return EigenCorrected()
    return FactoredKronecker() if damping_mode == "factored" else EigenKronecker()


__all__ = ["Curvature", "CurvatureState", "make_curvature"]
