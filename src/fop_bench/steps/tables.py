"""A record as Markdown tables. Pure: the same record gives the same text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from fop_bench.render import markdown_rows
from fop_bench.steps.methods import METHODS, OURS, STAGGERED
from fop_bench.steps.profile import ORDER
from fop_bench.steps.stats import Figures, counted, figures
from fop_bench.steps.store import by_interval, cell_key
from fop_bench.steps.workloads import SWEEPS, TABLE

Record = Mapping[str, Any]
NOTHING = "–"
LABELS = {name: method.label for name, method in METHODS.items()} | {
    STAGGERED: "**fop.KFAC, staggered**"
}

# What fop.KFAC aims at, as ratios to SGD: by workload, every step / interval 10 / plain / memory.
TARGETS = {
    "resnet18-b64": (3.2, 1.60, 1.30, 2.0),
    "vit-b64": (1.7, 1.12, 1.06, 1.25),
    "mlp-w1024-b512": (3.6, 2.4, 2.2, 1.7),
    "cnn-b512": (1.8, 1.08, 1.02, 1.5),
}
WORST_TARGET = 1.5  # worst step against the mean of its interval, staggered
COUNT_TARGET = 1.05  # FOP / KFAC measured, against the same by operation count
FOP_TARGETS = {"resnet18-b256": 1.10, "cnn-b4096": 1.10}  # FOP / KFAC, renewals every 10 steps
FOP_MEMORY_TARGET = 1.10


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return markdown_rows([head, ["---"] * len(head), *lines])


def number(value: float | None, digits: int = 2) -> str:
    return NOTHING if value is None else f"{value:.{digits}f}"


def verdict(value: float | None, target: float) -> str:
    """A figure beside its target; rounded as shown, so that text and verdict agree."""
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
    return [name for name in LABELS if name in measured]


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


def heads(record: Record) -> list[str]:
    return ["", *(TABLE[name].label for name in workloads(record))]


def times(record: Record) -> str:
    """Ratios to SGD, with a note for every cell that could not be measured."""
    lines, notes = [], []
    for method in methods(record):
        row = [LABELS[method]]
        for workload in workloads(record):
            found = of(record, workload, method)
            if found.error is not None:
                notes.append(f"{LABELS[method]} on {TABLE[workload].label}: `{found.error}`")
                row.append(f"{NOTHING} [{len(notes)}]")
            elif METHODS.get(method) is not None and METHODS[method].renews is None:
                row.append(number(found.every_step))
            else:
                parts = (found.every_step, found.interval, found.plain)
                measured = any(part is not None for part in parts)
                row.append(" / ".join(map(number, parts)) if measured else NOTHING)
        lines.append(row)
    seconds = [sgd_seconds(record, workload) for workload in workloads(record)]
    lines.append(["SGD, CPU seconds", *(number(s, 3) for s in seconds)])
    text = table(heads(record), lines)
    listed = "\n".join(f"{index}. {note}" for index, note in enumerate(notes, 1))
    return f"{text}\n\nCould not run:\n\n{listed}" if notes else text


def worst_steps(record: Record) -> str:
    lines = []
    for method in methods(record):
        row = [number(of(record, workload, method).worst) for workload in workloads(record)]
        if any(cell != NOTHING for cell in row):
            lines.append([LABELS[method], *row])
    return table(heads(record), lines)


def memory(record: Record) -> str:
    """Growth of peak memory against SGD's, and bytes of optimizer state."""
    lines = []
    for method in methods(record):
        row = [LABELS[method]]
        for workload in workloads(record):
            found, base = of(record, workload, method), of(record, workload, "sgd")
            if found.peak_bytes is None or found.state_bytes is None or not base.peak_bytes:
                row.append(NOTHING)
            else:
                growth = found.peak_bytes / base.peak_bytes
                row.append(f"{growth:.2f} / {found.state_bytes / 1e6:.0f} MB")
        lines.append(row)
    return table(heads(record), lines)


def targets(record: Record) -> str:
    names = [workload for workload in workloads(record) if workload in TARGETS]
    rows: dict[str, list[str]] = {
        "fop.KFAC, every step": [],
        "fop.KFAC, every 10 steps": [],
        "fop.KFAC, step without curvature work": [],
        "fop.KFAC, growth of peak memory": [],
        "fop.FOP's peak memory against fop.KFAC's": [],
        "fop.FOP / fop.KFAC every 10 steps, measured over counted": [],
        "worst step against the mean, staggered": [],
    }
    for name in names:
        kfac, sgd, fop = (of(record, name, method) for method in ("kfac", "sgd", "fop"))
        values = (kfac.every_step, kfac.interval, kfac.plain, _over(kfac, sgd))
        cells = [verdict(*pair) for pair in zip(values, TARGETS[name], strict=True)]
        cells.append(verdict(_over(fop, kfac), FOP_MEMORY_TARGET))
        measured, by_count = fop_against_kfac(record, name, "interval")
        over = None if measured is None or by_count is None else measured / by_count
        cells.append(verdict(over, COUNT_TARGET))
        cells.append(verdict(of(record, name, STAGGERED).worst, WORST_TARGET))
        for row, cell in zip(rows.values(), cells, strict=True):
            row.append(cell)
    return table(
        ["", *(TABLE[name].label for name in names)], [[k, *row] for k, row in rows.items()]
    )


def _over(one: Figures, other: Figures) -> float | None:
    if one.peak_bytes is None or not other.peak_bytes:
        return None
    return one.peak_bytes / other.peak_bytes


def fop_against_kfac(record: Record, workload: str, kind: str) -> tuple[float | None, float | None]:
    """FOP's cost over KFAC's, as measured and by counted multiply-adds."""
    fop, kfac = (getattr(of(record, workload, method), kind) for method in ("fop", "kfac"))
    measured = None if fop is None or kfac is None else fop / kfac
    counts = [counted(record["cells"].get(cell_key(workload, method, 10), {})) for method in OURS]
    if counts[0] is None or counts[1] is None:
        return measured, None
    return measured, counts[1][kind] / counts[0][kind]


def kfac_ratios(record: Record) -> str:
    """fop's steps against SGD's, as measured and by counted multiply-adds."""
    lines = []
    for workload in workloads(record):
        sgd = record["cells"].get(cell_key(workload, "sgd", 1), {}).get("multiply_adds")
        for method in OURS:
            counts = counted(record["cells"].get(cell_key(workload, method, 10), {}))
            if not sgd or counts is None:
                continue
            found = of(record, workload, method)
            row = [f"fop.{method.upper()}, {TABLE[workload].label}"]
            for kind, count in counts.items():
                row.append(f"{number(getattr(found, kind))}, {number(count / sgd['plain'])}")
            lines.append(row)
    head = ["against SGD: measured, by count", "every step", "every 10 steps", "plain step"]
    return table(head, lines) if lines else ""


def fop_ratios(record: Record) -> str:
    lines = []
    for workload in workloads(record):
        row = [TABLE[workload].label]
        for kind in ("every_step", "interval", "plain"):
            measured, by_count = fop_against_kfac(record, workload, kind)
            row.append(f"{number(measured)}, {number(by_count)}")
        measured, _ = fop_against_kfac(record, workload, "interval")
        target = FOP_TARGETS.get(workload)
        row.append(NOTHING if target is None else verdict(measured, target))
        lines.append(row)
    head = ["FOP / KFAC: measured, by count", "every step", "every 10 steps", "plain step"]
    return table([*head, "target, every 10 steps"], lines)


def growth(record: Record) -> str:
    """Cost along each sweep, where it was measured."""
    parts = []
    for title, sweep in SWEEPS.items():
        lines = []
        for size, workload in sweep.items():
            found = [of(record, workload.name, method) for method in OURS]
            if all(figure.interval is None for figure in found):
                continue
            row = [f"{size}", number(sgd_seconds(record, workload.name), 3)]
            for figure in found:
                values = (figure.every_step, figure.interval, figure.plain)
                row.append(" / ".join(map(number, values)))
            lines.append(row)
        if len(lines) > 1:  # one point shows no growth
            name, _, axis = title.rpartition(": ")
            head = [f"{name}, {axis}", "SGD, CPU seconds", *(f"fop.{m.upper()}" for m in OURS)]
            parts.append(table(head, lines))
    return "\n\n".join(parts)


def profiles(record: Record) -> str:
    """CPU seconds and shares by phase."""
    parts = []
    for key, found in record["profiles"].items():
        workload, method = key.split("/")
        head = [f"fop.{method.upper()}, {TABLE[workload].label}", "renewing step", "plain step"]
        lines = [
            [phase, *(_share(found[kind], phase) for kind in ("renewal", "plain"))]
            for phase in ORDER
        ]
        totals = [sum(found[kind].values()) for kind in ("renewal", "plain")]
        lines.append(["all", *(f"{total:.3f} s" for total in totals)])
        parts.append(table(head, lines))
    return "\n\n".join(parts)


def _share(seconds: Mapping[str, float], phase: str) -> str:
    total = sum(seconds.values())
    return f"{seconds[phase]:.3f} s, {100 * seconds[phase] / total:.0f} %"
