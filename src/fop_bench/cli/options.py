"""Options that several commands share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from fop_bench.cli.app import console
from fop_bench.config import ConfigError, parse_overrides
from fop_bench.errors import unknown
from fop_bench.files import atomic_open
from fop_bench.loop import Runtime
from fop_bench.methods import Method, get_method
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
Epochs = Annotated[
    int | None, typer.Option(min=1, help="Epochs of every run; default: the recipe's.")
]
Subset = Annotated[int | None, typer.Option(min=1, help="Train on this many examples only.")]
Seed = Annotated[int, typer.Option(min=0)]
DataDir = Annotated[
    Path | None,
    typer.Option(help="Where the data is; default: $FOP_DATA, then the download cache."),
]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ..., or auto.")]
Amp = Annotated[str | None, typer.Option(help="Mixed precision: off, bf16 or fp16 (CUDA only).")]
Compile = Annotated[bool | None, typer.Option("--compile/--no-compile", help="Compile the model.")]
Accumulate = Annotated[
    int | None, typer.Option(min=1, help="Micro-batches that each batch is split into.")
]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads; default: torch's choice.")]
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


def words(text: str, option: str) -> tuple[str, ...]:
    """What stands between commas, each once; nothing where the option was not given."""
    found = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if text and not found:
        raise ConfigError(f"{option} {text!r}: expected names or numbers with commas between them")
    return found


def method_names(text: str) -> tuple[str, ...]:
    names = words(text, "--methods")
    for name in names:
        get_method(name)
    return names


def numbers(text: str, option: str, least: int = 1) -> tuple[int, ...]:
    try:
        found = tuple(dict.fromkeys(int(part) for part in words(text, option)))
        if min(found, default=least) < least:
            raise ValueError
        return found
    except ValueError:
        raise ConfigError(
            f"{option} {text!r}: expected whole numbers >= {least} with commas between them"
        ) from None


def finite(least: float) -> Callable[[float], float]:
    """For options that are numbers with a fraction: none is NaN, infinite or below `least`."""

    def check(value: float) -> float:
        if not (math.isfinite(value) and value >= least):
            raise typer.BadParameter(f"{value} is not a finite number >= {least:g}.")
        return value

    return check


def recipe_from(
    name: str,
    assignments: list[str] | None,
    methods: Sequence[str] = (),
    tuned: Path | None = None,
    **flags: Any,
) -> Recipe:
    """The recipe with the command line on top; a flag that was not given (None) changes nothing."""
    overrides = parse_overrides(assignments or ())
    overrides.update({key: value for key, value in flags.items() if value is not None})
    recipe = load_recipe(name, overrides, tuned)
    _check_options(overrides.get("method", {}), [get_method(m) for m in methods or recipe.methods])
    return recipe


def _check_options(given: Iterable[str], methods: Sequence[Method]) -> None:
    """Each option is one of some method that will run, so that none is silently without effect."""
    for name in given:
        if not any(name in method.accepts for method in methods):
            likely = set().union(*(method.accepts for method in methods))
            taken = "; ".join(f"{m.name} takes {', '.join(sorted(m.accepts))}" for m in methods)
            raise ConfigError(
                f"--set method.{name}: no method here takes {unknown(name, likely)}; {taken}"
            )


def claim(path: Path) -> None:
    """Nothing is there yet and it can be written, found out before hours are spent measuring."""
    if path.exists():
        raise ConfigError(f"{path} exists: choose another directory with --out, or delete it")
    with atomic_open(path):
        pass
    path.unlink()


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
    return Runtime(device=device_from(device), data_dir=data_dir, **settings)


def device_from(device: str) -> torch.device:
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"--device {device!r}: {error}") from error
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"--device {device}: this torch sees no CUDA device; use --device cpu")
    return chosen
