"""Records are complete or absent, strict JSON, and say what a run reached."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from fop_bench.files import atomic_open, remove_leftovers
from fop_bench.records import (
    RecordError,
    Run,
    load_runs,
    read_run,
    run_path,
    write_meta,
    write_metrics,
)

META: dict[str, Any] = {
    "schema": 1,
    "workload": "digits-mlp",
    "method": "fop",
    "batch_size": 64,
    "seed": 0,
    "config": {},
    "status": "complete",
    "metric": "accuracy",
    "target": 0.9,
    "higher_is_better": True,
}

FIRST = {"epoch": 1, "step": 10, "train_time": 0.25}


def run_with(values: list[float | None], **meta: Any) -> Run:
    metrics = [
        {"epoch": n, "step": 10 * n, "train_time": n / 4, "test_accuracy": value}
        for n, value in enumerate(values, 1)
    ]
    return Run(Path("run"), {**META, **meta}, metrics)


def test_the_first_evaluation_at_the_target_counts() -> None:
    run = run_with([0.5, 0.9, 0.7, 0.95])
    assert run.to_target("epoch") == 2
    assert run.to_target("step") == 20
    assert run.to_target("train_time") == 0.5
    assert run.best() == 0.95


def test_a_miss_is_infinity_and_an_empty_run_is_the_worst() -> None:
    assert run_with([0.5, 0.8]).to_target() == math.inf
    assert run_with([], status="diverged").to_target() == math.inf
    assert run_with([], status="diverged").best() == -math.inf
    assert run_with([], higher_is_better=False).best() == math.inf


def test_lower_is_better_where_the_workload_says_so() -> None:
    run = run_with([9.0, 8.0, 8.5], target=8.2, higher_is_better=False)
    assert run.to_target() == 2
    assert run.best() == 8.0


def test_validation_metrics_are_found_under_their_own_name() -> None:
    assert run_with([], split="validation").metric_key == "validation_accuracy"


def test_numbers_that_are_not_finite_become_null(tmp_path: Path) -> None:
    write_meta(tmp_path, META)
    write_metrics(tmp_path, [{**FIRST, "test_accuracy": math.nan, "train_loss": math.inf}])

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    line = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(line, parse_constant=refuse)["test_accuracy"] is None
    assert read_run(tmp_path).to_target() == math.inf


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "meta.json"
    path.write_text("old")

    def write_half() -> None:
        with atomic_open(path) as stream:
            stream.write("half of the new")
            raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        write_half()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_what_a_killed_writer_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".meta.json.abc.tmp").write_text("half")
    (tmp_path / "notes.txt").write_text("the user's own")
    remove_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_runs_are_found_wherever_they_are_below_the_root(tmp_path: Path) -> None:
    for method, seed in (("fop", 0), ("fop", 1), ("sgd", 0)):
        folder = run_path(tmp_path, "digits", method, 64, seed)
        write_meta(folder, {**META, "method": method, "seed": seed})
        write_metrics(folder, [FIRST])
    found = load_runs(tmp_path)
    assert [(run.meta["method"], run.meta["seed"]) for run in found] == [
        ("fop", 0), ("fop", 1), ("sgd", 0),
    ]  # fmt: skip
    assert found[0].path == tmp_path / "digits" / "fop" / "b64" / "s0"


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "not JSON"), ('{"schema": 99}', "expected schema 1, found 99"), ("[]", "found 'list'")],
)
def test_an_unreadable_record_is_named(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "meta.json").write_text(content)
    with pytest.raises(RecordError, match=message) as error:
        read_run(tmp_path)
    assert "meta.json" in str(error.value)


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    write_meta(tmp_path, META)
    (tmp_path / "metrics.jsonl").write_text(json.dumps(FIRST) + '\n{"epoch"\n')
    with pytest.raises(RecordError, match="line 2"):
        read_run(tmp_path)


def test_a_directory_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="nowhere is not a directory"):
        load_runs(tmp_path / "nowhere")
