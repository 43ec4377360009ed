"""Eigenvalue-corrected curvature: exact in the Kronecker basis, for every kind of layer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fop
from fop.capture.squares import Eigenbasis, GradientSquares
from fop.curvature.ekfac import carried_over
from tests.common import distance, mlp, points, same, snapshot, train
from tests.oracles import Reference, ReferenceOptimizer, accumulate, cross_entropy

CLASSES = 3


class Tokens(nn.Module):
    """Shared positions, and a layer that is called three times in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 4)
        self.mix = nn.Linear(4, 4, bias=False)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.embed(x))
        for _ in range(3):
            x = torch.tanh(self.mix(x))
        return self.head(x.mean(1))


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 2, groups=2), nn.Tanh(), nn.Conv2d(4, 3, 3, padding=1, bias=False),
        nn.Tanh(), nn.Flatten(), nn.Linear(27, CLASSES),
    )  # fmt: skip


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, CLASSES)), (4,)),
    "tokens": (Tokens, (5, 3)),
    "convolutions": (convolutional, (2, 4, 4)),
}


def batch(shape: tuple[int, ...], seed: int, n: int = 40) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, *shape, generator=generator, dtype=torch.float64)
    return x, torch.randint(CLASSES, (n,), generator=generator)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"project": False},
        {"sharing": "reduce", "update_every": 2},
        {"loss_reduction": "sum", "kl_clip": None, "lr": 1e-3},
        {"fisher": "exact"},
        {"total": "sum", "factor_decay": 0.5, "damping": 0.1},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", MODELS)
def test_steps_are_those_of_the_dense_reference(name: str, settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    build, shape = MODELS[name]
    model = build().double()
    options = {"damping": 0.02, "curvature": "ekfac", **settings}
    reference = ReferenceOptimizer(model, Reference(**options))
    project = options.pop("project", True)
    optimizer = (fop.FOP if project else fop.KFAC)(model, **options)
    for step in range(6):
        whole = batch(shape, step)
        parts = (
            [tuple(t[:25] for t in whole), tuple(t[25:] for t in whole)] if step > 2 else [whole]
        )
        optimizer.zero_grad()
        accumulate(model, parts, cross_entropy, reference.reference.loss_reduction)
        optimizer.step()
        reference.step(parts, cross_entropy)
        assert distance(model.parameters(), reference.model.parameters()) < 1e-7, step


def test_eigenvalues_are_those_of_the_true_fisher_not_of_the_product() -> None:
    """Inputs and output gradients are correlated, so KFAC's eigenvalues are wrong."""
    model = mlp()
    x, y = points(64)
    optimizer = fop.KFAC(model, lr=0.0, curvature="ekfac", update_every=1, kl_clip=None)
    train(model, optimizer, [(x, y)] * 5)
    state = optimizer.state[model[0].weight]
    fisher = torch.zeros(36, 36, dtype=torch.float64)
    for index in range(len(x)):
        loss = nn.functional.cross_entropy(model(x[index : index + 1]), y[index : index + 1])
        weight, bias = torch.autograd.grad(loss, (model[0].weight, model[0].bias))
        gradient = torch.cat([weight, bias[:, None]], dim=1).flatten()
        fisher += torch.outer(gradient, gradient) / len(x)
    basis = torch.kron(state["output_basis"][0], state["input_basis"][0])
    wanted = (basis.T @ fisher @ basis).diagonal()
    found = state["corrected_eigenvalues"].flatten()
    assert distance([found], [wanted]) < 1e-9
    product = torch.outer(state["output_eigenvalues"][0], state["input_eigenvalues"][0])
    assert distance([product.flatten()], [wanted]) > 0.1


def test_an_embedding_is_corrected_like_a_linear_layer_on_one_hot_rows() -> None:
    """Indices that occur several times in an example, and the padding index, included."""
    generator = torch.Generator().manual_seed(0)
    indices = torch.randint(-1, 5, (6, 7), generator=generator)
    gradients = torch.randn(6, 1, 7, 3, generator=generator, dtype=torch.float64)
    one_hot = nn.functional.one_hot(indices.clamp(min=0), 5).double()
    one_hot[indices < 0] = 0
    q = torch.linalg.qr(torch.randn(1, 3, 3, generator=generator, dtype=torch.float64))[0]
    results = []
    for indexed in (True, False):
        squares = GradientSquares(Eigenbasis(None, q), 5, torch.float64, has_bias=False)
        if indexed:
            squares.add_indices(indices)
        else:
            squares.add_inputs(one_hot.unsqueeze(1))
        squares.add_outputs(gradients)
        results.append(squares.finish())
    assert distance([results[0]], [results[1]]) < 1e-12


def test_calls_with_fewer_examples_count_as_far_as_they_go() -> None:
    generator = torch.Generator().manual_seed(0)

    def rows(n: int, features: int) -> Tensor:
        return torch.randn(n, 1, 2, features, generator=generator, dtype=torch.float64)

    calls = [(rows(5, 4), rows(5, 3)), (rows(2, 4), rows(2, 3))]
    squares = GradientSquares(Eigenbasis(None, None), 4, torch.float64, has_bias=False)
    for x, g in calls:
        squares.add_inputs(x)
        squares.add_outputs(g)
    gradient = torch.zeros(5, 3, 4, dtype=torch.float64)
    for x, g in calls:
        gradient[: len(x)] += torch.einsum("nkso,nksi->noi", g, x)
    assert distance([squares.finish()[0]], [gradient.square().sum(0)]) < 1e-12


def test_carrying_over_keeps_the_trace_and_there_is_nothing_to_do_in_the_same_basis() -> None:
    torch.manual_seed(0)
    values = torch.rand(2, 3, 4, dtype=torch.float64)

    def basis() -> Eigenbasis:
        return Eigenbasis(
            *(torch.linalg.qr(torch.randn(2, d, d, dtype=torch.float64))[0] for d in (4, 3))
        )

    old, new = basis(), basis()
    moved = carried_over(values, old, new)
    assert moved.sum().item() == pytest.approx(values.sum().item())
    assert not torch.allclose(moved, values)
    assert distance([carried_over(values, old, old)], [values]) < 1e-12


@pytest.mark.parametrize("wide", [{}, {"max_factor_size": 5}], ids=str)
def test_it_resumes_bit_for_bit(wide: dict[str, Any]) -> None:
    model = mlp()
    optimizer = fop.FOP(model, curvature="ekfac", update_every=2, **wide)
    batches = [points(seed=seed) for seed in range(10)]
    train(model, optimizer, batches[:5])
    other = copy.deepcopy(model)
    resumed = fop.FOP(other, curvature="ekfac", update_every=2, **wide)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer, batches[5:])
    train(other, resumed, batches[5:])
    assert same(snapshot(other), snapshot(model))


def test_a_bias_unfrozen_during_training_starts_the_eigenvalues_again() -> None:
    model = mlp()
    model[0].bias.requires_grad_(False)
    optimizer = fop.FOP(model, curvature="ekfac", update_every=1)
    train(model, optimizer, [points(seed=seed) for seed in range(3)])
    assert optimizer.state[model[0].weight]["corrected_eigenvalues"].shape == (1, 6, 5)
    model[0].bias.requires_grad_(True)
    train(model, optimizer, [points(seed=4)])
    assert "corrected_eigenvalues" not in optimizer.state[model[0].weight]
    train(model, optimizer, [points(seed=5)])
    assert optimizer.state[model[0].weight]["corrected_eigenvalues"].shape == (1, 6, 6)


def test_diagnostics_report_the_corrected_curvature() -> None:
    model = mlp()
    reference = ReferenceOptimizer(model, Reference(curvature="ekfac", damping=0.02))
    optimizer = fop.FOP(model, curvature="ekfac", damping=0.02)
    for seed in range(4):
        data = points(40, seed)
        train(model, optimizer, [data])
        traces = reference.step([data], cross_entropy)
    for name, entry in fop.diagnostics(optimizer).items():
        trace = traces[name]
        u = trace.u.flatten()
        terms = [entry[key] for key in ("kl_base", "kl_cross", "kl_orthogonal")]
        assert sum(terms) == pytest.approx(float(u @ trace.F @ u), rel=1e-6)
        assert entry["condition"] == pytest.approx(float(torch.linalg.cond(trace.M)), rel=1e-6)
