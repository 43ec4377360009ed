"""A run's whole state in one file, from which it goes on as if it had never stopped.

The file holds tensors, numbers and strings alone, so it is read with ``weights_only=True``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fop_bench.records import RecordError, atomic_open

if TYPE_CHECKING:
    from fop_bench.training import Training

SCHEMA = 2


def save_checkpoint(path: Path, training: Training) -> None:
    """Called on every rank; the first one writes the file, with the random states of all."""
    consolidate = getattr(training.optimizer, "consolidate_state_dict", None)
    if consolidate is not None and not training.ranks.alone:
        consolidate(to=0)
    random_states = training.ranks.gathered(_random_states(training.device))
    if not training.ranks.first:
        return
    state = {
        "schema": SCHEMA,
        "model": training.model.state_dict(),
        "optimizer": training.optimizer.state_dict(),
        "schedule": training.schedule.state_dict(),
        "scaler": training.scaler.state_dict(),
        "rng": random_states,
        "epoch": training.epoch,
        "step": training.step,
        "train_time": training.watch.seconds,
    }
    with atomic_open(path, "wb") as stream:
        torch.save(state, stream)


def _random_states(device: torch.device) -> list[Tensor]:
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


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
    """Brings `training` to the checkpoint, on every rank; records made after it are dropped, they
    will be made again.
    """
    state = read_checkpoint(path, training.device)
    training.model.load_state_dict(state["model"])
    training.optimizer.load_state_dict(state["optimizer"])
    training.schedule.load_state_dict(state["schedule"])
    training.scaler.load_state_dict(state["scaler"])
    # On more ranks than before, the new ones keep the random numbers they started with.
    for random_states in state["rng"][training.ranks.index :][:1]:
        torch.set_rng_state(random_states[0].cpu())
        if training.device.type == "cuda" and len(random_states) > 1:
            torch.cuda.set_rng_state(random_states[1].cpu(), training.device)
    training.epoch, training.step = state["epoch"], state["step"]
    training.watch.seconds = state["train_time"]
    training.metrics = [record for record in recorded if record["step"] <= training.step]
