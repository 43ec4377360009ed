"""One bad batch does not wreck a run: a spike that stays finite is over within 30 steps."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fop
from fop.curvature.base import LARGEST_GROWTH, update_averages
from fop.linalg import Dense
from tests.common import train

FOUND = load_digits()
IMAGES = torch.as_tensor(FOUND.data, dtype=torch.float32)[:1500] / 16
LABELS = torch.as_tensor(FOUND.target)[:1500]

CURVATURE_STEP, PLAIN_STEP = 61, 64


def perceptron() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10)
    )


def whole_loss(model: nn.Module) -> float:
    with torch.no_grad():
        return float(cross_entropy(model(IMAGES), LABELS))


def spiked_backward(model: nn.Sequential, x: Tensor, y: Tensor, where: str, size: float) -> None:
    if where == "inputs":
        x = x * size
    hidden = model[2](model[1](model[0](x)))
    if where == "layer":
        hidden.register_hook(lambda grad: grad * size)
    loss = cross_entropy(model[4](model[3](hidden)), y)
    (loss * size if where == "loss" else loss).backward()


def batch(step: int) -> tuple[Tensor, Tensor]:
    chosen = torch.randint(len(IMAGES), (128,), generator=torch.Generator().manual_seed(step))
    return IMAGES[chosen], LABELS[chosen]


@functools.cache
def trained(kind: Any, steps: int, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The states of model and optimizer after so many steps."""
    model = perceptron()
    optimizer = kind(model, **options)
    train(model, optimizer, map(batch, range(1, steps + 1)))
    return copy.deepcopy((model.state_dict(), optimizer.state_dict()))


def recovers(kind: Any, where: str, size: float, at: int, **options: Any) -> tuple[float, float]:
    """The loss before the spike, and the least within 30 steps after it."""
    model = perceptron()
    optimizer = kind(model, **options)
    of_model, of_optimizer = copy.deepcopy(trained(kind, at - 1, **options))
    model.load_state_dict(of_model)
    optimizer.load_state_dict(of_optimizer)
    before, after = whole_loss(model), []
    spiked_backward(model, *batch(at), where, size)
    optimizer.step()
    for step in range(at + 1, at + 31):
        train(model, optimizer, [batch(step)])
        after.append(whole_loss(model))
    return before, min(after)


@pytest.mark.parametrize("size", [1e2, 1e4, 1e8])
@pytest.mark.parametrize("where", ["loss", "inputs", "layer"])
@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("kind", [fop.FOP, fop.KFAC])
def test_the_loss_is_back_within_30_steps(
    kind: Any, momentum: float, where: str, size: float
) -> None:
    """On a curvature step, whose factors the spike enters."""
    before, after = recovers(kind, where, size, CURVATURE_STEP, momentum=momentum)
    assert after < before


@pytest.mark.parametrize(
    "options",
    [
        {"update_every": 1},
        {"damping_mode": "exact"},
        {"curvature": "ekfac", "damping_mode": "exact"},
        {"sharing": "reduce"},
        {"fisher": "mc"},
    ],
    ids=str,
)
@pytest.mark.parametrize("at", [CURVATURE_STEP, PLAIN_STEP])
@pytest.mark.parametrize("where", ["loss", "inputs"])
def test_in_every_mode(options: dict[str, Any], at: int, where: str) -> None:
    before, after = recovers(fop.FOP, where, 1e6, at, **options)
    assert after < before


def averages(sizes: list[float], decay: float = 0.5) -> list[float]:
    """A moving average of multiples of one matrix, after each of them."""
    state: dict[str, Any] = {}
    matrix, found = torch.eye(3).unsqueeze(0), []
    for size in sizes:
        update_averages(state, {"factor": Dense(matrix * size)}, decay)
        found.append(float(state["factor"][0, 0, 0]))
    return found


def test_one_batch_enlarges_an_average_by_a_bounded_factor() -> None:
    assert averages([1.0, 1e8]) == [1.0, 0.5 + 0.5 * LARGEST_GROWTH]
    assert averages([1e-8, 1.0]) == pytest.approx([1e-8, 1e-8 * (0.5 + 0.5 * LARGEST_GROWTH)])


def test_growth_that_lasts_comes_in_with_the_next_batch() -> None:
    bounded = 0.5 + 0.5 * LARGEST_GROWTH
    assert averages([1.0, 1e4, 1e4]) == [1.0, bounded, 0.5 * bounded + 0.5e4]


def test_ordinary_batches_and_those_after_zeros_count_in_full() -> None:
    assert averages([1.0, 9.0, 0.0, 4.0]) == [1.0, 5.0, 2.5, 3.25]
    assert averages([0.0, 8.0]) == [0.0, 4.0]
