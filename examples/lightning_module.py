"""fop.FOP in Lightning: bfloat16, two batches a step, clipping and a schedule."""

from __future__ import annotations

from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import fop
from fop.integrations.lightning import ClippableMixedPrecision

EPOCHS, BATCH = 5, 64
Batch = tuple[Tensor, Tensor]


def make_data(n: int, seed: int) -> TensorDataset:
    """Pictures of 8 x 8 noise with a bright spot; the class is the quarter it is in."""
    generator = torch.Generator().manual_seed(seed)
    pictures = torch.randn(n, 1, 8, 8, generator=generator)
    row, column = torch.randint(8, (2, n), generator=generator)
    pictures[torch.arange(n), 0, row, column] += 6.0
    return TensorDataset(pictures, 2 * (row // 4) + column // 4)


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(128, 4),
        )

    def training_step(self, batch: Batch, index: int) -> Tensor:
        pictures, labels = batch
        return cross_entropy(self.net(pictures), labels)

    def test_step(self, batch: Batch, index: int) -> None:
        pictures, labels = batch
        self.log("accuracy", (self.net(pictures).argmax(1) == labels).float().mean())

    def configure_optimizers(self) -> Any:
        optimizer = fop.FOP(self.net, lr=0.1)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def main() -> float:
    lightning.seed_everything(0, verbose=False)
    module = Classifier()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,  # fop trains in one process
        max_epochs=EPOCHS,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        # In place of precision="bf16-mixed", with which Lightning refuses to clip for fop.
        plugins=ClippableMixedPrecision("bf16-mixed", "cpu"),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(make_data(2048, seed=1), batch_size=BATCH, shuffle=True))
    (found,) = trainer.test(module, DataLoader(make_data(2048, seed=2), BATCH), verbose=False)
    return found["accuracy"]


if __name__ == "__main__":
    print(f"accuracy on fresh pictures: {main():.3f}")
