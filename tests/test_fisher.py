"""The sampled Fisher aims at the exact one, costs one backward, and only when curvature is due."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fop
from fop.fisher import all_gradients, sampled_gradient
from tests.common import mlp, points, same, snapshot, train

OUTPUTS = {
    "classes": ((3,), "categorical"),
    "classes at positions": ((2, 3), "categorical"),
    "classes in images": ((3, 2, 1), "categorical"),
    "features": ((4,), "bernoulli"),
    "features at positions": ((2, 2), "gaussian"),
}

LOSSES = {
    "categorical": lambda o, y, reduction: cross_entropy(o, y, reduction=reduction),
    "bernoulli": lambda o, y, reduction: nn.functional.binary_cross_entropy_with_logits(
        o, y, reduction=reduction
    ),
    "gaussian": lambda o, y, reduction: nn.functional.mse_loss(o, y, reduction=reduction),
}


def target_for(output: Tensor, likelihood: str, shape: tuple[int, ...]) -> Tensor:
    if likelihood != "categorical":
        return torch.full_like(output, 0.3)
    spatial = shape[1:] if len(shape) != 2 else shape[:1]
    return torch.zeros(1, *spatial, dtype=torch.long)


@pytest.mark.parametrize("case", OUTPUTS)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_all_gradients_add_up_to_the_hessian_of_the_loss(case: str, reduction: str) -> None:
    """For these losses the expected Hessian at the output is the Hessian at any label."""
    shape, likelihood = OUTPUTS[case]
    torch.manual_seed(0)
    output = torch.randn(1, *shape, dtype=torch.float64)
    target = target_for(output, likelihood, shape)

    def loss(flat: Tensor) -> Tensor:
        o = flat.reshape(output.shape)
        if likelihood == "categorical" and len(shape) == 2:
            o = o.transpose(1, 2)  # torch wants classes in dimension 1
        return LOSSES[likelihood](o, target, reduction)

    hessian = torch.autograd.functional.hessian(loss, output.reshape(-1))
    columns = torch.stack([g.reshape(-1) for g in all_gradients(output, likelihood, reduction)])
    assert torch.allclose(columns.T @ columns, hessian, atol=1e-12)


@pytest.mark.parametrize("case", OUTPUTS)
def test_sampled_gradients_have_the_covariance_of_all(case: str) -> None:
    shape, likelihood = OUTPUTS[case]
    torch.manual_seed(1)
    output = torch.randn(1, *shape, dtype=torch.float64)
    columns = torch.stack([g.reshape(-1) for g in all_gradients(output, likelihood, "mean")])
    exact = columns.T @ columns
    n = 100_000
    sampled = sampled_gradient(output.expand(n, *shape), likelihood, "mean").reshape(n, -1)
    assert torch.allclose(sampled.T @ sampled / n, exact, atol=0.02 * float(exact.diagonal().max()))
    assert float(sampled.mean(0).abs().max()) < 0.02


class Counting(nn.Module):
    """Counts the backward passes that go through it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.backwards = 0

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.inner[0](x))
        hidden.register_hook(self.count)
        return self.inner[2](hidden)

    def count(self, grad: Tensor) -> None:
        self.backwards += 1


@pytest.mark.parametrize(("fisher", "extra"), [("empirical", 0), ("mc", 1), ("exact", 3)])
def test_extra_backwards_run_on_curvature_steps_alone(fisher: Any, extra: int) -> None:
    model = Counting()
    optimizer = fop.FOP(model, fisher=fisher)
    counts = []
    for seed in range(12):
        model.backwards = 0
        train(model, optimizer, [points(seed=seed)])
        counts.append(model.backwards)
    due = {1, 2, 4, 11}
    assert counts == [1 + extra if step in due else 1 for step in range(1, 13)]


@pytest.mark.parametrize("fisher", ["mc", "exact"])
def test_extra_passes_leave_the_gradient_alone(fisher: Any) -> None:
    one, two = mlp(), mlp()
    optimizer = fop.FOP(one, fisher=fisher)
    x, y = points()
    cross_entropy(one(x), y).backward()
    cross_entropy(two(x), y).backward()
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad, rtol=1e-12)
    del optimizer


def test_the_labels_do_not_enter_the_exact_curvature() -> None:
    factors = []
    for shift in (0, 1):
        model = mlp()
        optimizer = fop.KFAC(model, fisher="exact")
        x, y = points()
        train(model, optimizer, [(x, (y + shift) % 3)])
        factors.append(optimizer.state[model[0].weight]["output_factor"])
    assert torch.allclose(*factors, rtol=1e-12)


def test_sampling_repeats_with_the_seed() -> None:
    found = []
    for _ in range(2):
        model = mlp()
        optimizer = fop.FOP(model, fisher="mc")
        torch.manual_seed(5)
        train(model, optimizer, [points(seed=seed) for seed in range(4)])
        found.append(snapshot(model))
    assert same(*found)


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.inner(x)}


def test_outputs_it_can_not_read_are_named() -> None:
    model = Wrapped()
    optimizer = fop.FOP(model, fisher="mc")
    with pytest.raises(TypeError, match=r"Wrapped returned dict: wrap the model"):
        model(points()[0])
    del optimizer
    flat = nn.Sequential(nn.Linear(5, 1), nn.Flatten(0)).double()
    kept = fop.FOP(flat, fisher="mc")
    with pytest.raises(ValueError, match=r"needs model outputs \[n, classes, ...\], got shape"):
        flat(points()[0]).sum().backward()
    del kept
