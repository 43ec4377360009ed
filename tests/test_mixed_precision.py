"""Autocast, loss scaling and half-precision models: the same mathematics in fewer bits."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fop
from tests.common import distance, mlp, points, same, snapshot, train

HALVES = [torch.bfloat16, torch.float16]


def single(n: int = 12, seed: int = 0) -> tuple[Tensor, Tensor]:
    return points(n, seed, torch.float32)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("build", [fop.FOP, fop.KFAC])
def test_curvature_under_autocast_is_that_of_the_rounded_values_in_single_precision(
    dtype: torch.dtype, build: Any
) -> None:
    model = mlp(dtype=torch.float32)
    optimizer = build(model)
    x, y = single()
    with torch.autocast("cpu", dtype):
        logits = model(x)
        logits.retain_grad()
        loss = cross_entropy(logits, y)
    loss.backward()
    optimizer.step()
    rounded = torch.cat([x.to(dtype).float(), torch.ones(len(x), 1)], dim=1)
    expected = rounded.T @ rounded / len(x)
    assert distance([optimizer.state[model[0].weight]["input_factor"][0]], [expected]) < 1e-6
    g = logits.grad.float() * len(x)
    expected = g.T @ g / len(x)
    assert distance([optimizer.state[model[2].weight]["output_factor"][0]], [expected]) < 1e-6


@pytest.mark.parametrize("settings", [{}, {"fallback": "adamw", "skip": "2"}], ids=str)
@pytest.mark.parametrize("unscale", [False, True], ids=["step", "unscale_, clip and step"])
def test_steps_lost_to_overflow_in_fp16_lose_and_leak_nothing(
    settings: dict[str, Any], unscale: bool
) -> None:
    """A run that first has to find its scale is the run that started with it, bit for bit."""

    def run(scale: float) -> tuple[list[Tensor], float, int]:
        model = mlp(dtype=torch.float32)
        optimizer = fop.FOP(model, update_every=1, **settings)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        optimizer.grad_scaler = scaler
        skipped = 0
        for seed in range(6):
            x, y = single(seed=seed)
            while True:
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.float16):
                    loss = cross_entropy(model(x), y)
                scaler.scale(loss).backward()
                if unscale:
                    scaler.unscale_(optimizer)
                    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                before = scaler.get_scale()
                scaler.step(optimizer)
                scaler.update()
                if scaler.get_scale() == before:
                    break
                skipped += 1
        return snapshot(model), scaler.get_scale(), skipped

    found, scale, skipped = run(2.0**24)
    assert skipped > 3
    expected, _, none = run(scale)
    assert none == 0
    assert same(found, expected)


def test_fp16_with_a_scaler_trains_close_to_full_precision() -> None:
    full, mixed = mlp(dtype=torch.float32), mlp(dtype=torch.float32)
    one, two = fop.FOP(full), fop.FOP(mixed)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for seed in range(6):
        x, y = single(32, seed)
        train(full, one, [(x, y)])
        two.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = cross_entropy(mixed(x), y)
        scaler.scale(loss).backward()
        scaler.step(two)
        scaler.update()
    assert 0 < distance(snapshot(mixed), snapshot(full)) < 0.02


def test_a_pure_bf16_step_is_the_step_of_its_rounded_numbers() -> None:
    """Momentum aside, a bf16 model takes the float32 step from bf16 gradients, rounded once."""
    model = mlp(dtype=torch.bfloat16)
    optimizer = fop.KFAC(model, kl_clip=None, momentum=0.0)
    x, y = points(dtype=torch.bfloat16)
    cross_entropy(model(x), y).backward()
    before, gradients = snapshot(model), [p.grad.float() for p in model.parameters()]
    optimizer.step()
    for layer, index in ((model[0], 0), (model[2], 2)):
        own = optimizer.state[layer.weight]
        a = torch.cat([gradients[index], gradients[index + 1].unsqueeze(1)], dim=1)
        u = own["output_inverse"][0] @ a @ own["input_inverse"][0]
        for part, old, new in (
            (u[:, :-1], before[index], layer.weight),
            (u[:, -1], before[index + 1], layer.bias),
        ):
            wanted = old.clone().add_(part.to(torch.bfloat16), alpha=-0.1)
            assert (new.detach() - wanted).abs().max() <= 2**-7 * wanted.abs().max()
            assert own["input_inverse"].dtype == torch.float32


@pytest.mark.parametrize("dtype", HALVES)
def test_an_overflow_in_a_half_precision_model_changes_nothing(dtype: torch.dtype) -> None:
    model = mlp(dtype=dtype)
    optimizer = fop.FOP(model)
    train(model, optimizer, [points(seed=seed, dtype=dtype) for seed in range(3)])
    before, state = snapshot(model), copy.deepcopy(optimizer.state_dict()["state"])
    optimizer.zero_grad()
    x, y = points(dtype=dtype)
    (cross_entropy(model(x), y) * math.inf).backward()
    optimizer.step()
    assert same(snapshot(model), before)
    for number, entries in optimizer.state_dict()["state"].items():
        for key, value in entries.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(state[number][key]))
