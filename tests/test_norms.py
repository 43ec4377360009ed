"""Unit-wise curvature of normalisation layers is exact, and optional."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fop
from tests.common import cnn, distance, images, same, snapshot, train
from tests.oracles import Reference, block_diagonal, project

CLASSES, N, DAMPING = 3, 8, 0.01

# the layer, the shape of one input, and the axes of [n, ...] that its units lie on
NORMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], tuple[int, ...]]] = {
    "layer norm": (lambda: nn.LayerNorm(4), (4,), (1,)),
    "layer norm over tokens": (lambda: nn.LayerNorm(4), (3, 4), (2,)),
    "layer norm of a matrix": (lambda: nn.LayerNorm([2, 3]), (2, 3), (1, 2)),
    "layer norm without bias": (lambda: nn.LayerNorm(4, bias=False), (4,), (1,)),
    "rms norm": (lambda: nn.RMSNorm(4), (3, 4), (2,)),
    "group norm": (lambda: nn.GroupNorm(2, 4), (4, 3, 2), (1,)),
    "batch norm 1d": (lambda: nn.BatchNorm1d(4), (4,), (1,)),
    "batch norm 1d over time": (lambda: nn.BatchNorm1d(4), (4, 5), (1,)),
    "batch norm 2d": (lambda: nn.BatchNorm2d(4), (4, 3, 2), (1,)),
    "batch norm 3d": (lambda: nn.BatchNorm3d(2), (2, 2, 3, 2), (1,)),
    "batch norm in evaluation": (lambda: nn.BatchNorm2d(4).eval(), (4, 3, 2), (1,)),
}


def build(name: str) -> tuple[nn.Sequential, nn.Module, tuple[int, ...], tuple[int, ...]]:
    torch.manual_seed(0)
    make, shape, axes = NORMS[name]
    norm = make()
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(torch.randn_like(parameter))
        norm.weight.view(-1)[0] = 0.0  # where dividing by the weight would fail
        for buffer in norm.buffers():
            if buffer.is_floating_point():
                buffer.copy_(torch.rand_like(buffer) + 0.5)
    size = torch.Size(shape).numel()
    model = nn.Sequential(norm, nn.Tanh(), nn.Flatten(), nn.Linear(size, CLASSES)).double()
    return model, model[0], shape, axes


def unit_gradients(
    model: nn.Sequential, x: Tensor, y: Tensor, axes: tuple[int, ...]
) -> list[Tensor]:
    """Per-example gradients of weight and bias, [n, units] each, from the definition."""
    norm, plain = copy.deepcopy(model[0]), copy.deepcopy(model[0])
    with torch.no_grad():
        affine = norm(x)
        plain.weight.fill_(1.0)
        if getattr(plain, "bias", None) is not None:
            plain.bias.fill_(0.0)
        z = plain(x)
    output = affine.clone().requires_grad_()
    cross_entropy(model[1:](output), y, reduction="sum").backward()
    rest = [axis for axis in range(1, x.dim()) if axis not in axes]
    parts = [output.grad * z, output.grad][: len(list(norm.parameters()))]
    return [(part.sum(rest) if rest else part).reshape(len(x), -1) for part in parts]


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("project_it", [True, False], ids=["fop", "kfac"])
def test_a_norm_layer_takes_the_step_of_its_exact_blocks(name: str, project_it: bool) -> None:
    model, norm, shape, axes = build(name)
    x, y = torch.randn(N, *shape, dtype=torch.float64), torch.randint(CLASSES, (N,))
    single = torch.stack(unit_gradients(model, x, y, axes), dim=-1)  # [n, units, 1 or 2]
    fisher = block_diagonal([g.T @ g / N for g in single.unbind(1)])
    damped = fisher + DAMPING * torch.eye(len(fisher), dtype=fisher.dtype)
    a, d = single.mean(0), single[: N // 2].mean(0) - single[N // 2 :].mean(0)
    options = {"lr": 1.0, "kl_clip": None, "damping": DAMPING}
    wanted = project(a, d, fisher, damped, Reference(**options, project=project_it), [])

    build_it = fop.FOP if project_it else fop.KFAC
    optimizer = build_it(model, norms="unitwise", momentum=0.0, **options)
    before = [p.detach().clone() for p in norm.parameters()]
    train(model, optimizer, [(x, y)])
    found = torch.stack(
        [
            (old - new).detach().reshape(-1)
            for old, new in zip(before, norm.parameters(), strict=True)
        ],
        dim=-1,
    )
    assert distance([found], [wanted.u]) < 1e-9
    assert "0" in fop.diagnostics(optimizer)


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
    model, norm, shape, _ = build("layer norm")
    norm.bias.requires_grad_(False)
    optimizer = fop.FOP(model, norms="unitwise")
    before = norm.bias.clone()
    data = [(torch.randn(6, *shape, dtype=torch.float64), torch.randint(CLASSES, (6,)))] * 3
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
