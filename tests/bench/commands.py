"""`fop-bench` in this process, and what it says when it refuses."""

from __future__ import annotations

from typing import Any

from typer.testing import CliRunner, Result

from fop_bench.cli import app


def run(*arguments: Any) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def refused(*arguments: Any) -> str:
    """The one message of a command that could not do what was asked; not a traceback."""
    result = run(*arguments)
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code in (1, 2), result.output  # 2: typer's own
    assert result.exit_code == 2 or result.output.count("Error:") == 1, result.output
    return " ".join(result.output.replace("│", " ").split())
