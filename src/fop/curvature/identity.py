"""F = M = I, no curvature at all: KFAC becomes SGD with momentum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from fop.curvature.base import CurvatureState, RefreshJob, WithoutSquares
from fop.entries import AnyEntry
from fop.linalg import Factor
from fop.projection import Gradient, Metric, inner


class Identity(WithoutSquares):
    keys: Mapping[str, AnyEntry] = {}

    def absorb(self, state: CurvatureState, inputs: Factor, outputs: Factor, decay: float) -> None:
        raise AssertionError("the identity needs no statistics")

    def refresh(self, jobs: Sequence[RefreshJob]) -> list[bool]:
        return [True] * len(jobs)

    def ready(self, state: CurvatureState, shape: tuple[int, int]) -> bool:
        return True

    def metric(self, state: CurvatureState, shape: tuple[int, int]) -> Metric:
        return _IdentityMetric()


class _IdentityMetric:
    def enter(self, v: Tensor) -> Tensor:
        return v

    def leave(self, v: Tensor) -> Tensor:
        return v

    def along_fisher(self, a: Gradient, d: Gradient) -> tuple[Tensor, Tensor]:
        return inner(a.given, a.given), inner(d.given, a.given)

    def solve(self, v: Tensor) -> Tensor:
        return v.clone()  # the caller may overwrite what it gets
