"""Whatever is injected into a step, training goes on, and what was not hurt is not lost."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fop
from tests.common import distance, mlp, points, same, snapshot, train

MODES = ["factored", "exact"]


def poison_input(model: nn.Module, x: Tensor, y: Tensor) -> None:
    x = x.clone()
    x[3, 1] = math.inf
    cross_entropy(model(x), y).backward()


def poison_loss(model: nn.Module, x: Tensor, y: Tensor) -> None:
    (cross_entropy(model(x), y) * math.nan).backward()


def poison_one_layer(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """During the backward pass, in the gradient at one layer's output."""
    hidden = model[0](x)
    hidden.register_hook(lambda grad: grad.index_fill(0, torch.tensor([2]), math.nan))
    cross_entropy(model[2](model[1](hidden)), y).backward()


def empty_batch(model: nn.Module, x: Tensor, y: Tensor) -> None:
    cross_entropy(model(x[:0]), y[:0]).backward()


def overflow_in_the_factors(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Finite gradients whose squares are not."""
    (cross_entropy(model(x), y) * 1e160).backward()


@pytest.mark.parametrize(
    "poison",
    [poison_input, poison_loss, poison_one_layer, empty_batch, overflow_in_the_factors],
)
@pytest.mark.parametrize(
    "settings",
    [{}, {"damping_mode": "exact"}, {"fallback": "adamw", "skip": "2", "weight_decay": 0.01}],
    ids=str,
)
@pytest.mark.parametrize("at", [0, 1, 4])
def test_training_goes_on_as_if_the_bad_step_had_not_been(
    poison: Callable[..., None], settings: dict[str, Any], at: int
) -> None:
    """Bit for bit; curvature is refreshed on every step, so the count of steps does not matter."""
    disturbed, undisturbed = mlp(), mlp()
    one = fop.FOP(disturbed, update_every=1, **settings)
    two = fop.FOP(undisturbed, update_every=1, **settings)
    data = [points(seed=seed) for seed in range(8)]
    train(disturbed, one, data[:at])
    one.zero_grad()
    poison(disturbed, *points(seed=99))
    one.step()
    train(disturbed, one, data[at:])
    train(undisturbed, two, data)
    assert same(snapshot(disturbed), snapshot(undisturbed))
    assert one.steps == two.steps + 1


def rank_one(size: int) -> Tensor:
    torch.manual_seed(0)
    v = torch.randn(size, 1, dtype=torch.float64)
    return v @ v.T


DAMAGES: dict[str, Callable[[Tensor], Tensor]] = {
    "zero": torch.zeros_like,
    "singular": lambda factor: rank_one(factor.shape[-1]).expand_as(factor),
    "huge": lambda factor: factor * 1e12,
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("key", ["input_factor", "output_factor"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_factor_is_inverted_as_it_is(mode: Any, key: str, damage: str) -> None:
    """The metric is the exact one of the damaged average."""
    model = mlp()
    optimizer = fop.FOP(model, damping_mode=mode, update_every=1)
    train(model, optimizer, [points(seed=seed) for seed in range(3)])
    own = optimizer.state[model[0].weight]
    own[key].copy_(DAMAGES[damage](own[key]))
    train(model, optimizer, [points(seed=3)])
    A, G = own["input_factor"][0], own["output_factor"][0]
    damping = 1e-3
    if mode == "exact":
        found = [
            (basis * values) @ basis.T
            for basis, values in (
                (own[f"{side}_basis"][0], own[f"{side}_eigenvalues"][0])
                for side in ("input", "output")
            )
        ]
        assert distance(found, [A, G]) < 1e-12
    else:
        pi = (A.diagonal().mean() / G.diagonal().mean()).sqrt()
        shifts = (pi * damping**0.5, damping**0.5 / pi)
        for factor, shift, side in ((A, shifts[0], "input"), (G, shifts[1], "output")):
            product = own[f"{side}_inverse"][0] @ (factor + shift * torch.eye(len(factor)).double())
            assert distance([product], [torch.eye(len(factor)).double()]) < 1e-5
    train(model, optimizer, [points(seed=seed) for seed in range(4, 8)])
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("key", ["input_factor", "output_factor"])
def test_an_indefinite_factor_is_inverted_with_more_damping_and_fades(key: str) -> None:
    model = mlp()
    optimizer = fop.FOP(model, update_every=1, factor_decay=0.5)
    train(model, optimizer, [points(seed=seed) for seed in range(3)])
    own = optimizer.state[model[0].weight]
    size = own[key].shape[-1]
    own[key].copy_(rank_one(size) - 0.3 * torch.eye(size))
    before = snapshot(model)
    train(model, optimizer, [points(seed=3)])
    inverse = own[key.replace("factor", "inverse")][0]
    assert torch.linalg.eigvalsh(inverse).min() > 0
    assert distance(snapshot(model), before) > 1e-6
    train(model, optimizer, [points(seed=seed) for seed in range(4, 30)])
    assert torch.linalg.eigvalsh(own[key][0]).min() > -1e-8


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("key", ["input_factor", "output_factor"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_average_that_is_not_finite_starts_again(mode: Any, key: str, value: float) -> None:
    """It would never fade. The warning comes once; the next refresh is a sound one."""
    model = mlp()
    optimizer = fop.FOP(model, damping_mode=mode, update_every=1)
    train(model, optimizer, [points(seed=seed) for seed in range(3)])
    own = optimizer.state[model[0].weight]
    own[key][0, 1, 1] = value
    with pytest.warns(RuntimeWarning, match="curvature of '0' could not be inverted"):
        train(model, optimizer, [points(seed=3)])
    start = own[key].clone()
    assert start.isfinite().all()
    probe = mlp()
    probe.load_state_dict(model.state_dict())
    fresh = fop.FOP(probe)
    train(probe, fresh, [points(seed=4)])
    before = snapshot(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, [points(seed=4)])
    expected = 0.95 * start + 0.05 * fresh.state[probe[0].weight][key]
    assert distance([own[key]], [expected]) < 1e-12
    assert distance(snapshot(model), before) > 1e-6


@pytest.mark.parametrize("mode", MODES)
def test_a_decomposition_that_fails_once_loses_nothing_of_the_average(
    mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that is different is the one step that was taken with the older inverse."""
    models = [mlp(), mlp()]
    optimizers = [fop.FOP(model, lr=0.0, damping_mode=mode, update_every=1) for model in models]
    name = "cholesky_ex" if mode == "factored" else "eigh"

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise torch.linalg.LinAlgError("injected")

    for seed in range(6):
        train(models[0], optimizers[0], [points(seed=seed)])
        with monkeypatch.context() as patch:
            if seed == 3:
                patch.setattr(torch.linalg, name, fail)
                with pytest.warns(RuntimeWarning, match="could not be inverted"):
                    train(models[1], optimizers[1], [points(seed=seed)])
            else:
                train(models[1], optimizers[1], [points(seed=seed)])
    one, two = (o.state[m[0].weight] for o, m in zip(optimizers, models, strict=True))
    for key, value in one.items():
        if key != "momentum_buffer":
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(two[key])), key


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right, self.head = nn.Linear(5, 4), nn.Linear(5, 4), nn.Linear(4, 3)
        self.both = True

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.left(x)
        return self.head(torch.tanh(hidden + self.right(x) if self.both else hidden))


@pytest.mark.parametrize("zeroed", [True, False], ids=["set to none", "set to zero"])
def test_a_layer_unused_in_some_steps_keeps_its_curvature_and_disturbs_nobody(zeroed: bool) -> None:
    """While it rests, the others train as in a model without it."""
    model = Branches().double()
    optimizer = fop.FOP(model, update_every=1, momentum=0.0)

    def steps(net: nn.Module, opt: fop.FOP, seeds: range) -> None:
        for seed in seeds:
            opt.zero_grad(set_to_none=zeroed)
            x, y = points(seed=seed)
            cross_entropy(net(x), y).backward()
            opt.step()

    steps(model, optimizer, range(3))
    model.both = False
    optimizer.zero_grad()
    own = optimizer.state[model.right.weight]
    kept = {key: torch.as_tensor(value).clone() for key, value in own.items()}
    alone = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    for layer, part in ((alone[0], model.left), (alone[2], model.head)):
        layer.load_state_dict(part.state_dict())
    other = fop.FOP(alone, update_every=1, momentum=0.0)
    state = optimizer.state_dict()
    numbers = [0, 1, 4, 5]  # left and head
    groups = [{**state["param_groups"][0], "params": [0, 1, 2, 3]}]
    groups[0]["param_names"] = ["0.weight", "0.bias", "2.weight", "2.bias"]
    entries = {i: dict(state["state"][n]) for i, n in enumerate(numbers) if n in state["state"]}
    other.load_state_dict({"state": entries, "param_groups": groups})
    resting = [model.right.weight.clone(), model.right.bias.clone()]
    steps(model, optimizer, range(3, 6))
    steps(alone, other, range(3, 6))
    assert same([*alone.parameters()], [*model.left.parameters(), *model.head.parameters()])
    assert same([model.right.weight, model.right.bias], resting)
    for key, value in kept.items():
        assert torch.equal(torch.as_tensor(own[key]), value), key
    model.both = True
    steps(model, optimizer, range(6, 8))
    assert "right" in fop.diagnostics(optimizer)
    assert not same([model.right.weight], resting[:1])
