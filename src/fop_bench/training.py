"""The state of one run, and how it takes a step, evaluates and gets through an epoch.

Time is that of training alone: evaluation, data set-up, diagnostics and checkpoints stop the watch.
"""

from __future__ import annotations

import math
import time
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from fop_bench.config import ConfigError, RunConfig
from fop_bench.methods import get_method
from fop_bench.progress import Reporter
from fop_bench.records import write_metrics
from fop_bench.schedules import Schedule, scaled_options

if TYPE_CHECKING:
    from fop_bench.data.splits import Splits
    from fop_bench.workloads import Workload

LOOK_EVERY = 20  # steps between looks at the loss where a look makes the host wait for the device


class DivergedError(Exception):
    """The loss, the metric or a decomposition is no longer finite."""


@dataclass(frozen=True)
class Runtime:
    """Where and how a run is carried out; nothing here changes its numbers on one device.

    A checkpoint is written at the end of an epoch when the last one is `checkpoint_seconds` old.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    data_dir: Path | None = None
    checkpoint_seconds: float = 30.0
    keep_checkpoint: bool = True
    tensorboard: bool = True


class Stopwatch:
    """Seconds between `start` and `stop`, added up, with the device's queue empty at both ends."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds = 0.0
        self._started = 0.0

    def start(self) -> None:
        self._synchronise()
        self._started = time.perf_counter()

    def stop(self) -> None:
        self._synchronise()
        self.seconds += time.perf_counter() - self._started

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class Training:
    """Model, optimizer and everything else that a run carries from step to step."""

    def __init__(
        self, config: RunConfig, workload: Workload, splits: Splits, runtime: Runtime
    ) -> None:
        self.config, self.workload, self.splits, self.runtime = config, workload, splits, runtime
        self.device = runtime.device
        if config.amp == "fp16" and self.device.type != "cuda":
            raise ConfigError(
                f"amp = fp16 needs a CUDA device, found {self.device}: use --amp bf16"
            )
        method = get_method(config.method)
        torch.manual_seed(config.seed)
        self.model: nn.Module = workload.model(config.seed).to(self.device)
        self.options = scaled_options(
            config.options,
            config.batch_size,
            config.base_batch,
            config.lr_rule,
            config.interval_rule,
        )
        self.optimizer = method.build(self.model, **self.options)
        if config.compile:
            # A graph of an earlier run's model, which had other hooks or none, would be used again.
            torch.compiler.reset()
        self.forward = torch.compile(self.model) if config.compile else self.model
        self.peaks = [group["lr"] for group in self.optimizer.param_groups]
        self.schedule = Schedule(config.schedule, self.options["lr"], config.epochs)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=config.amp == "fp16")
        self.watch = Stopwatch(self.device)
        self.epoch = self.step = 0
        self.metrics: list[dict[str, Any]] = []
        batch_size = min(config.batch_size, splits.train_size)
        self.steps_per_epoch = math.ceil(splits.train_size / batch_size)

    def warm_up(self) -> None:
        """Two steps of a throw-away copy, so that loading libraries and kernels is not timed.

        It leaves no trace: the random state is put back, and where two examples are too few for an
        optimizer's decompositions it does not matter.
        """
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices), suppress(LinAlgError):
            model = self.workload.model(self.config.seed).to(self.device)
            optimizer = get_method(self.config.method).build(model, **self.options)
            inputs, targets = self.splits.example
            for _ in range(2):
                optimizer.zero_grad()
                with self.autocast():
                    loss = self.workload.loss(model(inputs), targets)
                loss.backward()
                optimizer.step()

    def autocast(self) -> AbstractContextManager[Any]:
        if self.config.amp == "off":
            return nullcontext()
        dtype = torch.bfloat16 if self.config.amp == "bf16" else torch.float16
        return torch.autocast(self.device.type, dtype)

    def lr(self) -> float:
        return self.schedule.lr(self.step, self.steps_per_epoch)

    def take_step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """One optimizer step on a batch, in `accumulate` pieces; the batch's mean loss, still on
        the device.
        """
        share = self.lr() / self.schedule.peak
        for group, peak in zip(self.optimizer.param_groups, self.peaks, strict=True):
            group["lr"] = peak * share
        self.optimizer.zero_grad()
        total = torch.zeros((), device=self.device)
        pieces = self.config.accumulate
        for piece, labels in zip(inputs.chunk(pieces), targets.chunk(pieces), strict=True):
            with self.autocast():
                loss = self.workload.loss(self.forward(piece), labels) * (len(piece) / len(inputs))
            self.scaler.scale(loss).backward()
            total += loss.detach()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.step += 1
        return total

    def evaluate(self, epoch: float, train_loss: float, lr: float) -> dict[str, Any]:
        """Evaluates, and appends what is recorded of it."""
        split = self.config.split
        self.model.eval()
        with torch.no_grad(), self.autocast():
            values = self.workload.evaluate(self.model, self.splits.evaluation(split))  # type: ignore[arg-type]
        self.model.train()
        record: dict[str, Any] = {
            "epoch": epoch,
            "step": self.step,
            "train_time": self.watch.seconds,
            "train_loss": train_loss,
            "lr": lr,
            **{f"{split}_{name}": value for name, value in values.items()},
        }
        if not math.isfinite(values["loss"]):
            raise DivergedError(f"the {split} loss is {values['loss']} after step {self.step}")
        self.metrics.append(record)
        return record

    def run_epoch(self, run_dir: Path, reporter: Reporter) -> dict[str, Any]:
        """The next epoch with its evaluations; the record of the last of them."""
        batches = self.splits.train(self.config.batch_size, self.epoch, self.config.seed)
        look_every = 1 if self.device.type == "cpu" else LOOK_EVERY
        loss_sum, examples = torch.zeros((), device=self.device), 0
        record: dict[str, Any] = {}
        self.watch.start()
        for number, (inputs, targets) in enumerate(batches, 1):
            lr = self.lr()
            loss = self.take_step(inputs, targets)
            loss_sum += loss * len(inputs)
            examples += len(inputs)
            last = number == len(batches)
            look = last or self.step % look_every == 0
            reporter.stepped(1, len(inputs), float(loss) if look else None)
            if look and not math.isfinite(float(loss_sum)):
                raise DivergedError(f"the training loss is {float(loss)} at step {self.step}")
            inside = self.config.evaluate_every
            if last or (inside is not None and self.step % inside == 0):
                self.watch.stop()
                epoch = self.epoch + 1 if last else self.epoch + number / len(batches)
                record = self.evaluate(epoch, float(loss_sum) / examples, lr)
                write_metrics(run_dir, self.metrics)
                metric = self.workload.metric
                reporter.evaluated(metric, record[f"{self.config.split}_{metric}"])
                self.watch.start()
        self.epoch += 1
        self.schedule.end_epoch(float(loss_sum) / examples)
        return record
