"""Every method gets the same budget, on the validation split, and the best setting is written."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fop_bench.config import ConfigError
from fop_bench.loop import Runtime
from fop_bench.progress import Display
from fop_bench.recipes import Recipe
from fop_bench.records import Run, load_runs
from fop_bench.tune import Budget, carry_out, plan_search, rank, score
from fop_bench.tuned import Setting, read_tuned, write_tuned
from fop_bench.workloads import WORKLOADS
from tests.bench.tiny import TinyWorkload

QUIET = Runtime(tensorboard=False, keep_checkpoint=False)
BUDGET = Budget(trials=3, seeds=(7, 8), epochs=2)


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WORKLOADS, "tiny", TinyWorkload())  # type: ignore[arg-type]


def recipe(**table: Any) -> Recipe:
    return Recipe("tiny", {"workload": "tiny", **table})


def quiet_display() -> Display:
    return Display(Console(quiet=True))


def run_reaching(epochs: float, best: float) -> Run:
    meta = {"metric": "accuracy", "target": 0.9, "higher_is_better": True, "status": "complete"}
    metrics = [{"epoch": 1, "test_accuracy": min(best, 0.5)}]
    if math.isfinite(epochs):
        metrics.append({"epoch": epochs, "test_accuracy": 0.9})
    return Run(Path(), meta, [*metrics, {"epoch": 99, "test_accuracy": best}])


def test_every_method_gets_the_same_trials_seeds_and_epochs(tmp_path: Path) -> None:
    methods = ("sgd", "adamw", "fop", "kfac", "kfac-2x")
    searches = plan_search(recipe(), methods, (32, 200), BUDGET, tmp_path)
    # The control takes KFAC's setting, so it is not searched itself.
    assert [s.method for s in searches] == ["sgd", "adamw", "fop", "kfac"] * 2
    for search in searches:
        assert len(search.trials) == 3
        assert [c.seed for _, c in search.jobs] == [7, 8] * 3
        assert {c.epochs for _, c in search.jobs} == {2}
        assert {c.split for _, c in search.jobs} == {"validation"}
    assert len({path for search in searches for path, _ in search.jobs}) == 8 * 3 * 2


def test_a_budget_that_a_grid_cannot_fill_is_refused(tmp_path: Path) -> None:
    small = recipe(grid={"sgd": {"lr": [0.1], "momentum": [0.9], "nesterov": [False, True]}})
    with pytest.raises(ConfigError, match=r"--trials 3 is more than the 2 settings of 'sgd'"):
        plan_search(small, ("sgd",), (32,), BUDGET, tmp_path)


def test_the_search_finds_the_rate_that_works_and_can_be_repeated(tmp_path: Path) -> None:
    only = {"sgd": {"lr": [1e-6, 0.1, 1e-5], "momentum": [0.9], "nesterov": [False]}}
    searches = plan_search(recipe(grid=only), ("sgd",), (32,), BUDGET, tmp_path)
    with quiet_display() as display:
        (setting,) = carry_out(searches, BUDGET, QUIET, display)
    assert setting.options["lr"] == 0.1
    assert setting.score["seeds"] == 2
    before = {run.path: run.meta["finished"] for run in load_runs(tmp_path)}
    assert len(before) == 6
    with quiet_display() as display:
        assert carry_out(searches, BUDGET, QUIET, display) == [setting]
    assert {run.path: run.meta["finished"] for run in load_runs(tmp_path)} == before


def test_misses_count_before_speed_and_speed_before_accuracy() -> None:
    sure = [run_reaching(9, 0.91), run_reaching(9, 0.91)]
    quick = [run_reaching(1, 0.99), run_reaching(math.inf, 0.89)]
    faster = [run_reaching(8, 0.90), run_reaching(8, 0.90)]
    better = [run_reaching(9, 0.95), run_reaching(9, 0.95)]
    assert sorted([sure, quick, faster, better], key=rank) == [faster, better, sure, quick]
    assert score(quick)["missed"] == 1


def test_settings_survive_the_file(tmp_path: Path) -> None:
    path = tmp_path / "tuned.toml"
    options = {"lr": 5e-05, "betas": (0.9, 0.99), "nesterov": True, "schedule.exponent": 4}
    settings = (
        Setting("tiny", "adamw", 32, {k: options[k] for k in ("lr", "betas")}, {"missed": 0}),
        Setting("tiny", "sgd", 32, {"lr": 0.1, "nesterov": True}, {}),
        Setting("tiny", "sgd", 200, {"lr": 0.5, "schedule.exponent": 4}, {}),
    )
    write_tuned(path, BUDGET.as_dict(), settings)
    tuned = read_tuned(path)
    assert tuned.budget["trials"] == 3
    assert tuned.budget["split"] == "validation"
    assert tuned.options("tiny", "adamw", 32) == {"lr": 5e-05, "betas": [0.9, 0.99]}
    assert tuned.options("tiny", "sgd", 200) == {"lr": 0.5, "schedule.exponent": 4}


def test_tuned_settings_reach_the_runs(tmp_path: Path) -> None:
    path = tmp_path / "tuned.toml"
    settings = (
        Setting("tiny", "kfac", 32, {"lr": 0.3, "damping": 1e-4, "schedule.factor": 0.5}, {}),
        Setting("tiny", "kfac", 200, {"lr": 0.7}, {}),
    )
    write_tuned(path, BUDGET.as_dict(), settings)
    chosen = Recipe("tiny", {"workload": "tiny"}, read_tuned(path))
    workload = WORKLOADS["tiny"]
    run = chosen.run(workload, "kfac", 32, 0)
    assert (run.options["lr"], run.options["damping"]) == (0.3, 1e-4)
    assert run.schedule.factor == 0.5
    # The control takes the setting of KFAC; the nearest smaller batch size serves where none is.
    assert chosen.run(workload, "kfac-2x", 32, 0).options == run.options
    assert chosen.run(workload, "kfac", 100, 0).options["lr"] == 0.3
    assert chosen.run(workload, "kfac", 400, 0).options["lr"] == 0.7
    assert chosen.run(workload, "kfac", 8, 0).options["lr"] == 0.3
    assert chosen.run(workload, "fop", 32, 0).options["lr"] == 0.1


def test_a_file_that_is_no_tuning_result_is_named(tmp_path: Path) -> None:
    path = tmp_path / "other.toml"
    path.write_text('title = "something else"\n')
    with pytest.raises(ConfigError, match=r"other\.toml: expected schema = 1, found None"):
        read_tuned(path)
    path.write_text('schema = 1\n[[setting]]\nmethod = "sgd"\n')
    with pytest.raises(ConfigError, match=r"setting\[0\]\.workload is missing"):
        read_tuned(path)
