"""What a run leaves behind: ``meta.json`` and ``metrics.jsonl``, written atomically.

A run directory is found by its ``meta.json``. Everything that reports on runs (tables, plots,
HTML) reads these two files through `load_runs` and nothing else, so a report never needs to train
again.

``meta.json``      who ran: workload, method, batch size, seed, resolved configuration, versions,
                   machine, status ("running", "complete" or "diverged"), target and metric.
``metrics.jsonl``  one object a line, one line an evaluation: epoch, step, train_time (seconds of
                   training alone, cumulative), train_loss, lr, and ``<split>_<metric>`` for every
                   metric evaluated.
"""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar

import torch

from fop_bench.errors import RecordError
from fop_bench.files import parse_json, read_json, read_text, strict_json, write_json, write_text
from fop_bench.schema import Count, MisfitError, Name, NonNegative, Setting, Settings, Whole, fit

SCHEMA = 1
META = "meta.json"
METRICS = "metrics.jsonl"
CHECKPOINT = "checkpoint.pt"

WALL_CLOCK_FIELDS = (
    "train_time",
)  # the only fields in which two runs of one configuration may differ


Content = TypeVar("Content")
AGAIN = "delete that run and repeat it"


class _Config(TypedDict, total=False):
    base_batch: Count
    options: Settings
    schedule: Settings


class _MetaExtras(TypedDict, total=False):
    split: Literal["test", "validation"]
    versions: dict[str, Any]
    machine: dict[str, Any]
    ranks: Count
    earlier_ranks: list[Count]
    evaluations: Whole
    reason: str


class _Meta(_MetaExtras):
    """``meta.json``: what others read of it."""

    schema: int
    workload: Name
    method: Name
    batch_size: Count
    seed: int
    config: _Config
    status: Literal["running", "complete", "diverged"]
    target: float
    metric: Name
    higher_is_better: bool


class _Evaluation(TypedDict):
    """A line of ``metrics.jsonl``; all else on it are numbers or null."""

    epoch: NonNegative
    step: Whole
    train_time: NonNegative


@dataclass(frozen=True)
class Run:
    """One recorded run: where it is, what it was, and its evaluations in order."""

    path: Path
    meta: dict[str, Any]
    metrics: list[dict[str, Any]] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return bool(self.meta["status"] in ("complete", "diverged"))

    @property
    def split(self) -> str:
        """The split the metrics were evaluated on: "test", or "validation" for tuning runs."""
        return str(self.meta.get("split", "test"))

    @property
    def metric_key(self) -> str:
        """The key of the workload's own metric in `metrics`, for example ``test_accuracy``."""
        return f"{self.split}_{self.meta['metric']}"

    def reached(self) -> dict[str, Any] | None:
        """The first evaluation at which the metric reached the target; None is a miss."""
        target = float(self.meta["target"])
        for record in self.metrics:
            value = record.get(self.metric_key)
            if value is None:
                continue
            if value >= target if self.meta["higher_is_better"] else value <= target:
                return record
        return None

    def to_target(self, unit: str = "epoch") -> float:
        """Epochs ("epoch"), steps ("step") or seconds ("train_time") to the target; a miss is
        infinity.
        """
        record = self.reached()
        return math.inf if record is None else float(record[unit])

    def best(self) -> float:
        """The best value of the metric; the worst possible one for a run that recorded none."""
        values = [r[self.metric_key] for r in self.metrics if r.get(self.metric_key) is not None]
        if self.meta["higher_is_better"]:
            return float(max(values, default=-math.inf))
        return float(min(values, default=math.inf))


def provenance(device: torch.device | str = "cpu", packages: Iterable[str] = ()) -> dict[str, Any]:
    """What every record of measurements begins with."""
    found = {"versions": versions(packages), "machine": machine(torch.device(device))}
    return {"schema": SCHEMA, **found}


def write_meta(run_dir: Path, meta: Mapping[str, Any]) -> None:
    write_json(run_dir / META, meta)


def write_metrics(run_dir: Path, metrics: Iterable[Mapping[str, Any]]) -> None:
    """Replaces the file as a whole, so that a reader never sees half a line."""
    lines = (json.dumps(strict_json(record), allow_nan=False) + "\n" for record in metrics)
    write_text(run_dir / METRICS, "".join(lines))


def read_run(run_dir: Path) -> Run:
    """The run, every entry of it checked; what is damaged raises a RecordError that names it."""
    path = run_dir / META
    if not path.exists():
        raise RecordError(f"{run_dir} is not a run directory: it has no {META}")
    meta = read_json(path, AGAIN)
    found = meta.get("schema") if isinstance(meta, dict) else type(meta).__name__
    if found != SCHEMA:
        raise RecordError(
            f"{path}: expected schema {SCHEMA}, found {found!r}: "
            "read it with the fop-bench that wrote it"
        )
    try:
        meta = fit(meta, _Meta)
        fit(meta["config"], dict[str, Setting | Settings], "config")
        metrics = _read_metrics(run_dir / METRICS, required=meta["status"] != "running")
        recorded = meta.get("evaluations", len(metrics))
        if recorded != len(metrics) and meta["status"] != "running":
            raise MisfitError(f"{recorded} evaluations were recorded, {METRICS} has {len(metrics)}")
    except MisfitError as error:
        raise RecordError(f"{path}: {error}: {AGAIN}") from error
    return Run(run_dir, meta, metrics)


def _read_metrics(path: Path, *, required: bool) -> list[dict[str, Any]]:
    """All evaluations; a run that was stopped at its very start has no file yet."""
    if not required and not path.exists():
        return []
    metrics: list[dict[str, Any]] = []
    for number, line in enumerate(read_text(path, AGAIN).splitlines(), 1):
        where = f"{path}, line {number}"
        record = parse_json(line, where, AGAIN)
        try:
            metrics.append(fit(fit(record, dict[str, float | None]), _Evaluation))
            if number > 1 and metrics[-1]["step"] <= metrics[-2]["step"]:
                raise MisfitError("steps do not rise")
        except MisfitError as error:
            raise RecordError(f"{where}: {error}: {AGAIN}") from error
    return metrics


def scan_runs(root: Path) -> tuple[list[Run], list[RecordError]]:
    """Every run below `root`, in the order of their paths, and what is wrong with the others."""
    if not root.is_dir():
        raise RecordError(
            f"{root} is not a directory: expected one that holds runs, as `compare` writes it"
        )
    return read_each((path.parent for path in sorted(root.rglob(META))), read_run)


def read_each(
    paths: Iterable[Path], read: Callable[[Path], Content]
) -> tuple[list[Content], list[RecordError]]:
    """What can be read, and the errors of the rest: one damaged record takes no other with it."""
    contents, damaged = [], []
    for path in paths:
        try:
            contents.append(read(path))
        except RecordError as error:
            damaged.append(error)
    return contents, damaged


def load_runs(root: Path) -> list[Run]:
    """Every run below `root`, in the order of their paths; raises where one is damaged."""
    runs, damaged = scan_runs(root)
    for error in damaged:
        raise error
    return runs


def run_path(root: Path, workload: str, method: str, batch_size: int, seed: int) -> Path:
    """Where a comparison keeps one run."""
    return root / workload / method / f"b{batch_size}" / f"s{seed}"


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def versions(packages: Iterable[str] = ()) -> dict[str, str]:
    """Of Python and of every package that can change a number or a second in a record."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("fop", "numpy", "pytorch_optimizer", *packages):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def machine(device: torch.device) -> dict[str, Any]:
    """The machine as far as times depend on it; no host name and no user."""
    facts: dict[str, Any] = {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": str(device),
    }
    if device.type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(device)
        facts["gpus"] = torch.cuda.device_count()
    return facts


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"
