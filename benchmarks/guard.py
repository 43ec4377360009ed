"""Fails if a step of fop has become dearer, against SGD's, than it was when last recorded.

    python -m benchmarks.guard             # make bench-guard: two small networks, 2 minutes
    python -m benchmarks.guard --record    # take today's figures as the new reference

Ratios are compared, not times, and with wide margins, so that another machine or a busy one does
not raise an alarm; an algorithm that was lost does.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from benchmarks import run, store, tables
from benchmarks.methods import OURS

REFERENCE = Path(__file__).parent / "results" / "guard.json"
TIME_MARGIN = 1.5
MEMORY_MARGIN = 1.25
BUDGET = 1.5
MEMORY = "peak memory"


def guarded(record: tables.Record) -> dict[str, float]:
    """The figures that are compared, by name."""
    found = {}
    for workload in tables.workloads(record):
        base = tables.of(record, workload, "sgd").peak_bytes
        for method in OURS:
            figures = tables.of(record, workload, method)
            named = {
                "curvature every step": figures.every_step,
                "curvature every 10 steps": figures.interval,
                "no curvature work": figures.plain,
                MEMORY: figures.peak_bytes / base if figures.peak_bytes and base else None,
            }
            for name, value in named.items():
                if value is not None:
                    found[f"{workload}, fop.{method.upper()}, {name}"] = value
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


def compared(now: Mapping[str, float], before: Mapping[str, float]) -> str:
    lines = [
        [name, tables.number(before.get(name)), tables.number(now.get(name))]
        for name in dict.fromkeys([*before, *now])
    ]
    return tables.table(["ratio to SGD", "recorded", "now"], lines)


def measure(path: Path, console: Console) -> tables.Record:
    record = store.Store.open(path, store.header("quick"), resume=False)
    tasks = [task for task in run.plan("quick", BUDGET) if task.section == "cells"]
    record.content["planned"] = len(tasks)
    run.measure_all(tasks, record, console)
    return record.content


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the cost of fop's steps with a record.")
    parser.add_argument("--record", action="store_true", help="make this run the new reference")
    arguments = parser.parse_args()
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "guard.json"
        now = guarded(measure(path, console))
        if arguments.record:
            REFERENCE.parent.mkdir(exist_ok=True)
            REFERENCE.write_bytes(path.read_bytes())
            console.print(f"recorded in {REFERENCE.relative_to(run.ROOT)}")
            return
    before = guarded(store.read(REFERENCE))
    console.print(compared(now, before), markup=False, highlight=False)
    worse = regressions(now, before)
    if worse:
        sys.exit("\n".join(["fop has become slower or larger:", *worse]))
    console.print("no regression")


if __name__ == "__main__":
    main()
