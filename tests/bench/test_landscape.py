"""The surface is the workload's own loss, and the arrows are the methods' own first steps."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from fop_bench.landscape import (
    Landscape,
    coordinates,
    filter_normalised,
    measure,
    read_landscape,
    write_landscape,
)
from fop_bench.records import RecordError
from fop_bench.workloads import WORKLOADS

DIGITS = WORKLOADS["digits-mlp"]


def digits(plane: str = "steps", **more: object) -> Landscape:
    assert plane in ("steps", "random")
    settings: dict[str, object] = {"batch_size": 200, "warmup": 3, "resolution": 5, **more}
    return measure(DIGITS, plane=plane, **settings)  # type: ignore[arg-type]


def test_filters_of_a_direction_are_as_long_as_the_weights() -> None:
    conv, norm = nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5)
    parameters = [*conv.parameters(), *norm.parameters()]
    direction = filter_normalised(parameters, torch.Generator().manual_seed(1))
    lengths = direction[0].flatten(1).norm(dim=1)
    torch.testing.assert_close(lengths, conv.weight.detach().flatten(1).norm(dim=1))
    assert all(part.abs().sum() == 0 for part in direction[1:])
    assert not torch.allclose(direction[0], conv.weight)


def test_a_zero_filter_stays_where_it_is() -> None:
    weight = torch.zeros(2, 3)
    (direction,) = filter_normalised([weight], torch.Generator())
    assert torch.equal(direction, weight)


def test_coordinates_are_the_nearest_point_of_a_skewed_plane() -> None:
    generator = torch.Generator().manual_seed(0)

    def vector() -> list[torch.Tensor]:
        return [torch.randn(4, 3, generator=generator), torch.randn(5, generator=generator)]

    one, two, off = vector(), vector(), vector()
    inside = [3 * a - 2 * b for a, b in zip(one, two, strict=True)]
    assert coordinates(inside, (one, two)) == pytest.approx((3, -2))
    x, y = coordinates(off, (one, two))
    rest = [o - x * a - y * b for o, a, b in zip(off, one, two, strict=True)]
    for axis in (one, two):
        assert sum(float((r * a).sum()) for r, a in zip(rest, axis, strict=True)) == pytest.approx(
            0, abs=1e-5
        )
    assert coordinates(inside, (one, one))[1] == 0.0


def test_sgd_step_and_losses_match_a_hand_made_one() -> None:
    """From given weights, against plain autograd on the same batch."""
    model = DIGITS.model(3)
    found = digits(
        methods=("sgd", "kfac"), weights=model.state_dict(), options={"sgd": {"lr": 0.25}}
    )
    splits = DIGITS.splits(None)
    inputs, targets = next(iter(splits.train(200, 0, 1)))
    before = DIGITS.loss(model(inputs), targets)
    gradients = torch.autograd.grad(before, list(model.parameters()))
    length = math.sqrt(sum(float(g.square().sum()) for g in gradients))
    with torch.no_grad():
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.sub_(0.25 * gradient)
        after = DIGITS.loss(model(inputs), targets)
    sgd = found.steps[0]
    assert found.loss == pytest.approx(before.item(), rel=1e-5)
    assert (sgd.x, sgd.y) == pytest.approx((0.25 * length, 0), rel=1e-4, abs=1e-6)
    assert sgd.loss == pytest.approx(after.item(), rel=1e-4)
    assert sgd.share == pytest.approx(1)


def test_the_grid_holds_the_losses_of_its_plane() -> None:
    found = digits()
    assert len(found.losses) == len(found.losses[0]) == 5
    assert found.xs[2] == found.ys[2] == 0
    assert found.losses[2][2] == pytest.approx(found.loss)
    along_sgd = found.losses[2]
    assert along_sgd[3] < along_sgd[2] < along_sgd[1]  # x is the direction of SGD's step
    assert max(abs(step.x) for step in found.steps) < found.xs[-1]
    assert (found.x_label, found.plane) == ("along the step of SGD", "steps")


def test_random_plane_depends_on_the_seed_alone() -> None:
    one, again, other = digits("random"), digits("random"), digits("random", seed=1)
    assert one == again
    assert one.losses != other.losses
    assert all(0 < step.share < 0.5 for step in one.steps)
    assert one.xs[-1] == 1.0


def test_batch_norm_is_measured_on_the_batch_and_left_alone() -> None:
    def build() -> nn.Module:
        return nn.Sequential(
            nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10)
        )

    normed = replace(DIGITS, build=build)
    found = measure(normed, batch_size=100, warmup=1, resolution=3)
    assert found.losses[1][1] == pytest.approx(found.loss, rel=1e-6)
    assert [step.method for step in found.steps] == ["sgd", "kfac", "fop"]


def test_progress_is_told_for_every_point() -> None:
    seen: list[tuple[int, int]] = []
    digits(resolution=3, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(n, 9) for n in range(1, 10)]


def test_a_recorded_surface_reads_back_the_same(tmp_path: Path) -> None:
    found = digits()
    walls = tuple((math.inf, *row[1:]) for row in found.losses)
    found = replace(found, losses=walls)
    assert read_landscape(write_landscape(found, tmp_path / "landscape.json")) == found


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="resolution: expected an odd number"):
        digits(resolution=4)
    with pytest.raises(ValueError, match="methods: expected at least one"):
        digits(methods=())
    broken = tmp_path / "landscape.json"
    broken.write_text('{"xs": [1]}', encoding="utf-8")
    with pytest.raises(RecordError, match=r"landscape\.json holds no landscape"):
        read_landscape(broken)
