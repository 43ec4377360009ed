"""Watched models can be differentiated in any mode, have empty weights, and lose modules."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fwd
from torch import Tensor, nn

import fop
from tests.common import distance, points, same, snapshot, train

# ---- forward-mode differentiation


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]


DIFFERENTIABLE: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), (6, 4)),
    "norm": (lambda: nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5)), (6, 4)),
    "conv": (lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), (2, 2, 3, 3)),
    "transposed": (lambda: nn.ConvTranspose1d(2, 3, 3, stride=2), (2, 2, 4)),
    "attention": (Attending, (3, 2, 4)),
}


def derivatives(model: nn.Module, x: Tensor, direction: Tensor) -> dict[str, Tensor]:
    def loss(x: Tensor) -> Tensor:
        return model(x).pow(3).sum()

    parameters = {name: p.detach() for name, p in model.named_parameters()}
    tangents = {name: torch.full_like(p, 0.5) for name, p in parameters.items()}

    def of_parameters(values: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, values, (x,))

    with fwd.dual_level():
        dual = fwd.unpack_dual(model(fwd.make_dual(x, direction))).tangent
    assert dual is not None
    with fwd.dual_level():  # forward over reverse
        leaf = fwd.make_dual(x.clone().requires_grad_(), direction)
        (slope,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
        product = fwd.unpack_dual(slope).tangent
    assert product is not None
    return {
        "jvp": torch.func.jvp(model, (x,), (direction,))[1],
        "jvp of parameters": torch.func.jvp(of_parameters, (parameters,), (tangents,))[1],
        "vjp": torch.func.vjp(model, x)[1](model(x).detach())[0],
        "grad": torch.func.grad(loss)(x),
        "hessian": torch.func.hessian(loss)(x),
        "dual": dual,
        "product with the Hessian": product.detach(),
    }


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own use
@pytest.mark.parametrize("fisher", ["empirical", {"name": "mc", "likelihood": "gaussian"}], ids=str)
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_derivatives_of_any_mode_are_those_of_an_unwatched_model(name: str, fisher: Any) -> None:
    torch.manual_seed(0)
    build, shape = DIFFERENTIABLE[name]
    model = build().double()
    plain = copy.deepcopy(model)
    optimizer = fop.FOP(model, norms="unitwise", fisher=fisher)
    x, direction = torch.randn(2, *shape, dtype=torch.float64).unbind()
    found, wanted = derivatives(model, x, direction), derivatives(plain, x, direction)
    for key, value in wanted.items():
        assert distance([found[key]], [value]) < 1e-10, key
    model(x).square().mean().backward()  # and training goes on
    optimizer.step()
    assert fop.diagnostics(optimizer)


# ---- empty weights


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("fallback", ["sgd", "adamw"])
def test_empty_weights_use_the_fallback_optimizer(
    fallback: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """And what is around them is trained as if they were not there."""

    class Hollow(nn.Module):
        def __init__(self, hollow: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.one, self.two = nn.Linear(5, 4), nn.Linear(4, 3)
            self.none = nn.Linear(0, 4, bias=False) if hollow else None
            self.nobody = nn.Embedding(0, 4) if hollow else None
            self.nothing = nn.Conv1d(2, 0, 3) if hollow else None
            self.norm = nn.LayerNorm(0) if hollow else None

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.one(x).tanh()
            if self.none is not None:
                assert self.norm is not None
                hidden = hidden + self.none(self.norm(x[:, :0]))
            return self.two(hidden)

    found = []
    for hollow in (True, False):
        model = Hollow(hollow).double()
        with caplog.at_level("INFO", logger="fop"):
            optimizer = fop.FOP(model, fallback=fallback, norms="unitwise", weight_decay=0.01)
        train(model, optimizer, [points(seed=seed) for seed in range(3)])
        assert set(fop.diagnostics(optimizer)) == {"one", "two"}
        found.append([*model.one.parameters(), *model.two.parameters()])
    assert distance(*found) < 1e-12
    assert "uses the fallback optimizer (its weight is empty): 'none'" in caplog.text


# ---- replaced modules


def replace_at(model: Any, place: str, module: nn.Module) -> None:
    parent, _, key = place.rpartition(".")
    setattr(model.get_submodule(parent), key, module)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(2)])
        self.heads = nn.ModuleDict({"one": nn.Linear(5, 3)})
        self.norm = nn.LayerNorm(5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.heads["one"](self.norm(x))


REPLACEMENTS: dict[str, Callable[[], nn.Module]] = {
    "blocks.1.0": lambda: nn.Linear(5, 5),
    "blocks.0": lambda: nn.Sequential(nn.Linear(5, 5)),
    "heads.one": lambda: nn.Linear(5, 3),
    "norm": lambda: nn.LayerNorm(5),
}


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("place", REPLACEMENTS)
def test_a_replaced_module_is_named_at_the_next_step(place: str, steps: int) -> None:
    model = Nested().double()
    optimizer = fop.FOP(model)
    train(model, optimizer, [points(seed=seed) for seed in range(steps)])
    replace_at(model, place, REPLACEMENTS[place]().double())
    before = snapshot(model)
    with pytest.raises(RuntimeError, match=f"module '{place}' was replaced by another"):
        train(model, optimizer, [points()])
    assert same(snapshot(model), before)


def test_replaced_modules_that_need_no_training_are_fine() -> None:
    """Frozen, without parameters, around the module of before, or in another place."""
    model, (x, y) = Nested().double(), points()
    optimizer = fop.FOP(model)
    model.norm = nn.Identity()  # type: ignore[assignment]
    model.heads["one"] = nn.Sequential(model.heads["one"])
    model.blocks[0][0] = nn.Linear(5, 5).double().requires_grad_(False)
    first, second = model.blocks
    model.blocks = nn.ModuleList([second, first])
    train(model, optimizer, [(x, y)])
    values = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    torch.func.functional_call(model, values, (x,))
    train(model, optimizer, [(x, y)])
    assert set(fop.diagnostics(optimizer)) == {"blocks.1.0", "heads.one"}
