"""What a report shows: a section for each workload of each collection, then memory, scaling and
landscapes.

A collection is a directory that one command filled. In a comparison each method has one setting;
where a method has several, the collection is a sweep and is drawn against the settings that
differ.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from fop_bench import landscape, memory, plots, scaling
from fop_bench.errors import RecordError
from fop_bench.records import Run, read_each, scan_runs
from fop_bench.render import Table
from fop_bench.scaling_tables import scaling_tables
from fop_bench.style import look, order
from fop_bench.summary import by_variant, by_workload, differing, group_key
from fop_bench.tables import detail_table, group_error_table, paper_table, summarise, tuning_table


@dataclass(frozen=True)
class Picture:
    """A plot as PNG, with a name for its file (see `file_name`)."""

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
    damaged: tuple[str, ...] = ()  # which records could not be shown, and why
    tables: tuple[Table, ...] = ()
    pictures: tuple[Picture, ...] = ()
    details: tuple[Table, ...] = ()
    runs: tuple[RunRecord, ...] = ()

    @property
    def heading(self) -> str:
        return f"{self.title} ({self.place})" if self.place else self.title


LONGEST_NAME = 100
READERS: dict[str, Callable[[Path], Any]] = {
    memory.FILE: memory.read_measurements,
    scaling.FILE: scaling.read_scaling,
    landscape.FILE: landscape.read_landscape,
}


def collect(root: Path) -> list[Section]:
    """Everything recorded below ``root``, with a list of what is damaged; or a RecordError that
    says what was expected there.
    """
    runs, damaged = scan_runs(root)
    makers = list(_of_runs(runs, root))
    for name, read in READERS.items():
        paths = sorted(root.rglob(name))
        contents, unreadable = read_each(paths, partial(_with_path, read))
        damaged += unreadable
        makers += [_of_file(name, path, content, root) for path, content in contents]
    sections = []
    for what, make in makers:
        try:
            sections.append(make())
        except Exception as error:  # one odd record must not take the rest of the report away
            damaged.append(RecordError(f"{what} cannot be shown ({type(error).__name__}: {error})"))
    if not sections:
        raise _nothing_there(root, damaged)
    if damaged:
        lines = tuple(str(error).replace(f"{root}{os.sep}", "") for error in damaged)
        sections.append(Section("Damaged records, not in this report", damaged=lines))
    return _with_file_names(sections)


def _with_path(read: Callable[[Path], Any], path: Path) -> tuple[Path, Any]:
    return path, read(path)


Maker = tuple[str, Callable[[], Section]]  # what is shown, and the function that draws it


def _of_runs(runs: Sequence[Run], root: Path) -> Iterator[Maker]:
    for folder, found in sorted(_collections(runs).items()):
        place = "" if folder == root else folder.relative_to(root).as_posix()
        for workload, members in by_workload(found).items():
            tested = [run for run in members if run.split == "test"]
            tuned = [run for run in members if run.split != "test"]
            what = f"{folder}: {workload}"
            if tested:
                yield what, partial(_runs_section, workload, tested, place, root)
            if tuned:
                yield what, partial(_tuning_section, workload, tuned, place, root)


def _of_file(name: str, path: Path, content: Any, root: Path) -> Maker:
    make: dict[str, Callable[[Any, str], Section]] = {
        memory.FILE: _memory_section,
        scaling.FILE: _scaling_section,
        landscape.FILE: _landscape_section,
    }
    place = "" if path.parent == root else path.parent.relative_to(root).as_posix()
    return str(path), partial(make[name], content, place)


def _nothing_there(root: Path, damaged: Sequence[RecordError]) -> RecordError:
    if damaged:
        return RecordError("\n".join(map(str, damaged)))
    return RecordError(
        f"{root}: expected recorded runs, {', '.join(READERS)} below it, found none: give the "
        "directory that compare, sweep, memory, scaling or landscape wrote"
    )


def _with_file_names(sections: Sequence[Section]) -> list[Section]:
    taken: set[str] = set()
    return [
        replace(
            section,
            pictures=tuple(replace(p, name=file_name(p.name, taken)) for p in section.pictures),
        )
        for section in sections
    ]


def file_name(text: str, taken: set[str]) -> str:
    """The one way from text, which in a record may be anything, to a name for a file.

    Letters, digits, dots, dashes and underscores, not too many, and no name twice (also where
    capitals do not count): what was given out is added to ``taken``.
    """
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.")[:LONGEST_NAME] or "picture"
    numbered = (f"{stem}-{number}" for number in itertools.count(2))
    name = next(n for n in itertools.chain([stem], numbered) if n.lower() not in taken)
    taken.add(name.lower())
    return name


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
    name = _label(workload, place)
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


def _memory_section(measurements: Sequence[memory.Measurement], place: str) -> Section:
    names = sorted({m.workload for m in measurements})
    return Section(
        title="memory",
        place=place,
        tables=tuple(memory.memory_table(measurements, name) for name in names),
        pictures=tuple(
            _picture(
                _label(f"{name}-memory", place),
                f"Peak memory, {name}",
                plots.memory_bars([m for m in measurements if m.workload == name]),
            )
            for name in names
        ),
    )


def _scaling_section(record: scaling.Scaling, place: str) -> Section:
    name = _label(f"{record.workload}-scaling", place)
    caption = "Strong scaling: measured (solid) and by a cost model (dashed)"
    return Section(
        title=f"{record.workload}: strong scaling",
        place=place,
        tables=tuple(scaling_tables(record)),
        pictures=(_picture(name, caption, plots.scaling_curves(record)),),
    )


def _landscape_section(surface: landscape.Landscape, place: str) -> Section:
    name = _label(f"{surface.workload}-landscape", place)
    return Section(
        title=f"{surface.workload}: loss landscape",
        place=place,
        pictures=(
            _picture(f"{name}-contour", "Loss around a point", plots.landscape_contour(surface)),
            _picture(f"{name}-3d", "The same in three dimensions", plots.landscape_3d(surface)),
        ),
    )


def _picture(name: str, caption: str, figure: Figure) -> Picture:
    return Picture(name, caption, plots.png(figure))


def _label(*parts: str) -> str:
    return "-".join(part for part in parts if part)


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
