"""Every method trains, resumes bit for bit, takes only its own options, and has an equal grid."""

from __future__ import annotations

import copy
import inspect
import io

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import fop
from fop_bench.methods import METHODS, MethodError, get_method, with_control

INPUTS = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
TARGETS = (INPUTS.sum(1) > 0).long()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 2))


def step(net: nn.Module, optimizer: Optimizer) -> Tensor:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(net(INPUTS), TARGETS)
    loss.backward()
    optimizer.step()
    return loss.detach()


def test_the_methods_are_those_promised() -> None:
    assert set(METHODS) == {
        "sgd", "adamw", "lamb", "shampoo", "soap", "kfac", "kfac-2x", "fop", "fop-sum", "sp-ngd",
    }  # fmt: skip


@pytest.mark.parametrize("name", METHODS)
def test_a_method_learns_and_goes_on_from_a_checkpoint_bit_for_bit(name: str) -> None:
    method = METHODS[name]
    rate = 0.05 if name in ("adamw", "lamb", "soap") else 0.1
    net = model()
    optimizer = method.build(net, rate)
    losses = [float(step(net, optimizer)) for _ in range(12)]
    assert losses[-1] < 0.7 * losses[0]

    stream = io.BytesIO()
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, stream)
    stream.seek(0)
    saved = torch.load(stream, weights_only=True)
    other = model()
    other.load_state_dict(saved["model"])
    resumed = method.build(other, rate)
    resumed.load_state_dict(saved["optimizer"])
    for _ in range(12):
        assert torch.equal(step(net, optimizer), step(other, resumed))


def test_the_control_is_fop_sum_without_the_projection() -> None:
    """Doubling lr alone would be no control: where the KL clip is active it changes nothing."""
    one, two = model(), model()
    control = METHODS["kfac-2x"].build(one, 0.1)
    # eta = 2 is what total="sum" gives where beta is 0.
    summed = fop.FOP(two, 0.1, beta=0.0, eta=2.0, damping=1e-3, momentum=0.9)
    plain = model()
    kfac = METHODS["kfac"].build(plain, 0.1)
    for _ in range(5):
        step(one, control)
        step(two, summed)
        step(plain, kfac)
    for ours, theirs in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(next(one.parameters()), next(plain.parameters()), rtol=1e-3)


def test_every_method_has_a_grid_of_the_same_size() -> None:
    assert {len(method.settings()) for method in METHODS.values()} == {20}
    for method in METHODS.values():
        points = method.settings()
        assert len({str(point) for point in points}) == len(points)
        rates = [point["lr"] for point in points[:5]]
        assert sorted(rates) == sorted(method.grid["lr"])


@pytest.mark.parametrize("name", ["kfac", "fop", "fop-sum", "sp-ngd"])
def test_momentum_and_damping_are_searched_alike(name: str) -> None:
    assert METHODS[name].grid["momentum"] == (0.9, 0.7)
    assert METHODS[name].grid["damping"] == (1e-3, 1e-4)
    tried = METHODS[name].settings()[:10]
    assert {(p["momentum"], p["damping"]) for p in tried} == {
        (0.9, 1e-3), (0.9, 1e-4), (0.7, 1e-3), (0.7, 1e-4),
    }  # fmt: skip


def test_frozen_parameters_stay_out() -> None:
    net = model()
    first = next(net.parameters())
    first.requires_grad_(False)
    before = copy.deepcopy(first)
    step(net, METHODS["sgd"].build(net, 0.1))
    assert torch.equal(first, before)


def test_an_option_of_another_method_is_refused() -> None:
    with pytest.raises(MethodError, match="'sgd' does not take 'damping'"):
        METHODS["sgd"].build(model(), 0.1, damping=1e-3)
    with pytest.raises(MethodError, match=r"'adam' \(did you mean adamw\?\): choose one of sgd,"):
        get_method("adam")


@pytest.mark.parametrize(("name", "kind"), [("fop", fop.FOP), ("kfac", fop.KFAC)])
def test_the_options_are_those_of_the_library(name: str, kind: type[Optimizer]) -> None:
    found = inspect.signature(kind).parameters
    expected = {name: p.default for name, p in found.items() if name != "model"}
    assert get_method(name).parameters == expected


def test_fop_never_comes_without_its_control() -> None:
    assert with_control(("sgd", "fop")) == ("sgd", "fop", "kfac-2x")
    assert with_control(("fop-sum", "kfac-2x")) == ("fop-sum", "kfac-2x")
    assert with_control(("sgd", "kfac")) == ("sgd", "kfac")
