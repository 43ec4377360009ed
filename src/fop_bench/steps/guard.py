"""Fails if a step of fop has become slower, against SGD's, than it was when last recorded.

Ratios are compared, not times, and with wide margins, so that another machine or a busy one does
not raise an alarm; an algorithm that was lost does.
"""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console

from fop_bench.errors import BenchError
from fop_bench.render import Cell, Table, to_rich
from fop_bench.steps import tables
from fop_bench.steps.methods import OURS
from fop_bench.style import look

TIME_MARGIN = 1.5
MEMORY_MARGIN = 1.25
MEMORY = "peak memory"


def guarded(record: tables.Record) -> dict[str, float]:
    """The figures that are compared, by name."""
    found = {}
    for workload in tables.workloads(record):
        sgd = tables.of(record, workload, "sgd")
        for method in OURS:
            figures = tables.of(record, workload, method)
            named = {
                "curvature every step": figures.every_step,
                "curvature every 10 steps": figures.interval,
                "no curvature work": figures.plain,
                MEMORY: tables.memory_ratio(figures, sgd),
            }
            for name, value in named.items():
                if value is not None:
                    found[f"{workload}, {look(method).label}, {name}"] = value
    return found


def regressions(now: Mapping[str, float], before: Mapping[str, float]) -> list[str]:
    """What is worse than its margin allows, or was not measured any more."""
    found = []
    for name, reference in before.items():
        margin = MEMORY_MARGIN if name.endswith(MEMORY) else TIME_MARGIN
        if name not in now:
            found.append(f"{name}: recorded as {reference:.2f} times SGD's, not measured now")
        elif now[name] > margin * reference:
            found.append(
                f"{name}: {now[name]:.2f} times SGD's, recorded {reference:.2f}, "
                f"more than {margin:g} times that"
            )
    return found


def compared(now: Mapping[str, float], before: Mapping[str, float]) -> Table:
    lines = [
        (Cell(name), *(Cell(tables.number(found.get(name))) for found in (before, now)))
        for name in dict.fromkeys([*before, *now])
    ]
    return Table("Ratio to SGD", ("", "recorded", "now"), tuple(lines))


class RegressionError(BenchError, RuntimeError):
    """A step has become slower or larger than its margin allows."""


def check(now: tables.Record, before: tables.Record, console: Console) -> None:
    """Show both and raise on a regression."""
    ratios, recorded = guarded(now), guarded(before)
    console.print(to_rich(compared(ratios, recorded)))
    worse = regressions(ratios, recorded)
    if worse:
        raise RegressionError("\n".join(["fop has become slower or larger:", *worse]))
    console.print("no regression")
