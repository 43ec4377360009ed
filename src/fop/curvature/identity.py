"""F = M = I, no curvature at all: KFAC becomes SGD with momentum."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fop.curvature.base import Curvature, CurvatureState, Shape
from fop.projection import Metric


class Identity(Curvature):
    def ready(self, state: CurvatureState, shape: Shape) -> bool:
        return True

    def metric(self, state: Mapping[str, Any], shape: Shape) -> Metric:
        return _IdentityMetric()


class _IdentityMetric:
    def to_basis(self, v: Tensor) -> Tensor:
        return v

    def from_basis(self, v: Tensor) -> Tensor:
        return v

    def fisher_product(self, a: Tensor, a_in_basis: Tensor) -> tuple[Tensor, bool]:
        return a, False

    def solve(self, v: Tensor) -> Tensor:
        return v.clone()  # the caller may overwrite what it gets
