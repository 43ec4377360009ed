"""The application, and how errors that a user can mend are shown: one message, no traceback."""

from __future__ import annotations

from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

from fop_bench.config import ConfigError
from fop_bench.data.errors import DataError
from fop_bench.loop import RunExistsError
from fop_bench.memory import MemoryMeasurementError
from fop_bench.methods import MethodError
from fop_bench.parallel import StoppedError, launched_ranks
from fop_bench.records import RecordError
from fop_bench.scaling import ScalingMeasurementError

EXPECTED = (
    ConfigError,
    DataError,
    MemoryMeasurementError,
    MethodError,
    RecordError,
    RunExistsError,
    ScalingMeasurementError,
)

# Commands that several ranks carry out together; each rank would do all of any other.
UNDER_TORCHRUN = ("train", "compare")

console = Console()


class Commands(TyperGroup):
    """Runs a command and ends with a message where the user can mend what went wrong."""

    def invoke(self, ctx: Any) -> Any:
        problems = Console(stderr=True)
        try:
            return super().invoke(ctx)
        except StoppedError as error:  # the first rank has told why
            raise typer.Exit(1) from error
        except EXPECTED as error:
            problems.print(f"[bold red]Error:[/] {escape(str(error))}", soft_wrap=True)
            raise typer.Exit(1) from error
        except KeyboardInterrupt:
            problems.print(
                "\nStopped. What was recorded is kept: repeat the command to go on "
                "(train: with --resume)."
            )
            raise typer.Exit(130) from None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        found = super().resolve_command(ctx, args)
        if launched_ranks() > 1 and found[0] not in UNDER_TORCHRUN:
            raise ConfigError(
                f"fop-bench {found[0]} runs in one process, torchrun launched {launched_ranks()}: "
                f"start it alone (under torchrun go: {', '.join(UNDER_TORCHRUN)})"
            )
        return found


app = typer.Typer(
    name="fop-bench",
    cls=Commands,
    help="Train, tune and compare FOP with other optimizers, and report from the records.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
