"""Training with Accelerate is training by the plain loop, bit for bit; it needs no glue."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState, GradientState
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader, TensorDataset

import fop
from tests.common import cnn, distance, images, mlp, points, same, snapshot
from tests.trainers.common import example

BATCH, BATCHES = 6, 5
DECAY, CLIP = 0.9, 0.1


@pytest.fixture(autouse=True)
def _fresh_accelerate() -> Iterator[None]:
    """Accelerate keeps the precision and the accumulation of the first Accelerator of a process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def batches() -> DataLoader[Any]:
    return DataLoader(TensorDataset(*images(BATCH * BATCHES)), batch_size=BATCH)


class Run:
    """Everything that Accelerate prepares, and saves and restores."""

    def __init__(
        self, accelerator: Accelerator, *, model_first: bool = False, **options: Any
    ) -> None:
        self.accelerator = accelerator
        model = accelerator.prepare(cnn()) if model_first else cnn()
        optimizer = fop.FOP(model, **options)
        others = optimizer, batches(), ExponentialLR(optimizer, DECAY)
        if model_first:
            prepared = model, *accelerator.prepare(*others)
        else:
            prepared = accelerator.prepare(model, *others)
        self.model, self.optimizer, self.loader, self.scheduler = prepared

    def epoch(self) -> None:
        for x, y in self.loader:
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(cross_entropy(self.model(x), y))
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), CLIP)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()


def plain_loop(
    epochs: int, *, accumulate: int = 1, autocast: torch.dtype | None = None, **options: Any
) -> nn.Module:
    """The reference: no library, micro-batches weighted as Accelerate does."""
    model = cnn()
    optimizer = fop.FOP(model, **options)
    scheduler = ExponentialLR(optimizer, DECAY)
    context = torch.autocast("cpu", autocast) if autocast else contextlib.nullcontext()
    for _ in range(epochs):
        for index, (x, y) in enumerate(batches(), start=1):
            with context:
                outputs = model(x)
            (cross_entropy(outputs.float(), y) / accumulate).backward()
            if index % accumulate == 0 or index == BATCHES:
                clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    return model


@pytest.mark.parametrize("accumulate", [1, 2, 3])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_prepared_and_accumulated(precision: str, accumulate: int) -> None:
    """Five batches by two or three leave fewer for an epoch's last step."""
    run = Run(
        Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=accumulate)
    )
    run.epoch()
    run.epoch()
    autocast = torch.bfloat16 if precision == "bf16" else None
    reference = plain_loop(2, accumulate=accumulate, autocast=autocast)
    assert same(snapshot(run.model), snapshot(reference))
    assert run.optimizer.optimizer.steps == 2 * -(-BATCHES // accumulate)


def test_optimizer_built_from_the_prepared_model() -> None:
    run = Run(Accelerator(cpu=True, mixed_precision="bf16"), model_first=True)
    run.epoch()
    assert same(snapshot(run.model), snapshot(plain_loop(1, autocast=torch.bfloat16)))


def test_accumulated_batches_are_one_large_batch() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=BATCHES)
    data = TensorDataset(*points(BATCH * BATCHES))
    module = mlp()
    model, optimizer, loader = accelerator.prepare(
        module, fop.FOP(module), DataLoader(data, batch_size=BATCH)
    )
    whole = mlp()
    reference = fop.FOP(whole)
    x, y = points(BATCH * BATCHES)
    # Halves are taken of each micro-batch: here, of the whole, they are its first and second half.
    order = torch.arange(BATCH * BATCHES).view(BATCHES, 2, -1).transpose(0, 1).flatten()
    for _ in range(4):
        for inputs, labels in loader:
            with accelerator.accumulate(model):
                accelerator.backward(cross_entropy(model(inputs), labels))
                optimizer.step()
                optimizer.zero_grad()
        reference.zero_grad()
        cross_entropy(whole(x[order]), y[order]).backward()
        reference.step()
    assert distance(snapshot(model), snapshot(whole)) < 1e-12


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_resumed_training_is_the_uninterrupted(tmp_path: Path, precision: str) -> None:
    """Stopped after the fifth step, when curvature is neither fresh nor due."""
    options = {"fallback": "adamw", "weight_decay": 1e-2}
    first = Run(Accelerator(cpu=True, mixed_precision=precision), **options)
    first.epoch()
    first.accelerator.save_state(str(tmp_path))
    stopped = snapshot(first.model)
    first.epoch()
    second = Run(Accelerator(cpu=True, mixed_precision=precision), **options)
    with torch.no_grad():
        for parameter in second.model.parameters():
            parameter.zero_()
    second.accelerator.load_state(str(tmp_path))
    assert same(snapshot(second.model), stopped)
    second.epoch()
    assert same(snapshot(second.model), snapshot(first.model))
    assert not same(snapshot(second.model), stopped)


def test_loss_scaling_goes_on_after_an_overflow() -> None:
    """Accelerate offers it on accelerators only, so its optimizer wrapper is built by hand."""
    Accelerator(cpu=True)
    models = [mlp(dtype=torch.float32) for _ in range(2)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**18) for _ in range(2)]
    plain = fop.FOP(models[0])
    wrapped = AcceleratedOptimizer(fop.FOP(models[1]), scaler=scalers[1])
    for seed in range(6):
        x, y = points(12, seed, torch.float32)
        for model, optimizer, scaler in zip(models, (plain, wrapped), scalers, strict=True):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = cross_entropy(model(x), y)
            scaler.scale(loss).backward()
        scalers[0].step(plain)
        scalers[0].update()
        wrapped.step()
        assert not wrapped.step_was_skipped  # step() itself leaves all as it was
    assert scalers[0].get_scale() == scalers[1].get_scale() < 2.0**18
    assert same(snapshot(models[1]), snapshot(models[0]))
    assert not same(snapshot(models[1]), snapshot(mlp(dtype=torch.float32)))


def test_the_example_learns() -> None:
    assert example("accelerate_loop").main() < 0.3  # 1 by always answering the mean
