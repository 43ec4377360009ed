"""fop.FOP with Accelerate: prepare, accumulate, and a state that is saved and taken up again."""

from __future__ import annotations

import tempfile

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import fop

EPOCHS, BATCH = 8, 64


def make_data(n: int, seed: int) -> TensorDataset:
    """A smooth function of eight numbers, to be learned."""
    x = torch.randn(n, 8, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x[:, :4] * x[:, 4:].tanh()).sum(1, keepdim=True))


def main() -> float:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Sequential(
        nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
    )
    optimizer = fop.FOP(model, lr=0.1)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(make_data(2048, seed=1), BATCH)
    )
    with tempfile.TemporaryDirectory() as folder:
        for epoch in range(EPOCHS):
            for x, y in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(mse_loss(model(x), y))
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
            if epoch == EPOCHS // 2:  # as if training had stopped here, and gone on
                accelerator.save_state(folder)
                accelerator.load_state(folder)
    x, y = make_data(2048, seed=2).tensors
    with torch.no_grad():
        return float(mse_loss(model(x), y) / y.var())


if __name__ == "__main__":
    print(f"unexplained variance on fresh points: {main():.4f}")
