"""Run directories made by hand, in the form the runner writes, for tests of what reads them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SPEED = {"sgd": 0.10, "adamw": 0.12, "kfac": 0.25, "kfac-2x": 0.24, "fop": 0.35, "fop-sum": 0.37}
STEP_COST = {"sgd": 1.0, "adamw": 1.05, "kfac": 1.5, "kfac-2x": 1.5, "fop": 1.7, "fop-sum": 1.7}


def write_run(
    root: Path,
    *,
    workload: str = "digits-mlp",
    method: str = "sgd",
    batch_size: int = 256,
    seed: int = 0,
    accuracies: Sequence[float | None],
    times: Sequence[float] | None = None,
    target: float = 0.9,
    status: str = "complete",
    options: dict[str, Any] | None = None,
    base_batch: int = 256,
    split: str = "test",
    folder: Path | None = None,
    **meta: Any,
) -> Path:
    """One run with the given accuracy after each epoch."""
    path = folder or root / workload / method / f"b{batch_size}" / f"s{seed}"
    path.mkdir(parents=True)
    times = times or [2.0 * (epoch + 1) for epoch in range(len(accuracies))]
    content = {
        "schema": 1,
        "workload": workload,
        "method": method,
        "batch_size": batch_size,
        "seed": seed,
        "config": {
            "workload": workload,
            "method": method,
            "batch_size": batch_size,
            "seed": seed,
            "epochs": 40,
            "base_batch": base_batch,
            "options": {"lr": 0.1, **(options or {})},
            "schedule": {"kind": "constant"},
            "split": split,
        },
        "versions": {"python": "3.11.7", "torch": "2.13.0", "fop": "0.1.0"},
        "machine": {"system": "Linux x86_64", "processor": "example", "device": "cpu"},
        "created": "2026-01-01T00:00:00+00:00",
        "status": status,
        "train_size": 1500,
        "steps_per_epoch": math.ceil(1500 / batch_size),
        "split": split,
        "target": target,
        "metric": "accuracy",
        "higher_is_better": True,
        **meta,
    }
    (path / "meta.json").write_text(json.dumps(content), encoding="utf-8")
    with (path / "metrics.jsonl").open("w", encoding="utf-8") as stream:
        for epoch, (accuracy, time) in enumerate(zip(accuracies, times, strict=True), 1):
            record = {
                "epoch": epoch,
                "step": epoch * content["steps_per_epoch"],
                "train_time": time,
                "train_loss": 1.0 / epoch,
                "lr": 0.1,
                f"{split}_loss": 1.0 / epoch,
                f"{split}_accuracy": accuracy,
            }
            stream.write(json.dumps(record) + "\n")
    return path


def learning_curve(method: str, batch_size: int, seed: int, epochs: int = 40) -> list[float]:
    """A made-up but plausible curve: slower at large batches, least so for second order."""
    slow = 1 + (batch_size / 2048) ** (0.9 if method in ("sgd", "adamw") else 0.45)
    speed = SPEED[method] / slow
    top = 0.965 + 0.002 * math.sin(3 * seed + len(method))
    return [
        round(top - (top - 0.1) * math.exp(-speed * e) + 0.004 * math.sin(5 * e + 7 * seed), 4)
        for e in range(1, epochs + 1)
    ]


def write_comparison(
    root: Path,
    methods: tuple[str, ...] = ("sgd", "adamw", "kfac", "kfac-2x", "fop"),
    batches: tuple[int, ...] = (256, 1024, 4096),
    seeds: tuple[int, ...] = (0, 1, 2),
    **fixed: Any,
) -> None:
    """All methods at all batch sizes with all seeds."""
    for method in methods:
        for batch in batches:
            for seed in seeds:
                curve = learning_curve(method, batch, seed)
                cost = STEP_COST[method] * (0.3 + 60 / batch) * (1 + 0.03 * seed)
                times = [cost * (epoch + 1) for epoch in range(len(curve))]
                write_run(
                    root,
                    method=method,
                    batch_size=batch,
                    seed=seed,
                    accuracies=curve,
                    times=times,
                    **fixed,
                )


def write_sweep(root: Path, parameter: str, values: tuple[Any, ...], **fixed: Any) -> None:
    """KFAC and FOP over the values of one option; best in the middle, FOP flatter."""
    for method, width in (("kfac", 0.010), ("fop", 0.004)):
        for batch in (1024, 4096):
            for place, value in enumerate(values):
                for seed in range(3):
                    off = (place - len(values) / 2 + 0.5) ** 2
                    top = (
                        0.95 - width * off - 0.01 * (batch > 2000) + 0.003 * math.sin(seed + place)
                    )
                    write_run(
                        root / f"{parameter}={value}",
                        method=method,
                        batch_size=batch,
                        seed=seed,
                        accuracies=[0.5, top],
                        options={"damping": 1e-3, parameter: value},
                        **fixed,
                    )
