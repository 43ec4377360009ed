"""Settings carried from a base batch to a larger one follow the paper's rules."""

from __future__ import annotations

import pytest

import fop
from fop.settings import Settings


@pytest.mark.parametrize(
    ("batch", "lr", "interval"),
    [(1024, 0.1, 100), (2048, 0.2, 50), (8192, 0.8, 12), (50000, 4.8828125, 5), (512, 0.05, 200)],
)
def test_lr_grows_and_the_interval_shrinks_to_five(batch: int, lr: float, interval: int) -> None:
    found = fop.scale_to_batch(batch, 1024, lr=0.1, update_every=100)
    assert found["lr"] == pytest.approx(lr)
    assert found["update_every"] == interval


def test_an_interval_below_five_is_kept() -> None:
    assert fop.scale_to_batch(4096, 1024, lr=0.1, update_every=2)["update_every"] == 2


def test_wrong_sizes_are_named() -> None:
    with pytest.raises(ValueError, match="base_batch_size must be a whole number >= 1, got 0"):
        fop.scale_to_batch(64, 0, lr=0.1)


def test_curvature_is_refreshed_early_and_then_by_the_interval() -> None:
    due = [step for step in range(1, 40) if Settings().refresh_due(step)]
    assert due == [1, 2, 4, 11, 21, 31]
    growing = Settings(update_every=lambda step: 2 if step < 10 else 10)
    assert [s for s in range(1, 33) if growing.refresh_due(s)] == [1, 2, 3, 4, 5, 7, 9, 11, 21, 31]
