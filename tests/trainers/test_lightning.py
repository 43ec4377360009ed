"""Training by Lightning is training by the plain loop, bit for bit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader, TensorDataset

import fop
from fop.integrations.lightning import ClippableMixedPrecision
from tests.common import Batch, distance, mlp, points, same, snapshot
from tests.trainers.common import example

pytestmark = pytest.mark.filterwarnings(
    # Lightning's own use of torch.
    "ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning",
    # Advice on loading data, which a test on thirty points need not take.
    "ignore::lightning.fabric.utilities.warnings.PossibleUserWarning",
)

BATCH, BATCHES = 6, 5
DECAY = 0.9


class Automatic(lightning.LightningModule):
    def __init__(self, dtype: torch.dtype = torch.float32, **options: Any) -> None:
        super().__init__()
        self.net = mlp(dtype=dtype)
        self.options = options

    def training_step(self, batch: Batch, index: int) -> Tensor:
        x, y = batch
        return cross_entropy(self.net(x), y)

    def configure_optimizers(self) -> Any:
        optimizer = fop.FOP(self, **self.options)
        scheduler = {"scheduler": ExponentialLR(optimizer, DECAY), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


class Manual(Automatic):
    """Two micro-batches a step, clipped; notes what diagnostics say of the wrapped optimizer."""

    def __init__(self, clip: float, **options: Any) -> None:
        super().__init__(**options)
        self.automatic_optimization = False
        self.clip = clip
        self.seen: list[dict[str, dict[str, float]]] = []

    def training_step(self, batch: Batch, index: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for x, y in zip(batch[0].chunk(2), batch[1].chunk(2), strict=True):
            self.manual_backward(cross_entropy(self.net(x), y) / 2)
        self.clip_gradients(optimizer, gradient_clip_val=self.clip, gradient_clip_algorithm="norm")
        optimizer.step()
        self.seen.append(fop.diagnostics(optimizer))
        self.lr_schedulers().step()


def batches(dtype: torch.dtype = torch.float32) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*points(BATCH * BATCHES, dtype=dtype)), batch_size=BATCH)


def fit(
    module: lightning.LightningModule,
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    resume: Path | None = None,
    **options: Any,
) -> lightning.Trainer:
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **{"max_epochs": 2, **options},
    )
    # What fop stores must load without pickled code.
    trainer.fit(module, batches(dtype), ckpt_path=resume, weights_only=True)
    return trainer


def plain_loop(
    *,
    dtype: torch.dtype = torch.float32,
    epochs: int = 2,
    accumulate: int = 1,
    autocast: torch.dtype | None = None,
    clip: Callable[[Iterable[Tensor]], object] | None = None,
    scaler: torch.amp.GradScaler | None = None,
    **options: Any,
) -> nn.Module:
    """The reference: no library, micro-batches weighted as Lightning does."""
    model = mlp(dtype=dtype)
    optimizer = fop.FOP(model, **options)
    scheduler = ExponentialLR(optimizer, DECAY)
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    optimizer.grad_scaler = scaler
    context = torch.autocast("cpu", autocast) if autocast else contextlib.nullcontext()
    for _ in range(epochs):
        for index, (x, y) in enumerate(batches(dtype), start=1):
            with context:
                loss = cross_entropy(model(x), y) / accumulate
            scaler.scale(loss).backward()
            if index % accumulate == 0 or index == BATCHES:
                if clip is not None:
                    scaler.unscale_(optimizer)
                    clip(model.parameters())
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                scheduler.step()
    return model


def test_automatic_optimization(tmp_path: Path) -> None:
    module = Automatic(weight_decay=1e-2)
    fit(module, tmp_path)
    assert same(snapshot(module), snapshot(plain_loop(weight_decay=1e-2)))


def test_fisher_by_extra_backwards_is_built_from_the_network(tmp_path: Path) -> None:
    """A LightningModule is not called in training, so its own output could not be watched."""

    class FromNetwork(Automatic):
        def configure_optimizers(self) -> Any:
            return fop.FOP(self.net, fisher="exact")

    module = FromNetwork()
    fit(module, tmp_path)
    model = mlp(dtype=torch.float32)
    optimizer = fop.FOP(model, fisher="exact")
    for x, y in [*batches(), *batches()]:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    assert same(snapshot(module), snapshot(model))


@pytest.mark.parametrize("accumulate", [2, 3])
def test_accumulate_grad_batches(tmp_path: Path, accumulate: int) -> None:
    """Both leave fewer batches for an epoch's last step, which Lightning takes all the same."""
    module = Automatic()
    trainer = fit(module, tmp_path, accumulate_grad_batches=accumulate)
    assert trainer.global_step == 2 * -(-BATCHES // accumulate)
    assert same(snapshot(module), snapshot(plain_loop(accumulate=accumulate)))


def test_accumulated_batches_are_one_large_batch(tmp_path: Path) -> None:
    module = Automatic(dtype=torch.float64)
    fit(module, tmp_path, dtype=torch.float64, accumulate_grad_batches=BATCHES, max_epochs=4)
    model = mlp()
    optimizer = fop.FOP(model)
    scheduler = ExponentialLR(optimizer, DECAY)
    x, y = points(BATCH * BATCHES)
    # Halves are taken of each micro-batch: here, of the whole, they are its first and second half.
    order = torch.arange(BATCH * BATCHES).view(BATCHES, 2, -1).transpose(0, 1).flatten()
    for _ in range(4):
        optimizer.zero_grad()
        cross_entropy(model(x[order]), y[order]).backward()
        optimizer.step()
        scheduler.step()
    assert distance(snapshot(module), snapshot(model)) < 1e-12


def test_bf16(tmp_path: Path) -> None:
    module = Automatic()
    fit(module, tmp_path, precision="bf16-mixed")
    reference = plain_loop(autocast=torch.bfloat16)
    assert same(snapshot(module), snapshot(reference))
    assert not same(snapshot(module), snapshot(plain_loop()))


CLIPS = {
    "norm": partial(clip_grad_norm_, max_norm=0.1),
    "value": partial(clip_grad_value_, clip_value=0.1),
}


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipping(tmp_path: Path, algorithm: str) -> None:
    module = Automatic()
    fit(module, tmp_path, gradient_clip_val=0.1, gradient_clip_algorithm=algorithm)
    assert same(snapshot(module), snapshot(plain_loop(clip=CLIPS[algorithm])))
    assert not same(snapshot(module), snapshot(plain_loop()))


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipping_in_bf16_needs_the_plugin(tmp_path: Path, algorithm: str) -> None:
    module = Automatic()
    clipping = {"gradient_clip_val": 0.1, "gradient_clip_algorithm": algorithm}
    fit(module, tmp_path, plugins=ClippableMixedPrecision("bf16-mixed", "cpu"), **clipping)
    reference = plain_loop(autocast=torch.bfloat16, clip=CLIPS[algorithm])
    assert same(snapshot(module), snapshot(reference))
    with pytest.raises(
        RuntimeError, match=r"plugins=ClippableMixedPrecision\(.bf16-mixed., .cpu.\)"
    ):
        fit(Automatic(), tmp_path, precision="bf16-mixed", **clipping)


@pytest.mark.parametrize("clip", [None, 0.1])
def test_fp16_with_a_scaler_that_first_overflows(tmp_path: Path, clip: float | None) -> None:
    """The first steps are skipped, until the scale fits."""
    module = Automatic()
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**18) for _ in range(2)]
    kind = MixedPrecision if clip is None else ClippableMixedPrecision
    fit(module, tmp_path, plugins=kind("16-mixed", "cpu", scalers[0]), gradient_clip_val=clip)
    reference = plain_loop(
        autocast=torch.float16, scaler=scalers[1], clip=None if clip is None else CLIPS["norm"]
    )
    assert scalers[0].get_scale() == scalers[1].get_scale() < 2.0**18
    assert same(snapshot(module), snapshot(reference))


def test_manual_optimization(tmp_path: Path) -> None:
    module = Manual(clip=0.1)
    fit(module, tmp_path)
    model = mlp(dtype=torch.float32)
    optimizer = fop.FOP(model)
    scheduler = ExponentialLR(optimizer, DECAY)
    for x, y in [*batches(), *batches()]:
        optimizer.zero_grad()
        for x_part, y_part in zip(x.chunk(2), y.chunk(2), strict=True):
            (cross_entropy(model(x_part), y_part) / 2).backward()
        CLIPS["norm"](model.parameters())
        optimizer.step()
        scheduler.step()
    assert same(snapshot(module), snapshot(model))
    expected = {f"net.{name}": found for name, found in fop.diagnostics(optimizer).items()}
    assert module.seen[-1] == expected


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_resumed_training_is_the_uninterrupted(tmp_path: Path, precision: str) -> None:
    """Stopped after the fifth step, when curvature is neither fresh nor due."""
    whole, first, second = (Automatic(fallback="adamw") for _ in range(3))
    fit(whole, tmp_path, max_epochs=3, precision=precision)
    checkpoint = tmp_path / "stopped.ckpt"
    fit(first, tmp_path, max_epochs=1, precision=precision).save_checkpoint(checkpoint)
    with torch.no_grad():
        for parameter in second.parameters():
            parameter.zero_()
    fit(second, tmp_path, max_epochs=3, precision=precision, resume=checkpoint)
    assert same(snapshot(second), snapshot(whole))
    assert not same(snapshot(first), snapshot(whole))


def test_the_example_learns() -> None:
    assert example("lightning_module").main() > 0.9  # 0.25 by chance
