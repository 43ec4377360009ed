"""Steps that size themselves: exact coefficients, free of units, and without a trace."""

from __future__ import annotations

import copy
import math
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fop
from fop.distributed import Ranks
from fop.trust import Memory, Model, solve
from tests.common import library_defaults, snapshot


@pytest.fixture(autouse=True)
def _defaults() -> Iterator[None]:
    with library_defaults():
        yield


def net(outputs: int = 4, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, outputs)).double()


def data(n: int = 24, outputs: int = 4, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 5, generator=generator, dtype=torch.float64)
    return x, torch.randint(outputs, (n,), generator=generator)


def cross_entropy(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z, y)


def smoothed(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z, y, label_smoothing=0.1)


def bernoulli(z: Tensor, y: Tensor) -> Tensor:
    target = F.one_hot(y, z.shape[1]).to(z)
    return F.binary_cross_entropy_with_logits(z, target, reduction="sum") / len(z)


def squares(z: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(z, F.one_hot(y, z.shape[1]).to(z) * 3 + 5)


LOSSES = [cross_entropy, smoothed, bernoulli, squares]
Loss = Callable[[Tensor, Tensor], Tensor]


def step(model: nn.Module, optimizer: Any, loss: Loss, x: Tensor, y: Tensor) -> float:
    optimizer.zero_grad()
    value = loss(model(x), y)
    value.backward()
    optimizer.step()
    return value.item()


def trained(loss: Loss, steps: int = 5, **options: Any) -> list[Tensor]:
    model, (x, y) = net(), data()
    optimizer = fop.FOP(model, **options)
    for _ in range(steps):
        step(model, optimizer, loss, x, y)
    assert optimizer.last_step.rule == "model", optimizer.last_step
    return snapshot(model)


def same(some: list[Tensor], others: list[Tensor], tolerance: float = 1e-8) -> bool:
    return all(
        torch.allclose(a, b, rtol=tolerance, atol=tolerance)
        for a, b in zip(some, others, strict=True)
    )


# ---- the model of the loss, against autograd


def dense_model(model: nn.Module, loss: Loss, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Gauss-Newton matrix and gradient over all parameters, by autograd alone."""
    z = model(x)
    rows = [
        torch.autograd.grad(entry, list(model.parameters()), retain_graph=True)
        for entry in z.flatten()
    ]
    J = torch.stack([torch.cat([part.flatten() for part in row]) for row in rows])

    def of_output(flat: Tensor) -> Tensor:
        return loss(flat.reshape(z.shape), y)

    start = z.detach().flatten()
    H: Any = torch.autograd.functional.hessian(of_output, start)
    g: Any = torch.autograd.functional.jacobian(of_output, start)
    return J.T @ H @ J, J.T @ g


@pytest.mark.parametrize("loss", LOSSES)
def test_model_of_the_loss_is_that_of_autograd(loss: Loss) -> None:
    model, (x, y) = net(), data()
    G, g = dense_model(model, loss, x, y)
    optimizer = fop.FOP(model)
    loss(model(x), y).backward()
    forwards = optimizer._engine.forwards
    assert forwards is not None
    assert len(forwards.complete) == 1, forwards.unreadable
    values = [p.detach() for p in model.parameters()]
    torch.manual_seed(1)
    directions = [[torch.randn_like(value) for value in values] for _ in range(3)]
    V = torch.stack([torch.cat([part.flatten() for part in v]) for v in directions])
    found = Model(model, forwards.complete, values, Ranks(), seed=0)
    A, b_part = found.matrices(found.along(directions, found.norms(directions)))
    b = found.slopes(directions, [p.grad for p in model.parameters() if p.grad is not None])
    assert torch.allclose(A, V @ G @ V.T, rtol=1e-4)
    assert torch.allclose(b, V @ g, rtol=1e-9)
    assert torch.allclose(b_part, V @ g, rtol=1e-4, atol=1e-6)
    c = solve(A, b, math.inf)[0]
    assert torch.allclose(c, -torch.linalg.solve(V @ G @ V.T, V @ g), rtol=1e-3)
    shortened, bounded = solve(A, b, float(c @ A @ c) / 4)
    assert bounded
    assert torch.allclose(shortened, c / 2)

    before = snapshot(model)
    actual = found.change(directions, [0.1, -0.2, 0.3])
    assert same(snapshot(model), before, 0.0)
    start = loss(model(x), y).item()
    with torch.no_grad():
        for value, *parts in zip(model.parameters(), *directions, strict=True):
            value += 0.1 * parts[0] - 0.2 * parts[1] + 0.3 * parts[2]
    assert actual == pytest.approx(loss(model(x), y).item() - start, rel=1e-9)
    if loss is not smoothed:  # its least value is not 0
        assert found.loss() == pytest.approx(start, rel=1e-8)


@pytest.mark.parametrize("loss", LOSSES)
def test_steps_reduce_the_loss_as_they_say(loss: Loss) -> None:
    model, (x, y) = net(), data()
    optimizer = fop.KFAC(model)
    for _ in range(6):
        before = step(model, optimizer, loss, x, y)
        after = loss(model(x), y).item()
        assert optimizer.last_step.reduction == pytest.approx(before - after, rel=1e-6, abs=1e-12)


# ---- units


@pytest.mark.parametrize("scale", [1e-3, 1e3])
@pytest.mark.parametrize("loss", LOSSES)
def test_units_of_the_loss_do_not_matter(loss: Loss, scale: float) -> None:
    torch.manual_seed(3)
    expected = trained(loss)
    torch.manual_seed(3)
    assert same(trained(lambda z, y: loss(z, y) * scale), expected, 1e-5)


def test_sums_over_examples_are_like_means() -> None:
    expected = trained(cross_entropy)
    assert same(trained(lambda z, y: F.cross_entropy(z, y, reduction="sum")), expected, 1e-5)


class Tokens(nn.Module):
    """[n, t] indices to logits [n, t, classes]."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm = nn.Embedding(7, 6), nn.LayerNorm(6)
        self.position = nn.Parameter(torch.randn(4, 6))
        self.head = nn.Linear(6, 7)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.norm(torch.tanh(self.embed(x) + self.position)))
        return found


def test_sums_over_tokens_are_like_means_and_free_parameters_move() -> None:
    x = torch.randint(7, (16, 4), generator=torch.Generator().manual_seed(0))
    ended = []
    for factor in (1.0, 4.0):
        model = Tokens()
        before, optimizer = model.position.detach().clone(), fop.FOP(model)
        for _ in range(5):
            optimizer.zero_grad()
            (F.cross_entropy(model(x).flatten(0, 1), x.roll(1, 1).flatten()) * factor).backward()
            optimizer.step()
        assert optimizer.last_step.rule == "model"
        assert not torch.equal(before, model.position)
        ended.append(snapshot(model))
    assert same(*ended, 1e-5)


# ---- loops


def test_lr_is_a_share_of_the_step() -> None:
    moved = []
    for lr in (0.1, 0.05):
        model, (x, y) = net(), data()
        before, optimizer = snapshot(model), fop.FOP(model, lr=0.1)
        optimizer.param_groups[0]["lr"] = lr
        step(model, optimizer, cross_entropy, x, y)
        moved.append([a - b for a, b in zip(snapshot(model), before, strict=True)])
    assert same(moved[1], [part / 2 for part in moved[0]], 1e-12)


def test_resumes_bit_for_bit() -> None:
    model, other, (x, y) = net(), net(), data()
    one, two = fop.FOP(model), fop.FOP(other)
    for _ in range(4):
        step(model, one, cross_entropy, x, y)
    other.load_state_dict(model.state_dict())
    two.load_state_dict(copy.deepcopy(one.state_dict()))
    for _ in range(4):
        step(model, one, cross_entropy, x, y)
        step(other, two, cross_entropy, x, y)
    assert same(snapshot(model), snapshot(other), 0.0)
    assert one.param_groups[0]["trust_radius"] == two.param_groups[0]["trust_radius"]


class Rich(nn.Module):
    """Batch norm and dropout, and a hook of the user's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.norm, self.two = nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.dropout(torch.tanh(self.norm(self.one(x))), 0.2, self.training)
        found: Tensor = self.two(hidden)
        return found


def test_extra_passes_leave_no_trace() -> None:
    model, (x, y) = Rich(), data(96)
    calls: list[int] = []
    model.one.register_forward_hook(lambda *_: calls.append(1))
    optimizer = fop.FOP(model)
    for number in range(1, 4):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        state, averages = torch.get_rng_state(), model.norm.running_mean
        assert averages is not None
        before = averages.clone()
        optimizer.step()
        assert optimizer.last_step.rule == "model"
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.equal(before, averages)
        assert len(calls) == number
        assert int(model.norm.num_batches_tracked or 0) == number


def test_batch_norm_and_dropout_train() -> None:
    model, (x, y) = Rich(), data(200)
    optimizer = fop.KFAC(model)
    losses = [step(model, optimizer, cross_entropy, x, x[:, 0].gt(0).long()) for _ in range(25)]
    assert losses[-1] < 0.4 * losses[0]
    del y


def test_micro_batches_are_like_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    # Halves are of other examples, and with them what is taken for noise.
    monkeypatch.setattr(Memory, "signal", lambda *_: 1.0)
    x, y = data()
    ended = []
    for parts in (1, 3):
        model = net()
        optimizer = fop.KFAC(model)
        for _ in range(4):
            optimizer.zero_grad()
            for some, labels in zip(x.chunk(parts), y.chunk(parts), strict=True):
                (F.cross_entropy(model(some), labels) / parts).backward()
            optimizer.step()
        assert optimizer.last_step.rule == "model"
        ended.append(snapshot(model))
    assert same(*ended, 1e-6)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = net(8), nn.Linear(8, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(checkpoint(self.body, x, use_reentrant=False))
        return found


@pytest.mark.filterwarnings("ignore:.*not a leaf Tensor")
@pytest.mark.parametrize("kind", ["checkpointed", "frozen", "tied", "compiled", "autocast"])
def test_models_as_people_have_them(kind: str) -> None:
    x, y = data(64)
    torch.manual_seed(0)
    model: Any = Checkpointed() if kind == "checkpointed" else net()
    if kind == "frozen":
        model[0].weight.requires_grad_(False)
    if kind == "tied":
        model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5)).double()
        model[2].weight = model[0].weight
        y = y % 4
    if kind == "compiled":
        model = torch.compile(model, backend="eager")
    if kind == "autocast":
        model, x = model.float(), x.float()
    optimizer = fop.FOP(model)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
            loss = F.cross_entropy(model(x).float(), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert optimizer.last_step.rule == "model", optimizer.last_step
    assert losses[-1] < losses[0]


# ---- where it can't be


class Faulty(nn.Module):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.net, self.fault = net(), fault

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.net(x)
        if self.fault == "nan" and not torch.is_grad_enabled():
            return z * math.nan
        if self.fault == "random":
            return z + torch.randn_like(z, generator=None) * 0 + _drift()
        return z


_count = iter(range(10**9))


def _drift() -> float:
    """Something that no seed brings back."""
    return 0.01 * next(_count)


FAULTS = {
    "nan": (cross_entropy, "not finite|another output"),
    "random": (squares, "another output"),
    "huber": (lambda z, y: F.huber_loss(z, F.one_hot(y, 4).to(z) * 5), ""),
    "focal": (
        lambda z, y: (
            (1 - z.softmax(-1).gather(1, y[:, None])) ** 2
            * -z.log_softmax(-1).gather(1, y[:, None])
        ).mean(),
        "row",
    ),
    "temperature": (lambda z, y: F.cross_entropy(z / 3, y), "softmax"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_cannot_be_read_has_fixed_steps(fault: str, caplog: Any) -> None:
    loss, why = FAULTS[fault]
    model, (x, y) = Faulty(fault), data()
    optimizer = fop.FOP(model)
    before = snapshot(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            step(model, optimizer, loss, x, y)
    assert optimizer.last_step.rule == "fixed"
    if why:
        assert re.search(why, optimizer.last_step.why), optimizer.last_step.why
    assert len([r for r in caplog.records if "fixed size" in r.message]) == 1
    assert not same(snapshot(model), before, 0.0)
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_a_non_finite_gradient_changes_nothing() -> None:
    model, (x, y) = net(), data()
    optimizer = fop.FOP(model)
    step(model, optimizer, cross_entropy, x, y)
    before, radius = snapshot(model), optimizer.param_groups[0]["trust_radius"]
    optimizer.zero_grad()
    F.cross_entropy(model(x * math.nan), y).backward()
    optimizer.step()
    assert same(snapshot(model), before, 0.0)
    assert optimizer.param_groups[0]["trust_radius"] == radius
    assert optimizer.skipped_steps == 1
