"""The sampled Fisher aims at the exact one, costs one backward, and only when curvature is due."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fop
from fop.capture.fisher import all_gradients, sampled_gradient
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


class Output(dict[str, Any]):
    """As transformers' classes: a mapping with attributes."""

    __getattr__ = dict.__getitem__


# What a model may return, given its logits and the loss it has computed itself.
RETURNED: dict[str, Any] = {
    "an output class": lambda logits, loss: Output(loss=loss, logits=logits),
    "a dict": lambda logits, loss: {"logits": logits, "hidden": logits * 2},
    "loss and logits": lambda logits, loss: (loss, logits),
    "one of several, picked": lambda logits, loss: [logits * 2, logits, loss],
}


class Wrapped(nn.Module):
    def __init__(self, returned: str) -> None:
        super().__init__()
        self.inner, self.returned = mlp(), RETURNED[returned]

    def forward(self, x: Tensor, y: Tensor) -> Any:
        logits = self.inner(x)
        return self.returned(logits, cross_entropy(logits, y))


@pytest.mark.parametrize("inside", [True, False], ids=["own loss", "loss outside"])
@pytest.mark.parametrize("fisher", ["mc", "exact"])
@pytest.mark.parametrize("returned", RETURNED)
def test_models_that_return_more_than_logits_train_alike(
    returned: str, fisher: Any, inside: bool
) -> None:
    """Bit for bit like the model that returns its logits."""
    plain, model = mlp(), Wrapped(returned)
    pick = (lambda output: output[1]) if "picked" in returned else None
    first = fop.FOP(plain, fisher=fisher)
    second = fop.FOP(model, fisher={"name": fisher, "model_output": pick})
    data = [points(seed=seed) for seed in range(5)]
    torch.manual_seed(1)
    train(plain, first, data)
    torch.manual_seed(1)
    for x, y in data:
        second.zero_grad()
        output = model(x, y)
        parts = list(output.values()) if isinstance(output, dict) else list(output)
        loss = next((part for part in parts if part.dim() == 0), None)
        logits = output["logits"] if isinstance(output, dict) else output[1]
        chosen = loss if inside and loss is not None else cross_entropy(logits, y)
        del output, parts, logits, loss
        chosen.backward()
        second.step()
    assert same(snapshot(plain), snapshot(model))


def test_outputs_it_can_not_read_are_named() -> None:
    model = Wrapped("one of several, picked")
    kept = fop.FOP(model, fisher="mc")
    with pytest.raises(TypeError, match=r"Wrapped returned list with 2 tensors .*model_output"):
        model(*points())
    kept = fop.FOP(model, fisher={"name": "mc", "model_output": len})  # type: ignore[typeddict-item]
    with pytest.raises(TypeError, match=r"model_output must return a tensor, .* it gave int"):
        model(*points())
    flat = nn.Sequential(nn.Linear(5, 1), nn.Flatten(0)).double()
    kept = fop.FOP(flat, fisher="mc")
    with pytest.raises(ValueError, match=r"needs model outputs \[n, classes, ...\], got shape"):
        flat(points()[0])
    del kept


@pytest.mark.parametrize("fisher", ["mc", "exact"])
def test_one_class_is_refused(fisher: Any) -> None:
    model = nn.Linear(5, 1).double()
    kept = fop.FOP(model, fisher=fisher)
    with pytest.raises(ValueError, match=r"two classes at least, .* shape \(12, 1\)"):
        model(points()[0])
    del kept


def test_forward_passes_without_a_backward_are_let_go() -> None:
    model = mlp()
    optimizer = fop.FOP(model, fisher="mc")
    kept = [weakref.ref(model(points()[0])) for _ in range(40)]
    gc.collect()
    assert sum(reference() is not None for reference in kept) <= 8
    optimizer.step()
    gc.collect()
    assert all(reference() is None for reference in kept)
