"""Unit-wise curvature of normalisation layers is exact, and optional."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import fop
from fop.testing import check_layer
from tests.common import cnn, distance, images, same, snapshot, train

CLASSES = 3

# The layer, and the shape of one input.
NORMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "layer norm": (lambda: nn.LayerNorm(4), (4,)),
    "layer norm over tokens": (lambda: nn.LayerNorm(4), (3, 4)),
    "layer norm of a matrix": (lambda: nn.LayerNorm([2, 3]), (2, 3)),
    "layer norm without bias": (lambda: nn.LayerNorm(4, bias=False), (4,)),
    "rms norm": (lambda: nn.RMSNorm(4), (3, 4)),
    "group norm": (lambda: nn.GroupNorm(2, 4), (4, 3, 2)),
    "batch norm 1d": (lambda: nn.BatchNorm1d(4), (4,)),
    "batch norm 1d over time": (lambda: nn.BatchNorm1d(4), (4, 5)),
    "batch norm 2d": (lambda: nn.BatchNorm2d(4), (4, 3, 2)),
    "batch norm 3d": (lambda: nn.BatchNorm3d(2), (2, 2, 3, 2)),
    "batch norm in evaluation": (lambda: nn.BatchNorm2d(4).eval(), (4, 3, 2)),
}


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_layer_takes_the_step_of_its_exact_blocks(name: str) -> None:
    torch.manual_seed(0)
    make, shape = NORMS[name]
    norm = make()
    with torch.no_grad():
        norm.weight.view(-1)[0] = -0.1  # zero in the battery: dividing by the weight would fail
        for buffer in norm.buffers():
            if buffer.is_floating_point():
                buffer.copy_(torch.rand_like(buffer) + 0.5)
    check_layer(norm, torch.randn(8, *shape))


def test_the_gradient_stays_autograds() -> None:
    found = []
    for norms in ("fallback", "unitwise"):
        model = cnn(dtype=torch.float64)
        optimizer = fop.FOP(model, norms=norms)
        x, y = images(dtype=torch.float64)
        cross_entropy(model(x), y).backward()
        found.append([p.grad for p in model[1].parameters()])
        del optimizer
    assert same(*found)


@pytest.mark.parametrize("settings", [{}, {"fisher": "exact"}, {"sharing": "reduce"}], ids=str)
def test_one_batch_equals_microbatches_with_norm_layers(settings: dict[str, Any]) -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(5, 6), nn.LayerNorm(6), nn.ReLU(inplace=True), nn.Linear(6, CLASSES)
        ).double()

    torch.manual_seed(1)
    x, y = torch.randn(12, 5, dtype=torch.float64), torch.randint(CLASSES, (12,))
    whole, split = model(), model()
    one = fop.FOP(whole, norms="unitwise", **settings)
    two = fop.FOP(split, norms="unitwise", **settings)
    for _ in range(3):
        train(whole, one, [(x, y)])
        two.zero_grad()
        for part in range(3):
            index = torch.arange(part, 12, 3)
            (cross_entropy(split(x[index]), y[index]) / 3).backward()
        two.step()
    assert distance(snapshot(split), snapshot(whole)) < 1e-11


def test_norms_without_parameters_and_the_default_use_no_curvature() -> None:
    model = nn.Sequential(
        nn.LayerNorm(4, elementwise_affine=False), nn.Linear(4, 3), nn.LayerNorm(3)
    )
    for norms, expected in (("unitwise", {"1", "2"}), ("fallback", {"1"})):
        optimizer = fop.FOP(model, norms=norms)
        train(model, optimizer, [(torch.randn(6, 4), torch.randint(3, (6,)))])
        assert set(fop.diagnostics(optimizer)) == expected


def test_a_frozen_bias_leaves_the_weight_its_curvature() -> None:
    torch.manual_seed(0)
    norm = nn.LayerNorm(4)
    model = nn.Sequential(norm, nn.Tanh(), nn.Linear(4, CLASSES)).double()
    norm.bias.requires_grad_(False)
    optimizer = fop.FOP(model, norms="unitwise")
    before = norm.bias.clone()
    data = [(torch.randn(6, 4, dtype=torch.float64), torch.randint(CLASSES, (6,)))] * 3
    train(model, optimizer, data)
    assert torch.equal(norm.bias, before)
    assert optimizer.state[norm.weight]["output_factor"].shape == (4, 1, 1)


def test_unitwise_norms_resume_bit_for_bit() -> None:
    data = [images(seed=seed) for seed in range(8)]
    whole = cnn()
    train(whole, fop.FOP(whole, norms="unitwise"), data)
    first, second = cnn(), cnn(seed=5)
    one, two = fop.FOP(first, norms="unitwise"), fop.FOP(second, norms="unitwise")
    train(first, one, data[:3])
    second.load_state_dict(first.state_dict())
    two.load_state_dict(one.state_dict())
    train(second, two, data[3:])
    assert same(snapshot(second), snapshot(whole))
