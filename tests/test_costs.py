"""The cost model is the arithmetic that its opening says, and what a step is seen to compute."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import fop
from fop.costs import FOP_PASSES, KFAC_PASSES, Work, owner_cost, refresh_cost, triangle
from fop_bench.steps.operations import count_multiply_adds

BATCH = 64


def test_costs_are_those_of_the_operations() -> None:
    """[2, 3]: decompositions, FOP's three products with each factor, elementwise work."""
    assert owner_cost(Work(2, 3), 1) == 35 / 2 + 3 * 6 * 5 + 18
    assert owner_cost(Work(2, 3), 10) == pytest.approx(1.75 + 3 * 6 * 5 + 18)
    assert owner_cost(Work(2, 3), 1, KFAC_PASSES) == 35 / 2 + 6 * 5 + 18
    assert owner_cost(Work(2, 3, groups=4), 1) == 4 * owner_cost(Work(2, 3), 1)
    assert owner_cost(Work(2, 3, diagonal_columns=True), 1) == 8 / 2 + 3 * 6 * 2 + 18


def test_a_diagonal_factor_costs_next_to_nothing() -> None:
    dense, kept = Work(8, 50000), Work(8, 50000, diagonal_columns=True)
    assert refresh_cost(kept) < 1e-4 * refresh_cost(dense)
    assert refresh_cost(Work(8, 5, groups=3)) == 3 * refresh_cost(Work(8, 5))


def test_of_a_wide_factor_little_more_than_half_is_computed() -> None:
    assert triangle(100) == 100**2
    assert 0.5 < triangle(4608) / 4608**2 < 0.53


@pytest.mark.parametrize("interval", [1, 10])
@pytest.mark.parametrize(("make", "passes"), [(fop.KFAC, KFAC_PASSES), (fop.FOP, FOP_PASSES)])
@pytest.mark.parametrize(("columns", "rows"), [(40, 30), (300, 10), (1000, 20), (1500, 200)])
def test_a_step_computes_what_the_model_says(
    columns: int, rows: int, make: type[fop.KFAC], passes: object, interval: int
) -> None:
    """Counted as it runs, less a step without curvature."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(columns, rows, bias=False))
    x, y = torch.randn(BATCH, columns), torch.randint(rows, (BATCH,))

    def counts(curvature: str) -> list[int]:
        optimizer = make(model, lr=1e-6, update_every=interval, curvature=curvature)
        return [count_multiply_adds(lambda: step(optimizer)) for _ in range(4)]

    def step(optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()

    with_curvature, without = counts("kronecker"), counts("identity")
    plain, refresh = (with_curvature[n] - without[n] for n in (2, 3))
    work = Work(rows, columns, solves_over=interval)
    products = work.products(passes)
    whole = products + work.second_moments(BATCH) + work.decompositions()
    if interval > 1:
        assert plain == pytest.approx(products, rel=0.05)
    assert refresh == pytest.approx(whole, rel=0.1)
