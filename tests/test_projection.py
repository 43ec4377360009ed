"""The projection keeps the paper's promises for every gradient and curvature."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fop
from fop import projection
from fop.projection import (
    Coefficients,
    Metric,
    inner,
    optimal_beta,
    optimal_eta,
    projection_scalar,
)
from tests.common import distance, mlp, points, snapshot, train


@dataclass
class DenseMetric:
    """Any positive semi-definite F, damped by a multiple of the identity."""

    f: Tensor
    damping: float

    def to_basis(self, v: Tensor) -> Tensor:
        return v

    def from_basis(self, v: Tensor) -> Tensor:
        return v

    def fisher(self, v: Tensor) -> Tensor:
        return (self.f @ v.reshape(-1)).reshape(v.shape)

    def fisher_product(self, a: Tensor, a_in_basis: Tensor) -> tuple[Tensor, bool]:
        return self.fisher(a), False

    def solve(self, v: Tensor) -> Tensor:
        m = self.f + self.damping * torch.eye(len(self.f), dtype=self.f.dtype)
        return torch.linalg.solve(m, v.reshape(-1)).reshape(v.shape)


def fop_update(
    a: Tensor, d: Tensor | None, metric: Metric, beta: Any, eta: Any, k: float
) -> tuple[Tensor, Coefficients]:
    """With a copy of d, which is overwritten."""
    return projection.fop_update(a, None if d is None else d.clone(), metric, beta, eta, k)


def orthogonal_part(a: Tensor, d: Tensor, fa: Tensor, eps: float = 0.0) -> tuple[Tensor, Tensor]:
    s = projection_scalar(inner(a, fa), inner(d, fa), eps)
    return s, d - s * a


@st.composite
def problems(draw: st.DrawFn) -> tuple[Tensor, Tensor, DenseMetric]:
    """a, d and a metric, over many scales, ranks of F and angles between a and d."""
    size = draw(st.integers(2, 8))
    rank = draw(st.integers(1, size))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    root = torch.randn(size, rank, generator=generator, dtype=torch.float64)
    f = root @ root.T * 10.0 ** draw(st.floats(-6, 3))
    a, noise = torch.randn(2, size, generator=generator, dtype=torch.float64)
    a = a * 10.0 ** draw(st.floats(-4, 2))
    d = draw(st.floats(-2, 2)) * a + noise * a.norm() * 10.0 ** draw(st.floats(-2, 2))
    metric = DenseMetric(f, float(f.trace()) * 10.0 ** draw(st.floats(-4, 2)))
    return a.reshape(1, 1, -1), d.reshape(1, 1, -1), metric


@given(problems(), st.floats(1e-12, 1e3))
def test_lemma_1(problem: tuple[Tensor, Tensor, DenseMetric], relative_eps: float) -> None:
    a, d, metric = problem
    fa = metric.fisher(a)
    eps = relative_eps * float(inner(a, fa))
    _, p = orthogonal_part(a, d, fa, eps)
    wanted = float(inner(d, fa)) * eps / (float(inner(a, fa)) + eps)
    scale = float(d.norm() * fa.norm() + a.norm() * fa.norm())
    assert float(inner(p, fa)) == pytest.approx(wanted, abs=1e-12 * scale)


@given(problems())
def test_the_orthogonal_part_is_orthogonal(problem: tuple[Tensor, Tensor, DenseMetric]) -> None:
    a, d, metric = problem
    fa = metric.fisher(a)
    s, p = orthogonal_part(a, d, fa)
    scale = float(fa.norm() * (d.norm() + s.abs() * a.norm()))
    assert abs(float(inner(p, fa))) <= 1e-13 * scale


@pytest.mark.parametrize("k", [1.0, 2.0])
@given(problem=problems())
def test_eta_lies_between_half_k_and_k(
    problem: tuple[Tensor, Tensor, DenseMetric], k: float
) -> None:
    a, d, metric = problem
    _, found = fop_update(a, d, metric, "adaptive", "adaptive", k)
    eta, cos2 = float(found.eta), float(found.cos2)
    assert -1e-12 <= cos2 <= 1 + 1e-9
    assert k / 2 * (1 - 1e-9) <= eta <= k * (1 + 1e-9)
    if float(found.beta) != 0:
        assert eta == pytest.approx(k * (1 + cos2) / (1 + 3 * cos2), rel=1e-6)


@given(problems())
def test_swapping_the_halves_changes_signs_and_no_update(
    problem: tuple[Tensor, Tensor, DenseMetric],
) -> None:
    a, d, metric = problem
    one, found_one = fop_update(a, d, metric, "adaptive", "adaptive", 1.0)
    two, found_two = fop_update(a, -d, metric, "adaptive", "adaptive", 1.0)
    assert torch.equal(one, two)
    assert float(found_one.s) == -float(found_two.s)
    assert float(found_one.beta) == -float(found_two.beta)


@given(problems())
def test_the_kl_norm_splits_as_in_the_paper_and_obeys_its_bounds(
    problem: tuple[Tensor, Tensor, DenseMetric],
) -> None:
    a, d, metric = problem
    u, found = fop_update(a, d, metric, "adaptive", "adaptive", 1.0)
    beta, eta, damping = float(found.beta), float(found.eta), metric.damping
    _, p = orthogonal_part(a, d, metric.fisher(a))
    va, vp, vu = a.reshape(-1), p.reshape(-1), u.reshape(-1)
    m = metric.f + damping * torch.eye(len(metric.f), dtype=metric.f.dtype)
    q = torch.linalg.solve(m, torch.linalg.solve(m, metric.f).T)
    base, cross, square = (float(x @ q @ y) for x, y in ((va, va), (va, vp), (vp, vp)))
    whole = float(vu @ metric.f @ vu)
    terms = [base, 2 * beta * cross, beta**2 * square]
    size = eta**2 * sum(map(abs, terms))
    assert whole == pytest.approx(eta**2 * sum(terms), abs=1e-6 * size)

    values, vectors = torch.linalg.eigh(metric.f)
    largest = float(values[-1])
    # |F^-1/2 v|; a floor for directions without curvature keeps the bounds valid
    floor = values.clamp(min=largest * 1e-14)
    root_a, root_p = (float(((vectors.T @ v) ** 2 / floor).sum().sqrt()) for v in (va, vp))
    assert abs(terms[1]) <= 2 * abs(beta) * largest / damping * root_a * root_p * (1 + 1e-9)
    assert terms[2] <= beta**2 * largest / (4 * damping) * root_p**2 * (1 + 1e-9)


@given(problems(), st.floats(-6, 6))
def test_the_update_does_not_depend_on_the_scale_of_the_difference(
    problem: tuple[Tensor, Tensor, DenseMetric], exponent: float
) -> None:
    a, d, metric = problem
    one, found = fop_update(a, d, metric, "adaptive", "adaptive", 1.0)
    assume(1e-9 < float(found.cos2) < 1 - 1e-9)
    two, _ = fop_update(a, d * 10.0**exponent, metric, "adaptive", "adaptive", 1.0)
    assert float((one - two).norm()) <= 1e-6 * float(one.norm())


def test_a_vanishing_gradient_or_difference_gives_a_finite_update() -> None:
    metric = DenseMetric(torch.eye(4, dtype=torch.float64), 0.1)
    some, zero = torch.ones(1, 2, 2, dtype=torch.float64), torch.zeros(1, 2, 2, dtype=torch.float64)
    u, found = fop_update(zero, some, metric, "adaptive", "adaptive", 1.0)
    assert torch.equal(u, zero)
    assert (float(found.eta), float(found.beta)) == (1, 0)
    u, found = fop_update(some, zero, metric, "adaptive", "adaptive", 2.0)
    assert torch.allclose(u, 2 * metric.solve(some))
    assert float(found.beta) == 0


def test_beta_and_eta_by_hand() -> None:
    q, D, E = (torch.tensor(value, dtype=torch.float64) for value in (2.0, -0.5, 4.0))
    beta = optimal_beta(q, D, E)
    assert float(beta) == -0.125
    assert float(optimal_eta(q, D, E, beta, 1.0)) == pytest.approx(2.0625 / 2.1875)
    assert float(optimal_beta(q, D, torch.tensor(1e-13, dtype=torch.float64))) == 0
    assert float(optimal_beta(q, D, torch.tensor(math.nan))) == 0


@settings(max_examples=20)
@given(st.floats(0.01, 100.0), st.sampled_from(["factored", "exact"]))
def test_a_scaled_loss_takes_the_scaled_step(factor: float, damping_mode: str) -> None:
    """With loss c L, a and d grow by c and F by c^2; with lambda c^2, the update is 1/c."""

    def updates(c: float) -> list[Tensor]:
        model = mlp()
        optimizer = fop.FOP(
            model,
            lr=c,
            damping=1e-2 * c**2,
            damping_mode=damping_mode,
            kl_clip=None,
            momentum=0.0,
        )
        before = snapshot(model)
        x, y = points()
        (c * nn.functional.cross_entropy(model(x), y)).backward()
        optimizer.step()
        return [a - b for a, b in zip(snapshot(model), before, strict=True)]

    assert distance(updates(factor), updates(1.0)) < 1e-9


def test_kfac_is_the_gauss_newton_matrix_of_a_deep_linear_network() -> None:
    """With a squared loss and one position an example, G (x) A is the exact block of the GGN."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3), nn.Linear(3, 2)).double()
    x, y = torch.randn(9, 3, dtype=torch.float64), torch.randn(9, 2, dtype=torch.float64)
    optimizer = fop.KFAC(model, fisher={"name": "exact", "likelihood": "gaussian"})
    names = [name for name, _ in model.named_parameters()]

    def outputs(*values: Tensor) -> Tensor:
        return torch.func.functional_call(model, dict(zip(names, values, strict=True)), (x,))

    start = tuple(snapshot(model))
    jacobians = torch.autograd.functional.jacobian(outputs, start)
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    for index, layer in enumerate(model):
        of_weight, of_bias = jacobians[2 * index], jacobians[2 * index + 1]
        # [examples, outputs, o, i + 1], the bias in the last column
        joint = torch.cat([of_weight, of_bias.unsqueeze(-1)], dim=-1).flatten(2)
        # Hessian of the mean of (o - y)^2 over 2 features is 1 on each; mean over the examples
        ggn = torch.einsum("nkp,nkq->pq", joint, joint) / len(x)
        state = optimizer.state[layer.weight]
        ours = torch.kron(state["output_factor"][0], state["input_factor"][0])
        assert distance([ours], [ggn]) < 1e-12


def test_one_training_step_of_fop_differs_from_kfac() -> None:
    """The projection is really at work: with two unlike halves, FOP and KFAC part."""
    one, two = mlp(), mlp()
    train(one, fop.FOP(one), [points()])
    train(two, fop.KFAC(two), [points()])
    assert distance(snapshot(one), snapshot(two)) > 1e-4
