"""Commands that train: train, tune, compare, sweep."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from fop_bench.cli import options as opt
from fop_bench.cli.app import app, console
from fop_bench.compare import comparison_jobs, run_all
from fop_bench.config import ConfigError, parse_value
from fop_bench.loop import train as run_training
from fop_bench.progress import Display
from fop_bench.recipes import Recipe
from fop_bench.records import run_path
from fop_bench.sweep import SWEEPS, get_sweep, sweep_jobs
from fop_bench.tune import Budget, carry_out, plan_search
from fop_bench.tuned import write_tuned
from fop_bench.workloads import WORKLOADS

DEFAULT_TRIALS = 10
# Tuning never sees the seeds of a comparison, so that a lucky initialisation is not what is tuned
# for.
TUNING_SEEDS = (1000, 1001)
KeepCheckpoints = Annotated[bool, typer.Option(help="Keep the final checkpoint of every run.")]


@app.command()
def train(
    name: opt.Name,
    method: Annotated[str, typer.Option(help="The optimizer.")] = "fop",
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Default: the recipe's first.")
    ] = None,
    seed: opt.Seed = 0,
    out: Annotated[
        Path | None, typer.Option(help="The run's directory; default: under runs/train.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with a run that was stopped.")
    ] = False,
    epochs: opt.Epochs = None,
    subset: opt.Subset = None,
    device: opt.Device = "auto",
    amp: opt.Amp = None,
    compile_model: opt.Compile = None,
    accumulate: opt.Accumulate = None,
    data_dir: opt.DataDir = None,
    threads: opt.Threads = None,
    tuned: opt.TunedFile = None,
    assignments: opt.Set = None,
    checkpoint_seconds: Annotated[
        float,
        typer.Option(
            callback=opt.finite(0.0),
            help="Least time between checkpoints, which are written after an epoch.",
        ),
    ] = 30.0,
    tensorboard: Annotated[bool, typer.Option(help="Write TensorBoard event files.")] = True,
) -> None:
    """One run, with checkpoints and TensorBoard event files; also under torchrun."""
    recipe = opt.recipe_from(
        name,
        assignments,
        (method,),
        tuned,
        epochs=epochs,
        subset=subset,
        amp=amp,
        compile=compile_model,
        accumulate=accumulate,
    )
    workload = WORKLOADS[recipe.workloads[0]]
    config = recipe.run(workload, method, batch_size or recipe.batch_sizes(workload)[0], seed)
    root = Path("runs") / "train"
    run_dir = out or run_path(root, workload.name, method, config.batch_size, seed)
    with (
        opt.parallel_runtime(
            device,
            data_dir,
            threads,
            checkpoint_seconds=checkpoint_seconds,
            tensorboard=tensorboard,
        ) as runtime,
        Display(console) as display,
    ):
        run = run_training(config, workload, run_dir, runtime, resume=resume, reporter=display)
    reached = run.reached()
    goal = f"{workload.metric} {workload.target:g}"
    ending = (
        f"reached {goal} after {reached['epoch']:g} epochs" if reached else f"did not reach {goal}"
    )
    reason = f" ({run.meta['reason']})" if "reason" in run.meta else ""
    console.print(f"{run.meta['status']}{reason}: {ending}; best {run.best():.4g}")
    console.print(f"Recorded in {run_dir}", soft_wrap=True)


def _say_where_settings_come_from(recipe: Recipe) -> None:
    """So that nobody takes a comparison of untuned methods for one of tuned ones."""
    if recipe.tuned is None:
        console.print(
            "Settings are the recipe's own, not tuned ones: see `fop-bench tune "
            f"{recipe.name}` and --tuned.",
            style="yellow",
            soft_wrap=True,
        )
        return
    budget = recipe.tuned.budget
    console.print(
        f"Settings from {recipe.tuned.path}: {budget.get('trials')} trials and "
        f"{len(budget.get('seeds', ()))} seeds for every method, on the validation split.",
        soft_wrap=True,
        highlight=False,
    )


@app.command()
def tune(
    name: opt.Name,
    methods: opt.Methods = "",
    batch_sizes: opt.BatchSizes = "",
    trials: Annotated[
        int | None, typer.Option(min=1, help="Settings tried for each method.")
    ] = None,
    seeds: Annotated[str, typer.Option(help="Seeds of each trial; default 1000,1001.")] = "",
    out: Annotated[Path | None, typer.Option(help="Directory; default: runs/tune/NAME.")] = None,
    epochs: opt.Epochs = None,
    subset: opt.Subset = None,
    device: opt.Device = "auto",
    amp: opt.Amp = None,
    accumulate: opt.Accumulate = None,
    data_dir: opt.DataDir = None,
    threads: opt.Threads = None,
    assignments: opt.Set = None,
) -> None:
    """Equal-budget search on the validation split; writes the best settings as tuned.toml."""
    names = opt.method_names(methods)
    recipe = opt.recipe_from(
        name, assignments, names, subset=subset, amp=amp, accumulate=accumulate
    )
    table = recipe.table.get("tune", {})
    budget = Budget(
        trials or table.get("trials", DEFAULT_TRIALS),
        opt.numbers(seeds, "--seeds", least=0) or tuple(table.get("seeds", TUNING_SEEDS)),
        epochs or table.get("epochs"),
    )
    root = out or Path("runs") / "tune" / recipe.name
    searches = plan_search(recipe, names, opt.numbers(batch_sizes, "--batch-sizes"), budget, root)
    runtime = opt.runtime_from(device, data_dir, threads, tensorboard=False, keep_checkpoint=False)
    with Display(
        console, sum(len(search.jobs) for search in searches), f"tune {recipe.name}"
    ) as display:
        settings = carry_out(searches, budget, runtime, display)
    path = root / "tuned.toml"
    write_tuned(path, budget.as_dict(), tuple(settings))
    for setting in settings:
        chosen = ", ".join(f"{key} {value}" for key, value in setting.options.items())
        score = ", ".join(f"{key} {value:g}" for key, value in setting.score.items())
        console.print(
            f"{setting.method} b{setting.batch_size}: {chosen}  ({score})", soft_wrap=True
        )
    console.print(f"Settings for `fop-bench compare {name} --tuned`: {path}", soft_wrap=True)


@app.command()
def compare(
    name: opt.Name,
    methods: opt.Methods = "",
    batch_sizes: opt.BatchSizes = "",
    seeds: opt.Seeds = "",
    out: Annotated[Path | None, typer.Option(help="Directory; default: runs/compare/NAME.")] = None,
    epochs: opt.Epochs = None,
    subset: opt.Subset = None,
    device: opt.Device = "auto",
    amp: opt.Amp = None,
    compile_model: opt.Compile = None,
    accumulate: opt.Accumulate = None,
    data_dir: opt.DataDir = None,
    threads: opt.Threads = None,
    tuned: opt.TunedFile = None,
    assignments: opt.Set = None,
    keep_checkpoints: KeepCheckpoints = False,
) -> None:
    """Methods x batch sizes x seeds; goes on where it was stopped, and ends with the paper's table
    and plots. Also under torchrun.
    """
    from fop_bench.outcome import finish, show_tables

    names = opt.method_names(methods)
    recipe = opt.recipe_from(
        name, assignments, names, tuned, epochs=epochs, subset=subset, amp=amp,
        compile=compile_model, accumulate=accumulate,
    )  # fmt: skip
    _say_where_settings_come_from(recipe)
    configs = recipe.plan(
        names, opt.numbers(batch_sizes, "--batch-sizes"), opt.numbers(seeds, "--seeds", least=0)
    )
    root = out or Path("runs") / "compare" / recipe.name
    with (
        opt.parallel_runtime(
            device, data_dir, threads, tensorboard=False, keep_checkpoint=keep_checkpoints
        ) as runtime,
        Display(console, len(configs), f"compare {recipe.name}") as display,
    ):
        runs = run_all(comparison_jobs(configs, root), runtime, display)
    if runtime.ranks.first:
        show_tables(runs, console)
        finish(root, console)


@app.command()
def sweep(
    name: opt.Name,
    parameter: Annotated[str, typer.Argument(help=f"What is varied: {', '.join(SWEEPS)}.")],
    values: Annotated[
        str, typer.Option(help="Comma-separated values instead of the usual ones.")
    ] = "",
    methods: opt.Methods = "",
    batch_sizes: opt.BatchSizes = "",
    seeds: opt.Seeds = "",
    out: Annotated[
        Path | None, typer.Option(help="Directory; default: runs/sweep/NAME-PARAMETER.")
    ] = None,
    epochs: opt.Epochs = None,
    subset: opt.Subset = None,
    device: opt.Device = "auto",
    amp: opt.Amp = None,
    accumulate: opt.Accumulate = None,
    data_dir: opt.DataDir = None,
    threads: opt.Threads = None,
    tuned: opt.TunedFile = None,
    assignments: opt.Set = None,
) -> None:
    """One setting varied, everything else as tuned; ends with its curves and the target line."""
    from fop_bench.outcome import finish

    chosen = get_sweep(parameter)
    names = opt.method_names(methods)
    recipe = opt.recipe_from(
        name, assignments, names or chosen.methods, tuned, epochs=epochs, subset=subset, amp=amp,
        accumulate=accumulate,
    )  # fmt: skip
    _say_where_settings_come_from(recipe)
    points = tuple(parse_value(word) for word in opt.words(values, "--values"))
    if not all(type(point) in (int, float) and math.isfinite(point) for point in points):
        raise ConfigError(f"--values {values!r}: expected numbers with commas between them")
    root = out or Path("runs") / "sweep" / f"{recipe.name}-{parameter}"
    jobs = sweep_jobs(
        chosen,
        recipe,
        root,
        methods=names,
        batch_sizes=opt.numbers(batch_sizes, "--batch-sizes"),
        seeds=opt.numbers(seeds, "--seeds", least=0),
        values=points,
    )
    runtime = opt.runtime_from(device, data_dir, threads, tensorboard=False, keep_checkpoint=False)
    with Display(console, len(jobs), f"sweep {parameter}") as display:
        run_all(jobs, runtime, display)
    finish(root, console)
