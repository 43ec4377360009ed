"""What a report shows: a section for each workload of each collection, then memory, scaling and
landscapes.

A collection is a directory that one command filled. In a comparison each method has one setting;
where a method has several, the collection is a sweep and is drawn against the settings that
differ.
"""

from __future__ import annotations

import base64
import json
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from fop_bench import landscape, memory, plots, scaling
from fop_bench.records import RecordError, Run, load_runs
from fop_bench.render import Table
from fop_bench.scaling_tables import scaling_tables
from fop_bench.style import look, order
from fop_bench.summary import by_variant, by_workload, differing, group_key
from fop_bench.tables import (
    detail_table,
    group_error_table,
    paper_table,
    summarise,
    tuning_table,
)


@dataclass(frozen=True)
class Picture:
    """A plot as PNG, with a name for its file."""

    name: str
    caption: str
    png: bytes

    @property
    def data_uri(self) -> str:
        return f"data:image/png;base64,{base64.b64encode(self.png).decode('ascii')}"


@dataclass(frozen=True)
class RunRecord:
    """One run in full, as text."""

    name: str
    record: str


@dataclass(frozen=True)
class Section:
    """A heading with what stands under it: tables, pictures, longer tables, the runs themselves."""

    title: str
    place: str = ""
    warnings: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    pictures: tuple[Picture, ...] = ()
    details: tuple[Table, ...] = ()
    runs: tuple[RunRecord, ...] = ()

    @property
    def heading(self) -> str:
        return f"{self.title} ({self.place})" if self.place else self.title


def collect(root: Path) -> list[Section]:
    """Everything recorded below ``root``, or a RecordError that says what was expected there."""
    sections = []
    for folder, runs in sorted(_collections(load_runs(root)).items()):
        place = "" if folder == root else folder.relative_to(root).as_posix()
        for workload, members in by_workload(runs).items():
            tested = [run for run in members if run.split == "test"]
            tuned = [run for run in members if run.split != "test"]
            if tested:
                sections.append(_runs_section(workload, tested, place, root))
            if tuned:
                sections.append(_tuning_section(workload, tuned, place, root))
    sections += [_memory_section(path, root) for path in sorted(root.rglob(memory.FILE))]
    sections += [_scaling_section(path, root) for path in sorted(root.rglob(scaling.FILE))]
    sections += [_landscape_section(path, root) for path in sorted(root.rglob(landscape.FILE))]
    if not sections:
        files = f"{memory.FILE}, {scaling.FILE} or {landscape.FILE}"
        raise RecordError(
            f"{root}: expected recorded runs, {files} below it, found none: give the directory "
            "that compare, sweep, memory, scaling or landscape wrote"
        )
    return sections


def _collections(runs: Sequence[Run]) -> dict[Path, list[Run]]:
    groups: dict[Path, list[Run]] = defaultdict(list)
    for run in runs:
        groups[_collection(run)].append(run)
    return groups


def _collection(run: Run) -> Path:
    """The directory above WORKLOAD/METHOD/bBATCH, and above the points of a sweep."""
    workload, method, batch_size = group_key(run)
    for folder in run.path.parents:
        if folder.parts[-3:] == (workload, method, f"b{batch_size}"):
            above = folder.parents[2]
            is_point = "=" in above.name or above.name == "as-tuned"
            return above.parent if is_point else above
    return run.path.parent


def _runs_section(workload: str, runs: list[Run], place: str, root: Path) -> Section:
    rows = summarise(runs)
    name = _file_name(workload, place)
    tables: list[Table] = []
    pictures: list[Picture] = []
    if is_sweep(runs):
        names = differing_within(runs)
        if {"beta", "eta"} & set(names):
            pictures.append(_picture(f"{name}-ablation", "Beta and eta", plots.ablation(runs)))
        pictures += [
            _picture(f"{name}-{option}", f"Best metric against {option}", plots.sweep(runs, option))
            for option in names
            if option not in ("beta", "eta")
        ]
    else:
        tables.append(paper_table(rows, workload))
        metric = runs[0].meta["metric"]
        curves = {"epochs": plots.curves(runs, "epochs"), "time": plots.curves(runs, "time")}
        pictures += [
            _picture(f"{name}-{x}", f"Test {metric} against {x}: mean, smallest to largest", figure)
            for x, figure in curves.items()
        ]
        if len({row.batch_size for row in rows}) > 1:
            pictures += [
                _picture(
                    f"{name}-target-{quantity}",
                    f"{quantity.capitalize()} to target against batch size",
                    plots.target_by_batch(rows, quantity),
                )
                for quantity in ("epochs", "seconds")
            ]
    errors = group_error_table(runs, workload)
    return Section(
        title=workload,
        place=place,
        warnings=tuple(warnings(runs)),
        tables=(*tables, *([errors] if errors else [])),
        pictures=tuple(pictures),
        details=(detail_table(rows, workload),),
        runs=_records(runs, root),
    )


def is_sweep(runs: Sequence[Run]) -> bool:
    return any(len(variants) > 1 for variants in by_variant(runs).values())


def differing_within(runs: Sequence[Run]) -> list[str]:
    """Settings that differ within some method and batch size, in the order they are recorded."""
    names: dict[str, None] = {}
    for variants in by_variant(runs).values():
        names.update(
            dict.fromkeys(differing([run for seeds in variants.values() for run in seeds]))
        )
    return list(names)


def warnings(runs: Sequence[Run]) -> list[str]:
    """What a reader should know before believing the numbers."""
    found = []
    methods = {run.meta["method"] for run in runs}
    fop = sorted((m for m in methods if m in ("fop", "fop-sum")), key=order)
    if fop and "kfac-2x" not in methods:
        names = " and ".join(look(m).label for m in fop)
        found.append(
            f"{names} without its control: there is no run of KFAC at twice the learning rate, so "
            "that a larger step cannot be told from a better one."
        )
    for what, title in (("machine", "machines"), ("versions", "versions of the software")):
        kinds = {json.dumps(run.meta.get(what), sort_keys=True) for run in runs}
        if len(kinds) > 1:
            found.append(f"These runs come from {len(kinds)} different {title}: compare no times.")
    moved = sum("earlier_ranks" in run.meta for run in runs)
    if moved:
        found.append(
            f"{moved} of {len(runs)} runs went on on another number of ranks: compare no times."
        )
    if len({run.meta.get("ranks", 1) for run in runs}) > 1:
        found.append("These runs were trained on different numbers of ranks.")
    counts = {
        "broke off or are still running": sum(not run.finished for run in runs),
        "diverged": sum(run.meta["status"] == "diverged" for run in runs),
    }
    found += [f"{n} of {len(runs)} runs {what}." for what, n in counts.items() if n]
    return found


def _tuning_section(workload: str, runs: list[Run], place: str, root: Path) -> Section:
    return Section(
        title=f"{workload}: tuning",
        place=place,
        tables=(tuning_table(runs, workload),),
        runs=_records(runs, root),
    )


def _memory_section(path: Path, root: Path) -> Section:
    measurements = memory.read_measurements(path)
    names = sorted({m.workload for m in measurements})
    place = _place(path, root)
    return Section(
        title="memory",
        place=place,
        tables=tuple(memory.memory_table(measurements, name) for name in names),
        pictures=tuple(
            _picture(
                _file_name(f"{name}-memory", place),
                f"Peak memory, {name}",
                plots.memory_bars([m for m in measurements if m.workload == name]),
            )
            for name in names
        ),
    )


def _scaling_section(path: Path, root: Path) -> Section:
    record = scaling.read_scaling(path)
    place = _place(path, root)
    name = _file_name(f"{record.workload}-scaling", place)
    caption = "Strong scaling: measured (solid) and by a cost model (dashed)"
    return Section(
        title=f"{record.workload}: strong scaling",
        place=place,
        tables=tuple(scaling_tables(record)),
        pictures=(_picture(name, caption, plots.scaling_curves(record)),),
    )


def _landscape_section(path: Path, root: Path) -> Section:
    surface = landscape.read_landscape(path)
    place = _place(path, root)
    name = _file_name(f"{surface.workload}-landscape", place)
    return Section(
        title=f"{surface.workload}: loss landscape",
        place=place,
        pictures=(
            _picture(f"{name}-contour", "Loss around a point", plots.landscape_contour(surface)),
            _picture(f"{name}-3d", "The same in three dimensions", plots.landscape_3d(surface)),
        ),
    )


def _place(path: Path, root: Path) -> str:
    return "" if path.parent == root else path.parent.relative_to(root).as_posix()


def _picture(name: str, caption: str, figure: Figure) -> Picture:
    return Picture(name, caption, plots.png(figure))


def _file_name(*parts: str) -> str:
    """A name for a file out of names from records, which may hold anything."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(part for part in parts if part)).strip("-.")


def _records(runs: Sequence[Run], root: Path) -> tuple[RunRecord, ...]:
    def full(run: Run) -> RunRecord:
        meta: dict[str, Any] = dict(run.meta)
        what = (
            f"{look(meta['method']).label}, batch size {meta['batch_size']:,}, seed {meta['seed']}"
        )
        name = f"{what}, {meta['status']}: {run.path.relative_to(root).as_posix()}"
        return RunRecord(name, json.dumps(meta, indent=2, sort_keys=True, ensure_ascii=False))

    ordered = sorted(
        runs, key=lambda r: (order(r.meta["method"]), r.meta["batch_size"], r.meta["seed"])
    )
    return tuple(full(run) for run in ordered)
