"""From runs to what tables and plots show: a ``Row`` for each method, batch size and setting.

A run that misses its target takes infinitely long and is never dropped: with one miss the mean is
infinite (printed as "--"), while the median and the count of those that got there still tell.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fop_bench import published
from fop_bench.records import Run
from fop_bench.style import look, order, value_text

# What a run is rather than how it is set up: no setting that runs are told apart by.
IDENTITY = ("workload", "method", "batch_size", "seed", "base_batch", "split", "compile")
DEFAULT = "default"  # a setting that this run did not name and another did
Variant = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Spread:
    """One number a seed. ``inf`` is a miss, ``nan`` a value that does not exist."""

    values: tuple[float, ...]

    @property
    def n(self) -> int:
        return len(self.values)

    @property
    def reached(self) -> int:
        return sum(math.isfinite(v) for v in self.values)

    @property
    def mean(self) -> float:
        return math.fsum(self.values) / self.n if self.n else math.nan

    @property
    def std(self) -> float:
        """Sample standard deviation; nan for a single value or with a miss among them."""
        return statistics.stdev(self.values) if self.n > 1 and self.reached == self.n else math.nan

    @property
    def median(self) -> float:
        return statistics.median(self.values) if self.n else math.nan


@dataclass(frozen=True)
class Row:
    """All seeds of one method at one batch size with one setting."""

    workload: str
    method: str
    batch_size: int
    variant: Variant
    metric: str
    target: float
    higher_is_better: bool
    epochs: Spread
    seconds: Spread
    best: Spread
    unfinished: int
    diverged: int
    base_batch: int | None = None
    speedup: float = math.nan

    @property
    def label(self) -> str:
        name = look(self.method).label
        return f"{name} ({variant_text(self.variant)})" if self.variant else name


def variant_text(variant: Variant) -> str:
    """A variant in print, such as "damping 0.001, beta adaptive"."""
    return ", ".join(f"{name} {value_text(value)}" for name, value in variant)


def series(run: Run, column: str) -> list[float]:
    """A column of the run's metrics; nan where a record does not have it."""
    return [number(record.get(column)) for record in run.metrics]


def number(value: Any) -> float:
    """A recorded value as a float; nan for null, text and anything else that is no number."""
    return float(value) if isinstance(value, (int, float)) else math.nan


def settings(run: Run) -> dict[str, Any]:
    """The run's settings: the optimizer's options first, then the schedule's and the run's own."""
    config = run.meta.get("config", {})
    groups = [config.get("options", {}), config.get("schedule", {}), config]
    found: dict[str, Any] = {}
    for group in groups:
        for name, value in group.items():
            if not isinstance(value, dict) and name not in IDENTITY:
                found.setdefault(name, tuple(value) if isinstance(value, list) else value)
    return found


def differing(runs: Sequence[Run]) -> list[str]:
    """Names of the settings in which the given runs differ."""
    chosen = [settings(run) for run in runs]
    names = dict.fromkeys(name for one in chosen for name in one)
    return [name for name in names if len({one.get(name, DEFAULT) for one in chosen}) > 1]


def group_key(run: Run) -> tuple[str, str, int]:
    return run.meta["workload"], run.meta["method"], int(run.meta["batch_size"])


def by_workload(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """Runs of each workload, in the order of their names."""
    groups: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        groups[run.meta["workload"]].append(run)
    return dict(sorted(groups.items()))


def by_variant(runs: Iterable[Run]) -> dict[tuple[str, str, int], dict[Variant, list[Run]]]:
    """Seeds together, settings apart; a variant names what differs in its method and batch size."""
    groups: dict[tuple[str, str, int], list[Run]] = defaultdict(list)
    for run in runs:
        groups[group_key(run)].append(run)
    split: dict[tuple[str, str, int], dict[Variant, list[Run]]] = {}
    for key in sorted(groups, key=lambda k: (k[0], k[2], order(k[1]))):
        members = sorted(groups[key], key=lambda run: int(run.meta["seed"]))
        names = differing(members)
        variants: dict[Variant, list[Run]] = defaultdict(list)
        for run in members:
            chosen = settings(run)
            variants[tuple((name, chosen.get(name, DEFAULT)) for name in names)].append(run)
        split[key] = dict(sorted(variants.items(), key=lambda item: variant_order(item[0])))
    return split


def variant_order(variant: Variant) -> list[tuple[bool, float, str]]:
    """Numbers by size, words after them."""
    return [
        (not isinstance(v, (int, float)), float(v) if isinstance(v, (int, float)) else 0.0, str(v))
        for _, v in variant
    ]


def summarise(runs: Iterable[Run]) -> list[Row]:
    """A row for each workload, batch size, method and setting, with speed-ups."""
    rows = [
        _row(key, variant, members)
        for key, variants in by_variant(runs).items()
        for variant, members in variants.items()
    ]
    for workload in {row.workload for row in rows}:
        base = reference(rows, workload)
        if base is not None:
            rows = [
                replace(row, speedup=_speedup(base, row)) if row.workload == workload else row
                for row in rows
            ]
    return rows


def reference(rows: Sequence[Row], workload: str) -> Row | None:
    """The row that speed-ups are counted against.

    The paper's own choice where those runs were made; else its method (SGD where nothing is
    published, AdamW where SGD was not run) at the base batch size, or the smallest on record.
    """
    figures = published.for_workload(workload)
    named = figures.reference if figures else None
    candidates = [row for row in rows if row.workload == workload and not row.variant]
    if named:
        for row in candidates:
            if (row.method, row.batch_size) == (named.method, named.batch_size):
                return row
    for method in [named.method] if named else ["sgd", "adamw"]:
        of_method = [row for row in candidates if row.method == method]
        if of_method:
            return min(
                of_method, key=lambda row: (row.batch_size != row.base_batch, row.batch_size)
            )
    return None


def _speedup(base: Row, row: Row) -> float:
    if not (math.isfinite(base.seconds.mean) and math.isfinite(row.seconds.mean)):
        return math.nan
    return base.seconds.mean / row.seconds.mean if row.seconds.mean > 0 else math.nan


def _row(key: tuple[str, str, int], variant: Variant, runs: list[Run]) -> Row:
    workload, method, batch_size = key
    meta = runs[0].meta
    return Row(
        workload=workload,
        method=method,
        batch_size=batch_size,
        variant=variant,
        metric=meta["metric"],
        target=meta["target"],
        higher_is_better=meta["higher_is_better"],
        epochs=Spread(tuple(run.to_target("epoch") for run in runs)),
        seconds=Spread(tuple(run.to_target("train_time") for run in runs)),
        best=Spread(tuple(run.best() for run in runs)),
        unfinished=sum(not run.finished for run in runs),
        diverged=sum(run.meta["status"] == "diverged" for run in runs),
        base_batch=meta.get("config", {}).get("base_batch"),
    )
