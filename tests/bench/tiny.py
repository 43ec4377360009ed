"""A workload of a few hundred numbers, with the protocol of the real ones, for tests of what runs
them.

Also a program, ``tiny.py RUN_DIR METHOD SECONDS_PER_BATCH``: starts or resumes a run, so that a
test can kill it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fop_bench.config import RunConfig
from fop_bench.data.splits import WHOLE, Share
from fop_bench.loop import Runtime, train
from fop_bench.methods import METHODS
from fop_bench.schedules import ScheduleConfig


@dataclass(frozen=True)
class TinyBatches:
    inputs: Tensor
    targets: Tensor
    batch_size: int
    pause: float = 0.0
    share: Share = WHOLE

    def __len__(self) -> int:
        return -(-len(self.inputs) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, len(self.inputs), self.batch_size):
            time.sleep(self.pause)
            chosen = slice(start, start + self.batch_size)
            yield self.share.of(self.inputs[chosen]), self.share.of(self.targets[chosen])


@dataclass(frozen=True)
class TinySplits:
    inputs: Tensor
    targets: Tensor
    train_size: int
    pause: float

    @property
    def example(self) -> tuple[Tensor, Tensor]:
        return self.inputs[:2], self.targets[:2]

    def train(self, batch_size: int, epoch: int, seed: int, share: Share = WHOLE) -> TinyBatches:
        order = torch.randperm(
            self.train_size, generator=torch.Generator().manual_seed(1000 * seed + epoch)
        )
        return TinyBatches(
            self.inputs[order],
            self.targets[order],
            min(batch_size, self.train_size),
            self.pause,
            share,
        )

    def evaluation(self, split: Literal["validation", "test"]) -> TinyBatches:
        return TinyBatches(self.inputs[self.train_size :], self.targets[self.train_size :], 1000)


@dataclass(frozen=True)
class TinyWorkload:
    """Two classes, told apart by a linear rule; dropout makes the model draw random numbers."""

    name: str = "tiny"
    summary: str = "two classes of random points"
    data: str = "tiny"
    epochs: int = 6
    base_batch: int = 32
    batch_sizes: tuple[int, ...] = (32, 200)
    seeds: tuple[int, ...] = (0, 1, 2)
    target: float = 0.8
    metric: str = "accuracy"
    higher_is_better: bool = True
    optimizer_overrides: Mapping[str, Any] = field(default_factory=dict)
    pause: float = 0.0
    poison: float = 0.0  # added to every input; NaN makes the loss NaN

    def splits(
        self, data_dir: Path | None, *, device: torch.device, validation: bool, subset: int | None
    ) -> TinySplits:
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(300, 8, generator=generator)
        targets = (inputs[:, :4].sum(1) > 0).long()
        return TinySplits(inputs + self.poison, targets, subset or 200, self.pause)

    def model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 2))

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, target)

    def evaluate(self, model: nn.Module, batches: TinyBatches) -> dict[str, float]:
        losses, right, count = 0.0, 0, 0
        for inputs, targets in batches:
            output = model(inputs)
            losses += float(self.loss(output, targets)) * len(inputs)
            right += int((output.argmax(1) == targets).sum())
            count += len(inputs)
        return {"loss": losses / count, "accuracy": right / count}


def tiny_config(method: str = "sgd", **changes: Any) -> RunConfig:
    options = {**METHODS[method].defaults, **changes.pop("options", {})}
    settings: dict[str, Any] = {
        "workload": "tiny", "method": method, "batch_size": 32, "seed": 0, "epochs": 6,
        "base_batch": 32, "evaluate_every": 3,
        "schedule": ScheduleConfig("plateau", warmup_epochs=2.0, patience=0),
    }  # fmt: skip
    return RunConfig(options=options, **{**settings, **changes})


def main(run_dir: str, method: str, pause: str) -> None:
    torch.set_num_threads(1)
    runtime = Runtime(checkpoint_seconds=0.0, tensorboard=False)
    workload: Any = TinyWorkload(pause=float(pause))
    train(tiny_config(method), workload, Path(run_dir), runtime, resume=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
