"""Tables of strong scaling: what was measured, what the cost model says, what was published."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence

from fop_bench import published
from fop_bench.costs import Hardware
from fop_bench.memory import bytes_text
from fop_bench.render import PUBLISHED, Cell, Table
from fop_bench.scaling import (
    REFERENCE,
    Point,
    Scaling,
    efficiencies,
    measured_points,
    modelled_points,
    processor_points,
    relative_efficiencies,
)
from fop_bench.style import look, order
from fop_bench.tables import time_text, time_unit

QUIET = 0.5  # a load average up to this is that of a machine with nothing else to do


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


MEASURED = (
    "method", "batch size", "ranks", "time a step", "rank-time", "efficiency",
    "of SGD's", "by CPU time", "curvature a rank", "model",
)  # fmt: skip


def _measured_table(record: Scaling) -> Table:
    blocks = min(len(timing.seconds) for timing in record.timings)
    busy = (
        f"Other programs ran at the same time (load average {record.load:.1f}): times by the "
        "clock are disturbed, CPU time is less so."
    )
    return Table(
        title=f"{record.workload}: strong scaling, measured",
        columns=MEASURED,
        lines=tuple(_measured_lines(record)),
        notes=(
            f"Median [smallest, largest] of {blocks} blocks of {record.interval} steps, each with "
            "one refresh of curvature, in fresh processes with one thread a rank; made-up inputs "
            "in memory. Efficiency: T(1) / (R T(R)); of SGD's: over that of SGD, from blocks that "
            "alternate in the same processes. By CPU time: the same with the busiest "
            "rank's processor time, without waiting. Curvature: factors and inverses of the "
            "fullest rank. Model: what the cost model predicts here, not measured.",
            *([busy] if record.load > QUIET else []),
        ),
    )


def _measured_lines(record: Scaling) -> Iterator[tuple[Cell, ...]]:
    points = measured_points(record)
    reached, computed = efficiencies(points), _by_place(efficiencies(processor_points(record)))
    here = record.hardware[0].name if record.hardware else ""
    model = _by_place({p: p.seconds for p in modelled_points(record, here)})
    relative = relative_efficiencies(record.timings)
    for point, timing in sorted(
        zip(points, record.timings, strict=True),
        key=lambda pair: (pair[0].batch_size, order(pair[0].method), pair[0].ranks),
    ):
        place = (point.method, point.batch_size, point.ranks)
        share = math.nan if point.method == REFERENCE else relative.get(timing, math.nan)
        predicted, state = model.get(place), max(timing.state_bytes, default=0)
        yield (
            Cell(look(point.method).label),
            Cell(f"{point.batch_size:,}", point.batch_size),
            Cell(str(point.ranks), point.ranks),
            Cell(_range_text(timing.seconds), point.seconds),
            Cell(time_text(point.seconds * point.ranks), point.seconds * point.ranks),
            _percent(reached[point]),
            _percent(share),
            _percent(computed.get(place, math.nan)),
            Cell(bytes_text(state) if state else "", state),
            Cell(time_text(predicted) if predicted else "", predicted or 0.0),
        )


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
