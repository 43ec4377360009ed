"""Stripped of what makes them special, the optimizers are ones that everybody knows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fop
from tests.common import cnn, distance, images, mlp, points, same, snapshot, train

SGD_OPTIONS: list[dict[str, Any]] = [
    {"momentum": 0.0},
    {"momentum": 0.9},
    {"momentum": 0.9, "nesterov": True},
    {"momentum": 0.9, "weight_decay": 0.01},
    {"momentum": 0.9, "weight_decay": 0.01, "nesterov": True},
    {"momentum": 0.0, "weight_decay": 0.1},
]


@pytest.mark.parametrize("options", SGD_OPTIONS, ids=str)
@pytest.mark.parametrize("rest", ["layers", "skipped"])
def test_without_curvature_and_clip_it_is_sgd(options: dict[str, Any], rest: str) -> None:
    """To round-off: the velocity is kept as a displacement, lr included."""
    batches = [images(seed=seed, dtype=torch.float64) for seed in range(6)]
    ours, theirs = cnn(dtype=torch.float64), cnn(dtype=torch.float64)
    plain: dict[str, Any] = {"beta": 0, "eta": 1, "kl_clip": None, "fallback": "sgd"}
    bare = {"curvature": "identity"} if rest == "layers" else {"skip": "*"}
    train(ours, fop.FOP(ours, 0.05, **plain, **bare, **options), batches)
    train(theirs, torch.optim.SGD(theirs.parameters(), 0.05, **options), batches)
    assert distance(snapshot(ours), snapshot(theirs)) < 1e-13


@pytest.mark.parametrize("damping_mode", ["factored", "exact"])
def test_fop_without_projection_is_kfac(damping_mode: str) -> None:
    batches = [images(seed=seed) for seed in range(6)]
    one, two = cnn(), cnn()
    train(one, fop.FOP(one, beta=0, eta=1, damping_mode=damping_mode), batches)
    train(two, fop.KFAC(two, damping_mode=damping_mode), batches)
    assert same(snapshot(one), snapshot(two))


def test_the_adamw_fallback_is_adamw() -> None:
    """With options of its own."""
    own = {"lr": 3e-3, "betas": (0.8, 0.95), "eps": 1e-3}
    batches = [points(seed=seed) for seed in range(5)]
    one, two = mlp(), mlp()
    fallback: Any = {"name": "adamw", **own}
    optimizer = fop.FOP(one, fallback=fallback, weight_decay=0.1, skip="*")
    train(one, optimizer, batches)
    train(two, torch.optim.AdamW(two.parameters(), weight_decay=0.1, **own), batches)
    assert distance(snapshot(one), snapshot(two)) < 1e-12


def test_decoupled_weight_decay_shrinks_the_weights_alone() -> None:
    """With a zero gradient only the decay is left: W (1 - lr wd)^t."""
    model = nn.Linear(3, 2).double()
    before = snapshot(model)
    optimizer = fop.KFAC(
        model, 0.1, curvature="identity", weight_decay=0.5, decoupled_weight_decay=True
    )
    for _ in range(3):
        optimizer.zero_grad()
        (model(torch.ones(2, 3, dtype=torch.float64)).sum() * 0).backward()
        optimizer.step()
    assert distance(snapshot(model), [w * 0.95**3 for w in before]) < 1e-14
