"""With `stagger`, every layer refreshes its curvature as often as ever, but not all on one step."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fop
from fop.costs import Work, refresh_cost
from fop.refresh import phases
from fop.settings import EARLY_REFRESH_STEPS
from tests.common import Batch, mlp, points, same, snapshot, train

STEPS = 26
EVERY = 5
STAGGERED: Any = {"steps": EVERY, "stagger": True}


def deep(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    widths = (5, 9, 7, 8, 6, 3)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).double()


def data(steps: int = STEPS) -> list[Batch]:
    return [points(seed=seed) for seed in range(steps)]


def factors(model: nn.Sequential, optimizer: Any) -> dict[str, Tensor]:
    return {
        name: optimizer.state[module.weight]["input_factor"].clone()
        for name, module in model.named_children()
        if isinstance(module, nn.Linear)
    }


def refreshes(model: nn.Sequential, optimizer: Any) -> dict[str, list[int]]:
    """On which steps each layer's factor changed."""
    found: dict[str, list[int]] = {}
    known: dict[str, Tensor] = {}
    for step, batch in enumerate(data(), start=1):
        train(model, optimizer, [batch])
        for name, factor in factors(model, optimizer).items():
            if name not in known or not torch.equal(known[name], factor):
                found.setdefault(name, []).append(step)
            known[name] = factor
    return found


@pytest.mark.parametrize("kind", [fop.FOP, fop.KFAC])
@pytest.mark.parametrize("settings", [{}, {"fisher": "mc"}, {"curvature": "ekfac"}])
def test_each_layer_is_refreshed_once_an_interval_and_early_on(
    kind: Any, settings: dict[str, Any]
) -> None:
    model = deep()
    found = refreshes(model, kind(model, update_every=STAGGERED, **settings))
    starts = set()
    for steps in found.values():
        late = [step for step in steps if step not in EARLY_REFRESH_STEPS]
        phase = (late[0] - 1) % EVERY
        starts.add(phase)
        expected = {s for s in range(1, STEPS + 1) if (s - 1 - phase) % EVERY == 0}
        assert steps == sorted(expected | EARLY_REFRESH_STEPS)
    assert starts == set(range(EVERY))  # five layers, one a step


def test_without_stagger_all_layers_are_refreshed_together() -> None:
    model = deep()
    found = refreshes(model, fop.FOP(model, update_every=EVERY))
    assert {tuple(steps) for steps in found.values()} == {(1, 2, 4, 6, 11, 16, 21, 26)}


def test_a_layer_sees_what_it_would_on_the_plain_schedule_shifted_by_its_phase() -> None:
    """With lr=0 layers do not influence each other, and factors and inverses are the same bits."""
    model = deep()
    optimizer = fop.FOP(model, lr=0.0, update_every=STAGGERED)
    found = refreshes(model, optimizer)
    for name, steps in found.items():
        alone = deep()
        shifted = fop.FOP(alone, lr=0.0, update_every=lambda step, due=steps: _interval(step, due))
        train(alone, shifted, data())
        ours, plain = model.get_submodule(name), alone.get_submodule(name)
        for key in ("input_factor", "output_factor", "input_inverse", "output_inverse"):
            assert torch.equal(optimizer.state[ours.weight][key], shifted.state[plain.weight][key])


def _interval(step: int, due: list[int]) -> int:
    return 1 if step in due else 10**6


def test_one_layer_trains_as_without_stagger() -> None:
    trained = []
    for stagger in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 3)).double()
        train(model, fop.FOP(model, update_every={"steps": EVERY, "stagger": stagger}), data())
        trained.append(snapshot(model))
    assert same(*trained)


@pytest.mark.parametrize("at", [3, 8, 14])
def test_a_staggered_run_resumes_bit_for_bit(at: int) -> None:
    model = deep()
    optimizer = fop.FOP(model, update_every=STAGGERED)
    train(model, optimizer, data()[:at])
    copied, saved = copy.deepcopy(model), copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, data()[at:])
    resumed = fop.FOP(copied, update_every=STAGGERED)
    resumed.load_state_dict(saved)
    train(copied, resumed, data()[at:])
    assert same(snapshot(model), snapshot(copied))


def test_a_layer_that_is_not_due_captures_no_sums() -> None:
    model = mlp()
    optimizer = fop.KFAC(model, update_every={"steps": 4, "stagger": True})
    train(model, optimizer, data(4))
    watched = []
    for x, y in data(4):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        blocks = optimizer._engine.layers
        watched.append([block.recorder.sample().statistics.passes > 0 for block in blocks])
        optimizer.step()
    # steps 5 to 8: two layers, two steps apart
    assert [sum(step) for step in watched] == [1, 0, 1, 0]


def resnet18_costs() -> list[float]:
    convolutions = [(64, 27)] + 4 * [(64, 576)]
    for width in (128, 256, 512):
        convolutions += [(width, 9 * width // 2), (width, width // 2)] + 3 * [(width, 9 * width)]
    shapes = [*convolutions, (10, 513)]
    return [refresh_cost(Work(rows, columns)) for rows, columns in shapes]


def work_by_step(costs: list[float], interval: int) -> list[float]:
    chosen = phases(tuple(costs), interval)
    return [sum(c for c, p in zip(costs, chosen, strict=True) if p == i) for i in range(interval)]


def test_the_worst_step_has_no_more_work_than_balance_allows() -> None:
    """Within 4/3 of the best possible, which is the mean or the dearest layer (Graham 1969)."""
    for costs in (resnet18_costs(), [1.0] * 23, [float(i) for i in range(1, 40)]):
        for interval in (2, 5, 10):
            work = work_by_step(costs, interval)
            assert sum(work) == pytest.approx(sum(costs))
            assert max(work) <= 4 / 3 * max(sum(costs) / interval, max(costs))


def test_few_layers_are_spread_evenly_over_a_long_interval() -> None:
    assert sorted(phases((3.0, 2.0, 1.0, 1.0), 100)) == [0, 25, 50, 75]
    assert phases((1.0, 1.0), 1) == (0, 0)
    assert phases((), 10) == ()


def test_a_diagonal_factor_costs_next_to_nothing() -> None:
    dense, kept = Work(8, 50000), Work(8, 50000, diagonal_columns=True)
    assert refresh_cost(kept) < 1e-4 * refresh_cost(dense)
    assert refresh_cost(Work(8, 5, groups=3)) == 3 * refresh_cost(Work(8, 5))


def test_stagger_is_a_flag() -> None:
    with pytest.raises(TypeError, match="stagger"):
        fop.FOP(mlp(), update_every={"steps": 3, "stagger": 3})  # type: ignore[typeddict-item]
