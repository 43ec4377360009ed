"""Peak memory of a few training steps, for each method and batch size, each in a fresh process.

On CUDA it is ``torch.cuda.max_memory_allocated``. On a CPU it is how far the process's resident
memory grew above what it was before the model was built, so that Python, torch and the data do
not count. A fresh process each time, because the peak of one measurement would hide in the memory
left by another.
"""

from __future__ import annotations

import gc
import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

import torch

from fop_bench import published
from fop_bench.errors import BenchError
from fop_bench.files import read_record, write_json
from fop_bench.methods import get_method
from fop_bench.processes import ProcessError, answer, ask, peak_resident, start_counting_peak
from fop_bench.records import provenance
from fop_bench.render import PUBLISHED, Cell, Table
from fop_bench.schema import Count, Limit, Name, OrInfinite
from fop_bench.stepper import Stepper, load_lazy_code
from fop_bench.style import look, order

FILE = "memory.json"
GIGA = 1e9
STEPS = 3  # curvature is refreshed on steps 1 and 2, and momentum exists from the first step on


class MemoryMeasurementError(BenchError, RuntimeError):
    """The process that was to be measured failed for another reason than memory."""


@dataclass(frozen=True)
class Measurement:
    """Peak memory in bytes; ``inf`` where the device ran out of it."""

    workload: Name
    method: Name
    batch_size: Count
    device: str
    peak_bytes: OrInfinite


class _Record(TypedDict):
    schema: Literal[1]
    measurements: Annotated[list[Measurement], Limit("measurements, one at least", bool)]


def measure_all(
    workload: str,
    methods: Iterable[str],
    batch_sizes: Iterable[int],
    *,
    device: str = "cpu",
    data_dir: Path | None = None,
    progress: Callable[[Measurement], None] | None = None,
) -> list[Measurement]:
    """Every method at every batch size, one process after the other."""
    found = []
    for batch_size in batch_sizes:
        for method in methods:
            found.append(measure(workload, method, batch_size, device=device, data_dir=data_dir))
            if progress:
                progress(found[-1])
    return found


def measure(
    workload: str,
    method: str,
    batch_size: int,
    *,
    device: str = "cpu",
    data_dir: Path | None = None,
) -> Measurement:
    """Peak memory of a few steps in a fresh process."""
    request = {
        "workload": workload,
        "method": method,
        "batch_size": batch_size,
        "device": device,
        "data_dir": None if data_dir is None else str(data_dir),
    }
    try:
        peak = ask("fop_bench.memory", request)
    except ProcessError as error:
        if not error.out_of_memory:
            raise MemoryMeasurementError(
                f"{method} at batch size {batch_size} on {workload}: {error}"
            ) from error
        peak = None
    kind = torch.device(device).type
    return Measurement(workload, method, batch_size, kind, math.inf if peak is None else peak)


def peak_of(work: Callable[[], None], device: torch.device) -> float:
    """Bytes by which ``work`` raised the memory peak; on CUDA the peak itself."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.reset_peak_memory_stats(device)
        work()
        return float(torch.cuda.max_memory_allocated(device))
    before = start_counting_peak()
    work()
    return float(max(peak_resident() - before, 0))


def _steps(request: dict[str, Any]) -> float | None:
    """In the fresh process: the peak of a few steps, or None when the device runs out of memory."""
    # Only the measured process needs the workloads; a report reads measurements without them.
    from fop_bench.workloads import WORKLOADS

    device = torch.device(request["device"])
    workload = WORKLOADS[request["workload"]]
    data_dir = None if request["data_dir"] is None else Path(request["data_dir"])
    splits = workload.splits(data_dir, device=device, validation=False, subset=None)
    method = get_method(request["method"])
    load_lazy_code(lambda model: Stepper(model, method.build(model, lr=1e-6)), device)

    def train() -> None:
        model = workload.model(0).to(device)
        model.train()
        overrides = workload.optimizer_overrides if method.takes_model else {}
        optimizer = method.build(model, **{"lr": method.defaults["lr"], **overrides})
        stepper = Stepper(model, optimizer, loss=workload.loss)
        taken = epoch = 0
        while taken < STEPS:
            for inputs, targets in splits.train(request["batch_size"], epoch, 0):
                stepper.step(inputs, targets)
                taken += 1
                if taken == STEPS:
                    break
            epoch += 1

    try:
        return peak_of(train, device)
    except torch.cuda.OutOfMemoryError:
        return None


def memory_table(measurements: Sequence[Measurement], workload: str) -> Table:
    """Batch sizes down, methods across, published figures below ours."""
    ours = {(m.batch_size, m.method): m for m in measurements if m.workload == workload}
    figures = published.for_workload(workload)
    theirs = {(m.batch_size, m.method): m for m in figures.memory} if figures else {}
    places = ours.keys() | theirs.keys()
    methods = sorted({method for _, method in places}, key=order)
    lines = []
    for batch in sorted({batch for batch, _ in places}):
        cells = [Cell(f"{batch:,}", batch)]
        for method in methods:
            mine, printed = ours.get((batch, method)), theirs.get((batch, method))
            below = f"{printed.gigabytes:.2f} GB × {printed.gpus} GPU" if printed else ""
            peak = mine.peak_bytes if mine else math.inf
            cells.append(Cell(bytes_text(peak) if mine else "", peak, below))
        lines.append(tuple(cells))
    devices = {m.device for m in ours.values()}
    notes = []
    if "cuda" in devices:
        notes.append("Largest memory allocated on the GPU during a few training steps.")
    if "cpu" in devices:
        notes.append("On a CPU: growth of resident memory from before the model is built.")
    if theirs and figures:
        notes.append(f"{PUBLISHED}: {figures.memory[0].source.citation}, {figures.memory[0].where}")
    return Table(
        title=f"{workload}: peak memory",
        columns=("batch size", *(look(method).label for method in methods)),
        lines=tuple(lines),
        notes=tuple(notes),
    )


def bytes_text(amount: float) -> str:
    if math.isinf(amount):
        return "out of memory"
    return f"{amount / GIGA:.2f} GB" if amount >= GIGA else f"{amount / 1e6:.1f} MB"


def write_measurements(measurements: Sequence[Measurement], path: Path) -> Path:
    """Record the measurements with versions and machine; null stands for out of memory."""
    device = measurements[0].device if measurements else "cpu"
    content = {"measurements": [asdict(measurement) for measurement in measurements]}
    return write_json(path, provenance(device) | content)


def read_measurements(path: Path) -> list[Measurement]:
    """Measurements that ``write_measurements`` recorded."""
    return read_record(path, _Record, "memory measurements")["measurements"]


if __name__ == "__main__":
    torch.set_num_threads(1)
    answer(_steps(json.loads(sys.argv[1])))
