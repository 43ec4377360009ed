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
from fop_bench.parallel import Ranks
from fop_bench.progress import Reporter
from fop_bench.records import write_metrics
from fop_bench.schedules import Schedule, scaled_options

if TYPE_CHECKING:
    from fop_bench.data.splits import Splits
    from fop_bench.workloads import Workload

LOOK_EVERY = 20  # steps between looks at the loss where a look waits for a device or other ranks
RANK_SEEDS = 1_000_003  # between the random numbers of one rank and the next


class DivergedError(Exception):
    """The loss, the metric or a decomposition is no longer finite."""


@dataclass(frozen=True)
class Runtime:
    """Where and how a run is carried out; but for `ranks`, nothing here changes its numbers on one
    device.

    A checkpoint is written at the end of an epoch when the last one is `checkpoint_seconds` old.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    data_dir: Path | None = None
    checkpoint_seconds: float = 30.0
    keep_checkpoint: bool = True
    tensorboard: bool = True
    ranks: Ranks = field(default_factory=Ranks)


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
        self.device, self.ranks = runtime.device, runtime.ranks
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
        if not self.ranks.first:  # dropout differs between examples, so also between ranks
            torch.manual_seed(config.seed + RANK_SEEDS * self.ranks.index)
        self.replica = self.ranks.wrap(self.model)
        self.optimizer = method.build(self.replica, **self.options)
        if config.compile:
            # A graph of an earlier run's model, which had other hooks or none, would be used again.
            torch.compiler.reset()
        self.forward = torch.compile(self.replica) if config.compile else self.replica
        self.peaks = [group["lr"] for group in self.optimizer.param_groups]
        self.schedule = Schedule(config.schedule, self.options["lr"], config.epochs)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=config.amp == "fp16")
        self.watch = Stopwatch(self.device)
        self.epoch = self.step = 0
        self.metrics: list[dict[str, Any]] = []
        self.batch_size = min(config.batch_size, splits.train_size)
        self.steps_per_epoch = math.ceil(splits.train_size / self.batch_size)

    def warm_up(self) -> None:
        """Two steps of a throw-away copy, so that loading libraries and kernels is not timed.

        It leaves no trace: the random state is put back, and where two examples are too few for an
        optimizer's decompositions it does not matter.
        """
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices), suppress(LinAlgError):
            model = self.ranks.wrap(self.workload.model(self.config.seed).to(self.device))
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

    def take_step(self, inputs: Tensor, targets: Tensor, examples: int | None = None) -> Tensor:
        """One optimizer step on this rank's share of a batch of `examples`, in `accumulate` pieces.

        Returns the share's part of the batch's mean loss, still on the device: over all ranks the
        parts add up to it.
        """
        share = self.lr() / self.schedule.peak
        for group, peak in zip(self.optimizer.param_groups, self.peaks, strict=True):
            group["lr"] = peak * share
        self.optimizer.zero_grad()
        total = torch.zeros((), device=self.device)
        count = len(inputs) if examples is None else examples
        pieces = inputs.chunk(self.config.accumulate)
        labels = targets.chunk(self.config.accumulate)
        for number, (piece, label) in enumerate(zip(pieces, labels, strict=True), 1):
            last = number == len(pieces)
            with nullcontext() if last else self.ranks.without_sync(self.replica):
                loss = self._loss(piece, label) * (len(piece) * self.ranks.count / count)
                self.scaler.scale(loss).backward()
            total += loss.detach() / self.ranks.count
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.step += 1
        return total

    def _loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        with self.autocast():
            output: Tensor = self.forward(inputs)
            if not len(inputs):
                # The mean over no examples is NaN, but their gradients are zeros, for which the
                # other ranks wait.
                return output.sum()
            return self.workload.loss(output, targets)

    def evaluate(self, epoch: float, train_loss: float, lr: float) -> dict[str, Any]:
        """Evaluates on the first rank, and appends what is recorded of it on all."""
        split = self.config.split
        values = self.ranks.agreed(self._evaluation)
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

    def _evaluation(self) -> dict[str, float]:
        self.model.eval()
        with torch.no_grad(), self.autocast():
            batches = self.splits.evaluation(self.config.split)
            values = self.workload.evaluate(self.model, batches)
        self.model.train()
        return values

    def run_epoch(self, run_dir: Path, reporter: Reporter) -> dict[str, Any]:
        """The next epoch with its evaluations; the record of the last of them."""
        batches = self.splits.train(self.batch_size, self.epoch, self.config.seed, self.ranks.share)
        look_every = 1 if self.device.type == "cpu" and self.ranks.alone else LOOK_EVERY
        loss_sum, examples = torch.zeros((), device=self.device), 0
        record: dict[str, Any] = {}
        self.watch.start()
        for number, (inputs, targets) in enumerate(batches, 1):
            lr = self.lr()
            size = min(self.batch_size, self.splits.train_size - examples)
            loss = self.take_step(inputs, targets, size)
            loss_sum += loss * size
            examples += size
            last = number == len(batches)
            inside = self.config.evaluate_every
            evaluating = last or (inside is not None and self.step % inside == 0)
            look = evaluating or self.step % look_every == 0
            if look:
                # Every rank looks at the same sums, so that all stop or none does.
                loss_now, so_far = self.ranks.total(torch.stack((loss, loss_sum))).tolist()
            reporter.stepped(1, size, loss_now if look else None)
            if look and not math.isfinite(so_far):
                raise DivergedError(f"the training loss is {loss_now} at step {self.step}")
            if evaluating:
                self.watch.stop()
                epoch = self.epoch + 1 if last else self.epoch + number / len(batches)
                record = self.evaluate(epoch, so_far / examples, lr)
                if self.ranks.first:
                    write_metrics(run_dir, self.metrics)
                metric = self.workload.metric
                reporter.evaluated(metric, record[f"{self.config.split}_{metric}"])
                self.watch.start()
        self.epoch += 1
        self.schedule.end_epoch(so_far / examples)
        return record
