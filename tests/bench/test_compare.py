"""Comparisons and sweeps run what is not recorded, never drop a miss, and carry their control."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fop_bench.compare import comparison_jobs, run_all
from fop_bench.config import ConfigError
from fop_bench.loop import RunExistsError, Runtime
from fop_bench.progress import Display
from fop_bench.recipes import Recipe
from fop_bench.records import load_runs
from fop_bench.sweep import SWEEPS, get_sweep, sweep_jobs
from fop_bench.workloads import WORKLOADS
from tests.bench.tiny import TinyWorkload

QUIET = Runtime(tensorboard=False, keep_checkpoint=False)


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WORKLOADS, "tiny", TinyWorkload())  # type: ignore[arg-type]


def recipe(**table: Any) -> Recipe:
    return Recipe("tiny", {"workload": "tiny", "seeds": [0], "epochs": 2, **table})


def carry_out(jobs: Any) -> Any:
    with Display(Console(quiet=True), len(jobs)) as display:
        return run_all(jobs, QUIET, display)


def test_a_comparison_has_every_run_and_its_control(tmp_path: Path) -> None:
    configs = recipe(seeds=[0, 1]).plan(("sgd", "fop"), (32, 200))
    assert len(configs) == 3 * 2 * 2
    runs = carry_out(comparison_jobs(configs, tmp_path))
    places = {run.path.relative_to(tmp_path).as_posix() for run in runs}
    assert "tiny/kfac-2x/b200/s1" in places
    assert len(places) == 12
    assert {run.path for run in load_runs(tmp_path)} == {run.path for run in runs}
    assert not list(tmp_path.rglob("checkpoint.pt"))


def test_what_is_recorded_is_not_run_again(tmp_path: Path) -> None:
    first = carry_out(comparison_jobs(recipe().plan(("sgd",), (32,)), tmp_path))
    both = carry_out(comparison_jobs(recipe().plan(("sgd", "adamw"), (32,)), tmp_path))
    assert both[0].meta == first[0].meta
    assert both[1].meta["method"] == "adamw"


def test_other_settings_are_not_mixed_into_a_comparison(tmp_path: Path) -> None:
    carry_out(comparison_jobs(recipe().plan(("sgd",), (32,)), tmp_path))
    other = recipe(method={"momentum": 0.5}).plan(("sgd",), (32,))
    with pytest.raises(RunExistsError, match=r"options\.momentum: 0\.9 / 0\.5"):
        carry_out(comparison_jobs(other, tmp_path))


def test_a_run_that_diverges_is_kept_as_a_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(WORKLOADS, "tiny", TinyWorkload(poison=math.nan))  # type: ignore[arg-type]
    (run,) = carry_out(comparison_jobs(recipe().plan(("sgd",), (32,)), tmp_path))
    assert run.meta["status"] == "diverged"
    assert [found.to_target() for found in load_runs(tmp_path)] == [math.inf]
    (again,) = carry_out(comparison_jobs(recipe().plan(("sgd",), (32,)), tmp_path))
    assert again.meta == run.meta


@pytest.mark.parametrize("name", SWEEPS)
def test_every_sweep_has_fop_kfac_and_the_control(name: str, tmp_path: Path) -> None:
    jobs = sweep_jobs(get_sweep(name), recipe(), tmp_path, batch_sizes=(32,))
    assert {"kfac", "kfac-2x", "fop"} <= {config.method for _, config in jobs}
    assert len({path for path, _ in jobs}) == len(jobs)


def test_the_damping_sweep_varies_damping_alone(tmp_path: Path) -> None:
    jobs = sweep_jobs(
        get_sweep("damping"), recipe(), tmp_path, batch_sizes=(32,), methods=("kfac",)
    )
    assert [config.options["damping"] for _, config in jobs] == [1e-5, 1e-4, 1e-3, 1e-2, 1e-1]
    others = [{**config.options, "damping": 0} for _, config in jobs]
    assert all(options == others[0] for options in others)
    chosen = sweep_jobs(
        get_sweep("damping"),
        recipe(),
        tmp_path,
        batch_sizes=(32,),
        methods=("kfac",),
        values=(0.5,),
    )
    assert [config.options["damping"] for _, config in chosen] == [0.5]


def test_the_ablation_has_every_pair_for_fop_and_one_kfac(tmp_path: Path) -> None:
    jobs = sweep_jobs(get_sweep("ablation"), recipe(), tmp_path, batch_sizes=(32,))
    pairs = [(c.options["beta"], c.options["eta"]) for _, c in jobs if c.method == "fop"]
    betas = (-0.1, -0.01, 0.0, 0.01, 0.1, "adaptive")
    assert set(pairs) == {(beta, eta) for beta in betas for eta in (1.0, "adaptive")}
    assert len(pairs) == 12
    assert [c.method for _, c in jobs if c.method != "fop"] == ["kfac", "kfac-2x"]


def test_the_interval_sweep_measures_the_interval_it_names(tmp_path: Path) -> None:
    sweep = get_sweep("update_every")
    jobs = sweep_jobs(
        sweep, recipe(), tmp_path, batch_sizes=(200,), methods=("kfac",), values=(1, 100)
    )
    runs = carry_out(jobs)
    # Batch 200 is 6.25 times the base batch, and yet no rule changed the interval.
    assert [run.meta["at_batch_size"]["update_every"] for run in runs] == [1, 100]


def test_values_are_refused_where_a_sweep_has_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'ablation' takes none"):
        sweep_jobs(get_sweep("ablation"), recipe(), tmp_path, values=(1,))
    with pytest.raises(ConfigError, match=r"unknown sweep .momentun. \(did you mean momentum"):
        get_sweep("momentun")
