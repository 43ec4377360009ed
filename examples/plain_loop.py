"""An ordinary PyTorch loop: fop.FOP in place of torch.optim.SGD, and nothing else changes.

It has what real loops have: two micro-batches a step, clipping, a schedule, and a checkpoint from
which a second call goes on, bit for bit, as if there had been no break.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fop

EPOCHS, BATCH, MICRO_BATCHES = 5, 128, 2


def make_data(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Sixteen numbers each; the class is which four of them have the largest sum."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 16, generator=generator)
    return x, x.view(n, 4, 4).sum(2).argmax(1)


def train(epochs: int, checkpoint: Path | None) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)
    )
    x, y = make_data(2048, seed=1)
    optimizer = fop.FOP(model, lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * len(x) // BATCH)
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    start = 0
    if checkpoint is not None and checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        start = saved.pop("epochs")
        for name, state in saved.items():
            parts[name].load_state_dict(state)
    for epoch in range(start, epochs):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
        for batch in order.split(BATCH):
            optimizer.zero_grad()
            for part in batch.chunk(MICRO_BATCHES):
                loss = cross_entropy(model(x[part]), y[part]) / MICRO_BATCHES
                loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
        if checkpoint is not None:
            states = {name: part.state_dict() for name, part in parts.items()}
            unfinished = checkpoint.with_suffix(".tmp")
            torch.save({"epochs": epoch + 1, **states}, unfinished)
            unfinished.replace(checkpoint)
    return model


def accuracy(model: nn.Module) -> float:
    x, y = make_data(2048, seed=2)
    with torch.no_grad():
        return float((model(x).argmax(1) == y).float().mean())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument(
        "--checkpoint", type=Path, help="written after each epoch; if it is there, go on"
    )
    options = parser.parse_args()
    model = train(options.epochs, options.checkpoint)
    print(f"accuracy on fresh points: {accuracy(model):.3f}")
