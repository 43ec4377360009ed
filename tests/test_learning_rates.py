"""Learning rates and schedules mean what they say: they act on the length of steps as on SGD's.

While the KL clip is active the clip decides the length at the reference lr, and a schedule what
share of it is taken.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    StepLR,
)

import fop
from tests.common import distance, snapshot

DIGITS = load_digits()
STEPS = 80
Optimizer = fop.FOP | fop.KFAC
Schedule = Callable[[Optimizer], LRScheduler]


class Problem:
    """Handwritten digits, an MLP, batches of 64."""

    def __init__(self, seed: int) -> None:
        digits = DIGITS
        shuffled = torch.randperm(len(digits.data), generator=torch.Generator().manual_seed(0))
        x = torch.as_tensor(digits.data, dtype=torch.float32)[shuffled] / 16
        y = torch.as_tensor(digits.target)[shuffled]
        (self.x, self.held_out), (self.y, self.labels) = x.split(1200), y.split(1200)
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 10))
        self._order = torch.Generator().manual_seed(seed)

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(STEPS):
            chosen = torch.randint(len(self.x), (64,), generator=self._order)
            yield self.x[chosen], self.y[chosen]

    def loss(self) -> float:
        with torch.no_grad():
            return float(cross_entropy(self.model(self.held_out), self.labels))


@functools.cache  # many schedules are compared with one run at constant lr
def lengths(
    kind: type[Optimizer], momentum: float, schedule: Schedule | None, seed: int = 0, **options: Any
) -> tuple[list[float], float]:
    """How far each step went, and the loss at the end."""
    problem = Problem(seed)
    model = problem.model
    optimizer = kind(model, momentum=momentum, **options)
    scheduler = None if schedule is None else schedule(optimizer)
    went = []
    for x, y in problem.batches():
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        before = torch.cat([p.detach().flatten() for p in model.parameters()])
        optimizer.step()
        after = torch.cat([p.detach().flatten() for p in model.parameters()])
        went.append(float((after - before).norm()))
        if isinstance(scheduler, ReduceLROnPlateau):
            scheduler.step(1.0)  # a loss that never falls
        elif scheduler is not None:
            scheduler.step()
    return went, problem.loss()


MOMENTA = [0.9, 0.7]
KINDS = [fop.FOP, fop.KFAC]

# Each is lr / 10 from step 40 on.
DECAYS: dict[str, Schedule] = {
    "StepLR": lambda o: StepLR(o, step_size=40),
    "ReduceLROnPlateau": lambda o: ReduceLROnPlateau(o, patience=38, cooldown=STEPS),
}


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("momentum", MOMENTA)
@pytest.mark.parametrize("kind", KINDS)
def test_decay_by_ten_makes_steps_ten_times_shorter(
    kind: type[Optimizer], momentum: float, decay: str
) -> None:
    """Within 20 steps, against a run at constant lr, where the clip is active all along.

    All but what momentum keeps of the past: 0.9 ** 20 of the old velocity is still 0.12 of it.
    """
    constant, _ = lengths(kind, momentum, None, kl_clip=1e-4)
    decayed, _ = lengths(kind, momentum, DECAYS[decay], kl_clip=1e-4)
    assert decayed[:40] == constant[:40]
    for step in range(60, STEPS - 10):
        window = slice(step, step + 10)  # single steps differ in direction, so in what they add to
        ratio = sum(decayed[window]) / sum(constant[window])
        expected = 0.1 + momentum ** (step - 40)
        assert ratio < 1.5 * expected, (step, ratio)


RISING: dict[str, Schedule] = {
    "OneCycleLR": lambda o: OneCycleLR(o, max_lr=0.1, total_steps=STEPS),
    "OneCycleLR to ten times the constructor's lr": lambda o: OneCycleLR(
        o, max_lr=1.0, total_steps=STEPS
    ),
    "CosineAnnealingWarmRestarts": lambda o: CosineAnnealingWarmRestarts(o, T_0=20),
    "LinearLR": lambda o: LinearLR(o, start_factor=0.01, total_iters=20),
}


@pytest.mark.parametrize("rise", RISING)
@pytest.mark.parametrize("momentum", MOMENTA)
@pytest.mark.parametrize("kind", KINDS)
def test_a_rising_lr_never_makes_steps_longer_than_constant_lr(
    kind: type[Optimizer], momentum: float, rise: str
) -> None:
    """By at most half; and the loss ends where that of constant lr does, within its seed spread."""
    largest = 0.95 if rise.startswith("OneCycle") else momentum  # which OneCycleLR cycles, too
    seeds = range(3)
    constant = [lengths(kind, largest, None, seed) for seed in seeds]
    scheduled = [lengths(kind, momentum, RISING[rise], seed) for seed in seeds]
    for (steady, _), (risen, _) in zip(constant, scheduled, strict=True):
        assert max(risen) <= 1.5 * max(steady)
    ends = [loss for _, loss in constant]
    spread = max(ends) - min(ends)
    assert sum(loss for _, loss in scheduled) <= sum(ends) + 3 * spread


def test_the_step_follows_the_schedule_in_proportion() -> None:
    """Without momentum, at every step: half the reference lr is half the way."""
    full, _ = lengths(fop.KFAC, 0.0, None, kl_clip=1e-6)
    half, _ = lengths(fop.KFAC, 0.0, lambda o: StepLR(o, step_size=1000), kl_clip=1e-6)
    assert full == half
    problem = Problem(0)
    optimizer = fop.KFAC(problem.model, momentum=0.0, kl_clip=1e-6)
    x, y = next(problem.batches())
    went = []
    for lr in (0.1, 0.05, 0.02, 0.1):
        optimizer.param_groups[0]["lr"] = lr
        optimizer.zero_grad()
        cross_entropy(problem.model(x), y).backward()
        before = snapshot(problem.model)
        optimizer.step()
        moved = [b - a for a, b in zip(before, snapshot(problem.model), strict=True)]
        went.append(math.sqrt(sum(float(m.square().sum()) for m in moved)) / lr)
        with torch.no_grad():  # the same point again, so that only lr differs
            for parameter, old in zip(problem.model.parameters(), before, strict=True):
                parameter.copy_(old)
    # The curvature is refreshed on steps 1, 2 and 4, of one and the same batch.
    assert went == pytest.approx([went[0]] * 4, rel=1e-3)


def test_cosine_to_zero_ends_in_steps_of_no_length() -> None:
    went, _ = lengths(fop.FOP, 0.7, lambda o: CosineAnnealingLR(o, T_max=STEPS))
    assert went[-1] < 0.01 * max(went)


def test_velocity_is_not_rescaled_by_a_change_of_lr() -> None:
    """After lr goes to 0 the last displacement fades by momentum alone, whatever lr was."""
    problem = Problem(0)
    optimizer = fop.KFAC(problem.model, momentum=0.5)
    went = []
    for number, (x, y) in enumerate(problem.batches()):
        optimizer.param_groups[0]["lr"] = 0.1 if number < 5 else 0.0
        optimizer.zero_grad()
        cross_entropy(problem.model(x), y).backward()
        before = snapshot(problem.model)
        optimizer.step()
        after = snapshot(problem.model)
        moved = [b - a for a, b in zip(before, after, strict=True)]
        went.append(math.sqrt(sum(float(m.square().sum()) for m in moved)))
        if number == 8:
            break
    assert went[5:] == pytest.approx([went[4] * 0.5**k for k in (1, 2, 3, 4)], rel=1e-3)


@pytest.mark.parametrize("fallback", ["adamw", "sgd"])
def test_lr_may_be_a_tensor(fallback: str) -> None:
    """As in torch.optim, and schedulers write to it in place."""
    ends = []
    for lr in (0.1, torch.tensor(0.1, dtype=torch.float64)):
        problem = Problem(0)
        model = problem.model = nn.Sequential(problem.model, nn.LayerNorm(10)).double()
        optimizer = fop.FOP(model, lr, weight_decay=1e-2, fallback=fallback)  # type: ignore[arg-type]
        scheduler = CosineAnnealingWarmRestarts(optimizer, T_0=4)
        for x, y in [(x.double(), y) for x, y in problem.batches()][:10]:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
            scheduler.step()
        ends.append(snapshot(model))
    assert distance(*ends) < 1e-12


@pytest.mark.parametrize("lr", [torch.tensor(-0.1), torch.tensor([0.1]), torch.tensor(math.nan)])
def test_a_tensor_lr_is_checked_like_a_number(lr: Tensor) -> None:
    with pytest.raises((ValueError, TypeError), match="lr must be"):
        fop.FOP(nn.Linear(2, 2), lr)


def test_one_lr_written_to_all_groups_suits_the_fallback_too() -> None:
    """OneCycleLR and hand-written loops do that; AdamW at lr 0.1 would wreck a model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).double()
    optimizer = fop.KFAC(model, 0.1, fallback={"name": "adamw", "lr": 1e-3}, curvature="identity")
    norm = model[1].weight
    assert isinstance(norm, Tensor)
    moved = []
    for lr in (0.1, 0.05, 1.0):
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.zero_grad()
        model(torch.ones(3, 4, dtype=torch.float64)).square().sum().backward()
        before = norm.detach().clone()
        optimizer.step()
        moved.append(float((norm.detach() - before).abs().max()))
    # AdamW moves every entry by about its lr.
    assert moved == pytest.approx([1e-3, 5e-4, 1e-3], rel=0.05)


def test_a_group_with_a_smaller_lr_has_a_smaller_fallback_lr() -> None:
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.LayerNorm(4))
    groups = [{"names": ["0"], "lr": 0.01}]
    optimizer = fop.FOP(model, 0.1, fallback={"name": "adamw", "lr": 2e-3}, param_groups=groups)
    found = {group["param_names"][0]: group["fallback_lr"] for group in optimizer.param_groups}
    assert found == pytest.approx({"0.weight": 2e-4, "1.weight": 2e-3, "2.weight": 2e-3})
