"""Matrices stored in halves act as whole ones, and solving with their roots is solving."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fop import symmetric

DOUBLE = torch.float64
# Widths below, at and beyond borders of blocks, and of the aligned rows of wide ones.
WIDTHS = pytest.mark.parametrize("width", [1, 2, 7, 8, 9, 24, 131])
GROUPS = pytest.mark.parametrize("groups", [1, 3])
Operation = Callable[[Tensor, Tensor], Tensor]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symmetric, "BLOCK", 8)
    monkeypatch.setattr(symmetric, "WHOLE_BELOW", 2)


def positive(groups: int, width: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(groups, width, width + 3, dtype=DOUBLE, generator=generator)
    product = x @ x.mT / width
    return (product + product.mT) / 2 + 0.1 * torch.eye(width, dtype=DOUBLE)


def vectors(groups: int, height: int, width: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(groups, height, width, dtype=DOUBLE, generator=generator)


def root_of(matrix: Tensor) -> Tensor:
    storage = symmetric.halved(matrix)
    assert symmetric.make_root(storage).all()
    return storage


@GROUPS
@WIDTHS
def test_nothing_is_lost(groups: int, width: int) -> None:
    matrix = positive(groups, width)
    stored = symmetric.halved(matrix)
    assert torch.equal(symmetric.whole(stored), matrix)
    assert torch.equal(symmetric.diagonal(stored), matrix.diagonal(dim1=-2, dim2=-1))
    assert symmetric.matrix_width(stored.shape) == width
    if width > 1:
        assert tuple(stored.shape) == symmetric.stored_shape(groups, width)


def test_every_width_is_known_by_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for width in [*range(512, 1100), 2304, 3137, 4608, 8192]:
        shape = symmetric.stored_shape(2, width)
        assert symmetric.matrix_width(shape) == width
        assert 0.5 < shape[-1] / width**2 < 0.5 + 110 / width
    assert symmetric.stored_shape(2, 511) == (2, 511, 511)
    with pytest.raises(ValueError, match="known form"):
        symmetric.matrix_width((1, 1, 10**6))


@pytest.mark.parametrize("storage", ["halved", "whole", "diagonal"])
@GROUPS
@WIDTHS
def test_products_are_those_of_the_whole_matrix(groups: int, width: int, storage: str) -> None:
    matrix = positive(groups, width)
    stored = symmetric.halved(matrix) if storage == "halved" else matrix
    if storage == "diagonal":
        stored = matrix.diagonal(dim1=-2, dim2=-1)
        matrix = torch.diag_embed(stored)
    v = vectors(groups, 5, width)
    torch.testing.assert_close(symmetric.from_right(v, stored), v @ matrix)
    torch.testing.assert_close(symmetric.from_left(stored, v.mT), matrix @ v.mT)
    torch.testing.assert_close(symmetric.from_left(stored, v.mT.contiguous()), matrix @ v.mT)


@GROUPS
@WIDTHS
def test_a_root_is_a_cholesky_factor_with_inverted_blocks(groups: int, width: int) -> None:
    matrix = positive(groups, width)
    lower = torch.linalg.cholesky(matrix)
    for row in symmetric.Lower.of(root_of(matrix)).rows:
        span = slice(row.start, row.end)
        torch.testing.assert_close(row.before, lower[:, span, : row.start])
        inverse = torch.linalg.inv(lower[:, span, span])
        torch.testing.assert_close(row.diagonal_block, inverse)


@GROUPS
@WIDTHS
def test_two_halves_of_a_solve_are_a_solve(groups: int, width: int) -> None:
    matrix = positive(groups, width)
    root, v = root_of(matrix), vectors(groups, 5, width)
    half = symmetric.half_solve_right(v, root)
    inverse = torch.linalg.inv(matrix)
    torch.testing.assert_close(half @ half.mT, v @ inverse @ v.mT)
    torch.testing.assert_close(symmetric.finish_solve_right(half, root), v @ inverse)
    for columns in (v.mT, v.mT.contiguous()):
        half = symmetric.half_solve_left(root, columns)
        torch.testing.assert_close(half.mT @ half, v @ inverse @ v.mT)
        torch.testing.assert_close(symmetric.finish_solve_left(root, half), inverse @ columns)
    assert torch.equal(v, vectors(groups, 5, width))


@pytest.mark.parametrize("bad", ["indefinite", "nan", "inf"])
@pytest.mark.parametrize("at", [3, 20])
def test_a_root_that_can_not_be_is_noticed(bad: str, at: int) -> None:
    """In the group where it is, in the first block or a later one."""
    matrix = positive(3, 24)
    matrix[1, at, at] = {"indefinite": -1.0, "nan": torch.nan, "inf": torch.inf}[bad]
    assert symmetric.make_root(symmetric.halved(matrix)).tolist() == [True, False, True]


def test_solving_by_a_root_costs_little_more_than_multiplying(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And half of it, for the products that the projection needs, half as much."""
    monkeypatch.setattr(symmetric, "BLOCK", 16)
    width, height = 128, 10
    matrix, v = positive(1, width), vectors(1, height, width)
    stored, root = symmetric.halved(matrix), root_of(matrix)
    product = 2 * height * width**2

    def operations(work: Callable[[], Tensor]) -> int:
        with FlopCounterMode(display=False) as counter:
            work()
        found: int = counter.get_total_flops()
        return found

    half = operations(lambda: symmetric.half_solve_right(v, root))
    assert half == product * (1 + 1 / 8) / 2
    assert operations(lambda: symmetric.finish_solve_right(v.clone(), root)) == half
    assert operations(lambda: symmetric.from_right(v, stored)) == product


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_rows_are_filled_up_with_zeros(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that states are the same bit for bit, and sums of them stay finite."""
    monkeypatch.undo()
    room = symmetric.Lower.new(torch.empty((), dtype=dtype), 1, 513)
    for row in room.rows:
        row.values.fill_(1)
    assert room.storage.numel() > sum(row.values.numel() for row in room.rows)
    assert float(room.storage.sum()) == sum(row.values.numel() for row in room.rows)
