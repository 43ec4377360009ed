"""What `fop.diagnostics` reports is what the step did."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import fop
from fop.scaling import noise_scale
from tests.common import cnn, images, mlp, points, train
from tests.oracles import Reference, ReferenceOptimizer
from tests.oracles import cross_entropy as oracle_loss


@pytest.mark.parametrize("settings", [{}, {"damping_mode": "exact", "damping": 0.05}], ids=str)
def test_every_entry_is_that_of_the_reference(settings: dict[str, Any]) -> None:
    model = mlp()
    reference = ReferenceOptimizer(model, Reference(**settings))
    optimizer = fop.FOP(model, **settings)
    for seed in range(3):
        x, y = points(12, seed)
        train(model, optimizer, [(x, y)])
        traces = reference.step([(x, y)], oracle_loss)
    report = fop.diagnostics(optimizer)
    assert list(report) == ["0", "2"]
    for name, entry in report.items():
        trace = traces[name]
        f, m = trace.F, trace.M
        a, d, p, u = (v.reshape(-1) for v in (trace.a, trace.d, trace.p, trace.u))
        q = torch.linalg.solve(m, torch.linalg.solve(m, f).T)
        beta, eta = float(trace.beta), float(trace.eta)
        factors = trace.factors[0]
        wanted = {
            "s": float(trace.s),
            "beta": beta,
            "eta": eta,
            "cos2": float(trace.cos2),
            "damping": settings.get("damping", 1e-3),
            "kl_clip_factor": float(reference.kl_scale),
            "gradient_norm": float(a.norm()),
            "difference_norm": float(d.norm()),
            "orthogonal_norm": float(p.norm()),
            "update_norm": float(u.norm()),
            "kl_base": float(a @ q @ a) * eta**2,
            "kl_cross": float(a @ q @ p) * 2 * beta * eta**2,
            "kl_orthogonal": float(p @ q @ p) * beta**2 * eta**2,
            "condition": float(torch.linalg.cond(m)),
            "noise_scale": 12 * float(d @ d) / (4 * float(a @ a) - float(d @ d))
            if 4 * float(a @ a) > float(d @ d)
            else math.inf,
        }
        for key, value in wanted.items():
            assert entry[key] == pytest.approx(value, rel=1e-6), (name, key)
        whole = float(u @ f @ u)
        terms = [entry[key] for key in ("kl_base", "kl_cross", "kl_orthogonal")]
        assert sum(terms) == pytest.approx(whole, rel=1e-6)
        assert abs(entry["kl_cross"]) <= entry["kl_cross_bound"]
        assert entry["kl_orthogonal"] <= entry["kl_orthogonal_bound"]
        if not settings:
            for factor, key in zip(factors, ("input_condition", "output_condition"), strict=True):
                undamped = torch.linalg.eigvalsh(factor)
                assert 1 <= entry[key] < float(undamped.max() / undamped.min().clamp(min=1e-12))


def test_it_works_for_groups_batch_norm_and_kfac() -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 3, groups=2), nn.Flatten(), nn.Linear(16, 3))
    optimizer = fop.KFAC(model)
    train(model, optimizer, [images(seed=seed) for seed in range(3)])
    for entry in fop.diagnostics(optimizer).values():
        assert (entry["beta"], entry["eta"], entry["kl_cross"]) == (0, 1, 0)
        assert entry["condition"] > 1
        assert math.isnan(entry["noise_scale"])
    model = cnn()
    optimizer = fop.FOP(model)
    train(model, optimizer, [images()])
    assert set(fop.diagnostics(optimizer)) == {"0", "4"}
    assert set(fop.diagnostics(optimizer, layers="4")) == {"4"}


def test_after_zero_grad_the_coefficients_remain_and_the_rest_is_nan() -> None:
    model = mlp()
    optimizer = fop.FOP(model)
    train(model, optimizer, [points()])
    before = fop.diagnostics(optimizer)["0"]
    optimizer.zero_grad()
    after = fop.diagnostics(optimizer)["0"]
    assert set(after) == set(before)
    for key in ("s", "beta", "eta", "cos2", "damping", "condition"):
        assert after[key] == before[key]
    assert math.isnan(after["kl_base"])
    assert math.isnan(after["noise_scale"])
    assert math.isnan(fop.noise_scale(optimizer))


def test_asking_changes_nothing() -> None:
    one, two = mlp(), mlp()
    first, second = fop.FOP(one), fop.FOP(two)
    for seed in range(5):
        train(one, first, [points(seed=seed)])
        fop.diagnostics(first)
        fop.noise_scale(first)
        train(two, second, [points(seed=seed)])
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


@pytest.mark.parametrize("n", [64, 65])
def test_the_noise_scale_is_that_of_the_data(n: int) -> None:
    """A linear model with squared loss, where tr(Sigma) / |G|^2 follows from all gradients."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1, bias=False).double()
    x = torch.randn(20000, 3, dtype=torch.float64)
    y = x @ torch.tensor([[1.0], [2.0], [-1.0]], dtype=torch.float64) + torch.randn(20000, 1)
    single = (2 * (model(x) - y) * x).detach()  # gradient of every example
    mean = single.mean(0)
    true = float((single - mean).square().sum(1).mean() / mean.square().sum())
    optimizer = fop.FOP(model, lr=0.0)
    squares = torch.zeros(2)
    for start in range(0, 20000 - n, n):
        batch = slice(start, start + n)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x[batch]), y[batch]).backward()
        optimizer.step()
        entry = fop.diagnostics(optimizer)[""]
        squares += torch.tensor([entry["gradient_norm"], entry["difference_norm"]]) ** 2
        first, second = n - n // 2, n // 2
        single_batch = noise_scale(
            entry["gradient_norm"] ** 2, entry["difference_norm"] ** 2, first, second
        )
        assert entry["noise_scale"] == single_batch == pytest.approx(fop.noise_scale(optimizer))
    # numerator and denominator are unbiased each, their quotient in one batch is not
    average = squares / (20000 // n)
    assert noise_scale(*average.tolist(), first, second) == pytest.approx(true, rel=0.1)


def test_clipped_gradients_are_reported_as_they_were_used() -> None:
    model = mlp()
    optimizer = fop.FOP(model)
    x, y = points()
    cross_entropy(model(x), y).backward()
    free = fop.noise_scale(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()
    norms = [entry["gradient_norm"] for entry in fop.diagnostics(optimizer).values()]
    assert math.hypot(*norms) == pytest.approx(0.01, rel=1e-3)
    assert fop.noise_scale(optimizer) == pytest.approx(free, rel=1e-9)
