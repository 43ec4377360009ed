"""Scaling is measured in fresh processes, modelled beyond them, and never mixed up."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from fop_bench import plots, published, scaling, scaling_worker
from fop_bench.cli import app
from fop_bench.costs import Hardware, accelerator
from fop_bench.methods import get_method
from fop_bench.processes import MARKER
from fop_bench.records import RecordError
from fop_bench.render import to_markdown
from fop_bench.report import write_report
from fop_bench.scaling import (
    FILE,
    Point,
    Scaling,
    ScalingMeasurementError,
    Timing,
    batch_efficiencies,
    efficiencies,
    measure,
    measure_all,
    predict_all,
    probe,
    read_scaling,
    relative_efficiencies,
    write_scaling,
)
from fop_bench.scaling_tables import scaling_tables
from fop_bench.scaling_worker import curvature_bytes

HERE = Hardware("this machine", "test", 1e10, 1e10, 1e10, 1e-4, 1e9, 1e9, 2, 1e-5, False)


def record(workload: str = "digits-mlp") -> Scaling:
    timings = tuple(
        Timing(
            method,
            batch,
            ranks,
            seconds=(factor * batch / ranks**0.8,) * 3,
            cpu_seconds=(0.1,) * 3,
            reference_seconds=(1e-4 * batch / ranks**0.9,) * 3,
            state_bytes=(1000,) * ranks,
        )
        for method, factor in (("sgd", 1e-4), ("fop", 3e-4))
        for batch in (64, 128)
        for ranks in (1, 2)
    )
    h100 = accelerator("h100")
    predictions = (
        *predict_all(workload, ("sgd", "fop"), (64, 128), (1, 2), 10, HERE),
        *predict_all(workload, ("sgd", "fop"), (64, 128), (8, 1024), 10, h100),
    )
    return Scaling(workload, 10, timings, predictions, (HERE, h100))


# Factors and inverses of [65, 64], [65, 32] and [33, 10], in float32.
CURVATURE_BYTES = 2 * 4 * sum(n * n for n in (65, 64, 65, 32, 33, 10))


@pytest.mark.slow
def test_ranks_of_their_own_time_what_a_step_takes() -> None:
    found = measure("digits-mlp", "fop", 96, 2, interval=2, blocks=3)
    assert (found.method, found.batch_size, found.ranks) == ("fop", 96, 2)
    assert len(found.seconds) == len(found.cpu_seconds) == len(found.reference_seconds) == 3
    assert all(0 < seconds < 10 for seconds in found.seconds)
    assert sum(found.state_bytes) == pytest.approx(CURVATURE_BYTES, rel=0.02)


@pytest.mark.slow
def test_constants_are_probed() -> None:
    here = probe("digits-mlp", 64, 2)
    assert here.name == "this machine"
    assert 1e7 < here.product_rate < 1e13
    assert 1e4 < here.bandwidth < 1e13
    assert not here.overlaps


def test_one_process_needs_no_group(capsys: pytest.CaptureFixture[str]) -> None:
    request = {"kind": "steps", "workload": "digits-mlp", "method": "fop", "batch_size": 64,
               "interval": 2, "blocks": 1, "device": "cpu"}  # fmt: skip
    scaling_worker.main(request)
    found = json.loads(capsys.readouterr().out.removeprefix(MARKER))
    assert found["state_bytes"] == [pytest.approx(CURVATURE_BYTES, rel=0.02)]


def test_curvature_is_what_is_kept_beside_momentum() -> None:
    layer = torch.nn.Linear(3, 2)
    for method, expected in (("adamw", 0), ("kfac", 4 * (2 * (16 + 4) + 2))):
        optimizer = get_method(method).build(layer, lr=1e-3)
        for _ in range(2):
            optimizer.zero_grad()
            layer(torch.randn(8, 3)).square().mean().backward()
            optimizer.step()
        assert curvature_bytes(optimizer) == expected


def test_everything_is_measured_in_turn_and_round_after_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[str, int]] = []

    def ask(request: dict[str, Any], ranks: int) -> dict[str, Any]:
        asked.append((request["method"], ranks))
        number = float(len(asked))
        return {
            "seconds": [number],
            "cpu_seconds": [number],
            "reference_seconds": [1.0],
            "state_bytes": [7] * ranks,
        }

    monkeypatch.setattr(scaling, "_ask", ask)
    found = measure_all("digits-mlp", ("sgd", "fop"), (64,), (1, 2), rounds=2)
    assert asked == [("sgd", 1), ("fop", 1), ("sgd", 2), ("fop", 2)] * 2
    assert [(t.method, t.ranks, t.seconds) for t in found] == [
        ("sgd", 1, (1, 5)), ("fop", 1, (2, 6)), ("sgd", 2, (3, 7)), ("fop", 2, (4, 8)),
    ]  # fmt: skip
    assert found[0].median == 3
    assert found[3].state_bytes == (7, 7)


def test_processes_that_fail_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert "--nproc-per-node=2" in command
        return subprocess.CompletedProcess(command, 3, "", "out of luck")

    monkeypatch.setattr(subprocess, "run", run)
    message = r"timing sgd of digits-mlp on 2 ranks at batch size 64 failed with exit code 3.*luck"
    with pytest.raises(ScalingMeasurementError, match=f"(?s){message}"):
        measure("digits-mlp", "sgd", 64, 2)


def test_efficiency_is_the_papers() -> None:
    """T_1 / (n T_n); with the smallest count in place of 1 where one was not measured."""
    points = [Point("sgd", 64, 1, 8.0), Point("sgd", 64, 4, 2.5), Point("fop", 64, 2, 4.0),
              Point("fop", 64, 8, 2.0)]  # fmt: skip
    assert list(efficiencies(points).values()) == [1.0, 0.8, 1.0, 0.5]


def test_what_slows_both_down_alike_cancels() -> None:
    """FOP 3 times as slow as SGD on one rank and 4 times on two: 75 % of SGD's efficiency."""
    alone = Timing("fop", 64, 1, (3.0, 30.0, 6.0), reference_seconds=(1.0, 10.0, 2.0))
    two = Timing("fop", 64, 2, (4.0, 8.0, 80.0), reference_seconds=(1.0, 2.0, 20.0))
    assert relative_efficiencies([two, alone]) == {two: 0.75, alone: 1.0}


def test_batch_efficiency_is_throughput() -> None:
    points = [Point("sgd", 64, 2, 1.0), Point("sgd", 128, 2, 1.6)]
    assert list(batch_efficiencies(points).values()) == [1.0, pytest.approx(1.25)]


def test_records_are_read_back(tmp_path: Path) -> None:
    written = record()
    assert read_scaling(write_scaling(written, tmp_path / FILE)) == written
    text = (tmp_path / FILE).read_text()
    assert "predictions of a cost model, not measured" in text
    (tmp_path / FILE).write_text(text.replace('"schema": 1', '"schema": 9'))
    with pytest.raises(RecordError, match=r"holds no scaling record .*schema: expected 1, found 9"):
        read_scaling(tmp_path / FILE)


def test_tables_keep_measured_and_modelled_apart() -> None:
    measured, model = scaling_tables(record())
    assert "measured" in measured.title
    assert len(measured.lines) == 8
    row = dict(zip(measured.columns, measured.lines[-1], strict=True))
    assert (row["method"].text, row["ranks"].text) == ("FOP", "2")
    assert row["efficiency"].text == f"{2**-0.2:.0%}"
    assert row["of SGD's"].text == f"{2**-0.1:.0%}"  # SGD beside it: 2 ** -0.1
    assert row["by CPU time"].text == "50%"
    assert "MODEL, not measured" in model.title
    assert all("(model)" in line[0].text for line in model.lines)
    assert "assumed" in model.notes[0]
    assert "1,024 ranks" in model.columns
    assert "load average" not in " ".join(measured.notes)
    busy = scaling_tables(replace(record(), load=8.0))[0]
    assert "Other programs ran at the same time (load average 8.0)" in busy.notes[-1]


def test_published_scaling_stands_beside_ours() -> None:
    """67 % from 1 to 2 GPUs and 61 % from 1 to 8, from table 3's minutes and epochs."""
    tables = scaling_tables(replace(record(), workload="imagenet1k-resnet50"))
    text = to_markdown(tables[-1])
    assert "published" in tables[-1].title
    assert tables[-1].marked == frozenset(range(4))
    assert "67%" in text
    assert "61%" in text
    efficiency = {e.gpus: e.efficiency for e in published.epoch_times("imagenet1k-resnet50")}
    assert efficiency[8] == pytest.approx(1306.1 / 32 / (8 * 335.1 / 40))
    assert published.epoch_times("digits-mlp") == ()


def test_plot_draws_the_model_dashed_and_says_so() -> None:
    figure = plots.scaling_curves(record())
    rows = figure.axes[:4], figure.axes[4:8]
    for axes, line, suffix in zip(rows, ("-", "--"), ("", " (model)"), strict=True):
        curves = [c for a in axes for c in a.lines if not str(c.get_label()).startswith("_")]
        assert len(curves) == 2 * 4
        assert {c.get_linestyle() for c in curves} == {line}
        assert {str(c.get_label()) for c in curves} == {f"SGD{suffix}", f"FOP{suffix}"}
    assert rows[1][1].get_title() == "model: NVIDIA H100 SXM, batch size 128"
    assert any("model, not measured" in t.get_text() for t in figure.legends[0].get_texts())


def test_reports_show_scaling(tmp_path: Path) -> None:
    write_scaling(record(), tmp_path / "scaling" / FILE)
    page = write_report(tmp_path, tmp_path / "report.html").page.read_text()
    assert "digits-mlp: strong scaling" in page
    assert "MODEL, not measured" in page
    assert (tmp_path / "report-plots" / "digits-mlp-scaling-scaling.png").is_file()


def run(*arguments: Any) -> str:
    result = CliRunner().invoke(app, ["scaling", *map(str, arguments)])
    return f"{result.exit_code} {' '.join(result.output.split())}"


def test_the_command_models_without_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = ["fashion-mlp", "--no-measure", "--accelerators", "h100,mi300x", "--out", tmp_path]
    assert run(*asked).startswith("0 ")
    found = read_scaling(tmp_path / FILE)
    assert found.timings == ()
    assert {p.hardware for p in found.predictions} == {"NVIDIA H100 SXM", "AMD MI300X"}
    assert {p.ranks for p in found.predictions} >= {1, 8, 1024}
    assert {p.batch_size for p in found.predictions} == {20_000}
    assert (tmp_path / "scaling.png").is_file()
    assert "exists: choose another directory" in run(*asked)


def test_the_command_measures_and_predicts_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scaling, "measure_all", lambda *_, **__: record().timings)
    monkeypatch.setattr(scaling, "probe", lambda *_, **__: HERE)
    output = run("digits-mlp", "--methods", "sgd,fop", "--batch-sizes", "64,128", "--out", tmp_path)
    assert output.startswith("0 "), output
    found = read_scaling(tmp_path / FILE)
    assert found.hardware[0] == HERE
    assert {p.ranks for p in found.predictions if p.hardware == HERE.name} == {1, 2}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "0"], "--ranks '0': expected whole numbers >= 1"),
        (["--accelerators", "tpu"], "--accelerators 'tpu': expected some of h100, mi300x, or none"),
        (["--no-measure", "--accelerators", "none"], "nothing to do"),
        (["--methods", "magic"], "unknown method 'magic'"),
    ],
)
def test_mistakes_are_answered(arguments: list[str], message: str, tmp_path: Path) -> None:
    output = run("digits-mlp", *arguments, "--out", tmp_path)
    assert output.startswith("1 ")
    assert message in output
