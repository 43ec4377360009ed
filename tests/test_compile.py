"""Compiled models train like plain ones: watched layers run between the compiled graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fop
from tests.common import distance, points, snapshot, train

# Torch's own tracer looks at .grad of the tensors between two graphs, and warns about it.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(5, 8), nn.ReLU(inplace=True), nn.LayerNorm(8), nn.Linear(8, 3)
    ).double()


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch.compiler.reset()


@pytest.mark.parametrize("settings", [{}, {"fisher": "exact"}, {"norms": "unitwise"}], ids=str)
@pytest.mark.parametrize("order", ["compiled first", "optimizer first", "in place"])
def test_a_compiled_model_trains_like_a_plain_one(settings: dict[str, Any], order: str) -> None:
    plain, inner = model(), model()
    compiled: Any = inner
    if order == "compiled first":
        compiled = torch.compile(inner, backend="aot_eager")
    optimizer = fop.FOP(compiled, **settings)
    if order == "optimizer first":
        compiled = torch.compile(inner, backend="aot_eager")
    elif order == "in place":
        inner.compile(backend="aot_eager")
    data = [points(seed=seed) for seed in range(6)]
    train(compiled, optimizer, data)
    train(plain, fop.FOP(plain, **settings), data)
    assert distance(snapshot(inner), snapshot(plain)) < 1e-12


def test_a_compiled_training_step_is_the_plain_one() -> None:
    plain, inner = model(), model()
    optimizer = fop.FOP(inner)

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        cross_entropy(inner(x), y).backward()
        optimizer.step()

    compiled = torch.compile(step, backend="aot_eager")
    data = [points(seed=seed) for seed in range(2)]
    for x, y in data:
        compiled(x, y)
    train(plain, fop.FOP(plain), data)
    assert distance(snapshot(inner), snapshot(plain)) < 1e-12


def test_a_compiled_optimizer_step_is_the_plain_one() -> None:
    plain, inner = model(), model()
    optimizer = fop.FOP(inner)
    step = torch.compile(optimizer.step, backend="eager")
    data = [points(seed=seed) for seed in range(2)]
    for x, y in data:
        optimizer.zero_grad()
        cross_entropy(inner(x), y).backward()
        step()
    train(plain, fop.FOP(plain), data)
    assert distance(snapshot(inner), snapshot(plain)) < 1e-12
