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
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import IO, Any

import torch

SCHEMA = 1
META = "meta.json"
METRICS = "metrics.jsonl"
CHECKPOINT = "checkpoint.pt"

STATUSES = ("running", "complete", "diverged")
WALL_CLOCK_FIELDS = (
    "train_time",
)  # the only fields in which two runs of one configuration may differ


class RecordError(RuntimeError):
    """A run directory holds something else than a readable record."""


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


@contextmanager
def atomic_open(path: Path, mode: str = "w") -> Iterator[IO[Any]]:
    """A file that appears under its name complete, or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open(mode, encoding=None if "b" in mode else "utf-8") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def remove_leftovers(folder: Path) -> None:
    """Deletes half-written files of a process that was killed while it wrote them."""
    for path in folder.glob(".*.tmp"):
        path.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    with atomic_open(path) as stream:
        stream.write(text)


def strict_json(value: Any) -> Any:
    """`value` with every non-finite number as None: JSON has no NaN and no infinity."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): strict_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict_json(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    return value


def write_meta(run_dir: Path, meta: Mapping[str, Any]) -> None:
    write_text(run_dir / META, json.dumps(strict_json(meta), indent=2, allow_nan=False) + "\n")


def write_metrics(run_dir: Path, metrics: Iterable[Mapping[str, Any]]) -> None:
    """Replaces the file as a whole, so that a reader never sees half a line."""
    lines = (json.dumps(strict_json(record), allow_nan=False) + "\n" for record in metrics)
    write_text(run_dir / METRICS, "".join(lines))


def read_run(run_dir: Path) -> Run:
    meta_path, metrics_path = run_dir / META, run_dir / METRICS
    if not meta_path.is_file():
        raise RecordError(f"{run_dir} is not a run directory: it has no {META}")
    try:
        meta = json.loads(meta_path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RecordError(
            f"{meta_path} is not JSON ({error}): delete that run and repeat it"
        ) from error
    if not isinstance(meta, dict) or meta.get("schema") != SCHEMA:
        found = meta.get("schema") if isinstance(meta, dict) else type(meta).__name__
        raise RecordError(
            f"{meta_path}: expected schema {SCHEMA}, found {found!r}: "
            "read it with the fop-bench that wrote it"
        )
    metrics: list[dict[str, Any]] = []
    if metrics_path.is_file():
        for number, line in enumerate(metrics_path.read_text(encoding="utf-8").splitlines(), 1):
            try:
                metrics.append(json.loads(line))
            except ValueError as error:
                raise RecordError(f"{metrics_path}, line {number} is not JSON: {error}") from error
    return Run(run_dir, meta, metrics)


def load_runs(root: Path) -> list[Run]:
    """Every run below `root`, in the order of their paths."""
    if not root.is_dir():
        raise RecordError(
            f"{root} is not a directory: expected one that holds runs, as `compare` writes it"
        )
    return [read_run(path.parent) for path in sorted(root.rglob(META))]


def run_path(root: Path, workload: str, method: str, batch_size: int, seed: int) -> Path:
    """Where a comparison keeps one run."""
    return root / workload / method / f"b{batch_size}" / f"s{seed}"


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def versions() -> dict[str, str]:
    """Of Python and of every package that can change a number or a second in a record."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("fop", "numpy", "pytorch_optimizer"):
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
