"""Strong scaling: one batch on more and more ranks, timed here and modelled for accelerators.

The paper's figures (appendices C.4.3 and E.2): time, device time (ranks x time) and parallel
efficiency T(1) / (R T(R)) against ranks, and efficiency against batch size. Every timing is that of
fresh processes with one thread a rank, all methods in turn and several rounds, so that what
disturbs the machine disturbs all. Predictions come from `costs` and are shown as a model.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypedDict

from fop_bench.costs import Hardware, Prediction, predict, shape_of
from fop_bench.errors import BenchError
from fop_bench.files import read_record, write_json
from fop_bench.processes import ONE_THREAD, ProcessError, ask
from fop_bench.records import provenance
from fop_bench.schema import Count, Name, NonNegative, Positive, Whole
from fop_bench.workloads import WORKLOADS

FILE = "scaling.json"
REFERENCE = "sgd"  # plain DistributedDataParallel


class ScalingMeasurementError(BenchError, RuntimeError):
    """The processes that were to be timed failed."""


@dataclass(frozen=True)
class Timing:
    """Mean seconds of a step in each block of steps, of all rounds, on `ranks` ranks together.

    `cpu_seconds` are processor time of the busiest rank, which leaves out what it waited for other
    ranks and for other programs; `reference_seconds` are the reference's in the same processes,
    block by block between the method's own; `state_bytes` are those of curvature on each rank.
    """

    method: Name
    batch_size: Count
    ranks: Count
    seconds: tuple[Positive, ...]
    cpu_seconds: tuple[Positive, ...] = ()
    reference_seconds: tuple[Positive, ...] = ()
    state_bytes: tuple[Whole, ...] = ()

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def slowdown(self) -> float:
        """Against the reference beside it: the median over pairs of blocks."""
        pairs = zip(self.seconds, self.reference_seconds, strict=True)
        return statistics.median(own / beside for own, beside in pairs)

    def joined(self, other: Timing) -> Timing:
        """With the blocks of another round."""
        return replace(
            self,
            seconds=self.seconds + other.seconds,
            cpu_seconds=self.cpu_seconds + other.cpu_seconds,
            reference_seconds=self.reference_seconds + other.reference_seconds,
        )


@dataclass(frozen=True)
class Scaling:
    """What one command found out: timings, and predictions with the constants behind them.

    `load` is the machine's load average before anything was timed: programs that others run on it,
    which disturb the clock.
    """

    workload: Name
    interval: Count  # steps between refreshes of curvature
    timings: tuple[Timing, ...]
    predictions: tuple[Prediction, ...]
    hardware: tuple[Hardware, ...]
    load: NonNegative = 0.0


class _Model(TypedDict):
    hardware: tuple[Hardware, ...]
    predictions: tuple[Prediction, ...]


class _Record(TypedDict):
    schema: Literal[1]
    workload: Name
    interval: Count
    load: NonNegative
    measured: tuple[Timing, ...]
    model: _Model


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
    request = {"kind": "probe", "workload": workload, "batch_size": batch_size, "device": device}
    return Hardware(**_ask(request, ranks))


def _ask(request: dict[str, Any], ranks: int) -> dict[str, Any]:
    try:
        found: dict[str, Any] = ask(
            "fop_bench.scaling_worker", request, ranks=ranks, environment=ONE_THREAD
        )
        return found
    except ProcessError as error:
        what = f"{request.get('method', request['kind'])} of {request['workload']} on {ranks} ranks"
        raise ScalingMeasurementError(
            f"timing {what} at batch size {request['batch_size']} failed with exit code "
            f"{error.code}:\n{error.said}"
        ) from error


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


def relative_efficiencies(timings: Sequence[Timing]) -> dict[Timing, float]:
    """A method's efficiency over the reference's, from blocks that were timed side by side.

    Since both efficiencies are of the same ranks, their ratio is that of the slowdowns, and what
    slowed both down alike cancels.
    """
    fewest: dict[tuple[str, int], Timing] = {}
    for timing in sorted(timings, key=lambda timing: timing.ranks):
        fewest.setdefault((timing.method, timing.batch_size), timing)
    return {
        timing: fewest[timing.method, timing.batch_size].slowdown / timing.slowdown
        for timing in timings
        if timing.reference_seconds
    }


def batch_efficiencies(points: Sequence[Point]) -> dict[Point, float]:
    """Examples a second against those at the smallest batch, of points on equally many ranks."""
    smallest: dict[tuple[str, int], Point] = {}
    for point in sorted(points, key=lambda point: point.batch_size):
        smallest.setdefault((point.method, point.ranks), point)

    def efficiency(point: Point) -> float:
        base = smallest[point.method, point.ranks]
        return base.seconds / base.batch_size / (point.seconds / point.batch_size)

    return {point: efficiency(point) for point in points}


def write_scaling(record: Scaling, path: Path, device: str = "cpu") -> Path:
    """Record what was found with versions and machine; predictions are marked as a model."""
    content = {
        "load": record.load,
        "workload": record.workload,
        "interval": record.interval,
        "measured": [asdict(timing) for timing in record.timings],
        "model": {
            "note": "predictions of a cost model, not measured",
            "hardware": [asdict(hardware) for hardware in record.hardware],
            "predictions": [asdict(prediction) for prediction in record.predictions],
        },
    }
    return write_json(path, provenance(device) | content)


def read_scaling(path: Path) -> Scaling:
    """What ``write_scaling`` recorded."""
    record = read_record(path, _Record, "scaling record")
    return Scaling(
        workload=record["workload"],
        interval=record["interval"],
        timings=record["measured"],
        predictions=record["model"]["predictions"],
        hardware=record["model"]["hardware"],
        load=record["load"],
    )
