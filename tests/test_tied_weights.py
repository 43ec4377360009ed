"""Modules that share a weight form one block: their gradients and statistics add up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

import fop
from tests.common import distance, snapshot, train
from tests.oracles import Reference, dense_curvature, project


class Twice(nn.Module):
    """One weight used twice: by one module, or by two that share it."""

    def __init__(self, tied: bool, bias: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.head = nn.Linear(4, 4, bias=bias), nn.Linear(4, 3)
        self.two = self.one
        if tied:
            self.two = nn.Linear(4, 4, bias=bias)
            self.two.weight, self.two.bias = self.one.weight, self.one.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.two(torch.tanh(self.one(x)))))


def batches() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(7)
    return [(torch.randn(8, 4).double(), torch.randint(3, (8,))) for _ in range(5)]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("settings", [{}, {"sharing": "reduce"}, {"fisher": "exact"}], ids=str)
def test_two_tied_layers_train_like_one_layer_called_twice(
    bias: bool, settings: dict[str, Any]
) -> None:
    tied, single = Twice(True, bias).double(), Twice(False, bias).double()
    train(tied, fop.FOP(tied, **settings), batches())
    train(single, fop.FOP(single, **settings), batches())
    assert distance(snapshot(tied), snapshot(single)) < 1e-12


def test_biases_of_their_own_follow_the_fallback() -> None:
    model = Twice(True, False).double()
    model.one.bias, model.two.bias = (nn.Parameter(torch.zeros(4).double()) for _ in range(2))
    optimizer = fop.FOP(model, fallback="sgd")
    rules = {n: g["rule"] for g in optimizer.param_groups for n in g["param_names"]}
    assert rules["one.weight"] == "curvature"
    assert rules["one.bias"] == rules["two.bias"] == "sgd"
    x, y = batches()[0]
    cross_entropy(model(x), y).backward()
    expected = [-0.1 * layer.bias.grad for layer in (model.one, model.two)]
    optimizer.step()
    assert distance([model.one.bias, model.two.bias], expected) < 1e-12


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(6, 4)
        self.mix = nn.Linear(4, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, index: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.embed(index))))


@pytest.mark.parametrize("settings", [{}, {"damping_mode": "exact", "damping": 0.02}], ids=str)
def test_an_embedding_tied_to_the_output_adds_its_gradient(settings: dict[str, Any]) -> None:
    """a and d hold both uses; the curvature is the output layer's."""
    model = LanguageModel().double()
    index, target = torch.randint(6, (8,)), torch.randint(6, (8,))
    start = model.embed.weight.detach().clone()

    gradients = []
    for part in (slice(0, 4), slice(4, 8)):
        model.zero_grad()
        cross_entropy(model(index[part]), target[part]).backward()
        gradients.append(model.head.weight.grad.clone())
    model.zero_grad()
    hidden = torch.tanh(model.mix(model.embed(index))).detach()
    logits = model.head(hidden).detach().requires_grad_()
    cross_entropy(logits, target, reduction="sum").backward()
    factors = (hidden.T @ hidden / 8, logits.grad.T @ logits.grad / 8)
    reference = Reference(lr=1.0, kl_clip=None, **settings)
    fisher, damped = dense_curvature([factors], reference)
    average, difference = (gradients[0] + gradients[1]) / 2, gradients[0] - gradients[1]
    wanted = project(average, difference, fisher, damped, reference, [])

    optimizer = fop.FOP(model, lr=1.0, kl_clip=None, momentum=0.0, **settings)
    train(model, optimizer, [(index, target)])
    assert distance([start - model.embed.weight], [wanted.u]) < 1e-9
    assert set(fop.diagnostics(optimizer)) == {"embed", "mix"}


def preconditioned(model: nn.Module, **options: Any) -> set[str]:
    """The layers that take a step of curvature."""
    optimizer = fop.FOP(model, **options)
    train(model, optimizer, [(torch.randint(6, (8,)), torch.randint(6, (8,)))])
    return set(fop.diagnostics(optimizer))


def test_a_tied_embedding_with_another_gradient_leaves_the_weight_to_the_fallback() -> None:
    model = LanguageModel()
    model.embed.scale_grad_by_freq = True
    assert preconditioned(model) == {"mix"}


def test_skipping_one_of_the_tied_layers_skips_the_weight() -> None:
    assert preconditioned(LanguageModel(), skip="head") == {"mix"}


@pytest.mark.parametrize("kind", [fop.FOP, fop.KFAC])
def test_a_weight_tied_without_a_module_is_named(kind: Any) -> None:
    class Direct(LanguageModel):
        def forward(self, index: Tensor) -> Tensor:
            return linear(torch.tanh(self.mix(self.embed(index))), self.embed.weight)

    model = Direct().double()
    del model.head
    optimizer = kind(model)
    index, target = torch.randint(6, (8,)), torch.randint(6, (8,))
    with pytest.warns(RuntimeWarning, match=r"of layer 'embed' is not what .* skip=\['embed'\]"):
        train(model, optimizer, [(index, target)])
    train(model, optimizer, [(index, target)] * 3)  # and says so once
    del optimizer
    train(model, kind(model, skip="embed"), [(index, target)] * 3)


def test_a_hook_that_changes_a_gradient_is_named() -> None:
    model = nn.Sequential(nn.Linear(4, 3)).double()
    model[0].weight.register_hook(lambda gradient: gradient * 0.5)
    with pytest.warns(RuntimeWarning, match="or a hook changes its gradient"):
        train(model, fop.FOP(model), batches()[:1])
