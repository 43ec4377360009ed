"""A run's whole state in one file, from which it goes on as if it had never stopped.

The file holds tensors, numbers and strings alone, so it is read with ``weights_only=True``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fop_bench.records import RecordError, atomic_open

if TYPE_CHECKING:
    from fop_bench.training import Training

SCHEMA = 1


def save_checkpoint(path: Path, training: Training) -> None:
    on_cuda = training.device.type == "cuda"
    state = {
        "schema": SCHEMA,
        "model": training.model.state_dict(),
        "optimizer": training.optimizer.state_dict(),
        "schedule": training.schedule.state_dict(),
        "scaler": training.scaler.state_dict(),
        "rng": torch.get_rng_state(),
        "cuda_rng": torch.cuda.get_rng_state_all() if on_cuda else [],
        "epoch": training.epoch,
        "step": training.step,
        "train_time": training.watch.seconds,
    }
    with atomic_open(path, "wb") as stream:
        torch.save(state, stream)


def read_checkpoint(path: Path, device: torch.device) -> dict[str, Any]:
    """The state as saved, its tensors on `device`; for example ``["model"]``, to evaluate a trained
    one.
    """
    try:
        state = torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # torch.load raises many kinds, and all mean the same here
        raise RecordError(
            f"{path} cannot be read ({error}): delete that run and repeat it"
        ) from error
    found = state.get("schema") if isinstance(state, dict) else type(state).__name__
    if found != SCHEMA:
        raise RecordError(f"{path}: expected checkpoint schema {SCHEMA}, found {found!r}")
    return dict(state)


def load_checkpoint(path: Path, training: Training, recorded: Sequence[dict[str, Any]]) -> None:
    """Brings `training` to the checkpoint; records made after it are dropped, they will be made
    again.
    """
    state = read_checkpoint(path, training.device)
    training.model.load_state_dict(state["model"])
    training.optimizer.load_state_dict(state["optimizer"])
    training.schedule.load_state_dict(state["schedule"])
    training.scaler.load_state_dict(state["scaler"])
    torch.set_rng_state(state["rng"].cpu())
    if state["cuda_rng"]:
        torch.cuda.set_rng_state_all([rng.cpu() for rng in state["cuda_rng"]])
    training.epoch, training.step = state["epoch"], state["step"]
    training.watch.seconds = state["train_time"]
    training.metrics = [record for record in recorded if record["step"] <= training.step]
