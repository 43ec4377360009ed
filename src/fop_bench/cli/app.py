"""The application, and how errors that a user can mend are shown: one message, no traceback."""

from __future__ import annotations

import errno
from typing import Any

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from fop_bench.config import ConfigError
from fop_bench.errors import BenchError, cure, missing_package, reason
from fop_bench.parallel import StoppedError, launched_ranks

# Commands that several ranks carry out together; each rank would do all of any other.
UNDER_TORCHRUN = ("train", "compare")

# Without markup: names of files and settings may hold brackets.
console = Console(markup=False)


class Commands(TyperGroup):
    """Runs a command and ends with a message where the user can mend what went wrong."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except StoppedError as error:  # the first rank has told why
            raise typer.Exit(1) from error
        except KeyboardInterrupt:
            Console(stderr=True).print(
                "\nStopped. What was recorded is kept: repeat the command to go on "
                "(train: with --resume)."
            )
            raise typer.Exit(130) from None
        except Exception as error:
            message = explanation(error)
            if message is None:
                raise
            label = Text.assemble(("Error:", "bold red"), f" {message}")
            Console(stderr=True).print(label, soft_wrap=True)
            raise typer.Exit(1) from error

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        found = super().resolve_command(ctx, args)
        if launched_ranks() > 1 and found[0] not in UNDER_TORCHRUN:
            raise ConfigError(
                f"fop-bench {found[0]} runs in one process, torchrun launched {launched_ranks()}: "
                f"start it alone (under torchrun go: {', '.join(UNDER_TORCHRUN)})"
            )
        return found


def explanation(error: Exception) -> str | None:
    """What the user can do about it; None where it is no fault of the user's or the machine's."""
    if isinstance(error, BenchError):
        return str(error)
    if isinstance(error, ModuleNotFoundError):
        return missing_package(error)
    if isinstance(error, OSError) and error.errno != errno.EPIPE:  # of which click knows
        place = f"{error.filename}: " if error.filename else ""
        return f"{place}{reason(error)}: {cure(error)}"
    return None


app = typer.Typer(
    name="fop-bench",
    cls=Commands,
    help="Train, tune and compare FOP with other optimizers, and report from the records.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
