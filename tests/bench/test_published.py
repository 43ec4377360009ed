"""The published figures are the printed ones, complete, and each says where it comes from."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from fop_bench import published
from fop_bench.workloads import WORKLOADS

TABLE_SIZES = {
    "cifar10-resnet18": (24, 20),
    "imagenet100-t2tvit": (12, 12),
    "imagenet1k-resnet50": (25, 12),
    "cifar10-lt-100": (4, 0),
    "cifar10-lt-50": (4, 0),
    "cifar100-lt-100": (4, 0),
    "cifar100-lt-50": (4, 0),
}


def test_every_published_workload_is_one_of_ours() -> None:
    assert set(published.workloads()) == set(TABLE_SIZES) <= set(WORKLOADS)
    assert published.for_workload("digits-mlp") is None


@pytest.mark.parametrize("name", TABLE_SIZES)
def test_tables_are_complete_and_sourced(name: str) -> None:
    figures = published.for_workload(name)
    assert figures is not None
    assert figures.workload == name
    assert (len(figures.results), len(figures.memory)) == TABLE_SIZES[name]
    places = [(r.method, r.batch_size) for r in figures.results]
    assert len(set(places)) == len(places)
    origins = [(r.source, r.where) for r in figures.results]
    origins += [(m.source, m.where) for m in figures.memory]
    for source, where in origins:
        assert source.url.startswith("https://arxiv.org/abs/")
        assert where


@pytest.mark.parametrize("name", TABLE_SIZES)
def test_printed_speedups_follow_from_the_printed_times(name: str) -> None:
    """Catches a slip of the pen in a time or a speed-up: both were printed, to two decimals."""
    figures = published.for_workload(name)
    assert figures is not None
    printed = [r for r in figures.results if r.speedup is not None]
    if not printed:
        return
    assert figures.reference is not None
    base = figures.find(figures.reference.method, figures.reference.batch_size)
    assert base is not None
    assert base.seconds is not None
    for result in printed:
        assert result.seconds is not None
        assert base.seconds / result.seconds == pytest.approx(result.speedup, abs=0.015)


@pytest.mark.parametrize("name", ["cifar10-resnet18", "imagenet100-t2tvit", "imagenet1k-resnet50"])
def test_targets_agree_with_the_workloads(name: str) -> None:
    figures = published.for_workload(name)
    assert figures is not None
    assert figures.target == WORKLOADS[name].target


def test_units_and_misses() -> None:
    cifar = published.for_workload("cifar10-resnet18")
    imagenet = published.for_workload("imagenet1k-resnet50")
    assert cifar is not None
    assert imagenet is not None
    fop = imagenet.find("fop", 8192)
    missed = cifar.find("kfac", 50000)
    assert fop is not None
    assert missed is not None
    assert fop.seconds == pytest.approx(335.1 * 60)
    assert missed.epochs == missed.seconds == math.inf
    assert not missed.reached
    assert cifar.find("soap", 2048) is None


def test_long_tail_errors_become_accuracies() -> None:
    figures = published.for_workload("cifar100-lt-100")
    assert figures is not None
    best = {r.method: r.best for r in figures.results}
    assert best["fop"] == pytest.approx(1 - 0.5897)
    assert max(best, key=lambda method: best[method] or 0) == "fop"


def test_other_second_order_methods_cite_their_own_papers() -> None:
    figures = published.for_workload("imagenet1k-resnet50")
    assert figures is not None
    seng = figures.find("seng", 4096)
    assert seng is not None
    assert (seng.epochs, seng.source.short) == (41, "Yang et al. 2020")
    sp_ngd = [r for r in figures.results if r.method == "sp-ngd"]
    assert {r.source.short for r in sp_ngd} == {"Osawa et al. 2020"}
    assert published.sources()["fop-paper"].short == "Lu and Armour 2025"


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "broken.toml"
    broken.write_text("results = [", encoding="utf-8")
    with pytest.raises(ValueError, match=r"broken\.toml"):
        published._read(broken)
