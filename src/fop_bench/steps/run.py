"""Measures every cell of the table in a process of its own; a record keeps them.

Processes are pinned to the last core allowed, so `taskset -c 0` before it means core 0. Wants a
quiet machine: times are CPU times, but a busy neighbour takes cache and memory bandwidth.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fop_bench.errors import BenchError
from fop_bench.processes import KEEP_HEAP, ONE_THREAD, ProcessError, ask
from fop_bench.steps import store
from fop_bench.steps.methods import METHODS, OURS, OWN
from fop_bench.steps.workloads import LARGE_BATCH, SWEEPS, TABLE

PROFILED = "resnet18-b64"
SMALL = ("mlp-w1024-b512", "cnn-b512")
BUDGETS = {"quick": 1.5}  # CPU seconds of timed steps for each process, where not 4


class StepMeasurementError(BenchError, RuntimeError):
    """A process that was to measure one of fop's own methods failed."""


@dataclass(frozen=True)
class Task:
    """One process to start: `section` and `key` say where its result is kept."""

    section: str
    key: str
    module: str
    request: dict[str, Any]


def measurement(workload: str, method: str, interval: int, budget: float) -> Task:
    request = {"workload": workload, "method": method, "interval": interval, "budget": budget}
    return Task(
        "cells", store.cell_key(workload, method, interval), "fop_bench.steps.measure", request
    )


def plan(mode: str, budget: float) -> list[Task]:
    """What a run measures. "quick": ours on small networks; "everything": no cell left out."""
    tasks = []
    for workload in SMALL if mode == "quick" else TABLE:
        large = workload in LARGE_BATCH and mode != "everything"
        for method in METHODS.values():
            if (large or mode == "quick") and method.name not in OWN:
                continue
            if large and method.staggered:
                continue
            # At an interval of ten there are steps of both kinds. Where a step takes half a minute
            # the curvature of every step is read off them, too.
            intervals = method.intervals[-1:] if large else method.intervals
            tasks += [measurement(workload, method.name, i, budget) for i in intervals]
    if mode == "quick":
        return [*tasks, profile_task("cnn-b512", "kfac"), profile_task("cnn-b512", "fop")]
    tasks += [profile_task(PROFILED, method) for method in OURS]
    along = {workload.name for sweep in SWEEPS.values() for workload in sweep.values()}
    known = {task.key for task in tasks}
    sweeps = [
        measurement(name, method, 10, budget / 2) for name in sorted(along) for method in OURS
    ]
    return [*tasks, *(task for task in sweeps if task.key not in known)]


def profile_task(workload: str, method: str) -> Task:
    request = {"workload": workload, "method": method}
    return Task("profiles", f"{workload}/{method}", "fop_bench.steps.profile", request)


def start(task: Task) -> dict[str, Any]:
    """Run one task in a fresh process and return what it measured."""
    try:
        result: dict[str, Any] = ask(
            task.module, task.request, environment={**KEEP_HEAP, **ONE_THREAD}
        )
        return result
    except ProcessError as error:
        if error.out_of_memory and task.request["method"] not in OWN:
            return {"error": "ended by the system, which was out of memory"}
        raise StepMeasurementError(f"{task.key}: {error}") from error


def measure_all(tasks: list[Task], record: store.Store, console: Console) -> None:
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    )  # fmt: skip
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=len(tasks))
        for task in tasks:
            progress.update(bar, description=task.key)
            if not record.has(task.section, task.key):
                result = start(task)
                record.put(task.section, task.key, result)
                if "error" in result:
                    progress.console.print(f"{task.key}: {result['error']}", markup=False)
            progress.advance(bar)


def measure(
    mode: str,
    path: Path,
    console: Console,
    *,
    budget: float | None = None,
    only: tuple[str, ...] = (),
    resume: bool = False,
    profiles: bool = True,
) -> dict[str, Any]:
    """The record at `path`, with the cells of a mode that have all of `only` in their names."""
    tasks = plan(mode, budget or BUDGETS.get(mode, 4.0))
    tasks = [task for task in tasks if profiles or task.section == "cells"]
    record = store.Store.open(path, store.header(mode), resume=resume)
    record.content["planned"] = len(tasks)
    wanted = [task for task in tasks if all(part in task.key for part in only)]
    measure_all(wanted, record, console)
    return record.content
