"""A factor acts as the dense matrix that it stands for, however it is stored."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fop.linalg import (
    STORAGE,
    Blocked,
    Cholesky,
    Dense,
    Diagonal,
    Factor,
    Form,
    Gram,
    fits,
    from_state,
    state_shapes,
)
from fop.linalg.blocked import BlockTriangle, factorise, packed_shape

DOUBLE = torch.float64
# Widths below, at and beyond borders of blocks, and of the aligned rows of wide ones.
WIDTHS = pytest.mark.parametrize("width", [1, 2, 7, 8, 9, 24, 131])
GROUPS = pytest.mark.parametrize("groups", [1, 3])
BLOCK = 8


def positive(groups: int, width: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(groups, width, width + 3, dtype=DOUBLE, generator=generator)
    product = x @ x.mT / width
    return (product + product.mT) / 2 + 0.1 * torch.eye(width, dtype=DOUBLE)


def vectors(groups: int, height: int, width: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(groups, height, width, dtype=DOUBLE, generator=generator)


def dense(matrix: Tensor) -> Factor:
    return Dense(matrix)


def diagonal(matrix: Tensor) -> Factor:
    return Diagonal(matrix.diagonal(dim1=-2, dim2=-1).clone())


def packed(matrix: Tensor) -> Factor:
    return Blocked.from_dense(matrix, BLOCK)


KINDS = pytest.mark.parametrize("kind", [dense, diagonal, packed])
Kind = Callable[[Tensor], Factor]


def cholesky_of(matrix: Tensor, block: int = BLOCK) -> Cholesky:
    found = Cholesky.from_dense(matrix, block)
    assert factorise(found).all()
    return found


# ---- every form


@KINDS
@GROUPS
@WIDTHS
def test_a_factor_acts_as_its_dense_matrix(kind: Kind, groups: int, width: int) -> None:
    factor = kind(positive(groups, width))
    matrix = positive(groups, width)
    if kind is diagonal:
        matrix = torch.diag_embed(matrix.diagonal(dim1=-2, dim2=-1))
    assert torch.equal(factor.dense(), matrix)
    assert torch.equal(factor.diagonal(), matrix.diagonal(dim1=-2, dim2=-1))
    mean = torch.linalg.eigvalsh(matrix).mean(-1)
    torch.testing.assert_close(factor.mean_eigenvalue(), mean)
    v = vectors(groups, 5, width)
    torch.testing.assert_close(factor.rmatmul(v), v @ matrix)
    for columns in (v.mT, v.mT.contiguous()):
        torch.testing.assert_close(factor.matmul(columns), matrix @ columns)
    assert torch.equal(v, vectors(groups, 5, width))


@KINDS
@GROUPS
@WIDTHS
def test_decompositions_are_those_of_the_dense_matrix(kind: Kind, groups: int, width: int) -> None:
    factor = kind(positive(groups, width))
    matrix, before = factor.dense().clone(), factor.values.clone()
    shift = torch.linspace(0.1, 0.5, groups, dtype=DOUBLE)
    damped = matrix + shift.reshape(-1, 1, 1) * torch.eye(width, dtype=DOUBLE)
    (inverse,), finite = factor.inverse(shift)
    assert finite.tolist() == [True] * groups
    inverse = torch.diag_embed(inverse) if kind is diagonal else inverse
    torch.testing.assert_close(inverse, torch.linalg.inv(damped))
    (values, *basis), finite = factor.eigenbasis(shift)
    assert finite.tolist() == [True] * groups
    rotation = basis[0] if basis else torch.eye(width, dtype=DOUBLE)
    torch.testing.assert_close(rotation @ torch.diag_embed(values) @ rotation.mT, matrix)
    if isinstance(factor, Blocked):
        (found,), finite = factor.cholesky(shift)
        assert finite.tolist() == [True] * groups
        assert torch.equal(found, cholesky_of(damped).values)
    assert torch.equal(factor.values, before)


@KINDS
@pytest.mark.parametrize("at", [3, 20])
@pytest.mark.parametrize("bad", ["indefinite", "nan", "inf"])
def test_a_decomposition_that_can_not_be_is_noticed(kind: Kind, bad: str, at: int) -> None:
    """In the group where it is, in the first block or a later one."""
    matrix = positive(3, 24)
    matrix[1, at, at] = {"indefinite": -1.0, "nan": torch.nan, "inf": torch.inf}[bad]
    factor = kind(matrix)
    assert factor.inverse(torch.zeros(3))[1].tolist() == [True, False, True]
    if isinstance(factor, Blocked):
        assert factor.cholesky(torch.zeros(3))[1].tolist() == [True, False, True]


@KINDS
def test_factors_are_added_scaled_and_cast(kind: Kind) -> None:
    one, two = kind(positive(2, 24)), kind(positive(2, 24, seed=1))
    expected = 3 * (one.dense() + two.dense())
    one.add_(two).values.mul_(3.0)
    torch.testing.assert_close(one.dense(), expected)
    short = one.to(dtype=torch.float32)
    assert type(short) is type(one)
    assert torch.equal(short.dense(), one.dense().float())


# ---- states and messages


def forms(groups: int, width: int) -> list[Form]:
    return [Form(groups, width), Form(groups, width, diagonal=True)]


def stored(form: Form) -> Factor:
    matrix = positive(form.groups, form.width)
    if form.diagonal:
        return diagonal(matrix)
    return Blocked.from_dense(matrix) if form.packed else Dense(matrix)


@pytest.mark.parametrize("storage", [{}, {"packed_from": 2, "block": BLOCK}], ids=str)
@GROUPS
@WIDTHS
def test_states_and_messages_lose_nothing(groups: int, width: int, storage: dict[str, int]) -> None:
    with STORAGE.changed(**storage):
        check_states_and_messages(groups, width)


def check_states_and_messages(groups: int, width: int) -> None:
    for form in forms(groups, width):
        factor = stored(form)
        assert tuple(factor.values.shape) == form.shape
        again = from_state(factor.values, width)
        assert type(again) is type(factor)
        assert [w for w in range(1, 200) if fits(factor.values, w)] == [width]
        assert torch.equal(again.dense(), factor.dense())
        message = torch.full(form.message_shape, torch.nan, dtype=DOUBLE)
        factor.pack(message)
        entries = width if form.diagonal else width * (width + 1) // 2
        assert message[0].numel() == entries
        assert not message.isnan().any()
        received = form.unpack(message)
        assert type(received) is type(factor)
        assert torch.equal(received.values, factor.values)
        message.zero_()
        assert torch.equal(received.values, factor.values)


@pytest.mark.parametrize("width", [512, 576, 577, 1025])
def test_wide_factors_travel_as_one_triangle(width: int) -> None:
    factor = stored(Form(2, width))
    message = torch.empty(Form(2, width).message_shape, dtype=DOUBLE)
    factor.pack(message)
    assert isinstance(factor, Blocked)
    assert torch.equal(Form(2, width).unpack(message).values, factor.values)


def test_wide_factors_are_packed_into_little_more_than_half() -> None:
    assert state_shapes(2, 511) == [(2, 511, 511), (2, 511)]
    for width in (512, 577, 1001, 2304, 4608, 8192):
        (groups, one, length), wide = state_shapes(2, width)
        assert (groups, one) == (2, 1)
        assert 0.5 < length / width**2 < 0.5 + 110 / width
        assert wide == (2, width)
    # The format of checkpoints.
    assert state_shapes(1, 1001)[0] == (1, 1, 594288)


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_rows_are_filled_up_with_zeros(dtype: torch.dtype) -> None:
    """So that states are the same bit for bit, and sums of them stay finite."""
    room = BlockTriangle.empty(torch.empty((), dtype=dtype), 1, 513, 192)
    for row in room.rows:
        row.values.fill_(1)
    assert room.values.numel() > sum(row.values.numel() for row in room.rows)
    assert float(room.values.sum()) == sum(row.values.numel() for row in room.rows)


# ---- sums of products


@pytest.mark.parametrize("packed_from", [1, 512])
@GROUPS
@pytest.mark.parametrize("width", [2, 9, 131])
def test_a_gram_is_the_sum_of_products(groups: int, width: int, packed_from: int) -> None:
    """Of rows, of columns, and with the last row and column set on their own."""
    x = torch.randn(6, groups, 4, width, dtype=DOUBLE)
    x[..., -1] = 1  # a bias's constant input
    expected = torch.einsum("ngsi,ngsj->gij", x, x)
    with STORAGE.changed(packed_from=packed_from, block=BLOCK, dense_block=5):
        gram = Gram(x, groups, width, features=width - 1)
    gram.add_rows(x[:2, ..., :-1])
    gram.add_columns(x[2:, ..., :-1].permute(1, 3, 0, 2).flatten(2))
    gram.fill_last(x.sum((0, 2)))
    factor = gram.factor()
    assert isinstance(factor, Blocked if packed_from == 1 else Dense)
    torch.testing.assert_close(factor.dense(), expected)


@pytest.mark.parametrize("step", [1, 3, 9])
def test_a_gram_may_be_written_row_by_row(step: int) -> None:
    matrix = positive(2, 18)
    gram = Gram(matrix, 2, 18)
    for start in range(step):
        gram.write_rows(matrix[:, start::step], start, step)
    assert torch.equal(gram.factor().dense(), matrix)


# ---- Cholesky factors


@GROUPS
@WIDTHS
def test_a_cholesky_factor_is_stored_with_inverted_diagonal_blocks(groups: int, width: int) -> None:
    matrix = positive(groups, width)
    lower = torch.linalg.cholesky(matrix)
    found = cholesky_of(matrix)
    assert tuple(found.values.shape) == packed_shape(groups, width, BLOCK)
    for row in found.rows:
        span = slice(row.start, row.end)
        torch.testing.assert_close(row.before, lower[:, span, : row.start])
        torch.testing.assert_close(row.diagonal_block, torch.linalg.inv(lower[:, span, span]))


@GROUPS
@WIDTHS
def test_two_triangular_solves_are_a_solve(groups: int, width: int) -> None:
    matrix = positive(groups, width)
    found, v = cholesky_of(matrix), vectors(groups, 5, width)
    inverse = torch.linalg.inv(matrix)
    once = found.solve_right(v)
    torch.testing.assert_close(once @ once.mT, v @ inverse @ v.mT)
    torch.testing.assert_close(found.solve_transposed_right(once), v @ inverse)
    for columns in (v.mT, v.mT.contiguous()):
        once = found.solve_left(columns)
        torch.testing.assert_close(once.mT @ once, v @ inverse @ v.mT)
        torch.testing.assert_close(found.solve_transposed_left(once), inverse @ columns)
    assert torch.equal(v, vectors(groups, 5, width))


def test_two_triangular_solves_cost_little_more_than_multiplying() -> None:
    """And one, for the inner products that the projection needs, half as much."""
    width, height, block = 128, 10, 16
    matrix, v = positive(1, width), vectors(1, height, width)
    factor, found = Blocked.from_dense(matrix, block), cholesky_of(matrix, block)
    product = 2 * height * width**2

    def operations(work: Callable[[], Tensor]) -> int:
        with FlopCounterMode(display=False) as counter:
            work()
        count: int = counter.get_total_flops()
        return count

    once = operations(lambda: found.solve_right(v))
    assert once == product * (1 + 1 / 8) / 2
    assert operations(lambda: found.solve_transposed_right(v.clone())) == once
    assert operations(lambda: factor.rmatmul(v)) == product
