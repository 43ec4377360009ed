"""Strong scaling: one batch on more and more ranks, timed here and modelled for accelerators.

The paper's figures (appendices C.4.3 and E.2): time, device time (ranks x time) and parallel
efficiency T(1) / (R T(R)) against ranks, and efficiency against batch size. Every timing is that of
fresh processes with one thread a rank, all methods in turn and several rounds, so that what
disturbs the machine disturbs all. Predictions come from `costs` and are shown as a model.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fop_bench import published
from fop_bench.costs import Hardware, Prediction, predict, shape_of
from fop_bench.memory import bytes_text
from fop_bench.records import RecordError, machine, strict_json, versions, write_text
from fop_bench.render import PUBLISHED, Cell, Table
from fop_bench.style import look, order
from fop_bench.tables import time_text, time_unit
from fop_bench.workloads import WORKLOADS

FILE = "scaling.json"
SCHEMA = 1
MARKER = "fop-bench scaling: "
REFERENCE = "sgd"


class ScalingMeasurementError(RuntimeError):
    """The processes that were to be timed failed."""


@dataclass(frozen=True)
class Timing:
    """Mean seconds of a step in each block of steps, of all rounds, on `ranks` ranks together.

    `cpu_seconds` are processor time of the busiest rank, which leaves out what it waited for other
    ranks and for other programs; `state_bytes` are those of curvature on each rank.
    """

    method: str
    batch_size: int
    ranks: int
    seconds: tuple[float, ...]
    cpu_seconds: tuple[float, ...] = ()
    state_bytes: tuple[int, ...] = ()

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def joined(self, other: Timing) -> Timing:
        """With the blocks of another round."""
        return replace(
            self,
            seconds=self.seconds + other.seconds,
            cpu_seconds=self.cpu_seconds + other.cpu_seconds,
        )


@dataclass(frozen=True)
class Scaling:
    """What one command found out: timings, and predictions with the constants behind them."""

    workload: str
    interval: int  # steps between renewals of curvature
    timings: tuple[Timing, ...]
    predictions: tuple[Prediction, ...]
    hardware: tuple[Hardware, ...]


@dataclass(frozen=True)
class Point:
    """One place of a curve: measured, predicted or published."""

    method: str
    batch_size: int
    ranks: int
    seconds: float


def measure_all(
    workload: str,
    methods: Sequence[str],
    batch_sizes: Sequence[int],
    ranks: Sequence[int],
    *,
    interval: int = 10,
    blocks: int = 3,
    rounds: int = 3,
    device: str = "cpu",
    progress: Callable[[], None] | None = None,
) -> tuple[Timing, ...]:
    """Every method at every batch size on every number of ranks, in turn, round after round."""
    found: dict[tuple[str, int, int], Timing] = {}
    for _ in range(rounds):
        for batch_size in batch_sizes:
            for count in ranks:
                for method in methods:
                    timing = measure(
                        workload, method, batch_size, count,
                        interval=interval, blocks=blocks, device=device,
                    )  # fmt: skip
                    key = (method, batch_size, count)
                    found[key] = found[key].joined(timing) if key in found else timing
                    if progress:
                        progress()
    return tuple(found.values())


def measure(
    workload: str,
    method: str,
    batch_size: int,
    ranks: int,
    *,
    interval: int = 10,
    blocks: int = 3,
    device: str = "cpu",
) -> Timing:
    """One method in processes of its own."""
    request = {
        "kind": "steps",
        "workload": workload,
        "method": method,
        "batch_size": batch_size,
        "interval": interval,
        "blocks": blocks,
        "device": device,
    }
    answer = {name: tuple(values) for name, values in _ask(request, ranks).items()}
    return Timing(method, batch_size, ranks, **answer)


def probe(workload: str, batch_size: int, ranks: int, *, device: str = "cpu") -> Hardware:
    """The cost model's constants on this machine."""
    request = {
        "kind": "probe",
        "workload": workload,
        "batch_size": batch_size,
        "device": device,
    }
    return Hardware(**_ask(request, ranks))


def _ask(request: dict[str, Any], ranks: int) -> dict[str, Any]:
    launch = ["-m"]
    if ranks > 1:
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
    command = [sys.executable, *launch, "fop_bench.scaling_worker", json.dumps(request)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    for line in done.stdout.splitlines():
        if line.startswith(MARKER):
            answer: dict[str, Any] = json.loads(line.removeprefix(MARKER))
            return answer
    what = f"{request.get('method', request['kind'])} of {request['workload']} on {ranks} ranks"
    raise ScalingMeasurementError(
        f"timing {what} at batch size {request['batch_size']} failed with exit code "
        f"{done.returncode}:\n{done.stderr[-2000:]}"
    )


def predict_all(
    workload: str,
    methods: Iterable[str],
    batch_sizes: Sequence[int],
    ranks: Sequence[int],
    interval: int,
    hardware: Hardware,
) -> tuple[Prediction, ...]:
    """By the cost model; always with one rank, which efficiencies refer to."""
    chosen = WORKLOADS[workload]
    shape = shape_of(chosen.model(0), chosen.made_up(1))
    return tuple(
        predict(method, shape, batch_size, count, interval, hardware)
        for method in methods
        for batch_size in batch_sizes
        for count in sorted({1, *ranks})
    )


def measured_points(record: Scaling) -> list[Point]:
    return [Point(t.method, t.batch_size, t.ranks, t.median) for t in record.timings]


def processor_points(record: Scaling) -> list[Point]:
    """By the busiest rank's processor time instead of the clock."""
    return [
        Point(t.method, t.batch_size, t.ranks, statistics.median(t.cpu_seconds))
        for t in record.timings
        if t.cpu_seconds
    ]


def modelled_points(record: Scaling, hardware: str) -> list[Point]:
    return [
        Point(p.method, p.batch_size, p.ranks, p.seconds)
        for p in record.predictions
        if p.hardware == hardware
    ]


def efficiencies(points: Sequence[Point]) -> dict[Point, float]:
    """T(r0) r0 / (R T(R)) of each point, r0 the fewest ranks of its method and batch size."""
    fewest: dict[tuple[str, int], Point] = {}
    for point in sorted(points, key=lambda point: point.ranks):
        fewest.setdefault((point.method, point.batch_size), point)

    def efficiency(point: Point) -> float:
        base = fewest[point.method, point.batch_size]
        return base.seconds * base.ranks / (point.seconds * point.ranks)

    return {point: efficiency(point) for point in points}


def batch_efficiencies(points: Sequence[Point]) -> dict[Point, float]:
    """Examples a second against those at the smallest batch, of points on equally many ranks."""
    smallest: dict[tuple[str, int], Point] = {}
    for point in sorted(points, key=lambda point: point.batch_size):
        smallest.setdefault((point.method, point.ranks), point)

    def efficiency(point: Point) -> float:
        base = smallest[point.method, point.ranks]
        return base.seconds / base.batch_size / (point.seconds / point.batch_size)

    return {point: efficiency(point) for point in points}


def scaling_tables(record: Scaling) -> list[Table]:
    """What was measured, what the model says for each hardware, and what was published."""
    tables = [_measured_table(record)] if record.timings else []
    tables += [
        _model_table(record, hardware)
        for hardware in record.hardware
        if any(point.ranks > 2 for point in modelled_points(record, hardware.name))
    ]
    theirs = published.epoch_times(record.workload)
    return [*tables, _published_table(record.workload, theirs)] if theirs else tables


def _measured_table(record: Scaling) -> Table:
    points = measured_points(record)
    reached, computed = efficiencies(points), _by_place(efficiencies(processor_points(record)))
    here = record.hardware[0].name if record.hardware else ""
    model = {(p.method, p.batch_size, p.ranks): p for p in record.predictions if p.hardware == here}
    plain = {(p.batch_size, p.ranks): e for p, e in reached.items() if p.method == REFERENCE}
    lines = []
    for point, timing in sorted(
        zip(points, record.timings, strict=True),
        key=lambda pair: (pair[0].batch_size, order(pair[0].method), pair[0].ranks),
    ):
        place = (point.method, point.batch_size, point.ranks)
        share = reached[point] / plain.get((point.batch_size, point.ranks), math.nan)
        cpu, predicted = computed.get(place, math.nan), model.get(place)
        state = max(timing.state_bytes, default=0)
        lines.append(
            (
                Cell(look(point.method).label),
                Cell(f"{point.batch_size:,}", point.batch_size),
                Cell(str(point.ranks), point.ranks),
                Cell(_range_text(timing.seconds), point.seconds),
                Cell(time_text(point.seconds * point.ranks), point.seconds * point.ranks),
                _percent(reached[point]),
                _percent(share),
                _percent(cpu),
                Cell(bytes_text(state) if state else "", state),
                Cell(
                    time_text(predicted.seconds) if predicted else "",
                    predicted.seconds if predicted else 0.0,
                ),
            )
        )
    blocks = min(len(t.seconds) for t in record.timings)
    return Table(
        title=f"{record.workload}: strong scaling, measured",
        columns=(
            "method", "batch size", "ranks", "time a step", "rank-time", "efficiency",
            "of SGD's", "by CPU time", "curvature a rank", "model",
        ),
        lines=tuple(lines),
        notes=(
            f"Median [smallest, largest] of {blocks} blocks of {record.interval} steps, each with "
            "one renewal of curvature, in fresh processes with one thread a rank; made-up inputs "
            "in memory. Efficiency: T(1) / (R T(R)). By CPU time: the same with the busiest "
            "rank's processor time, without waiting. Curvature: factors and inverses of the "
            "fullest rank. Model: what the cost model predicts here, not measured.",
        ),
    )  # fmt: skip


def _by_place(values: Mapping[Point, float]) -> dict[tuple[str, int, int], float]:
    return {(p.method, p.batch_size, p.ranks): value for p, value in values.items()}


def _range_text(seconds: Sequence[float]) -> str:
    size, unit = time_unit(statistics.median(seconds))
    low, middle, high = (f"{f(seconds) / size:.1f}" for f in (min, statistics.median, max))
    return f"{middle} [{low}, {high}] {unit}"


def _percent(value: float) -> Cell:
    return Cell("", -1.0) if math.isnan(value) else Cell(f"{value:.0%}", value)


def _model_table(record: Scaling, hardware: Hardware) -> Table:
    points = modelled_points(record, hardware.name)
    reached = efficiencies(points)
    counts = sorted({point.ranks for point in points})
    rows = sorted({(p.batch_size, p.method) for p in points}, key=lambda r: (r[0], order(r[1])))
    at = {(p.batch_size, p.method, p.ranks): p for p in points}

    def cell(batch: int, method: str, count: int) -> Cell:
        point = at[batch, method, count]
        return Cell(f"{time_text(point.seconds)}, {reached[point]:.0%}", point.seconds)

    return Table(
        title=f"{record.workload}: {hardware.name}, by the cost MODEL, not measured",
        columns=("method", "batch size", *(_ranks_text(count) for count in counts)),
        lines=tuple(
            (
                Cell(f"{look(method).label} (model)"),
                Cell(f"{batch:,}", batch),
                *(cell(batch, method, count) for count in counts),
            )
            for batch, method in rows
        ),
        notes=(
            "Time a step and efficiency T(1) / (R T(R)) as the cost model predicts them from "
            f"operations and bytes, curvature every {record.interval} steps. Constants: "
            f"{hardware.source}.",
        ),
    )


def _ranks_text(count: int) -> str:
    return "1 rank" if count == 1 else f"{count:,} ranks"


def _published_table(workload: str, theirs: Sequence[published.EpochTime]) -> Table:
    lines = tuple(
        (
            Cell(look(entry.method).label),
            Cell(f"{entry.batch_size:,}", entry.batch_size),
            Cell(str(entry.gpus), entry.gpus),
            Cell(time_text(entry.seconds), entry.seconds),
            Cell(time_text(entry.seconds * entry.gpus), entry.seconds * entry.gpus),
            Cell(f"{entry.efficiency:.0%}", entry.efficiency),
        )
        for entry in theirs
    )
    first = theirs[0]
    return Table(
        title=f"{workload}: time of an epoch, {PUBLISHED}",
        columns=("method", "batch size", "GPUs", "time an epoch", "GPU-time", "efficiency"),
        lines=lines,
        notes=(
            f"{PUBLISHED}: {first.source.citation}, {first.where}. Time divided by epochs; the "
            "batch grows with the GPUs. The paper's scaling figures (C.4.3, E.2) print no numbers.",
        ),
        marked=frozenset(range(len(lines))),
    )


def write_scaling(record: Scaling, path: Path, device: str = "cpu") -> Path:
    """Record what was found with versions and machine; predictions are marked as a model."""
    content = {
        "schema": SCHEMA,
        "versions": versions(),
        "machine": machine(torch.device(device)),
        "workload": record.workload,
        "interval": record.interval,
        "measured": [asdict(timing) for timing in record.timings],
        "model": {
            "note": "predictions of a cost model, not measured",
            "hardware": [asdict(hardware) for hardware in record.hardware],
            "predictions": [asdict(prediction) for prediction in record.predictions],
        },
    }
    write_text(path, json.dumps(strict_json(content), indent=2, allow_nan=False) + "\n")
    return path


def read_scaling(path: Path) -> Scaling:
    """What ``write_scaling`` recorded."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["schema"] != SCHEMA:
            raise ValueError(f"expected schema {SCHEMA}, found {content['schema']!r}")
        model = content["model"]
        return Scaling(
            workload=content["workload"],
            interval=content["interval"],
            timings=tuple(
                Timing(**{k: tuple(v) if isinstance(v, list) else v for k, v in t.items()})
                for t in content["measured"]
            ),
            predictions=tuple(Prediction(**prediction) for prediction in model["predictions"]),
            hardware=tuple(Hardware(**hardware) for hardware in model["hardware"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise RecordError(f"{path} holds no scaling record ({error}): measure again") from error
