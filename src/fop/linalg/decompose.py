"""Decompositions that do not give up: first as asked, then in float64, then with more damping.

A failure is found with one host read for a whole list of factors; only those that failed are tried
again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fop.linalg.blocked import Cholesky
from fop.linalg.device import on_host
from fop.linalg.factor import Blocked, Factor, Found, unpacked

# Each retry is in float64 with this times the asked-for shift.
RETRIES = (1.0, 10.0, 1e3, 1e5)
# Solving with a Cholesky factor of width d costs this over d more than multiplying with the inverse
# (measured on CPUs with MKL, widths 576 to 4608).
SOLVE_OVERHEAD = 500

# Solves with a damped factor: its inverse, or its Cholesky factor.
Solver = Factor | Cholesky


def solve_pays(width: int, vectors: int) -> bool:
    """Whether to keep the Cholesky factor of a matrix that so many vectors will be solved with.

    Solving with it costs little more than a product with the inverse; the inverse costs twice the
    Cholesky factor once.
    """
    return SOLVE_OVERHEAD * vectors < width**2


def damped_solvers(
    factors: Sequence[Factor], shifts: Sequence[Tensor], cholesky: Sequence[bool] | None = None
) -> list[Solver | None]:
    """(S + shift I)^-1 for each factor S and shift [groups]; None where all retries failed.

    Where `cholesky`, the Cholesky factor of S + shift I instead; for blocked factors only.
    """
    wanted = cholesky or [False] * len(factors)
    attempts: list[Attempt] = [_cholesky if alone else _inverse for alone in wanted]
    found: list[Solver | None] = []
    for factor, attempt, result in zip(
        factors, attempts, _with_retries(attempts, factors, shifts), strict=True
    ):
        if result is None:
            found.append(None)
        elif attempt is _cholesky:
            assert isinstance(factor, Blocked)
            found.append(Cholesky(result[0], factor.width, factor.block))
        else:
            found.append(unpacked(result[0]))
    return found


def eigenbases(factors: Sequence[Factor]) -> list[tuple[Tensor, ...] | None]:
    """Eigenvalues [groups, d] >= 0 and, unless diagonal, eigenvectors; None where all failed."""
    # A shift moves eigenvalues only, and is taken off again: it serves to get the iteration past a
    # bad matrix.
    shifts = [factor.mean_eigenvalue() * 1e-6 for factor in factors]
    return _with_retries([_eigenbasis] * len(factors), factors, shifts, first_shift=0.0)


Attempt = Callable[[Factor, Tensor], Found]


def _inverse(factor: Factor, shift: Tensor) -> Found:
    return factor.inverse(shift)


def _eigenbasis(factor: Factor, shift: Tensor) -> Found:
    return factor.eigenbasis(shift)


def _cholesky(factor: Factor, shift: Tensor) -> Found:
    assert isinstance(factor, Blocked)
    return factor.cholesky(shift)


def _with_retries(
    attempts: Sequence[Attempt],
    factors: Sequence[Factor],
    shifts: Sequence[Tensor],
    first_shift: float = 1.0,
) -> list[tuple[Tensor, ...] | None]:
    """Try every factor once, then those that failed again in float64 with growing shifts."""
    results: list[tuple[Tensor, ...] | None] = [None] * len(factors)
    flags: dict[int, Tensor] = {}
    for members in _batches(attempts, factors):
        first, sizes = factors[members[0]], [len(factors[index].values) for index in members]
        factor = first.like(_joined([factors[index].values for index in members]))
        shift = _joined([shifts[index] for index in members])
        result, good = _guarded(attempts[members[0]], factor, shift * first_shift)
        flags |= zip(members, good.split(sizes), strict=True)
        if result is None or len(members) == 1:
            results[members[0]] = result
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
            results[index] = _retried(attempts[index], factors[index], shifts[index])
    return results


def _batches(attempts: Sequence[Attempt], factors: Sequence[Factor]) -> list[list[int]]:
    """Which factors to decompose in one call: on accelerators those of one shape.

    On a CPU, which is busy with one, nothing would be gained.
    """
    alike: dict[object, list[int]] = {}
    for index, (attempt, factor) in enumerate(zip(attempts, factors, strict=True)):
        values = factor.values
        shape = (attempt, type(factor), values.shape[1:], values.dtype, values.device)
        alike.setdefault(index if on_host(values) else shape, []).append(index)
    return list(alike.values())


def _joined(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def _retried(attempt: Attempt, factor: Factor, shift: Tensor) -> tuple[Tensor, ...] | None:
    for more in RETRIES:
        precise = factor.to(dtype=torch.float64)
        result, good = _guarded(attempt, precise, shift.double() * more)
        if result is not None and bool(good.all()):
            return tuple(part.to(factor.values.dtype) for part in result)
    return None


def _guarded(
    attempt: Attempt, factor: Factor, shift: Tensor
) -> tuple[tuple[Tensor, ...] | None, Tensor]:
    try:
        return attempt(factor, shift)
    except RuntimeError:  # torch.linalg.LinAlgError, and what some back ends raise instead
        values = factor.values
        return None, torch.zeros(len(values), dtype=torch.bool, device=values.device)
