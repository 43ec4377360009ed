"""What is frozen, unfrozen or cast in the middle of a step gives the step of the gradients there.

As torch's optimizers do: they look at p.grad, and not at requires_grad.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import fop
from tests.common import distance, mlp, points, same, snapshot, train
from tests.oracles import Reference, project

CURVATURES = pytest.mark.parametrize(
    "settings",
    [{}, {"damping_mode": "exact"}, {"curvature": "ekfac"}, {"norms": "unitwise"}],
    ids=str,
)
BOTH = pytest.mark.parametrize("build", [fop.FOP, fop.KFAC])
WHEN = pytest.mark.parametrize("steps", [0, 4, 5], ids=["first step", "refresh due", "not due"])


def normed() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(5, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3)
    ).double()  # fmt: skip


def backward(model: nn.Module, seed: int, dtype: torch.dtype = torch.float64) -> None:
    x, y = points(seed=seed, dtype=dtype)
    (cross_entropy(model(x), y) * 0.5).backward()


def interval(step: int) -> int:
    return 4 if step <= 5 else 100


def started(build: Any, steps: int, **settings: Any) -> tuple[nn.Sequential, Any]:
    """At the fifth step, and none of the next ones, curvature is refreshed."""
    model = normed()
    optimizer = build(model, update_every=interval, kl_clip=None, momentum=0.0, **settings)
    train(model, optimizer, [points(seed=seed) for seed in range(steps)])
    optimizer.zero_grad()
    return model, optimizer


def go_on(model: nn.Module, optimizer: Any) -> None:
    train(model, optimizer, [points(seed=seed) for seed in range(20, 23)])


@WHEN
@CURVATURES
@pytest.mark.parametrize("name", ["0.bias", "0.weight", "1.bias"])
@pytest.mark.parametrize("to", [False, True], ids=["frozen", "unfrozen"])
def test_what_is_toggled_before_step_is_toggled_after_it(
    steps: int, settings: dict[str, Any], name: str, to: bool
) -> None:
    found = []
    for early in (True, False):
        model, optimizer = started(fop.FOP, 0, **settings)
        model.get_parameter(name).requires_grad_(not to)
        train(model, optimizer, [points(seed=seed) for seed in range(steps)])
        optimizer.zero_grad()
        backward(model, 10)
        backward(model, 11)
        if early:
            model.get_parameter(name).requires_grad_(to)
        optimizer.step()
        model.get_parameter(name).requires_grad_(to)
        go_on(model, optimizer)
        found.append(snapshot(model))
    assert same(*found)


@WHEN
@CURVATURES
@pytest.mark.parametrize("name", ["0.bias", "1.bias"])
def test_a_bias_frozen_between_passes_keeps_its_gradient_so_far(
    steps: int, settings: dict[str, Any], name: str
) -> None:
    """KFAC's step is that of the gradients, with the curvature of both passes."""
    frozen, optimizer = started(fop.KFAC, steps, **settings)
    backward(frozen, 10)
    frozen.get_parameter(name).requires_grad_(False)
    backward(frozen, 11)
    optimizer.step()
    twin, other = started(fop.KFAC, steps, **settings)
    backward(twin, 10)
    kept = twin.get_parameter(name).grad.clone()
    backward(twin, 11)
    twin.get_parameter(name).grad.copy_(kept)
    other.step()
    assert distance(snapshot(frozen), snapshot(twin)) < 1e-12
    go_on(frozen, optimizer)
    assert all(p.isfinite().all() for p in frozen.parameters())


def halves_of(seed: int, bias: bool) -> list[torch.Tensor]:
    """Of a micro-batch, the two parts of the first layer's gradient as vectors."""
    x, y = points(seed=seed)
    found = []
    for part in (slice(0, 6), slice(6, 12)):
        twin = mlp()
        (cross_entropy(twin(x[part]), y[part]) * 0.25).backward()
        of_bias = twin[0].bias.grad if bias else torch.zeros_like(twin[0].bias)
        found.append(torch.cat([twin[0].weight.grad.flatten(), of_bias]))
    return found


def test_a_bias_frozen_between_passes_keeps_its_difference_so_far() -> None:
    """Without curvature F = M = I, and weight and bias are one vector."""
    model = mlp()
    optimizer = fop.FOP(model, lr=1.0, curvature="identity", kl_clip=None, momentum=0.0)
    before = snapshot(model)
    backward(model, 10)
    model[0].bias.requires_grad_(False)
    backward(model, 11)
    optimizer.step()
    one, two = (
        a + b for a, b in zip(halves_of(10, bias=True), halves_of(11, bias=False), strict=True)
    )
    a, d = one + two, 2 * (one - two)
    identity = torch.eye(len(a)).double()
    wanted = project(
        a.unsqueeze(0), d.unsqueeze(0), identity, identity, Reference(kl_clip=None), []
    )
    moved = torch.cat([(before[i] - snapshot(model)[i]).flatten() for i in (0, 1)])
    assert distance([moved], [wanted.u[0]]) < 1e-10


@BOTH
@WHEN
def test_a_bias_unfrozen_between_passes_follows_its_plain_gradient(build: Any, steps: int) -> None:
    """It joins the layer's curvature on the next step."""
    models = []
    for early in (True, False):
        model, optimizer = started(build, 0)
        model[0].bias.requires_grad_(False)
        train(model, optimizer, [points(seed=seed) for seed in range(steps)])
        optimizer.zero_grad()
        before = model[0].bias.detach().clone()
        backward(model, 10)
        model[0].bias.requires_grad_(early)
        backward(model, 11)
        expected = before - 0.1 * model[0].bias.grad if early else before
        optimizer.step()
        assert torch.equal(model[0].bias, expected)
        models.append(snapshot(model))
        model[0].bias.requires_grad_(True)
        go_on(model, optimizer)
        assert optimizer.state[model[0].weight]["input_factor"].shape == (1, 6, 6)
    del models[0][1], models[1][1]  # the bias itself
    assert same(*models)


@pytest.mark.parametrize("steps", [4, 5], ids=["refresh due", "not due"])
@pytest.mark.parametrize("first", [True, False], ids=["frozen", "unfrozen"])
def test_a_weight_toggled_between_passes_makes_a_kfac_step_and_is_said(
    steps: int, first: bool
) -> None:
    """The bias has a pass that the weight has not, so their halves are not those of one batch."""
    model, optimizer = started(fop.FOP, steps, beta=0.4, eta=1.0)
    twin, other = started(fop.FOP, steps, beta=0.4, eta=1.0)
    reference = normed()
    reference.load_state_dict(twin.state_dict())
    kfac = fop.KFAC(reference, kl_clip=None, momentum=0.0, update_every=100)
    kfac.load_state_dict(other.state_dict())
    for net in (model, reference):
        net[0].weight.requires_grad_(first)
        backward(net, 10)
        net[0].weight.requires_grad_(not first)
        backward(net, 11)
    with pytest.warns(RuntimeWarning, match="gradient of layer '0' is not the one"):
        optimizer.step()
    kfac.step()
    if steps == 5:
        assert distance(snapshot(model)[:2], snapshot(reference)[:2]) < 1e-12
    assert all(p.isfinite().all() for p in model.parameters())


SETTINGS = pytest.mark.parametrize(
    "settings",
    [{}, {"damping_mode": "exact"}, {"curvature": "ekfac"}, {"fisher": "exact"}],
    ids=str,
)


@SETTINGS
@WHEN
@pytest.mark.parametrize("where", ["between passes", "before step"])
@pytest.mark.parametrize("to", [torch.float64, torch.bfloat16])
def test_a_model_cast_in_the_middle_of_a_step_goes_on_in_the_new_precision(
    settings: dict[str, Any], steps: int, where: str, to: torch.dtype
) -> None:
    """The step is that of the run in double precision, as far as the coarser of the two goes."""
    found = []
    for casts in (True, False):
        model = mlp()
        optimizer = fop.FOP(model, kl_clip=None, momentum=0.9, lr=0.01, **settings)
        dtype = torch.float64
        if casts:
            dtype = torch.float32
            model.float()
        train(model, optimizer, [points(seed=s, dtype=dtype) for s in range(steps)])
        optimizer.zero_grad()
        backward(model, 10, dtype)
        if casts and where == "between passes":
            model.to(to)
            dtype = to
        backward(model, 11, dtype)
        if casts and where == "before step":
            model.to(to)
        optimizer.step()
        found.append([p.detach().double() for p in model.parameters()])
        own = optimizer.state[model[0].weight]
        if casts:
            precise = torch.promote_types(to, torch.float32)
            assert own["momentum_buffer"].dtype == to
            assert own["input_factor"].dtype == precise
    assert distance(*found) < (1e-4 if to == torch.float64 else 3e-2)
