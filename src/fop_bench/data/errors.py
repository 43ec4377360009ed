"""The one exception of the data loaders: which file, what is wrong, what to do."""

from __future__ import annotations

from pathlib import Path

from fop_bench.errors import BenchError


class DataError(BenchError, RuntimeError):
    """A data file is missing, truncated or corrupt; raised before training starts."""

    def __init__(self, path: Path | str, problem: str, fix: str) -> None:
        self.path = Path(path)
        self.problem = problem
        self.fix = fix
        super().__init__(f"{path}: {problem}. {fix}")
