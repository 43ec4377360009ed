"""A record of what steps cost as tables. Pure: the same record gives the same text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from fop_bench.render import Cell, Table
from fop_bench.steps.methods import METHODS, OURS, STAGGERED
from fop_bench.steps.profile import ORDER
from fop_bench.steps.stats import Figures, counted, figures
from fop_bench.steps.store import by_interval, cell_key
from fop_bench.steps.workloads import SWEEPS, TABLE
from fop_bench.style import look

Record = Mapping[str, Any]
NOTHING = "–"
KINDS = {"every_step": "every step", "interval": "every 10 steps", "plain": "plain step"}

# What KFAC aims at, as ratios to SGD: by workload, every step / interval 10 / plain / memory.
TARGETS = {
    "resnet18-b64": (3.2, 1.60, 1.30, 2.0),
    "vit-b64": (1.7, 1.12, 1.06, 1.25),
    "mlp-w1024-b512": (3.6, 2.4, 2.2, 1.7),
    "cnn-b512": (1.8, 1.08, 1.02, 1.5),
}
WORST_TARGET = 1.5  # worst step against the mean of its interval, staggered
COUNT_TARGET = 1.05  # FOP / KFAC measured, against the same by operation count
FOP_TARGETS = {"resnet18-b256": 1.10, "cnn-b4096": 1.10}  # FOP / KFAC, refreshes every 10 steps
FOP_MEMORY_TARGET = 1.10


def sections(record: Record) -> dict[str, list[Table]]:
    """Every table that has something in it, by heading."""
    found = {
        "Time of a step": [times(record)],
        "Worst step": [worst_steps(record)],
        "Memory": [memory(record)],
        "Targets": [targets(record)],
        "Against operation counts": [ratios_to_sgd(record)],
        "FOP against KFAC": [fop_ratios(record)],
        "How cost grows": growth(record),
        "Phases of a step": profiles(record),
    }
    kept = {heading: [t for t in tables if t.lines] for heading, tables in found.items()}
    return {heading: tables for heading, tables in kept.items() if tables}


def number(value: float | None, digits: int = 2) -> str:
    return NOTHING if value is None else f"{value:.{digits}f}"


def against_target(value: float | None, target: float) -> str:
    """A figure beside its target; rounded as shown, so that number and word agree."""
    if value is None:
        return NOTHING
    reached = round(value, 2) <= target
    return f"{value:.2f} ({'reached' if reached else 'target'} {target:.2f})"


def workloads(record: Record) -> list[str]:
    """The columns: workloads of the table for which anything was measured."""
    measured = {key.split("/")[0] for key in record["cells"]}
    return [name for name in TABLE if name in measured]


def methods(record: Record) -> list[str]:
    """The rows, in the order of METHODS."""
    measured = {key.split("/")[1] for key in record["cells"]}
    return [name for name in METHODS if name in measured]


def of(record: Record, workload: str, method: str) -> Figures:
    return figures(by_interval(record, workload, method))


def sgd_seconds(record: Record, workload: str) -> float | None:
    times = [
        seconds
        for key, cell in record["cells"].items()
        if key.startswith(f"{workload}/") and "error" not in cell
        for seconds in cell["reference"]
    ]
    return median(times) if times else None


def _table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str] = ()
) -> Table:
    lines = tuple(tuple(Cell(text) for text in row) for row in rows)
    return Table(title, tuple(columns), lines, tuple(notes))


def _by_method(
    record: Record, title: str, text: Callable[[str, str], str], *more: Sequence[str],
    notes: Sequence[str] = (),
) -> Table:  # fmt: skip
    """Methods down, workloads across; methods of which nothing is known are left out."""
    names = workloads(record)
    rows = [
        [look(method).label, *cells]
        for method in methods(record)
        if set(cells := [text(workload, method) for workload in names]) != {NOTHING}
    ]
    return _table(title, ["", *(TABLE[name].label for name in names)], [*rows, *more], notes)


def _three(found: Figures) -> str:
    parts = [getattr(found, kind) for kind in KINDS]
    return NOTHING if parts == [None] * 3 else " / ".join(map(number, parts))


def times(record: Record) -> Table:
    """Ratios to SGD, with a note for every cell that could not be measured."""
    notes: list[str] = []

    def text(workload: str, method: str) -> str:
        found = of(record, workload, method)
        if found.error is not None:
            where = f"{look(method).label} on {TABLE[workload].label}"
            notes.append(f"[{len(notes) + 1}] could not run: {where}: {found.error}")
            return f"{NOTHING} [{len(notes)}]"
        return number(found.every_step) if METHODS[method].refreshes is None else _three(found)

    seconds = [number(sgd_seconds(record, workload), 3) for workload in workloads(record)]
    title = (
        "Ratio to SGD with momentum: curvature every step / every 10 steps (mean over the "
        "interval) / a step without curvature work"
    )
    return _by_method(record, title, text, ["SGD, CPU seconds", *seconds], notes=notes)


def worst_steps(record: Record) -> Table:
    title = "The worst step of an interval of 10, against the interval's mean"
    return _by_method(record, title, lambda w, m: number(of(record, w, m).worst))


def memory(record: Record) -> Table:
    def text(workload: str, method: str) -> str:
        found = of(record, workload, method)
        growth = memory_ratio(found, of(record, workload, "sgd"))
        if growth is None or found.state_bytes is None:
            return NOTHING
        return f"{growth:.2f} / {found.state_bytes / 1e6:.0f} MB"

    title = (
        "Growth of peak resident memory from before the model is built, against SGD's / "
        "optimizer state"
    )
    return _by_method(record, title, text)


def memory_ratio(one: Figures, other: Figures) -> float | None:
    if one.peak_bytes is None or not other.peak_bytes:
        return None
    return one.peak_bytes / other.peak_bytes


def targets(record: Record) -> Table:
    names = [workload for workload in workloads(record) if workload in TARGETS]
    columns = [_aims(record, name) for name in names]
    rows = [
        [across[0][0], *(against_target(value, target) for _, value, target in across)]
        for across in zip(*columns, strict=True)
    ]
    return _table("Ratios, with the targets", ["", *(TABLE[name].label for name in names)], rows)


def _aims(record: Record, workload: str) -> list[tuple[str, float | None, float]]:
    """(what, as measured, target) of one workload."""
    kfac, sgd, fop = (of(record, workload, method) for method in ("kfac", "sgd", "fop"))
    every_step, interval, plain, peak = TARGETS[workload]
    measured, by_count = fop_against_kfac(record, workload, "interval")
    over = None if measured is None or by_count is None else measured / by_count
    worst = of(record, workload, STAGGERED).worst
    return [
        ("KFAC, every step", kfac.every_step, every_step),
        ("KFAC, every 10 steps", kfac.interval, interval),
        ("KFAC, step without curvature work", kfac.plain, plain),
        ("KFAC, growth of peak memory", memory_ratio(kfac, sgd), peak),
        ("FOP's peak memory against KFAC's", memory_ratio(fop, kfac), FOP_MEMORY_TARGET),
        ("FOP / KFAC every 10 steps, measured over counted", over, COUNT_TARGET),
        ("worst step against the mean, staggered", worst, WORST_TARGET),
    ]


def fop_against_kfac(record: Record, workload: str, kind: str) -> tuple[float | None, float | None]:
    """FOP's cost over KFAC's, as measured and by counted multiply-adds."""
    fop, kfac = (getattr(of(record, workload, method), kind) for method in ("fop", "kfac"))
    measured = None if fop is None or kfac is None else fop / kfac
    counts = [counted(record["cells"].get(cell_key(workload, method, 10), {})) for method in OURS]
    if counts[0] is None or counts[1] is None:
        return measured, None
    return measured, counts[1][kind] / counts[0][kind]


def ratios_to_sgd(record: Record) -> Table:
    """fop's steps against SGD's, as measured and by counted multiply-adds."""
    rows = []
    for workload in workloads(record):
        sgd = record["cells"].get(cell_key(workload, "sgd", 1), {}).get("multiply_adds")
        for method in OURS:
            counts = counted(record["cells"].get(cell_key(workload, method, 10), {}))
            if not sgd or counts is None:
                continue
            found = of(record, workload, method)
            pairs = [(getattr(found, kind), counts[kind] / sgd["plain"]) for kind in KINDS]
            name = f"{look(method).label}, {TABLE[workload].label}"
            rows.append([name, *(f"{number(a)}, {number(b)}" for a, b in pairs)])
    return _table("Ratio to SGD: measured, by count", ["", *KINDS.values()], rows)


def fop_ratios(record: Record) -> Table:
    rows = []
    for workload in workloads(record):
        found = {kind: fop_against_kfac(record, workload, kind) for kind in KINDS}
        target = FOP_TARGETS.get(workload)
        rows.append([
            TABLE[workload].label,
            *(f"{number(measured)}, {number(by_count)}" for measured, by_count in found.values()),
            NOTHING if target is None else against_target(found["interval"][0], target),
        ])  # fmt: skip
    columns = ["", *KINDS.values(), "target, every 10 steps"]
    return _table("FOP / KFAC: measured, by count", columns, rows)


def growth(record: Record) -> list[Table]:
    """Cost along each sweep, where it was measured."""
    tables = []
    for title, sweep in SWEEPS.items():
        name, _, axis = title.rpartition(": ")
        rows = []
        for size, workload in sweep.items():
            found = [of(record, workload.name, method) for method in OURS]
            if any(figure.interval is not None for figure in found):
                seconds = number(sgd_seconds(record, workload.name), 3)
                rows.append([f"{size}", seconds, *map(_three, found)])
        if len(rows) > 1:  # one point shows no growth
            columns = [axis, "SGD, CPU seconds", *(look(method).label for method in OURS)]
            tables.append(_table(name, columns, rows))
    return tables


def profiles(record: Record) -> list[Table]:
    """CPU seconds and shares by phase."""
    tables = []
    for key, found in record["profiles"].items():
        workload, method = key.split("/")
        steps = [found[kind] for kind in ("refresh", "plain")]
        rows = [[phase, *(_share(step, phase) for step in steps)] for phase in ORDER]
        rows.append(["all", *(f"{sum(step.values()):.3f} s" for step in steps)])
        title = f"{look(method).label}, {TABLE[workload].label}"
        tables.append(_table(title, ["phase", "refreshing step", "plain step"], rows))
    return tables


def _share(seconds: Mapping[str, float], phase: str) -> str:
    return f"{seconds[phase]:.3f} s, {100 * seconds[phase] / sum(seconds.values()):.0f} %"
