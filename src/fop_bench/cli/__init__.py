"""The command line: ``fop-bench COMMAND``. Commands translate options and print; the work is done
elsewhere.
"""

from fop_bench.cli import running, scaling, showing, steps
from fop_bench.cli.app import app

__all__ = ["app", "running", "scaling", "showing", "steps"]
