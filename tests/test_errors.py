"""Every mistake is met with what was found and what to do."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

import fop
from tests.common import mlp, points, same, snapshot, train

WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"lr": -0.1}, ValueError, r"lr must be >= 0, got -0.1"),
    ({"lr": "fast"}, TypeError, r"lr must be a number, got 'fast'"),
    ({"lr": float("nan")}, ValueError, "lr must be >= 0, got nan"),
    ({"lr": True}, TypeError, "lr must be a number"),
    ({"lr": torch.tensor([0.1])}, TypeError, "lr must be a number"),
    ({"momentum": -1}, ValueError, "momentum must be >= 0"),
    ({"weight_decay": -1}, ValueError, "weight_decay must be >= 0"),
    ({"damping": 0}, ValueError, "damping must be > 0, got 0"),
    ({"damping": None}, TypeError, "damping must be a number"),
    ({"damping_mode": "none"}, ValueError, "damping_mode must be one of 'factored', 'exact'"),
    ({"factor_decay": 1.0}, ValueError, "factor_decay must be >= 0 and < 1, got 1.0"),
    ({"max_factor_size": 0}, ValueError, "max_factor_size must be >= 1, got 0"),
    ({"update_every": 0}, ValueError, "update_every must be >= 1, got 0"),
    ({"update_every": 2.5}, TypeError, "update_every must be a whole number of steps"),
    ({"update_every": lambda step: 0}, ValueError, r"update_every\(1\) must be >= 1, got 0"),
    ({"fisher": "true"}, ValueError, "fisher must be one of 'auto', 'empirical', 'mc', 'exact'"),
    (
        {"fisher": {"name": "mc", "likelihood": "poisson"}},
        ValueError,
        r"fisher\['likelihood'\] must be one of 'auto', 'categorical', 'bernoulli', 'gaussian'",
    ),
    (
        {"fisher": {"name": "mc", "model_output": 1}},
        TypeError,
        r"fisher\['model_output'\] must be a function of what the model returns, or None, got 1",
    ),
    (
        {"fisher": {"name": "empirical", "likelihood": "gaussian"}},
        ValueError,
        "fisher has the option 'likelihood', but 'empirical' takes",
    ),
    (
        {"update_every": {"steps": 0}},
        ValueError,
        r"update_every\['steps'\] must be >= 1, got 0",
    ),
    ({"update_every": {"stagger": True}}, ValueError, "update_every must have 'steps'"),
    (
        {"update_every": {"steps": 3, "spread": True}},
        ValueError,
        "update_every has the option 'spread', but a schedule takes 'steps', 'stagger'",
    ),
    ({"sharing": "both"}, ValueError, "sharing must be one of 'expand', 'reduce'"),
    ({"beta": "auto"}, TypeError, "beta must be a number or \"adaptive\", got 'auto'"),
    ({"eta": float("inf")}, ValueError, 'eta must be finite or "adaptive", got inf'),
    ({"total": "average"}, ValueError, "total must be one of 'mean', 'sum'"),
    ({"kl_clip": 0}, ValueError, 'kl_clip must be > 0, "auto" or None to switch it off, got 0'),
    ({"loss_reduction": "none"}, ValueError, "loss_reduction must be one of 'mean', 'sum'"),
    ({"halves": "quarters"}, ValueError, "halves must be one of 'auto', 'samples', 'microbatches'"),
    ({"halves": "ranks"}, ValueError, 'halves="ranks" takes even and odd ranks of a process group'),
    ({"strategy": "some"}, ValueError, "strategy must be one of 'owner', 'all', got 'some'"),
    ({"strategy": 0}, ValueError, "strategy must be >= 1, got 0"),
    (
        {"curvature": "dense"},
        ValueError,
        "curvature must be one of 'kronecker', 'ekfac', 'diagonal'",
    ),
    ({"fallback": "adam"}, ValueError, "fallback must be one of 'adamw', 'sgd', got 'adam'"),
    ({"fallback": {"lr": 1}}, ValueError, "fallback must have a 'name', one of 'adamw', 'sgd'"),
    (
        {"fallback": {"name": "adam"}},
        ValueError,
        r"fallback\['name'\] must be one of 'adamw', 'sgd', got 'adam'",
    ),
    (
        {"fallback": {"name": "adamw", "lr": -1}},
        ValueError,
        r"fallback\['lr'\] must be >= 0, got -1",
    ),
    (
        {"fallback": {"name": "adamw", "betas": (0.9, 1)}},
        ValueError,
        r"fallback\['betas'\]\[1\] must be >= 0 and < 1, got 1",
    ),
    (
        {"fallback": {"name": "adamw", "momentum": 0.9}},
        ValueError,
        "fallback has the option 'momentum', but 'adamw' takes 'lr', 'betas', 'eps'",
    ),
    (
        {"fallback": {"name": "sgd", "betas": (0.9, 0.99)}},
        ValueError,
        "fallback has the option 'betas', but 'sgd' takes 'lr'",
    ),
    ({"nesterov": 1}, TypeError, "nesterov must be True or False, got 1"),
    ({"nesterov": True, "momentum": 0}, ValueError, "nesterov=True needs momentum > 0"),
    ({"decoupled_weight_decay": "yes"}, TypeError, "decoupled_weight_decay must be True or False"),
    ({"skip": "layer9"}, ValueError, "skip: no layer of the model matches 'layer9'"),
    ({"skip": [3]}, TypeError, "skip takes layer name patterns, module types and modules, got 3"),
    ({"skip": nn.Linear(2, 2)}, ValueError, "no layer of the model matches the given Linear"),
    ({"param_groups": [{"names": "9.*"}]}, ValueError, r"no parameter or layer matches '9.\*'"),
    ({"param_groups": [{"lr": 1.0}]}, ValueError, "must have either 'names' .* or 'params'"),
    (
        {"param_groups": [{"names": "0", "beta": 1}]},
        ValueError,
        "of options only damping, fallback",
    ),
    ({"param_groups": ["0"]}, TypeError, r"param_groups\[0\] must be a dict"),
    (
        {"param_groups": [{"params": [nn.Parameter(torch.zeros(2, 7))]}]},
        ValueError,
        r"holds a tensor of shape \(2, 7\) that is no parameter of the model",
    ),
    ({"param_groups": [{"names": "0", "lr": -1.0}]}, ValueError, "lr must be >= 0"),
]


@pytest.mark.parametrize(
    ("arguments", "error", "message"), WRONG, ids=lambda value: str(value)[:40]
)
def test_wrong_arguments_are_named(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    model = mlp()
    with pytest.raises(error, match=message):
        fop.FOP(model, **arguments)
    fop.FOP(model)  # nothing of the failed attempt is in the way


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        (list(mlp().parameters()), TypeError, "model must be a torch.nn.Module, got list"),
        (None, TypeError, "got NoneType"),
        (nn.ReLU(), ValueError, "ReLU has no parameters"),
        (nn.LazyLinear(3), ValueError, "'weight' of a lazy module has no shape yet"),
    ],
)
def test_wrong_models_are_named(model: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        fop.FOP(model)


@pytest.mark.parametrize("name", ["beta", "eta", "total", "halves"])
def test_kfac_has_no_projection_to_configure(name: str) -> None:
    with pytest.raises(TypeError, match=name):
        fop.KFAC(mlp(), **{name: 1.0})


@pytest.mark.parametrize("make", [mlp, lambda: nn.MultiheadAttention(4, 2)])
def test_a_second_optimizer_takes_the_model_over(make: Any) -> None:
    """As a notebook cell run twice does, while a scheduler keeps the first one alive."""
    model = make()
    first = fop.FOP(model)
    fop.KFAC(model)
    with pytest.raises(RuntimeError, match="this FOP no longer trains its model"):
        first.step()


def test_the_second_optimizer_trains_as_if_it_were_alone() -> None:
    data = [points(seed=seed) for seed in range(8)]
    model, other = mlp(), mlp()
    first = fop.FOP(model, update_every=2)
    train(model, first, data[:3])
    other.load_state_dict(model.state_dict())
    train(model, fop.FOP(model), data[3:])
    train(other, fop.FOP(other), data[3:])
    assert same(snapshot(model), snapshot(other))


class Functional(nn.Module):
    """Uses a layer's weight without calling the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.layer.weight, self.layer.bias)


def test_a_model_none_of_whose_layers_are_called_is_refused() -> None:
    model = Functional().double()
    optimizer = fop.FOP(model)
    with pytest.raises(RuntimeError, match=r"no backward pass through any layer .* 'layer' have"):
        train(model, optimizer, [points()])
    del optimizer
    train(model, fop.FOP(model, skip=["layer"]), [points()])


def test_a_compiled_model_that_bypasses_the_hooks_is_named() -> None:
    torch.compiler.reset()
    model = mlp()
    compiled = torch.compile(model, backend="eager")
    x, y = points()
    compiled(x)  # traced before there were hooks
    optimizer = fop.FOP(compiled)
    cross_entropy(compiled(x), y).backward()
    with pytest.raises(RuntimeError, match=r"no backward pass .* '0', '2' .* torch.compile"):
        optimizer.step()


def test_sparse_gradients_are_refused() -> None:
    model = nn.Embedding(4, 2, sparse=True)
    optimizer = fop.FOP(model)
    model(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match="parameter 'weight' has a sparse gradient"):
        optimizer.step()


def test_layers_that_can_not_be_watched_fall_back_and_are_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2)
            for projection in ("in_proj_weight", "out_proj.weight"):
                holder = self.attention.get_submodule(projection.rpartition(".")[0])
                nn.utils.parametrizations.weight_norm(holder, projection.rpartition(".")[2])
            self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
            self.encode = nn.Linear(4, 4)
            self.decode = nn.Bilinear(4, 1, 4)
            self.decode.weight = nn.Parameter(self.decode.weight.detach().squeeze())
            self.encode.weight = self.decode.weight

        def forward(self, x: Tensor) -> Tensor:
            x = self.attention(x, x, x)[0]
            return (
                linear(torch.relu(self.encode(self.normed(x))), self.decode.weight)
                + self.decode.bias
            )

    model = Model()
    with caplog.at_level("INFO", logger="fop"):
        optimizer = fop.FOP(model)
    messages = "\n".join(caplog.messages)
    computed = ["normed", *(f"attention.{role}" for role in ("query", "key", "value", "out_proj"))]
    [message] = [text for text in messages.splitlines() if "its weight is computed" in text]
    assert all(repr(name) in message for name in computed)  # one message for all of them
    assert re.search(r"optimizer \(it shares parameters with .*\): .*'encode'", messages)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model(torch.randn(3, 2, 4)).square().mean().backward()
    optimizer.step()
    moved = [name for name, p in model.named_parameters() if not torch.equal(p, before[name])]
    assert len(moved) == len(before)


def test_wrapped_optimizers_are_named_by_diagnostics() -> None:
    with pytest.raises(TypeError, match=r"expected a fop.FOP or fop.KFAC optimizer, got SGD"):
        fop.diagnostics(torch.optim.SGD(mlp().parameters()))  # type: ignore[arg-type]
