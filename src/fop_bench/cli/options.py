"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from fop_bench.cli.app import console
from fop_bench.config import ConfigError, parse_overrides
from fop_bench.loop import Runtime
from fop_bench.parallel import process_group
from fop_bench.recipes import Recipe, load_recipe

Name = Annotated[
    str,
    typer.Argument(help="A recipe or workload (see `fop-bench list`), or a .toml or .yaml file."),
]
Methods = Annotated[str, typer.Option(help="Comma-separated methods; default: the recipe's.")]
BatchSizes = Annotated[
    str, typer.Option(help="Comma-separated batch sizes; default: the recipe's.")
]
Seeds = Annotated[str, typer.Option(help="Comma-separated seeds; default: the recipe's.")]
Epochs = Annotated[int | None, typer.Option(help="Epochs of every run; default: the recipe's.")]
Subset = Annotated[int | None, typer.Option(help="Train on this many examples only.")]
DataDir = Annotated[
    Path | None,
    typer.Option(help="Where the data is; default: $FOP_DATA, then the download cache."),
]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ..., or auto.")]
Amp = Annotated[str | None, typer.Option(help="Mixed precision: off, bf16 or fp16 (CUDA only).")]
Compile = Annotated[bool | None, typer.Option("--compile/--no-compile", help="Compile the model.")]
Accumulate = Annotated[
    int | None, typer.Option(help="Micro-batches that each batch is split into.")
]
Threads = Annotated[int | None, typer.Option(help="CPU threads; default: torch's choice.")]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override the recipe, e.g. method.damping=1e-4."
    ),
]
TunedFile = Annotated[
    Path | None,
    typer.Option("--tuned", help="Settings from `fop-bench tune`; default: the recipe's."),
]


def words(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def numbers(text: str, option: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in words(text))
    except ValueError:
        raise ConfigError(
            f"{option} {text!r}: expected whole numbers with commas between them"
        ) from None


def recipe_from(
    name: str,
    assignments: list[str] | None,
    tuned: Path | None = None,
    **flags: Any,
) -> Recipe:
    """The recipe with the command line on top; a flag that was not given (None) changes nothing."""
    overrides = parse_overrides(assignments or ())
    overrides.update({key: value for key, value in flags.items() if value is not None})
    return load_recipe(name, overrides, tuned)


@contextmanager
def parallel_runtime(
    device: str, data_dir: Path | None, threads: int | None, **settings: Any
) -> Iterator[Runtime]:
    """A runtime on all ranks that torchrun launched; only the first of them prints."""
    alone = runtime_from(device, data_dir, threads, **settings)
    with process_group(alone.device) as (ranks, own_device):
        console.quiet = not ranks.first
        yield replace(alone, device=own_device, ranks=ranks)


def runtime_from(
    device: str, data_dir: Path | None, threads: int | None, **settings: Any
) -> Runtime:
    if threads is not None:
        torch.set_num_threads(threads)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"--device {device!r}: {error}") from error
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"--device {device}: this torch sees no CUDA device; use --device cpu")
    return Runtime(device=chosen, data_dir=data_dir, **settings)
