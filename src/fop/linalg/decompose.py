"""Decompositions that do not give up: first as asked, then in float64, then with more damping.

A failure is found with one host read for a whole list of factors; only those that failed are tried
again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from fop.linalg.blocked import STORAGE
from fop.linalg.factor import Factor, Found

# Which method of a factor makes the decomposition.
How = Literal["inverse", "cholesky", "eigenbasis"]
Result = tuple[Tensor, ...] | None

# Each retry is in float64 with this times the asked-for shift.
RETRIES = (1.0, 10.0, 1e3, 1e5)


def solve_pays(width: int, vectors: int) -> bool:
    """Whether to keep the Cholesky factor of a matrix that so many vectors will be solved with.

    Solving with it costs little more than a product with the inverse; the inverse costs twice the
    Cholesky factor once.
    """
    return STORAGE.solve_overhead * vectors < width**2


def decomposed(
    factors: Sequence[Factor], hows: Sequence[How], shifts: Sequence[Tensor]
) -> list[Result]:
    """What `how` makes of S + shift I, for each factor S; None where all retries failed.

    inverse      (S + shift I)^-1, dense unless S is diagonal
    cholesky     the values of its `Cholesky` factor, of blocked S
    eigenbasis   eigenvalues [groups, d] >= 0 of S itself and, unless diagonal, eigenvectors;
                 the shift [groups] only serves to get retries past a bad matrix
    """
    results: list[Result] = [None] * len(factors)
    flags: dict[int, Tensor] = {}
    for members in _batches(factors, hows):
        index = members[0]
        factor, how, shift = factors[index], hows[index], shifts[index]
        sizes = [len(shifts[index]) for index in members]
        if len(members) > 1:
            factor = factor.like(torch.cat([factors[index].values for index in members]))
            shift = torch.cat([shifts[index] for index in members])
        result, good = _guarded(factor, how, shift * (0.0 if how == "eigenbasis" else 1.0))
        flags |= zip(members, good.split(sizes), strict=True)
        if result is None or len(members) == 1:
            results[index] = result
            continue
        for index, *parts in zip(members, *(part.split(sizes) for part in result), strict=True):
            results[index] = tuple(part.clone() for part in parts)  # to be kept and saved alone
    if not flags:
        return results
    # The one host read; devices may differ in a model spread over several.
    device = flags[0].device
    finite = torch.stack([flags[index].all().to(device) for index in range(len(factors))]).tolist()
    for index, fine in enumerate(finite):
        if not fine:
            results[index] = _retried(factors[index], hows[index], shifts[index])
    return results


def _batches(factors: Sequence[Factor], hows: Sequence[How]) -> list[list[int]]:
    """Which factors to decompose in one call: those of one shape.

    But not the two of a single layer, as which they come on a CPU: it would gain nothing by it, and
    need more memory.
    """
    if len(factors) == 2:
        return [[0], [1]]
    alike: dict[object, list[int]] = {}
    for index, (factor, how) in enumerate(zip(factors, hows, strict=True)):
        values = factor.values
        shape = (how, type(factor), values.shape[1:], values.dtype, values.device)
        alike.setdefault(shape, []).append(index)
    return list(alike.values())


def _retried(factor: Factor, how: How, shift: Tensor) -> Result:
    precise = factor.to(dtype=torch.float64)
    for more in RETRIES:
        result, good = _guarded(precise, how, shift.double() * more)
        if result is not None and bool(good.all()):
            return tuple(part.to(factor.values.dtype) for part in result)
    return None


def _guarded(factor: Factor, how: How, shift: Tensor) -> tuple[Result, Tensor]:
    try:
        found: Found = getattr(factor, how)(shift)
    except RuntimeError:  # torch.linalg.LinAlgError, and what some back ends raise instead
        return None, torch.zeros(len(shift), dtype=torch.bool, device=shift.device)
    return found
