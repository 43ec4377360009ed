"""The fast ways to a convolution's second moment are exact: they equal written-out patches."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fop.layers import patches as module
from fop.layers.patches import Patches
from fop.linalg import STORAGE, Gram
from fop.linalg.gram import columns

DOUBLE = torch.float64


def geometry(seed: int, *, unit_stride: bool) -> tuple[Patches, Tensor]:
    """Any kernel, padding (also cropping), dilation, groups and sizes that fit together."""
    draw = random.Random(seed)
    dimensions = draw.choice([1, 2, 2] if unit_stride else [1, 2, 3])

    def sizes(*options: int) -> tuple[int, ...]:
        return tuple(draw.choice(options) for _ in range(dimensions))

    patches = Patches(
        groups=draw.choice([1, 1, 2, 3]),
        kernel=sizes(1, 2, 3, 4),
        stride=sizes(1) if unit_stride else sizes(1, 2, 3),
        dilation=sizes(1, 1, 2),
        before=sizes(-1, 0, 1, 2, 3),
        sizes=sizes(1, 2, 4, 6),
    )
    channels = patches.groups * draw.choice([1, 2, 3])
    generator = torch.Generator().manual_seed(seed)
    shape = (draw.choice([1, 2, 5]), channels, *sizes(3, 5, 7))
    return patches, torch.randn(shape, dtype=DOUBLE, generator=generator)


def gathered(patches: Patches, x: Tensor) -> Tensor:
    """[n, groups, positions, features], element by element from the definition."""
    n, channels = x.shape[:2]
    each = channels // patches.groups
    axes = range(len(patches.kernel))
    rows = x.new_zeros(n, patches.groups, *patches.sizes, each, *patches.kernel)
    for position in torch.cartesian_prod(*map(torch.arange, (*patches.sizes, 1))).tolist():
        for tap in torch.cartesian_prod(*map(torch.arange, (*patches.kernel, 1))).tolist():
            at = [
                position[i] * patches.stride[i] + tap[i] * patches.dilation[i] - patches.before[i]
                for i in axes
            ]
            if all(0 <= at[i] < x.shape[2 + i] for i in axes):
                value = x[(slice(None), slice(None), *at)].reshape(n, patches.groups, each)
                rows[(slice(None), slice(None), *position[:-1], slice(None), *tap[:-1])] = value
    return rows.reshape(n, patches.groups, -1, each * patches.taps)


def moment(rows: Tensor) -> Tensor:
    return torch.einsum("ngsi,ngsj->gij", rows, rows)


def written(like: Tensor, write: Callable[[Gram], None]) -> Tensor:
    """What is written to the room for such matrices, which is part of a larger one, as with a bias
    column, and full of what must not stay."""
    groups, width = like.shape[:2]
    gram = Gram(like, groups, width + 1, features=width)
    for row in gram._rows:
        row.values.fill_(float("nan"))
    write(gram)
    return gram.factor().dense()[:, :width, :width]


def of_width(width: int) -> Gram:
    return Gram(torch.empty((), dtype=DOUBLE), 1, width)


def add_all(chunks: Iterable[Tensor], gram: Gram) -> None:
    for chunk in chunks:
        gram.add_columns(chunk)


@pytest.mark.parametrize("seed", range(15))
def test_rows_and_totals_are_the_definition(seed: int) -> None:
    patches, x = geometry(seed, unit_stride=False)
    rows = gathered(patches, x)
    assert torch.equal(patches.rows(x), rows)
    assert torch.allclose(patches.totals(x), rows.sum(2))


@pytest.mark.parametrize("seed", range(15))
@pytest.mark.parametrize("chunk", [1, 200, 1 << 24])
def test_the_moment_of_written_out_patches(
    seed: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one piece, in several pieces and example by example."""
    monkeypatch.setattr(module, "CHUNK", chunk)
    patches, x = geometry(seed, unit_stride=False)
    expected = moment(gathered(patches, x))
    found = written(expected, lambda gram: patches._moment_by_rows(x, gram))
    assert torch.allclose(found, expected)


@pytest.mark.parametrize("block", [3, 128])
@pytest.mark.parametrize("seed", range(40))
def test_the_moment_by_lags(seed: int, block: int) -> None:
    patches, x = geometry(seed, unit_stride=True)
    expected = moment(gathered(patches, x))
    with STORAGE.changed(dense_block=block):
        found = written(expected, lambda gram: patches._moment_by_lags(x, gram))
    assert torch.allclose(found, expected)


@pytest.mark.parametrize(
    ("channels", "length", "stride", "by_lags"),
    [(64, 32, 1, True), (512, 4, 1, True), (3, 32, 1, True), (64, 32, 2, False), (64, 2, 1, False)],
)
def test_lags_are_taken_where_they_are_cheaper(
    channels: int, length: int, stride: int, by_lags: bool
) -> None:
    positions = (length - 1) // stride + 1
    patches = Patches(1, (3, 3), (stride, stride), (1, 1), (1, 1), (positions, positions))
    assert patches._lags_pay(torch.empty(64, channels, length, length, device="meta")) == by_lags


def test_patches_are_not_written_out_where_lags_are_cheaper() -> None:
    patches = Patches(1, (3, 3), (1, 1), (1, 1), (1, 1), (8, 8))
    x = torch.randn(16, 32, 8, 8, dtype=DOUBLE)
    with FlopCounterMode(display=False) as counter:
        patches.moment(x, of_width(288))
    assert counter.get_total_flops() < 0.25 * 2 * 288**2 * 16 * 64


@pytest.mark.parametrize("width", [1, 127, 128, 300, 1100])
@pytest.mark.parametrize("groups", [1, 2])
def test_a_gram_product_is_the_dense_product(width: int, groups: int) -> None:
    torch.manual_seed(0)
    chunks = [torch.randn(groups, width, length, dtype=DOUBLE) for length in (5, 1, 3)]
    together = torch.cat(chunks, dim=2)
    expected = together @ together.mT
    found = written(expected, lambda gram: add_all(chunks, gram))
    assert torch.allclose(found, expected)


def test_a_gram_product_costs_little_more_than_half() -> None:
    vectors = torch.randn(1, 1024, 512, dtype=DOUBLE)
    with FlopCounterMode(display=False) as counter:
        of_width(1024).add_columns(vectors)
    assert 0.5 < counter.get_total_flops() / (2 * 1024**2 * 512) < 0.6


@pytest.mark.parametrize("positions_last", [False, True])
def test_rows_in_either_layout_become_columns(positions_last: bool) -> None:
    rows = torch.randn(3, 2, 4, 5)
    laid_out = rows.mT.contiguous().mT if positions_last else rows
    expected = rows.permute(1, 3, 0, 2).reshape(2, 5, 12)
    assert torch.equal(columns(laid_out), expected)
