"""One batch equals its micro-batches, and what was captured lives and dies with `p.grad`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import fop
from tests.common import distance, mlp, points, same, snapshot, train

# The last is FOP's alone.
SETTINGS: list[dict[str, Any]] = [
    {},
    {"damping_mode": "exact"},
    {"sharing": "reduce"},
    {"fisher": "exact"},
    {"total": "sum"},
]


def small_cnn() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 4, 2, groups=1), nn.Flatten(),
        nn.Linear(36, 3),
    ).double()  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        *((fop.FOP, chosen) for chosen in SETTINGS),
        *((fop.KFAC, chosen) for chosen in SETTINGS[:-1]),
    ],
)
@pytest.mark.parametrize("parts", [2, 3, 6])
def test_one_batch_equals_k_microbatches(
    settings: dict[str, Any], kind: Callable[..., Any], parts: int
) -> None:
    """Each micro-batch is interleaved so that its halves are parts of the whole batch's halves."""
    torch.manual_seed(1)
    x, y = torch.randn(12, 2, 4, 4, dtype=torch.float64), torch.randint(3, (12,))
    whole, split = small_cnn(), small_cnn()
    one, two = kind(whole, **settings), kind(split, **settings)
    for _ in range(4):
        one.zero_grad()
        cross_entropy(whole(x), y).backward()
        one.step()
        two.zero_grad()
        for part in range(parts):
            index = torch.arange(part, 12, parts)
            (cross_entropy(split(x[index]), y[index]) / parts).backward()
        two.step()
    assert distance(snapshot(split), snapshot(whole)) < 1e-10


def test_a_sum_loss_gives_the_curvature_of_a_mean_loss() -> None:
    """Only the gradient grows by N, so with lr / N the step is the same."""
    one, two = mlp(), mlp()
    n = 12
    first = fop.FOP(one, lr=0.12, kl_clip=None)
    second = fop.FOP(two, lr=0.01, kl_clip=None, loss_reduction="sum")
    for seed in range(4):
        x, y = points(n, seed)
        first.zero_grad()
        cross_entropy(one(x), y).backward()
        first.step()
        second.zero_grad()
        cross_entropy(two(x), y, reduction="sum").backward()
        second.step()
    assert distance(snapshot(two), snapshot(one)) < 1e-12


def after_disturbance(disturb: Callable[[nn.Module, fop.FOP], None]) -> list[torch.Tensor]:
    """Two training steps; before the second something happens that must not matter."""
    model = mlp()
    # a fixed beta makes the update depend on the scale of the difference too
    optimizer = fop.FOP(model, update_every=1, beta=0.4)
    train(model, optimizer, [points(seed=0)])
    disturb(model, optimizer)
    x, y = points(seed=1)
    cross_entropy(model(x), y).backward()
    optimizer.step()
    return snapshot(model)


def undisturbed(model: nn.Module, optimizer: fop.FOP) -> None:
    optimizer.zero_grad()


def dropped_batch(model: nn.Module, optimizer: fop.FOP) -> None:
    """A backward whose step is skipped, as after an overflow."""
    optimizer.zero_grad()
    x, y = points(seed=7)
    cross_entropy(model(x), y).backward()
    optimizer.zero_grad()


def dropped_by_model_zero_grad(model: nn.Module, optimizer: fop.FOP) -> None:
    dropped_batch(model, optimizer)
    x, y = points(seed=8)
    cross_entropy(model(x), y).backward()
    model.zero_grad()


def dropped_in_place(model: nn.Module, optimizer: fop.FOP) -> None:
    x, y = points(seed=8)
    cross_entropy(model(x), y).backward()
    model.zero_grad(set_to_none=False)


def zeroed_in_place(model: nn.Module, optimizer: fop.FOP) -> None:
    dropped_batch(model, optimizer)
    optimizer.zero_grad(set_to_none=False)


def input_gradient(model: nn.Module, optimizer: fop.FOP) -> None:
    """An adversarial example, say: a backward that reaches no p.grad."""
    optimizer.zero_grad()
    x, y = points(seed=7)
    x.requires_grad_()
    torch.autograd.grad(cross_entropy(model(x), y), x)


def parameter_gradient(model: nn.Module, optimizer: fop.FOP) -> None:
    optimizer.zero_grad()
    x, y = points(seed=7)
    torch.autograd.grad(cross_entropy(model(x), y), list(model.parameters()))


def evaluation(model: nn.Module, optimizer: fop.FOP) -> None:
    optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        model(points(seed=7)[0])
    model(points(seed=7)[0])  # with a graph that is never used
    model.train()


@pytest.mark.parametrize(
    "disturb",
    [
        dropped_batch,
        dropped_by_model_zero_grad,
        dropped_in_place,
        zeroed_in_place,
        input_gradient,
        parameter_gradient,
        evaluation,
    ],
)
def test_what_never_reached_the_gradient_leaves_no_trace(
    disturb: Callable[[nn.Module, fop.FOP], None],
) -> None:
    assert distance(after_disturbance(disturb), after_disturbance(undisturbed)) < 1e-14


def test_gradients_that_are_not_zeroed_go_on_growing_with_their_difference() -> None:
    """Without zero_grad() the next step is that of both batches, as in any torch optimizer."""
    kept, fresh = mlp(), mlp()
    one = fop.FOP(kept, lr=0.0, update_every=100, momentum=0.0, beta=0.4)
    two = fop.FOP(fresh, lr=0.0, update_every=100, momentum=0.0, beta=0.4)
    for model, optimizer in ((kept, one), (fresh, two)):
        train(model, optimizer, [points(seed=s) for s in range(4)])  # early curvature steps
        optimizer.param_groups[0]["lr"] = 0.1
        optimizer.zero_grad()
    for model, optimizer in ((kept, one), (fresh, two)):
        x, y = points(seed=5)
        cross_entropy(model(x), y).backward()
        if model is kept:
            one.param_groups[0]["lr"] = 0.0
            optimizer.step()
            one.param_groups[0]["lr"] = 0.1
        x, y = points(seed=6)
        cross_entropy(model(x), y).backward()
        optimizer.step()
    assert same(snapshot(kept), snapshot(fresh))


@pytest.mark.parametrize("clip", [0.01, 0.3, 100.0])
def test_clipping_scales_average_and_difference_alike(clip: float) -> None:
    """u is linear in (a, d) for fixed coefficients: a clipped gradient gives the clipped step."""
    models = [mlp(), mlp()]
    found = []
    for model, limit in zip(models, (clip, float("inf")), strict=True):
        optimizer = fop.FOP(model, beta=0.4, eta=1.0, kl_clip=None, momentum=0.0)
        before = snapshot(model)
        x, y = points()
        cross_entropy(model(x), y).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), limit)
        optimizer.step()
        found.append([a - b for a, b in zip(snapshot(model), before, strict=True)])
    factor = min(1.0, clip / (float(norm) + 1e-6))
    assert distance(found[0], [u * factor for u in found[1]]) < 1e-9


def test_clipping_between_microbatches_rescales_what_was_captured() -> None:
    """The first backward is halved in p.grad before the second comes: so must its difference be."""
    one, two = mlp(), mlp()
    first, second = fop.FOP(one, beta=0.4), fop.FOP(two, beta=0.4)
    (x0, y0), (x1, y1) = points(seed=0), points(seed=1)
    for model, halve in ((one, False), (two, True)):
        (cross_entropy(model(x0), y0) * (1.0 if halve else 0.5)).backward()
        if halve:
            for parameter in model.parameters():
                parameter.grad.mul_(0.5)
        cross_entropy(model(x1), y1).backward()
    # the curvature sums differ (they hold unclipped gradients), so compare the captured difference
    for a, b in zip(first._engine.layers, second._engine.layers, strict=True):
        assert distance(b.recorder.sample().difference, a.recorder.sample().difference) < 1e-12
