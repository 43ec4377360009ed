"""Learning rates follow the paper's formulas, and torch's schedulers where they are the same."""

from __future__ import annotations

import math

import pytest
import torch

from fop_bench.schedules import Schedule, ScheduleConfig, cosine, power, scaled_options


def test_cosine_is_the_papers_formula() -> None:
    for epoch in (0, 1, 37, 99):
        angle = 2 * 0.47 * math.pi * epoch / 100
        expected = 0.001 + 0.5 * (0.3 - 0.001) * (1 + math.cos(angle))
        assert cosine(epoch, 100, 0.3) == pytest.approx(expected, rel=1e-12)
    assert cosine(0, 100, 0.3) == pytest.approx(0.3)
    # 0.47 of a turn, not 0.5: the rate does not quite reach its floor.
    assert cosine(100, 100, 0.3) > 0.003


def test_cosine_never_raises_a_small_rate() -> None:
    rates = [cosine(epoch, 50, 1e-4) for epoch in range(50)]
    assert max(rates) == pytest.approx(1e-4)


@pytest.mark.parametrize("exponent", [4, 5, 6])
def test_power_is_the_papers_formula(exponent: int) -> None:
    assert power(0, 50, 0.2, exponent) == pytest.approx(0.2)
    assert power(25, 50, 0.2, exponent) == pytest.approx(0.2 / 2**exponent)
    assert power(50, 50, 0.2, exponent) == 0


def test_step_drops_at_its_milestones() -> None:
    schedule = Schedule(ScheduleConfig("step"), peak=0.1, epochs=200)
    rates = [schedule.lr(epoch * 7, 7) for epoch in (0, 159, 160, 179, 180, 199)]
    assert rates == pytest.approx([0.1, 0.1, 0.01, 0.01, 0.001, 0.001])


def test_warmup_rises_with_every_step_to_the_peak() -> None:
    schedule = Schedule(ScheduleConfig("constant", warmup_epochs=5), peak=1.0, epochs=50)
    rates = [schedule.lr(step, 4) for step in range(24)]
    assert rates[:20] == pytest.approx([(step + 1) / 20 for step in range(20)])
    assert rates[20:] == [1.0] * 4


def test_plateau_is_torchs_reduce_on_plateau() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    theirs = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, patience=5, factor=0.1, threshold=1e-4, threshold_mode="rel"
    )
    ours = Schedule(ScheduleConfig("plateau"), peak=0.5, epochs=100)
    generator = torch.Generator().manual_seed(0)
    drops = set()
    for epoch in range(60):
        # Falls, then lingers: some improvements are larger than the threshold and some are not.
        loss = max(0.3, 1 - epoch / 20) * (1 + 2e-4 * float(torch.rand(1, generator=generator)))
        theirs.step(loss)
        ours.end_epoch(loss)
        drops.add(ours.lr(epoch, 1))
        assert ours.lr(epoch, 1) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12)
    assert len(drops) >= 3


def test_a_plateau_goes_on_from_its_state() -> None:
    first = Schedule(ScheduleConfig("plateau", patience=2), peak=1.0, epochs=20)
    for _ in range(3):
        first.end_epoch(1.0)
    second = Schedule(ScheduleConfig("plateau", patience=2), peak=1.0, epochs=20)
    second.load_state_dict(first.state_dict())
    first.end_epoch(1.0)
    second.end_epoch(1.0)
    assert second.lr(0, 1) == first.lr(0, 1) == pytest.approx(0.1)


def test_rate_and_interval_follow_the_batch_size() -> None:
    options = {"lr": 0.1, "update_every": 100, "damping": 1e-3}
    assert scaled_options(options, 4096, 1024) == {
        "lr": pytest.approx(0.4),
        "update_every": 25,
        "damping": 1e-3,
    }
    assert scaled_options(options, 51200, 1024)["update_every"] == 5
    assert scaled_options({"lr": 0.1}, 2048, 1024) == {"lr": pytest.approx(0.2)}


def test_the_rules_can_be_switched_off() -> None:
    options = {"lr": 0.1, "update_every": 100}
    assert scaled_options(options, 4096, 1024, "none", "none") == options


def test_an_unknown_schedule_is_refused() -> None:
    with pytest.raises(ValueError, match=r"schedule\.name: expected one of 'constant', 'plateau'"):
        ScheduleConfig("exponential")
