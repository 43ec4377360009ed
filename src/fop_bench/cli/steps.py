"""The commands `steps run`, `steps guard` and so on: what a step costs, against peers."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from fop_bench.cli.app import app, console
from fop_bench.config import ConfigError

RESULTS = Path("benchmarks") / "results"
DOCS = Path("docs")

steps = typer.Typer(
    help="What a step costs in time and memory, against peers (from the root of the repository).",
    no_args_is_help=True,
)
app.add_typer(steps, name="steps")


@steps.command()
def run(
    quick: Annotated[bool, typer.Option(help="fop and SGD on two small networks.")] = False,
    everything: Annotated[bool, typer.Option(help="Peers at large batches, too.")] = False,
    budget: Annotated[
        float | None, typer.Option(min=0.01, help="CPU seconds of timed steps for each process.")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Part of a cell's name, as in kfac or vit.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help=f"The record; default: {RESULTS}/DATE-MODE.json.")
    ] = None,
    resume: Annotated[bool, typer.Option(help="Go on with an unfinished record.")] = False,
) -> None:
    """Time every method on every network; writes the record and, where complete, the docs."""
    from fop_bench.records import now
    from fop_bench.render import to_rich
    from fop_bench.steps import report
    from fop_bench.steps.run import measure
    from fop_bench.steps.tables import sections

    if quick and everything:
        raise ConfigError("--quick --everything: drop one of them")
    mode = "quick" if quick else "everything" if everything else "full"
    path = output or RESULTS / f"{now()[:10]}-{mode}.json"
    record = measure(mode, path, console, budget=budget, only=tuple(only or ()), resume=resume)
    for tables in sections(record).values():
        for table in tables:
            console.print(to_rich(table))
    console.print(f"recorded in {path}", highlight=False)
    if not quick and not only:
        report.write_docs(record, DOCS)


@steps.command()
def guard(
    record: Annotated[bool, typer.Option("--record", help="Make this the new reference.")] = False,
    reference: Annotated[Path, typer.Option(help="The record to compare with.")] = (
        RESULTS / "guard.json"
    ),
) -> None:
    """Fail if a step costs much more, against SGD's, than recorded: two networks, 2 minutes."""
    from fop_bench.files import write_text
    from fop_bench.steps import guard, store
    from fop_bench.steps.run import measure

    before = None if record else store.read(reference)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "guard.json"
        now = measure("quick", path, console, profiles=False)
        if before is not None:
            guard.check(now, before, console)
            return
        write_text(reference, path.read_text(encoding="utf-8"))
        console.print(f"recorded in {reference}")


@steps.command()
def report(record: Annotated[Path, typer.Argument(help="What `steps run` recorded.")]) -> None:
    """Write the tables and plots of docs/performance.md from a record."""
    from fop_bench.steps.report import write_docs
    from fop_bench.steps.store import read

    write_docs(read(record), DOCS)


@steps.command()
def half_gradients(
    repeats: Annotated[int, typer.Option(min=2, help="Rounds of both models in turn.")] = 15,
) -> None:
    """What half-batch gradients cost: forward and backward of a hooked against a plain model."""
    import torch

    from fop_bench.steps.half_gradients import NETWORKS, compare

    torch.set_num_threads(1)
    for workload in NETWORKS:
        console.print(compare(workload, repeats), highlight=False)
