"""Many runs into one directory: resumable, and what is recorded there already is not run again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fop_bench.config import RunConfig
from fop_bench.loop import Runtime, load_splits, open_run, train
from fop_bench.progress import Display
from fop_bench.records import Run, run_path
from fop_bench.workloads import WORKLOADS

if TYPE_CHECKING:
    from fop_bench.data.splits import Splits


class DataCache:
    """The data of the last workload: many runs in a row need the same."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._key: tuple[Any, ...] = ()
        self._splits: Splits | None = None

    def get(self, config: RunConfig) -> Splits:
        key = (config.workload, config.split, config.subset)
        if self._splits is None or key != self._key:
            self._splits = load_splits(config, WORKLOADS[config.workload], self._runtime)
            self._key = key
        return self._splits


def run_all(
    jobs: Iterable[tuple[Path, RunConfig]],
    runtime: Runtime,
    display: Display,
    *,
    cache: DataCache | None = None,
) -> list[Run]:
    """Carries out each job in its own directory, or reads what was recorded there."""
    cache = cache or DataCache(runtime)
    runs = []
    for run_dir, config in jobs:
        recorded = runtime.ranks.agreed(partial(_recorded, run_dir, config, runtime.ranks.count))
        if recorded is not None and recorded.finished:
            display.count()
            runs.append(recorded)
            continue
        workload = WORKLOADS[config.workload]
        run = train(
            config,
            workload,
            run_dir,
            runtime,
            resume=True,
            reporter=display,
            splits=cache.get(config),
        )
        if run.meta["status"] == "diverged":
            display.say(f"{run_dir} diverged: {run.meta.get('reason')}; it counts as a miss")
        runs.append(run)
    return runs


def _recorded(run_dir: Path, config: RunConfig, ranks: int) -> Run | None:
    return open_run(run_dir, config, resume=True, ranks=ranks)


def comparison_jobs(configs: Sequence[RunConfig], root: Path) -> list[tuple[Path, RunConfig]]:
    """Where each run of a comparison is kept."""
    return [
        (run_path(root, config.workload, config.method, config.batch_size, config.seed), config)
        for config in configs
    ]
