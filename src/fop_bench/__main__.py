"""The command ``fop-bench``, and ``python -m fop_bench``."""

from __future__ import annotations

import sys

from fop_bench.errors import missing_package


def main() -> None:
    """The command line, or what to install for it: the library itself needs torch alone."""
    try:
        from fop_bench.cli import app
    except ModuleNotFoundError as error:
        message = missing_package(error)
        if message is None:
            raise
        sys.exit(f"Error: {message}")
    app(prog_name="fop-bench")


if __name__ == "__main__":
    main()
