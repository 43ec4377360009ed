"""A researcher's own curvature, damping rule and step rule, without touching the library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fop
from fop.curvature.base import Curvature, CurvatureState, Requires, Shape
from fop.entries import Entry
from fop.projection import Coefficients, Metric
from fop.rules import Feedback, FixedDamping, KLClip, RelativeDamping
from tests.common import distance, mlp, points, snapshot, train

PLAIN: Any = {"kl_clip": None, "momentum": 0.0, "update_every": 1, "fallback": "sgd"}


# ---- a curvature in one file: the library's diagonal one, against autograd alone


def per_example_squares(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """E[(gradient of one example's loss)^2]"""
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for one in range(len(x)):
        loss = cross_entropy(model(x[one : one + 1]), y[one : one + 1])
        found = torch.autograd.grad(loss, list(model.parameters()))
        for name, gradient in zip(total, found, strict=True):
            total[name] += gradient.square() / len(x)
    return total


def test_diagonal_curvature_is_the_diagonal_of_the_empirical_fisher() -> None:
    model, (x, y) = mlp(), points()
    before, squares = snapshot(model), per_example_squares(model, x, y)
    optimizer = fop.KFAC(model, lr=0.5, curvature="diagonal", damping=0.01, **PLAIN)
    optimizer.zero_grad()
    cross_entropy(model(x), y).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    optimizer.step()
    expected = [
        old - 0.5 * gradients[name] / (squares[name] + 0.01)
        for old, (name, _) in zip(before, model.named_parameters(), strict=True)
    ]
    assert distance(snapshot(model), expected) < 1e-12
    assert all("input_factor" not in own for own in optimizer.state.values())


@pytest.mark.parametrize("kind", [fop.FOP, fop.KFAC])
def test_diagonal_curvature_trains_and_resumes(kind: Any) -> None:
    data = [points(seed=seed) for seed in range(8)]
    model, other = mlp(), mlp()
    one, two = kind(model, curvature="diagonal"), kind(other, curvature="diagonal")
    train(model, one, data[:4])
    other.load_state_dict(model.state_dict())
    two.load_state_dict(one.state_dict())
    train(model, one, data[4:])
    train(other, two, data[4:])
    assert distance(snapshot(model), snapshot(other)) == 0.0
    report = fop.diagnostics(one)
    assert all(
        entry["kl_base"] <= entry["kl_base"] + entry["kl_orthogonal"] for entry in report.values()
    )


# ---- a curvature of a user's own, which watches every gradient


class RunningSquares(Curvature):
    """M = diag(E[g^2])^1/2 + eps, of mini-batch gradients: RMSprop as a metric."""

    requires = Requires(gradients=True)
    entries: ClassVar[Any] = {"mean_square": Entry(lambda size: [size], low=0.0)}

    def watch(self, state: CurvatureState, gradient: Tensor) -> None:
        average = state.setdefault("mean_square", torch.zeros_like(gradient))
        average.mul_(0.9).addcmul_(gradient, gradient, value=0.1)

    def ready(self, state: CurvatureState, shape: Shape) -> bool:
        return True

    def metric(self, state: Mapping[str, Any], shape: Shape) -> Metric:
        return ElementwiseMetric(state["mean_square"].sqrt() + 1e-8)


@dataclass
class ElementwiseMetric:
    values: Tensor

    def to_basis(self, v: Tensor) -> Tensor:
        return v

    def from_basis(self, v: Tensor) -> Tensor:
        return v

    def fisher_product(self, a: Tensor, a_in_basis: Tensor) -> tuple[Tensor, bool]:
        return self.values * a, False

    def solve(self, v: Tensor) -> Tensor:
        return v / self.values


def test_a_curvature_may_watch_every_gradient() -> None:
    model, reference = mlp(), mlp()
    optimizer = fop.KFAC(model, lr=0.01, curvature=RunningSquares(), **PLAIN)
    rmsprop = torch.optim.RMSprop(reference.parameters(), lr=0.01, alpha=0.9)
    data = [points(seed=seed) for seed in range(6)]
    train(model, optimizer, data)
    for x, y in data:
        rmsprop.zero_grad()
        cross_entropy(reference(x), y).backward()
        rmsprop.step()
    assert distance(snapshot(model), snapshot(reference)) < 1e-12


# ---- rules


@dataclass
class Halving:
    """Half of what it was, at each refresh; remembers what it was told."""

    initial: float = 1.0
    told: list[Feedback] = field(default_factory=list)

    def __call__(self, feedback: Feedback) -> float:
        self.told.append(feedback)
        return feedback.asked if feedback.previous is None else feedback.previous / 2


def test_a_damping_rule_has_a_value_for_each_layer_and_feedback() -> None:
    model, rule = mlp(), Halving()
    optimizer = fop.FOP(model, damping=rule, update_every=1)
    assert optimizer.param_groups[0]["damping"] == 1.0
    train(model, optimizer, [points(seed=seed) for seed in range(3)])
    names = list(fop.diagnostics(optimizer))
    assert [f.layer for f in rule.told] == names * 3
    assert [f.step for f in rule.told[:: len(names)]] == [1, 2, 3]
    assert {entry["damping"] for entry in fop.diagnostics(optimizer).values()} == {0.25}
    assert rule.told[0].coefficients is None
    last = rule.told[-1]
    assert last.coefficients is not None
    assert last.mean_eigenvalue is not None
    own = optimizer.state[model[0].weight]
    traces = (
        own["input_factor"].diagonal(0, 1, 2).mean() * own["output_factor"].diagonal(0, 1, 2).mean()
    )
    first = [f for f in rule.told if f.layer == names[0]][-1]
    assert torch.isclose(first.mean_eigenvalue, traces)  # type: ignore[arg-type]


def test_a_fixed_rule_is_the_number() -> None:
    data = [points(seed=seed) for seed in range(4)]
    results = []
    for damping in (0.02, FixedDamping(0.02)):
        model = mlp()
        train(model, fop.FOP(model, damping=damping), data)
        results.append(snapshot(model))
    assert distance(*results) == 0.0


def test_relative_damping_does_not_depend_on_the_scale_of_the_loss() -> None:
    results = []
    for scale in (1.0, 1e3):
        model = mlp()
        rule = RelativeDamping(0.1)
        optimizer = fop.KFAC(model, lr=scale, damping=rule, damping_mode="exact", **PLAIN)
        for seed in range(3):
            x, y = points(seed=seed)
            optimizer.zero_grad()
            (scale * cross_entropy(model(x), y)).backward()
            optimizer.step()
        results.append(snapshot(model))
    assert distance(*results) < 1e-9


class HalfSteps:
    """No quadratic model at all: half of every update."""

    def terms(self, coefficients: Coefficients, lr: Any) -> Tensor:
        return coefficients.q.unsqueeze(-1)

    def scale(self, totals: Tensor) -> Tensor:
        return torch.full_like(totals[0], 0.5)


def test_a_step_rule_scales_all_updates() -> None:
    results = []
    for lr, rule in ((0.1, HalfSteps()), (0.05, KLClip(None))):
        model = mlp()
        optimizer = fop.KFAC(model, lr=lr, momentum=0.0, kl_clip=rule, fallback="sgd")
        train(model, optimizer, [points(seed=seed) for seed in range(3)])
        results.append(snapshot(model))
    assert distance(*results) < 1e-12


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"damping": FixedDamping}, "damping must be a number"),
        ({"damping": "fixed"}, "damping must be a number"),
        ({"kl_clip": KLClip}, "kl_clip must be"),
        ({"curvature": RunningSquares}, "curvature must be one of"),
    ],
)
def test_what_is_no_rule_is_refused(settings: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        fop.FOP(mlp(), **settings)
