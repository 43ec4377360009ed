"""``python -m fop_bench``: the same as ``fop-bench``."""

from fop_bench.cli import app

app(prog_name="fop-bench")
