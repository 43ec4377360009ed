"""Decompositions that do not give up: first as asked, then in float64, then with more damping.

All functions work on batches of symmetric positive semi-definite matrices in any form that
`symmetric.py` stores them in, or [g, d] for diagonal ones. A failure is found with one host read
for a whole list of matrices; only the ones that failed climb the ladder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import reduce

import torch
from torch import Tensor

from fop import symmetric
from fop.symmetric import diagonal, finite_diagonal

# Each rung retries in float64 with this times the asked-for shift.
LADDER = (1.0, 10.0, 1e3, 1e5)
# Devices that compute while the host waits: it may read what they have found at no cost, and many
# small operations cost no more than one large one.
HOST_DEVICES = {"cpu"}
# Solving with a root of width d costs this over d more than multiplying with the inverse (measured
# on CPUs with MKL, widths 576 to 4608).
ROOT_OVERHEAD = 500


def on_host(tensor: Tensor) -> bool:
    return tensor.device.type in HOST_DEVICES


def all_finite(tensors: Iterable[Tensor]) -> Tensor:
    """A 0-dimensional flag on the first tensor's device. There must be one tensor at least."""
    # Extremes can't overflow as sums do, and are found faster than an infinity norm.
    tensors = list(tensors)
    extremes = [
        extreme
        for tensor in tensors
        if tensor.numel() > 0
        for extreme in torch.aminmax(torch.view_as_real(tensor) if tensor.is_complex() else tensor)
    ]
    if not extremes:  # a rank may have no row of any sharded parameter
        return torch.ones((), dtype=torch.bool, device=tensors[0].device)
    first = extremes[0]
    widest = reduce(torch.promote_types, {extreme.dtype for extreme in extremes})
    return torch.stack([extreme.to(first.device, widest) for extreme in extremes]).isfinite().all()


def solve_pays(width: int, vectors: int) -> bool:
    """Whether to keep a root of a matrix that so many vectors will be solved with.

    Solving with it costs little more than a product with the inverse; the inverse costs twice the
    root once.
    """
    return ROOT_OVERHEAD * vectors < width**2


def damped_inverses(
    factors: Sequence[Tensor], shifts: Sequence[Tensor], roots: Sequence[bool] | None = None
) -> list[Tensor | None]:
    """(factor + shift I)^-1 for each factor and shift [g]; None where all rungs failed.

    Where `roots`, a root of factor + shift I instead; for factors stored in halves only.
    """
    wanted = roots or [False] * len(factors)
    attempts: list[Attempt] = [_root if alone else _inverse for alone in wanted]
    found = _with_ladder(attempts, factors, shifts)
    return [None if result is None else result[0] for result in found]


def eigenbases(factors: Sequence[Tensor]) -> list[tuple[Tensor, ...] | None]:
    """Eigenvalues [g, d] >= 0 and, unless diagonal, eigenvectors; None where all rungs failed."""
    # A shift moves eigenvalues only, and is taken off again: it serves to get the iteration past a
    # bad matrix.
    shifts = [diagonal(factor).mean(-1) * 1e-6 for factor in factors]
    return _with_ladder([_eigenbasis] * len(factors), factors, shifts, first_shift=0.0)


# Of a factor and a shift: the decomposition, and flags [g] on the device that tell whether it is
# sound.
Attempt = Callable[[Tensor, Tensor], tuple[tuple[Tensor, ...], Tensor]]


def _with_ladder(
    attempts: Sequence[Attempt],
    factors: Sequence[Tensor],
    shifts: Sequence[Tensor],
    first_shift: float = 1.0,
) -> list[tuple[Tensor, ...] | None]:
    """Try every factor once, then those that failed again in float64 with growing shifts."""
    results: list[tuple[Tensor, ...] | None] = [None] * len(factors)
    flags: dict[int, Tensor] = {}
    for members in _batches(attempts, factors):
        attempt, sizes = attempts[members[0]], [len(factors[index]) for index in members]
        factor, shift = (_joined([all_[index] for index in members]) for all_ in (factors, shifts))
        result, good = _guarded(attempt, factor, shift * first_shift)
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
    sound = torch.stack([flags[index].all().to(device) for index in range(len(factors))]).tolist()
    for index, fine in enumerate(sound):
        if not fine:
            results[index] = _climb(attempts[index], factors[index], shifts[index])
    return results


def _batches(attempts: Sequence[Attempt], factors: Sequence[Tensor]) -> list[list[int]]:
    """Which factors to decompose in one call: on accelerators those of one shape.

    On a CPU, which is busy with one, nothing would be gained.
    """
    alike: dict[object, list[int]] = {}
    for index, (attempt, factor) in enumerate(zip(attempts, factors, strict=True)):
        shape = (attempt, factor.shape[1:], factor.dtype, factor.device)
        alone = on_host(factor)
        alike.setdefault(index if alone else shape, []).append(index)
    return list(alike.values())


def _joined(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def _climb(attempt: Attempt, factor: Tensor, shift: Tensor) -> tuple[Tensor, ...] | None:
    for more in LADDER:
        result, good = _guarded(attempt, factor.double(), shift.double() * more)
        if result is not None and bool(good.all()):
            return tuple(part.to(factor.dtype) for part in result)
    return None


def _guarded(
    attempt: Attempt, factor: Tensor, shift: Tensor
) -> tuple[tuple[Tensor, ...] | None, Tensor]:
    try:
        return attempt(factor, shift)
    except RuntimeError:  # torch.linalg.LinAlgError, and what some back ends raise instead
        return None, torch.zeros(len(factor), dtype=torch.bool, device=factor.device)


def _shifted(factor: Tensor, shift: Tensor) -> Tensor:
    """A new matrix, whole."""
    copied = symmetric.whole(factor)
    damped = copied if copied is not factor else factor.clone(memory_format=torch.contiguous_format)
    damped.diagonal(dim1=-2, dim2=-1).add_(shift.unsqueeze(-1))
    return damped


def _inverse(factor: Tensor, shift: Tensor) -> tuple[tuple[Tensor], Tensor]:
    if factor.dim() == 2:
        return _reciprocal(factor, shift)
    damped = _shifted(factor, shift)
    lower = damped.mT  # column by column, as LAPACK works: in place
    info = torch.empty(lower.shape[:-2], dtype=torch.int32, device=lower.device)
    torch.linalg.cholesky_ex(lower, out=(lower, info))
    good = (info == 0) & finite_diagonal(damped)
    torch.cholesky_inverse(lower, out=lower)  # in place, and symmetric
    return (damped,), good & finite_diagonal(damped)


def _root(factor: Tensor, shift: Tensor) -> tuple[tuple[Tensor], Tensor]:
    damped = factor.clone()
    for row in symmetric.Lower.of(damped).rows:
        row.diagonal_block.diagonal(dim1=-2, dim2=-1).add_(shift.unsqueeze(-1))
    return (damped,), symmetric.make_root(damped)


def _reciprocal(factor: Tensor, shift: Tensor) -> tuple[tuple[Tensor], Tensor]:
    inverse = (factor + shift.unsqueeze(-1)).reciprocal()
    return (inverse,), ((inverse > 0) & inverse.isfinite()).all(-1)


def _eigenbasis(factor: Tensor, shift: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
    if factor.dim() == 2:
        return (factor.clamp(min=0.0),), factor.isfinite().all(-1)
    values, vectors = torch.linalg.eigh(_shifted(factor, shift))
    values = (values - shift.unsqueeze(-1)).clamp_(min=0.0)
    return (values, vectors), values.isfinite().all(-1) & vectors.isfinite().flatten(1).all(-1)
