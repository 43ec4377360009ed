"""Training under torchrun by trainers that save, one after the other, each of them interrupted.

usage: ranks_worker.py DIRECTORY TRAINER...

The last interruption is a rank that kills itself. The workers that torchrun then starts resume, and
afterwards train without interruption for comparison. Each writes what it found to
DIRECTORY/TRAINER/RANK.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import fop
from tests.common import cnn, images, points, same, snapshot

STEPS, KILLED_AFTER = 8, 7
SAVE_EVERY = 3  # curvature is then neither fresh nor due
OPTIONS: dict[str, Any] = {
    "lr": 0.1,
    "momentum": 0.7,
    "weight_decay": 1e-2,
    "fallback": "adamw",
    "update_every": 5,
}
RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
resumed_at: list[int] = []  # by the optimizer's count of steps


class StoppedError(Exception):
    """Ends a training that is not the last."""


def stop_after(step: int) -> None:
    if step == KILLED_AFTER:
        raise StoppedError


def die_after(step: int) -> None:
    if step == KILLED_AFTER and RANK == RANKS - 1:
        os.kill(os.getpid(), signal.SIGKILL)


def by_accelerate(directory: Path, after_step: Callable[[int], None]) -> nn.Module:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    loader = DataLoader(TensorDataset(*images(6 * RANKS * STEPS)), batch_size=6)
    module = cnn()
    optimizer = fop.FOP(module, **OPTIONS)
    model, prepared, loader = accelerator.prepare(module, optimizer, loader)
    folder = directory / "checkpoint"
    if folder.exists():
        accelerator.load_state(str(folder))
        loader = accelerator.skip_first_batches(loader, optimizer.steps)
    resumed_at.append(optimizer.steps)
    for x, y in loader:
        accelerator.backward(cross_entropy(model(x), y))
        prepared.step()
        prepared.zero_grad()
        if optimizer.steps % SAVE_EVERY == 0:
            accelerator.save_state(str(folder))
        after_step(optimizer.steps)
    assert optimizer.steps == STEPS
    return module


def by_hugging_face(
    directory: Path, after_step: Callable[[int], None], *, mixin: bool = False
) -> nn.Module:
    from transformers import Trainer, TrainerCallback
    from transformers.trainer_utils import get_last_checkpoint

    from tests.trainers import test_huggingface as texts

    class Watch(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **found: Any) -> None:
            resumed_at.append(found["optimizer"].optimizer.steps)

        def on_step_end(self, args: Any, state: Any, control: Any, **found: Any) -> None:
            after_step(state.global_step)

    saving = {"save_strategy": "steps", "save_steps": SAVE_EVERY, "max_steps": STEPS}
    sampling = {"train_sampling_strategy": "random", "per_device_train_batch_size": 2}
    args = texts.arguments(directory, weight_decay=1e-2, **saving, **sampling)
    model = texts.bert(dropout=0.1)
    common = {
        "model": model,
        "args": args,
        "train_dataset": texts.sentences(),
        "compute_loss_func": texts.class_loss,
        "callbacks": [Watch()],
    }
    options = {**OPTIONS, "skip": texts.SKIP}
    if mixin:
        trainer = texts.FOPTrainer(**common, optimizer_options=options)
    else:
        trainer = Trainer(**common, optimizers=(fop.FOP(model, **options), None))
    trainer.train(get_last_checkpoint(str(directory)) if directory.exists() else None)
    return model


def by_mixin(directory: Path, after_step: Callable[[int], None]) -> nn.Module:
    return by_hugging_face(directory, after_step, mixin=True)


def by_lightning(directory: Path, after_step: Callable[[int], None]) -> nn.Module:
    import lightning
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint

    from tests.trainers import test_lightning as modules

    class Watch(Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            resumed_at.append(trainer.optimizers[0].steps)

        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            after_step(trainer.global_step)

    data = TensorDataset(*points(6 * RANKS * SAVE_EVERY, dtype=torch.float32))
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy="ddp",
        max_steps=STEPS,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=directory,
        # Not by epochs: with max_steps, Lightning resumes these with a batch too many (and SGD).
        callbacks=[
            ModelCheckpoint(directory, save_top_k=-1, every_n_train_steps=SAVE_EVERY),
            Watch(),
        ],
    )
    module = modules.Automatic(**OPTIONS)
    saved = sorted(directory.glob("*.ckpt"))
    resume = saved[-1] if saved else None
    trainer.fit(module, DataLoader(data, batch_size=6), ckpt_path=resume, weights_only=True)
    return module


TRAINERS: dict[str, Callable[[Path, Callable[[int], None]], nn.Module]] = {
    "accelerate": by_accelerate,
    "trainer": by_hugging_face,
    "mixin": by_mixin,
    "lightning": by_lightning,
}


def interrupt(directory: Path, names: Sequence[str]) -> None:
    """Never returns."""
    for name in names:
        torch.manual_seed(0)
        with suppress(StoppedError):
            last = name == names[-1]
            TRAINERS[name](directory / name / "interrupted", die_after if last else stop_after)


def resume(directory: Path, name: str) -> None:
    resumed_at.clear()
    found: list[list[Tensor]] = []
    for folder in ("interrupted", "undisturbed"):
        torch.manual_seed(0)
        found.append(snapshot(TRAINERS[name](directory / name / folder, lambda _: None)))
    result = {
        "resumed at": resumed_at,
        "same": same(*found),
        "sums": [float(parameter.double().sum()) for parameter in found[0]],
    }
    (directory / name / str(RANK)).write_text(json.dumps(result))


def main() -> None:
    directory, names = Path(sys.argv[1]), sys.argv[2:]
    torch.set_num_threads(1)
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        interrupt(directory, names)
    for name in names:
        resume(directory, name)


if __name__ == "__main__":
    main()
