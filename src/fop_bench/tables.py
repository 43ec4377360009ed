"""The paper's table (batch sizes down, methods across) and a long one with every number, from rows.

``summarise(runs)`` gives the rows; ``to_rich``, ``to_markdown`` and ``to_html`` print any table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from fop_bench import published
from fop_bench.published import Result
from fop_bench.records import Run
from fop_bench.render import PUBLISHED, Cell, Table, to_html, to_markdown, to_rich
from fop_bench.style import look, order
from fop_bench.summary import Row, Spread, by_variant, number, reference, summarise, variant_text

__all__ = [
    "detail_table",
    "group_error_table",
    "paper_table",
    "summarise",
    "to_html",
    "to_markdown",
    "to_rich",
    "tuning_table",
]

MISS = "--"
COLUMNS = (
    "method", "batch size", "reached", "epochs to target", "median", "time to target", "speed-up",
)  # fmt: skip


def epochs_text(epochs: float) -> str:
    return f"{epochs:.0f}" if float(epochs).is_integer() else f"{epochs:.1f}"


def metric_text(value: float, metric: str) -> str:
    """Accuracies and errors are fractions and print as percentages."""
    if not math.isfinite(value):
        return MISS
    return f"{100 * value:.2f} %" if is_fraction(metric) else f"{value:.4g}"


def is_fraction(metric: str) -> bool:
    return metric.startswith(("accuracy", "error"))


def metrics_text(spread: Spread, metric: str) -> str:
    """Mean ± standard deviation of a metric, with its unit once."""
    if not math.isfinite(spread.mean):
        return MISS
    if not is_fraction(metric):
        return with_spread(spread, lambda value: f"{value:.4g}")
    percent = Spread(tuple(100 * value for value in spread.values))
    return f"{with_spread(percent, lambda value: f'{value:.2f}')} %"


def time_unit(seconds: float) -> tuple[float, str]:
    """The unit that suits a duration, as (seconds in it, name)."""
    for size, name, limit in ((1e-3, "ms", 1.0), (1.0, "s", 1000.0), (60.0, "min", 36_000.0)):
        if seconds < limit:
            return size, name
    return 3600.0, "h"


def time_text(seconds: float) -> str:
    size, unit = time_unit(seconds)
    return f"{seconds / size:.1f} {unit}"


def with_spread(spread: Spread, text: Callable[[float], str] = epochs_text) -> str:
    """Mean ± standard deviation; "--" as soon as one seed misses."""
    if not math.isfinite(spread.mean):
        return MISS
    if math.isnan(spread.std):
        return text(spread.mean)
    return f"{text(spread.mean)} ± {text(spread.std)}"


def times_text(spread: Spread) -> str:
    """Mean ± standard deviation of durations, both in the unit that suits the mean."""
    if not math.isfinite(spread.mean):
        return MISS
    size, unit = time_unit(spread.mean)
    scaled = Spread(tuple(value / size for value in spread.values))
    return f"{with_spread(scaled, lambda value: f'{value:.1f}')} {unit}"


def speedup_text(speedup: float | None) -> str:
    return MISS if speedup is None or math.isnan(speedup) else f"×{speedup:.2f}"


def published_text(result: Result) -> str:
    """Epochs / time [speed-up] on one line, or the best metric where no target was reached."""
    if result.epochs is not None and math.isfinite(result.epochs):
        text = epochs_text(result.epochs)
        if result.seconds is not None:
            text += f" / {time_text(result.seconds)}"
        return f"{text} [{speedup_text(result.speedup)}]" if result.speedup else text
    return MISS if result.best is None else f"best {metric_text(result.best, 'accuracy')}"


def paper_table(rows: Sequence[Row], workload: str) -> Table:
    """Epochs / time to target and speed-up of each method at each batch size.

    Batch sizes stand down and methods across, as in the paper's first table, or the other way
    round, as in its second and third, where there are more methods than batch sizes.
    """
    of_workload = [row for row in rows if row.workload == workload]
    ours = {(row.method, row.batch_size): row for row in of_workload if not row.variant}
    figures = published.for_workload(workload)
    theirs = {(r.method, r.batch_size): r for r in figures.results} if figures else {}
    places = ours.keys() | theirs.keys()
    methods = sorted({method for method, _ in places}, key=order)
    batches = sorted({batch for _, batch in places})

    def cell(method: str, batch: int) -> Cell:
        return _paper_cell(ours.get((method, batch)), theirs.get((method, batch)))

    by_method = [
        (Cell(look(method).label), *(cell(method, batch) for batch in batches))
        for method in methods
    ]
    by_batch = [
        (Cell(f"{batch:,}", batch), *(cell(method, batch) for method in methods))
        for batch in batches
    ]
    upright = len(methods) <= len(batches)
    across = (look(m).label for m in methods) if upright else (f"batch {b:,}" for b in batches)
    return Table(
        title=f"{workload}: epochs / time to target [speed-up]",
        columns=("batch size" if upright else "method", *across),
        lines=tuple(by_batch if upright else by_method),
        notes=_notes(of_workload, workload),
    )


def _paper_cell(row: Row | None, result: Result | None) -> Cell:
    below = published_text(result) if result else ""
    if row is None:
        return Cell("", math.inf, below)
    if not math.isfinite(row.epochs.mean):
        some = f" ({row.epochs.reached}/{row.epochs.n})" if row.epochs.reached else ""
        return Cell(f"{MISS} / {MISS}{some}", math.inf, below)
    speed = f"\n[{speedup_text(row.speedup)}]" if math.isfinite(row.speedup) else ""
    text = f"{with_spread(row.epochs)} / {times_text(row.seconds)}{speed}"
    return Cell(text, row.epochs.mean, below)


def detail_table(rows: Sequence[Row], workload: str) -> Table:
    """Every number of a workload, a line for each row: ours first, then the published ones."""
    ours = [row for row in rows if row.workload == workload]
    figures = published.for_workload(workload)
    results = figures.results if figures else ()
    lines = [_our_line(row) for row in ours] + [_published_line(result) for result in results]
    columns: tuple[str, ...] = (*COLUMNS, f"best {ours[0].metric if ours else 'metric'}", "source")
    if not results:  # then every source is the same
        lines, columns = [line[:-1] for line in lines], columns[:-1]
    sources = sorted({result.source.citation for result in results})
    return Table(
        title=f"{workload}: all results",
        columns=columns,
        lines=tuple(lines),
        notes=(*_notes(ours, workload), *(f"{PUBLISHED}: {source}" for source in sources)),
        marked=frozenset(range(len(ours), len(lines))),
    )


def _our_line(row: Row) -> tuple[Cell, ...]:
    share = row.epochs.reached / row.epochs.n
    median = row.epochs.median
    return (
        Cell(row.label),
        Cell(f"{row.batch_size:,}", row.batch_size),
        Cell(f"{row.epochs.reached}/{row.epochs.n}{_trouble(row)}", share),
        Cell(with_spread(row.epochs), row.epochs.mean),
        Cell(epochs_text(median) if math.isfinite(median) else MISS, median),
        Cell(times_text(row.seconds), row.seconds.mean),
        Cell(speedup_text(row.speedup), _speedup_order(row.speedup)),
        Cell(metrics_text(row.best, row.metric), row.best.mean),
        Cell("this record"),
    )


def _published_line(result: Result) -> tuple[Cell, ...]:
    epochs = math.inf if result.epochs is None else result.epochs
    seconds = math.inf if result.seconds is None else result.seconds
    best = -math.inf if result.best is None else result.best
    name = look(result.method).label if result.label == result.method else result.label
    return (
        Cell(name),
        Cell(f"{result.batch_size:,}", result.batch_size),
        Cell("", -1.0),
        Cell(epochs_text(epochs) if math.isfinite(epochs) else MISS, epochs),
        Cell("", math.inf),
        Cell(time_text(seconds) if math.isfinite(seconds) else MISS, seconds),
        Cell(speedup_text(result.speedup), _speedup_order(result.speedup)),
        Cell(metric_text(best, "accuracy") if result.best is not None else "", best),
        Cell(f"{PUBLISHED}: {result.source.short}, {result.where}"),
    )


def _speedup_order(speedup: float | None) -> float:
    return -1.0 if speedup is None or math.isnan(speedup) else speedup


def _trouble(row: Row) -> str:
    counts = {"diverged": row.diverged, "unfinished": row.unfinished}
    parts = [f"{count} {name}" for name, count in counts.items() if count]
    return f" ({', '.join(parts)})" if parts else ""


def tuning_table(runs: Sequence[Run], workload: str) -> Table:
    """The search behind the settings: budget and best trial of each method and batch size."""
    rows = [row for row in summarise(runs) if row.workload == workload]
    lines = []
    for method, batch in sorted(
        {(r.method, r.batch_size) for r in rows}, key=lambda k: order(k[0])
    ):
        trials = [row for row in rows if (row.method, row.batch_size) == (method, batch)]
        best = min(trials, key=_tuning_rank)
        lines.append(
            (
                Cell(look(method).label),
                Cell(f"{batch:,}", batch),
                Cell(f"{len(trials)} × {best.epochs.n}", len(trials)),
                Cell(f"{best.epochs.reached}/{best.epochs.n}", best.epochs.reached),
                Cell(metrics_text(best.best, best.metric), best.best.mean),
                Cell(variant_text(best.variant)),
            )
        )
    return Table(
        title=f"{workload}: tuning on the validation split",
        columns=("method", "batch size", "trials × seeds", "reached", "best score", "best setting"),
        lines=tuple(lines),
        notes=("Only settings that were searched are named; all others are the method's own.",),
    )


def _tuning_rank(row: Row) -> tuple[float, float, float]:
    best = -row.best.mean if row.higher_is_better else row.best.mean
    return -row.epochs.reached / row.epochs.n, row.epochs.median, best


def group_error_table(runs: Sequence[Run], workload: str) -> Table | None:
    """Final error by head, middle and tail classes; None where runs do not record it."""
    columns = ("test_error", "test_error_head", "test_error_middle", "test_error_tail")
    lines = []
    for (name, method, batch), variants in by_variant(runs).items():
        for variant, seeds in variants.items():
            recorded = [run.metrics[-1] for run in seeds if run.metrics]
            if name != workload or not all("test_error_head" in last for last in recorded):
                continue
            spreads = [Spread(tuple(number(r.get(c)) for r in recorded)) for c in columns]
            label = look(method).label + (f" ({variant_text(variant)})" if variant else "")
            cells = [Cell(metrics_text(s, "error"), s.mean) for s in spreads]
            lines.append((Cell(label), Cell(f"{batch:,}", batch), *cells))
    if not lines:
        return None
    return Table(
        title=f"{workload}: test error by class group, last epoch",
        columns=("method", "batch size", "all classes", "head", "middle", "tail"),
        lines=tuple(lines),
    )


def _notes(rows: Sequence[Row], workload: str) -> tuple[str, ...]:
    if not rows:
        return ()
    first, seeds = rows[0], sorted({row.epochs.n for row in rows})
    count = f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    notes = [
        f"Target: {first.metric} {metric_text(first.target, first.metric)}. "
        f"Mean ± standard deviation over {count} seed{'' if seeds == [1] else 's'}; "
        f"{MISS}: not reached by every seed (k/n: k of n reached it)."
    ]
    base = reference(rows, workload)
    if base is None:
        notes.append("No speed-up: there is no SGD or AdamW run to compare with.")
    else:
        where = f"{look(base.method).label} at batch size {base.batch_size:,}"
        reached = math.isfinite(base.seconds.mean)
        notes.append(
            f"Speed-up: time to target against {where}."
            if reached
            else f"No speed-up: the reference, {where}, did not reach the target with every seed."
        )
    if any(row.unfinished for row in rows):
        notes.append("Unfinished runs count as misses until they reach the target.")
    if published.for_workload(workload):
        notes.append(f"Figures marked {PUBLISHED} were measured by others, on other machines.")
    return tuple(notes)
