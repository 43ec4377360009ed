"""Memory is measured in fresh processes, recorded, and shown beside the published figures."""

from __future__ import annotations

import math
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from fop_bench import memory
from fop_bench.memory import (
    Measurement,
    MemoryMeasurementError,
    bytes_text,
    measure,
    measure_all,
    memory_table,
    read_measurements,
    write_measurements,
)
from fop_bench.processes import MARKER
from fop_bench.records import RecordError


def test_a_process_of_its_own_measures_what_training_takes() -> None:
    found = measure("digits-mlp", "fop", 512)
    assert (found.workload, found.method, found.batch_size) == ("digits-mlp", "fop", 512)
    assert found.device == "cpu"
    assert 1e5 < found.peak_bytes < 1e9  # the model alone has 7,000 parameters, their copies more


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_the_peak_counts_what_was_freed_again_but_not_what_was_there_before() -> None:
    before = torch.ones(30_000_000)  # 120 MB that stay

    def work() -> None:
        for _ in range(3):
            # 200 MB, freed at once: more than other tests may have left free on the heap.
            torch.ones(50_000_000)

    assert 190e6 < memory.peak_of(work, torch.device("cpu")) < 300e6
    assert before[0] == 1


def test_every_method_at_every_batch_size_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        return subprocess.CompletedProcess(command, 0, f"noise\n{MARKER}1000.0\n", "")

    monkeypatch.setattr(subprocess, "run", run)
    seen: list[Measurement] = []
    found = measure_all("digits-mlp", ("sgd", "fop"), (64, 128), progress=seen.append)
    assert [(m.batch_size, m.method) for m in found] == [
        (64, "sgd"), (64, "fop"), (128, "sgd"), (128, "fop"),
    ]  # fmt: skip
    assert seen == found
    assert len(asked) == 4
    assert {m.peak_bytes for m in found} == {1000.0}


@pytest.mark.parametrize(("code", "out"), [(-9, ""), (0, f"{MARKER}null\n")])
def test_running_out_of_memory_is_a_result(
    monkeypatch: pytest.MonkeyPatch, code: int, out: str
) -> None:
    ended = subprocess.CompletedProcess([], code, out, "")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: ended)
    assert measure("digits-mlp", "fop", 64).peak_bytes == math.inf


def test_any_other_failure_is_told_with_its_reason() -> None:
    with pytest.raises(
        MemoryMeasurementError, match=r"(?s)fop at batch size 64 on nowhere.*nowhere"
    ):
        measure("nowhere", "fop", 64)


def test_table_sets_published_figures_below_ours() -> None:
    mine = [
        Measurement("cifar10-resnet18", "fop", 2048, "cuda", 17e9),
        Measurement("cifar10-resnet18", "fop", 4096, "cuda", math.inf),
    ]
    table = memory_table(mine, "cifar10-resnet18")
    column = table.columns.index("FOP")
    cells = {line[0].text: line[column] for line in table.lines}
    assert (cells["2,048"].text, cells["2,048"].published) == ("17.00 GB", "19.21 GB × 1 GPU")
    assert cells["4,096"].text == "out of memory"
    assert (cells["32,768"].text, cells["32,768"].published) == ("", "108.44 GB × 2 GPU")
    assert any(note.startswith("published: Lu and Armour (2025)") for note in table.notes)


def test_table_of_a_workload_that_nobody_published() -> None:
    table = memory_table([Measurement("digits-mlp", "sgd", 64, "cpu", 2.5e6)], "digits-mlp")
    assert [[cell.text for cell in line] for line in table.lines] == [["64", "2.5 MB"]]
    assert table.notes == ("On a CPU: growth of resident memory from before the model is built.",)


def test_measurements_read_back_the_same(tmp_path: Path) -> None:
    mine = [
        Measurement("digits-mlp", "sgd", 64, "cpu", 2.5e6),
        Measurement("digits-mlp", "fop", 64, "cpu", math.inf),
    ]
    path = write_measurements(mine, tmp_path / "memory.json")
    assert read_measurements(path) == mine
    assert '"torch"' in path.read_text(encoding="utf-8")
    path.write_text('{"schema": 2}', encoding="utf-8")
    with pytest.raises(RecordError, match=r"memory\.json.*schema: expected 1, found 2"):
        read_measurements(path)


def test_sizes_in_print() -> None:
    assert [bytes_text(n) for n in (2.5e6, 1e9, math.inf)] == ["2.5 MB", "1.00 GB", "out of memory"]
