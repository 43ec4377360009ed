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
from fop_bench.records import RecordError

EXPECTED = (
    ConfigError,
    DataError,
    MemoryMeasurementError,
    MethodError,
    RecordError,
    RunExistsError,
)

console = Console()


class Commands(TyperGroup):
    """Runs a command and ends with a message where the user can mend what went wrong."""

    def invoke(self, ctx: Any) -> Any:
        problems = Console(stderr=True)
        try:
            return super().invoke(ctx)
        except EXPECTED as error:
            problems.print(f"[bold red]Error:[/] {escape(str(error))}", soft_wrap=True)
            raise typer.Exit(1) from error
        except KeyboardInterrupt:
            problems.print(
                "\nStopped. What was recorded is kept: repeat the command to go on "
                "(train: with --resume)."
            )
            raise typer.Exit(130) from None


app = typer.Typer(
    name="fop-bench",
    cls=Commands,
    help="Train, tune and compare FOP with other optimizers, and report from the records.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
