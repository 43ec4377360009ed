"""One training loop for all methods, recorded so that it can be killed at any moment and resumed.

A run that is resumed writes the same metrics file as one that was never interrupted, but for the
wall-clock fields.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from fop_bench.checkpoint import load_checkpoint, save_checkpoint
from fop_bench.config import RunConfig, differences
from fop_bench.errors import BenchError
from fop_bench.events import EventLog, layer_diagnostics
from fop_bench.files import is_leftover, remove_leftovers
from fop_bench.lock import LOCK, run_lock
from fop_bench.parallel import depends_on_ranks
from fop_bench.progress import Reporter
from fop_bench.records import (
    CHECKPOINT,
    META,
    SCHEMA,
    Run,
    machine,
    now,
    read_run,
    versions,
    write_meta,
    write_metrics,
)
from fop_bench.training import DivergedError, Runtime, Training

if TYPE_CHECKING:
    from fop_bench.data.splits import Splits
    from fop_bench.workloads import Workload

__all__ = ["RunExistsError", "Runtime", "load_splits", "open_run", "train"]


class RunExistsError(BenchError, RuntimeError):
    """The run directory holds something already."""


def train(
    config: RunConfig,
    workload: Workload,
    run_dir: Path,
    runtime: Runtime,
    *,
    resume: bool = False,
    reporter: Reporter | None = None,
    splits: Splits | None = None,
) -> Run:
    """Carries out one run and records it in `run_dir`; `splits` spares a caller of many runs
    loading data twice.

    With `resume` a broken-off run goes on from its last checkpoint and a finished one is returned
    as it is.
    """
    with ExitStack() as stack:
        runtime.ranks.agreed(lambda: stack.enter_context(run_lock(run_dir)))
        return _train(config, workload, run_dir, runtime, resume, reporter, splits)


def _train(
    config: RunConfig,
    workload: Workload,
    run_dir: Path,
    runtime: Runtime,
    resume: bool,
    reporter: Reporter | None,
    splits: Splits | None,
) -> Run:
    """The run itself, in a directory that nobody else trains into."""
    ranks = runtime.ranks
    reporter = reporter if reporter and ranks.first else Reporter()
    recorded = ranks.agreed(lambda: open_run(run_dir, config, resume=resume, ranks=ranks.count))
    if recorded is not None and recorded.finished:
        return recorded
    if splits is None:
        splits = load_splits(config, workload, runtime)
    training = Training(config, workload, splits, runtime)
    meta = ranks.agreed(
        lambda: describe(training) if recorded is None else _going_on(recorded, training)
    )
    if ranks.agreed((run_dir / CHECKPOINT).exists) and recorded is not None:
        load_checkpoint(run_dir / CHECKPOINT, training, recorded.metrics)
    if ranks.first:
        remove_leftovers(run_dir)
        write_meta(run_dir, meta)
        write_metrics(run_dir, training.metrics)

    training.warm_up()
    label = f"{config.method} b{config.batch_size} s{config.seed}"
    reporter.begin(label, config.epochs * training.steps_per_epoch, training.step)
    try:
        logging = runtime.tensorboard and ranks.first
        with EventLog(run_dir, training.step, enabled=logging) as events:
            _epochs(training, run_dir, reporter, events)
        meta = {**meta, "status": "complete"}
    except (DivergedError, LinAlgError) as error:
        meta = {
            **meta,
            "status": "diverged",
            "reason": str(error),
            "diverged_at_step": training.step,
        }
    reporter.end(meta["status"])
    meta["evaluations"] = len(training.metrics)
    return ranks.agreed(lambda: _finish(run_dir, meta, runtime))


def _finish(run_dir: Path, meta: dict[str, Any], runtime: Runtime) -> Run:
    write_meta(run_dir, {**meta, "finished": now()})
    if not runtime.keep_checkpoint:
        (run_dir / CHECKPOINT).unlink(missing_ok=True)
    return read_run(run_dir)


def _going_on(recorded: Run, training: Training) -> dict[str, Any]:
    """The record of a run that is taken up again, also on another number of ranks where that
    changes its numbers by round-off alone.
    """
    before, ranks = recorded_ranks(recorded), training.ranks.count
    if before == ranks:
        return recorded.meta
    why = depends_on_ranks(training.config.method, training.model)
    if why is not None:
        raise RunExistsError(
            f"{recorded.path} was started on {_count(before)} and can't go on on {ranks}: {why}. "
            f"{_launch(before)}, or choose another directory."
        )
    earlier = [*recorded.meta.get("earlier_ranks", []), before]
    return {**recorded.meta, "ranks": ranks, "earlier_ranks": earlier}


def recorded_ranks(run: Run) -> int:
    """How many ranks a run was trained on; records from before there were several do not say."""
    return int(run.meta.get("ranks", 1))


def _count(ranks: int) -> str:
    return "1 rank" if ranks == 1 else f"{ranks} ranks"


def _launch(ranks: int) -> str:
    if ranks == 1:
        return "Resume it without torchrun"
    return f"Resume it with {ranks} ranks (torchrun --nproc-per-node {ranks} on one host)"


def _epochs(training: Training, run_dir: Path, reporter: Reporter, events: EventLog) -> None:
    runtime, saved = training.runtime, time.monotonic()
    while training.epoch < training.config.epochs:
        record = training.run_epoch(run_dir, reporter)
        if runtime.tensorboard:
            # Each rank knows of the layers that it looks after.
            parts = training.ranks.gathered(layer_diagnostics(training.optimizer))
            events.write(record, {name: one for part in parts for name, one in part.items()})
        last = training.epoch == training.config.epochs
        # All ranks take part in a checkpoint, and their clocks differ.
        due = training.ranks.of_first(time.monotonic() - saved >= runtime.checkpoint_seconds)
        if runtime.keep_checkpoint if last else due:
            save_checkpoint(run_dir / CHECKPOINT, training)
            saved = time.monotonic()


def open_run(run_dir: Path, config: RunConfig, *, resume: bool, ranks: int = 1) -> Run | None:
    """The run recorded in the directory, None if there is none; refuses what would overwrite or mix
    runs.

    A finished run on another number of `ranks` is another run: its times are, and its numbers are
    the same up to round-off at best.
    """
    if (run_dir / META).exists():
        recorded = read_run(run_dir)
        different = differences(recorded.meta["config"], config.as_dict())
        if different:
            raise RunExistsError(
                f"{run_dir} holds a run with other settings (recorded / asked for): "
                f"{'; '.join(different)}. Choose another directory, or delete that one."
            )
        if not resume:
            raise RunExistsError(
                f"{run_dir} holds this run already, status {recorded.meta['status']!r}: "
                "continue it with --resume, or choose another directory."
            )
        if recorded.finished and recorded_ranks(recorded) != ranks:
            raise RunExistsError(
                f"{run_dir} holds this run on {_count(recorded_ranks(recorded))}, asked for on "
                f"{ranks}: choose another directory."
            )
        return recorded
    if run_dir.exists() and (not run_dir.is_dir() or any(map(_belongs_to_user, run_dir.iterdir()))):
        raise RunExistsError(
            f"{run_dir} exists and is no run (it has no {META}): choose another directory."
        )
    return None


def _belongs_to_user(path: Path) -> bool:
    return path.name != LOCK and not is_leftover(path)


def load_splits(config: RunConfig, workload: Workload, runtime: Runtime) -> Splits:
    """The data of a run; the validation part is held out only where it is evaluated on."""

    def load() -> Splits:
        return workload.splits(
            runtime.data_dir,
            device=runtime.device,
            validation=config.split == "validation",
            subset=config.subset,
        )

    # One rank downloads what is missing; the others find it.
    return runtime.ranks.in_turn(load)


def describe(training: Training) -> dict[str, Any]:
    """The record of what is about to run."""
    config, workload = training.config, training.workload
    return {
        "schema": SCHEMA,
        "workload": config.workload,
        "method": config.method,
        "batch_size": config.batch_size,
        "seed": config.seed,
        "config": config.as_dict(),
        "at_batch_size": {
            name: training.options[name]
            for name in ("lr", "update_every")
            if name in training.options
        },
        "versions": versions(),
        "machine": machine(training.device),
        "ranks": training.ranks.count,
        "created": now(),
        "status": "running",
        "train_size": training.splits.train_size,
        "steps_per_epoch": training.steps_per_epoch,
        "split": config.split,
        "target": workload.target,
        "metric": workload.metric,
        "higher_is_better": workload.higher_is_better,
    }
