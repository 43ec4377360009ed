"""Decompositions that do not give up: first as asked, then in float64, then with more damping.

All functions work on batches of symmetric positive semi-definite matrices: [g, d, d], or [g, d] for
diagonal ones. A failure is found with one host read for a whole list of matrices; only the ones
that failed climb the ladder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import reduce

import torch
from torch import Tensor

# Each rung retries in float64 with this times the asked-for shift.
LADDER = (1.0, 10.0, 1e3, 1e5)
# Where decompositions of equal shape are made one by one.
UNBATCHED_DEVICES = {"cpu"}
# Symmetric products are computed in blocks of rows: smaller ones are slower, more save little.
SMALLEST_BLOCK = 128
MOST_BLOCKS = 8
# Numbers in a cache line, of the shortest type that factors have.
ALIGNMENT = 16
# Triangular solves lose what the diagonal blocks cost, in effect blocks of this size (measured on
# CPUs with MKL, widths 576 to 4608).
DIAGONAL_BLOCK = 500


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


def diagonal(factor: Tensor) -> Tensor:
    """[g, d] of a factor in either form."""
    return factor if factor.dim() == 2 else factor.diagonal(dim1=-2, dim2=-1)


def from_left(factor: Tensor, v: Tensor) -> Tensor:
    """factor v, for v [g, d, k]."""
    return factor.unsqueeze(-1) * v if factor.dim() == 2 else product(factor, v)


def from_right(v: Tensor, factor: Tensor) -> Tensor:
    """v factor, for v [g, k, d]."""
    return v * factor.unsqueeze(-2) if factor.dim() == 2 else product(v, factor)


def product(a: Tensor, b: Tensor) -> Tensor:
    """a b for batches of matrices; the rows of the result may lie further apart than their length.

    A layer with a bias is 1025 wide, say, and products written to rows of such a length are slower
    by a third (MKL): what counts is that every row starts on a cache line.
    """
    width = b.shape[-1]
    if width < SMALLEST_BLOCK or width % ALIGNMENT == 0:
        return a @ b
    out = _aligned(a, len(a), a.shape[1], width)
    if len(out) == 1:
        torch.mm(a[0], b[0], out=out[0])
    else:
        torch.bmm(a, b, out=out)
    return out


def _aligned(like: Tensor, groups: int, height: int, width: int) -> Tensor:
    """An empty [groups, height, width] with aligned rows."""
    return like.new_empty(groups, height, _aligned_length(width))[..., :width]


def _aligned_length(width: int) -> int:
    return -(-width // ALIGNMENT) * ALIGNMENT


def columns(rows: Tensor) -> Tensor:
    """Rows [n, g, s, d] as columns [g, d, n s], copied only if they do not lie like that."""
    _, groups, positions, width = rows.shape
    if positions > 1 and rows.stride(3) != 1 and rows.stride(2) == 1:  # channels before positions
        return rows.permute(1, 3, 0, 2).reshape(groups, width, -1)
    return rows.transpose(0, 1).reshape(groups, -1, width).mT


def gram(chunks: Iterable[Tensor], out: Tensor) -> None:
    """Write the sum of c c^T over all chunks c [g, d, k] to `out` [g, d, d].

    It is symmetric: only blocks up to the diagonal are multiplied, the others mirrored.
    """
    width = out.shape[-1]
    size = max(SMALLEST_BLOCK, -(-width // MOST_BLOCKS))
    blocks = [(start, min(start + size, width)) for start in range(0, width, size)]
    lies_well = width < SMALLEST_BLOCK or out.stride(1) % ALIGNMENT == 0
    total = out if lies_well else _aligned(out, len(out), width, width)
    for number, chunk in enumerate(chunks):
        for start, end in blocks:
            onto, rows, columns = total[:, start:end, :end], chunk[:, start:end], chunk[:, :end].mT
            keep = 0 if number == 0 else 1
            if len(out) == 1:
                onto[0].addmm_(rows[0], columns[0], beta=keep)
            else:
                onto.baddbmm_(rows, columns, beta=keep)
    for start, end in blocks:
        block = total[:, start:end, :end]
        if total is not out:
            out[:, start:end, :end] = block
        out[:, :start, start:end] = block[..., :start].mT


def solve_pays(width: int, vectors: int) -> bool:
    """Whether to keep a Cholesky factor of a matrix that so many vectors will be solved with.

    A pair of triangular solves costs the multiplications of a product with the inverse, and more
    only for the blocks on the diagonal; the inverse costs twice the factor once.
    """
    return DIAGONAL_BLOCK * vectors < width**2


def damped_inverses(
    factors: Sequence[Tensor], shifts: Sequence[Tensor], triangular: Sequence[bool] | None = None
) -> list[Tensor | None]:
    """(factor + shift I)^-1 for each factor and shift [g]; None where all rungs failed.

    Where `triangular`, U with U^T U = factor + shift I instead, unless the factor is diagonal.
    """
    wanted = triangular or [False] * len(factors)
    attempts: list[Attempt] = [_triangle if alone else _inverse for alone in wanted]
    found = _with_ladder(attempts, factors, shifts)
    return [None if result is None else result[0] for result in found]


def solve_from_right(v: Tensor, triangle: Tensor) -> Tensor:
    """v (U^T U)^-1, for v [g, k, d]."""
    groups, height, width = v.shape
    # LAPACK works on columns. With aligned ones, and in place, a solve is a third faster.
    spare = height if height < SMALLEST_BLOCK else _aligned_length(height)
    columns = v.new_empty(groups, width, spare)
    columns[..., :height] = v.mT
    columns[..., height:] = 0
    rows = columns.mT
    torch.linalg.solve_triangular(triangle, rows, upper=True, left=False, out=rows)
    torch.linalg.solve_triangular(triangle.mT, rows, upper=False, left=False, out=rows)
    return rows[:, :height]


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
        alone = factor.device.type in UNBATCHED_DEVICES
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
    damped = factor.clone(memory_format=torch.contiguous_format)
    damped.diagonal(dim1=-2, dim2=-1).add_(shift.unsqueeze(-1))
    return damped


def _inverse(factor: Tensor, shift: Tensor) -> tuple[tuple[Tensor], Tensor]:
    if factor.dim() == 2:
        return _reciprocal(factor, shift)
    (triangle,), good = _triangle(factor, shift)
    lower = triangle.mT
    torch.cholesky_inverse(lower, out=lower)  # in place, and symmetric
    return (triangle,), good & _finite_diagonal(triangle)


def _triangle(factor: Tensor, shift: Tensor) -> tuple[tuple[Tensor], Tensor]:
    if factor.dim() == 2:
        return _reciprocal(factor, shift)
    damped = _shifted(factor, shift)
    lower = damped.mT  # column by column, as LAPACK works: in place
    info = torch.empty(lower.shape[:-2], dtype=torch.int32, device=lower.device)
    torch.linalg.cholesky_ex(lower, out=(lower, info))
    return (damped,), (info == 0) & _finite_diagonal(damped)


def _reciprocal(factor: Tensor, shift: Tensor) -> tuple[tuple[Tensor], Tensor]:
    inverse = (factor + shift.unsqueeze(-1)).reciprocal()
    return (inverse,), ((inverse > 0) & inverse.isfinite()).all(-1)


def _finite_diagonal(matrix: Tensor) -> Tensor:
    """Enough to look at: the diagonal of U, and of U^-1 U^-T, bounds all other entries."""
    return matrix.diagonal(dim1=-2, dim2=-1).isfinite().all(-1)


def _eigenbasis(factor: Tensor, shift: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
    if factor.dim() == 2:
        return (factor.clamp(min=0.0),), factor.isfinite().all(-1)
    values, vectors = torch.linalg.eigh(_shifted(factor, shift))
    values = (values - shift.unsqueeze(-1)).clamp_(min=0.0)
    return (values, vectors), values.isfinite().all(-1) & vectors.isfinite().flatten(1).all(-1)
