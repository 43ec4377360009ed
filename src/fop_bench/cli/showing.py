"""Commands that look: list, landscape, memory, report; and the demo."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from fop_bench.checkpoint import read_checkpoint
from fop_bench.cli import options as opt
from fop_bench.cli.app import app, console
from fop_bench.config import ConfigError
from fop_bench.data import data_status
from fop_bench.methods import METHODS
from fop_bench.recipes import available, load_recipe
from fop_bench.records import CHECKPOINT, read_run
from fop_bench.schedules import scaled_options
from fop_bench.workloads import WORKLOADS


@app.command("list")
def list_all(data_dir: opt.DataDir = None) -> None:
    """Workloads, methods and recipes, with the data they need and whether it is found."""
    needed = sorted({workload.data for workload in WORKLOADS.values()})
    status = {name: data_status(name, data_dir) for name in needed}

    def found(names: set[str]) -> Text:
        states = [
            Text.assemble(
                f"{name}: ", ("found", "green") if status[name].found else ("missing", "red")
            )
            for name in sorted(names)
        ]
        return Text(", ").join(states)

    _table("Workloads", ("name", "what", "scale", "target", "data"), [
        (w.name, w.summary, w.scale, f"{w.metric} {w.target:g}", found({w.data}))
        for w in WORKLOADS.values()
    ])  # fmt: skip
    _table("Methods", ("name", "what"), [(m.name, m.summary) for m in METHODS.values()])
    recipes = [load_recipe(name) for name in available()]
    _table("Recipes", ("name", "what", "source", "data"), [
        (r.name, r.title, r.source, found({WORKLOADS[name].data for name in r.workloads}))
        for r in recipes
    ])  # fmt: skip
    _table("Data", ("name", "found", "where it is, or how to get it"), [
        (name, "yes" if s.found else "no", s.where if s.found else s.how_to_get)
        for name, s in status.items()
    ])  # fmt: skip


def _table(title: str, columns: tuple[str, ...], rows: list[tuple[str | Text, ...]]) -> None:
    table = Table(title=title, title_justify="left", title_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, no_wrap=number == 0, overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)


@app.command()
def landscape(
    name: opt.Name,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Default: the recipe's largest.")
    ] = None,
    methods: opt.Methods = "sgd,kfac,fop",
    run: Annotated[
        Path | None,
        typer.Option(help="Around the weights of this run; default: after a few steps."),
    ] = None,
    plane: Annotated[
        str,
        typer.Option(
            help="random (filter-normalised directions) or steps (the plane of two steps)."
        ),
    ] = "random",
    resolution: Annotated[int, typer.Option(min=3, help="Points to a side, an odd number.")] = 31,
    span: Annotated[
        float,
        typer.Option(
            callback=opt.finite(1e-12),
            help="How far the surface reaches; 1: a filter's own length.",
        ),
    ] = 1.0,
    warmup: Annotated[
        int, typer.Option(min=0, help="Steps before the surface, without --run.")
    ] = 20,
    seed: opt.Seed = 0,
    out: Annotated[
        Path | None, typer.Option(help="Directory; default: runs/landscape/NAME.")
    ] = None,
    subset: opt.Subset = None,
    device: opt.Device = "auto",
    data_dir: opt.DataDir = None,
    threads: opt.Threads = None,
    tuned: opt.TunedFile = None,
    assignments: opt.Set = None,
) -> None:
    """The loss surface around a point, with each method's step drawn as an arrow."""
    from fop_bench import plots
    from fop_bench.landscape import FILE, measure, write_landscape

    names = opt.method_names(methods)
    recipe = opt.recipe_from(name, assignments, names, tuned, subset=subset)
    workload = WORKLOADS[recipe.workloads[0]]
    size = batch_size or max(recipe.batch_sizes(workload))
    configs = {method: recipe.run(workload, method, size, seed) for method in names}
    runtime = opt.runtime_from(device, data_dir, threads)
    weights = None
    if run is not None:
        if read_run(run).meta["workload"] != workload.name:
            raise ConfigError(
                f"--run {run}: a run of {read_run(run).meta['workload']}, not of {workload.name}"
            )
        weights = read_checkpoint(run / CHECKPOINT, runtime.device)["model"]
    chosen: Literal["random", "steps"] = _plane(plane)
    root = out or Path("runs") / "landscape" / recipe.name
    opt.claim(root / FILE)
    with Progress(console=console) as progress:
        task = progress.add_task(f"landscape of {workload.name}", total=resolution**2)
        surface = measure(
            workload,
            batch_size=size,
            methods=tuple(configs),
            options={
                method: scaled_options(
                    c.options, c.batch_size, c.base_batch, c.lr_rule, c.interval_rule
                )
                for method, c in configs.items()
            },
            weights=weights,
            warmup=warmup,
            resolution=resolution,
            span=span,
            plane=chosen,
            seed=seed,
            data_dir=data_dir,
            device=runtime.device,
            subset=subset,
            progress=lambda done, total: progress.update(task, completed=done, total=total),
        )
    written = [
        write_landscape(surface, root / FILE),
        plots.save(plots.landscape_contour(surface), root / "contour.png"),
        plots.save(plots.landscape_3d(surface), root / "surface.png"),
    ]
    for path in written:
        console.print(str(path), soft_wrap=True)


def _plane(text: str) -> Literal["random", "steps"]:
    if text == "random":
        return "random"
    if text == "steps":
        return "steps"
    raise ConfigError(f"--plane {text!r}: expected random or steps")


@app.command()
def memory(
    name: opt.Name,
    methods: opt.Methods = "",
    batch_sizes: opt.BatchSizes = "",
    out: Annotated[Path | None, typer.Option(help="Directory; default: runs/memory/NAME.")] = None,
    device: opt.Device = "auto",
    data_dir: opt.DataDir = None,
) -> None:
    """Peak memory of each method at each batch size."""
    from fop_bench import plots
    from fop_bench.memory import FILE, measure_all, memory_table, write_measurements
    from fop_bench.tables import to_rich

    recipe = load_recipe(name)
    workload = WORKLOADS[recipe.workloads[0]]
    names = opt.method_names(methods) or recipe.methods
    sizes = opt.numbers(batch_sizes, "--batch-sizes") or recipe.batch_sizes(workload)
    root = out or Path("runs") / "memory" / recipe.name
    opt.claim(root / FILE)
    runtime = opt.runtime_from(device, data_dir, None)
    with Progress(console=console) as progress:
        task = progress.add_task(f"memory of {workload.name}", total=len(names) * len(sizes))
        measured = measure_all(
            workload.name,
            names,
            sizes,
            device=str(runtime.device),
            data_dir=data_dir,
            progress=lambda _: progress.advance(task),
        )
    console.print(to_rich(memory_table(measured, workload.name)))
    picture = plots.save(plots.memory_bars(measured), root / "memory.png")
    for path in (write_measurements(measured, root / FILE), picture):
        console.print(str(path), soft_wrap=True)


@app.command()
def report(
    root: Annotated[Path, typer.Argument(help="A directory that holds records.")],
    out: Annotated[
        Path | None, typer.Option(help="The HTML file; default: ROOT/report.html.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace files that no report has written.")
    ] = False,
) -> None:
    """A self-contained HTML page and Markdown, from records alone."""
    from fop_bench.report import write_report

    written = write_report(root, out or root / "report.html", force=force)
    console.print(str(written.page), soft_wrap=True)
    written.complain()


@app.command()
def demo(
    out: Annotated[
        Path, typer.Option(help="Where demos are kept, each in a new directory.")
    ] = Path("runs/demo"),
) -> None:
    """All methods on digits-mlp at a small and the full batch, with 3 seeds, in under 3 minutes."""
    from fop_bench.demo import run_demo

    run_demo(out, console)
