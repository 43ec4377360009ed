"""Multiply-adds of a step, counted as it runs.

torch counts products and convolutions; decompositions are added by their textbook formulas. Two
operations (a multiplication and an addition) are one multiply-add, half of what
torch counts.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

aten = torch.ops.aten
Shape = tuple[int, ...]


def _of_square(share: float) -> Callable[..., int]:
    """Operations of a decomposition of n x n matrices: `share` n^3 each."""

    def count(shape: Shape, *_: Any, out_shape: Any = None, **__: Any) -> int:
        return round(share * shape[-1] ** 3 * prod(shape[:-2]))

    return count


def _solve(factor_position: int, right_position: int, share: float) -> Callable[..., int]:
    """Operations of substitutions: `share` n^2 for each right-hand side."""

    def count(*shapes: Any, out_shape: Any = None, **__: Any) -> int:
        n: int = shapes[factor_position][-1]
        right: Shape = shapes[right_position]
        return round(share * n * prod(right))

    return count


def _added_product(_onto: Shape, a: Shape, b: Shape, out_shape: Any = None, **__: Any) -> int:
    return 2 * prod(a) * b[-1]


FORMULAS: dict[Any, Callable[..., int]] = {
    aten.linalg_cholesky_ex: _of_square(1 / 3),
    aten.cholesky: _of_square(1 / 3),
    aten.cholesky_inverse: _of_square(2 / 3),
    aten.linalg_inv_ex: _of_square(2),
    aten._linalg_eigh: _of_square(9),
    aten.linalg_qr: _of_square(8 / 3),
    # Each right-hand side: one triangle is n^2 operations, a Cholesky factor has two.
    aten.cholesky_solve: _solve(1, 0, 2),
    aten.linalg_solve_triangular: _solve(0, 1, 1),
    # Which torch counts only where they are not in place.
    aten.addmm_: _added_product,
    aten.baddbmm_: _added_product,
}


def count_multiply_adds(work: Callable[[], None]) -> int:
    """Run `work` and count what it multiplies and adds."""
    with FlopCounterMode(display=False, custom_mapping=FORMULAS) as counter:
        work()
    total: int = counter.get_total_flops()
    return total // 2
