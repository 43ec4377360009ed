"""Measures every cell of the table in a process of its own; writes record, docs and plots.

    python -m benchmarks.run               # make bench: about 50 minutes on one core
    python -m benchmarks.run --quick       # fop and SGD on two small networks, 3 minutes
    python -m benchmarks.run --resume      # go on where an interrupted run stopped
    python -m benchmarks.run --only kfac --only vit    # cells with all of these in their name

Docs are written from complete runs alone; `python -m benchmarks.report` writes them from any
record. Processes are pinned to the last core allowed, so `taskset -c 0` before it means core 0.
Wants a quiet machine: times are CPU times, but a busy neighbour takes cache and memory bandwidth.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import report, store
from benchmarks.measure import MARKER
from benchmarks.methods import METHODS, OURS, OWN
from benchmarks.process import child_environment
from benchmarks.workloads import LARGE_BATCH, SWEEPS, TABLE

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
PROFILED = "resnet18-b64"
SMALL = ("mlp-w1024-b512", "cnn-b512")


@dataclass(frozen=True)
class Task:
    """One process to start: `section` and `key` say where its result is kept."""

    section: str
    key: str
    module: str
    request: dict[str, Any]


def measurement(workload: str, method: str, interval: int, budget: float) -> Task:
    request = {"workload": workload, "method": method, "interval": interval, "budget": budget}
    return Task("cells", store.cell_key(workload, method, interval), "benchmarks.measure", request)


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
    return Task("profiles", f"{workload}/{method}", "benchmarks.profile", request)


def start(task: Task) -> dict[str, Any]:
    """Run one task in a fresh process and return what it measured."""
    done = subprocess.run(
        [sys.executable, "-m", task.module, json.dumps(task.request)],
        cwd=ROOT,
        env=child_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    for line in done.stdout.splitlines():
        if line.startswith(MARKER):
            result: dict[str, Any] = json.loads(line.removeprefix(MARKER))
            return result
    # The kernel ends a process that asks for too much memory with signal 9, without a word.
    if done.returncode == -9 and task.request["method"] not in OWN:
        return {"error": "ended by the system, which was out of memory"}
    said = done.stderr.strip()[-2000:] or "it said nothing"
    raise RuntimeError(f"{task.key}: the process ended with code {done.returncode}: {said}")


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


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks.run", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--quick", action="store_true", help="fop and SGD on two small networks")
    modes.add_argument("--everything", action="store_true", help="peers at large batches too")
    parser.add_argument("--budget", type=float, help="CPU seconds of timed steps a process")
    parser.add_argument("--only", action="append", default=[], help="part of a cell's name")
    parser.add_argument("--output", type=Path, help="the record, default benchmarks/results/DATE")
    parser.add_argument("--resume", action="store_true", help="go on with an unfinished record")
    arguments = parser.parse_args()
    mode = "quick" if arguments.quick else "everything" if arguments.everything else "full"
    budget = arguments.budget or (1.5 if mode == "quick" else 4.0)
    head = store.header(mode)
    path = arguments.output or RESULTS / f"{head['date']}-{mode}.json"
    console = Console()
    tasks = [
        task for task in plan(mode, budget) if all(part in task.key for part in arguments.only)
    ]
    try:
        record = store.Store.open(path, head, resume=arguments.resume)
    except store.StoreError as error:
        sys.exit(str(error))
    record.content["planned"] = len(plan(mode, budget))
    measure_all(tasks, record, console)
    console.print(report.markdown(record.content), markup=False, highlight=False, soft_wrap=True)
    console.print(f"recorded in {path}", highlight=False)
    if mode != "quick" and not arguments.only:
        report.write_docs(record.content, ROOT / "docs")


if __name__ == "__main__":
    main()
