"""The command `scaling`: strong scaling, measured here and modelled for accelerators."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import Progress

from fop_bench.cli import options as opt
from fop_bench.cli.app import app, console
from fop_bench.config import ConfigError
from fop_bench.costs import PEAKS, accelerator
from fop_bench.recipes import load_recipe
from fop_bench.workloads import WORKLOADS

if TYPE_CHECKING:
    from fop_bench.scaling import Timing


@app.command()
def scaling(
    name: opt.Name,
    methods: opt.Methods = "sgd,kfac,fop",
    batch_sizes: Annotated[
        str, typer.Option(help="Comma-separated global batch sizes; default: the largest.")
    ] = "",
    ranks: Annotated[str, typer.Option(help="Comma-separated numbers of ranks to measure.")] = (
        "1,2"
    ),
    interval: Annotated[int, typer.Option(min=1, help="Steps between curvature refreshes.")] = 10,
    blocks: Annotated[int, typer.Option(min=1, help="Intervals that each process times.")] = 3,
    rounds: Annotated[
        int, typer.Option(min=1, help="Times that everything is measured, in turn.")
    ] = 3,
    measuring: Annotated[
        bool, typer.Option("--measure/--no-measure", help="Without: the cost model alone.")
    ] = True,
    accelerators: Annotated[
        str, typer.Option(help=f"Comma-separated presets to model: {', '.join(PEAKS)}; or none.")
    ] = "h100",
    model_ranks: Annotated[
        str, typer.Option(help="Comma-separated numbers of ranks to model.")
    ] = "1,8,16,32,64,128,256,512,1024",
    model_batch_sizes: Annotated[
        str, typer.Option(help="Global batch sizes to model; default: those measured.")
    ] = "",
    utilisation: Annotated[
        float,
        typer.Option(
            callback=opt.finite(1e-6), help="Share of an accelerator's peak that training reaches."
        ),
    ] = 0.3,
    out: Annotated[Path | None, typer.Option(help="Directory; default: runs/scaling/NAME.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
) -> None:
    """Time, rank-time and efficiency against ranks and batch size; beyond this machine by a model
    that is marked as one.
    """
    from fop_bench import plots
    from fop_bench.scaling import FILE, Scaling, predict_all, probe, write_scaling
    from fop_bench.scaling_tables import scaling_tables
    from fop_bench.tables import to_rich

    recipe = load_recipe(name)
    workload = WORKLOADS[recipe.workloads[0]]
    names = opt.method_names(methods)
    opt.device_from(device)
    sizes = opt.numbers(batch_sizes, "--batch-sizes") or recipe.batch_sizes(workload)[-1:]
    counts = sorted(opt.numbers(ranks, "--ranks") or (1,))
    modelled = sorted(opt.numbers(model_ranks, "--model-ranks") or (1,))
    modelled_sizes = opt.numbers(model_batch_sizes, "--model-batch-sizes") or sizes
    hardware = [accelerator(preset, utilisation) for preset in _presets(accelerators, measuring)]
    root = out or Path("runs") / "scaling" / recipe.name
    opt.claim(root / FILE)
    timings: tuple[Timing, ...] = ()
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    predictions = [
        p for h in hardware
        for p in predict_all(workload.name, names, modelled_sizes, modelled, interval, h)
    ]  # fmt: skip
    if measuring:
        timings = _measured(
            workload.name, names, sizes, counts,
            interval=interval, blocks=blocks, rounds=rounds, device=device,
        )  # fmt: skip
        here = probe(workload.name, max(sizes), max(counts), device=device)
        predictions[:0] = predict_all(workload.name, names, sizes, counts, interval, here)
        hardware.insert(0, here)
    record = Scaling(workload.name, interval, timings, tuple(predictions), tuple(hardware), load)
    for table in scaling_tables(record):
        console.print(to_rich(table))
    picture = plots.save(plots.scaling_curves(record), root / "scaling.png")
    for path in (write_scaling(record, root / FILE, device), picture):
        console.print(str(path), soft_wrap=True)


def _presets(accelerators: str, measuring: bool) -> tuple[str, ...]:
    presets = () if accelerators == "none" else opt.words(accelerators, "--accelerators")
    unknown = [preset for preset in presets if preset not in PEAKS]
    if unknown:
        raise ConfigError(
            f"--accelerators {unknown[0]!r}: expected some of {', '.join(PEAKS)}, or none"
        )
    if not measuring and not presets:
        raise ConfigError("--no-measure --accelerators none: nothing to do; drop one of them")
    return presets


def _measured(
    workload: str,
    methods: Sequence[str],
    sizes: Sequence[int],
    counts: Sequence[int],
    *,
    rounds: int,
    **settings: Any,
) -> tuple[Timing, ...]:
    """Every timing, with a bar."""
    from fop_bench.scaling import measure_all

    with Progress(console=console) as progress:
        total = rounds * len(methods) * len(sizes) * len(counts)
        task = progress.add_task(f"scaling of {workload}", total=total)
        return measure_all(
            workload, methods, sizes, counts,
            rounds=rounds, progress=lambda: progress.advance(task), **settings,
        )  # fmt: skip
