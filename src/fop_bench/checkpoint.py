"""A run's whole state in one file, from which it goes on as if it had never stopped.

The file holds tensors, numbers and strings alone, so it is read with ``weights_only=True``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

import torch
from torch import Tensor

from fop_bench.errors import RecordError
from fop_bench.files import atomic_open
from fop_bench.schema import Limit, NonNegative, Whole, fit

if TYPE_CHECKING:
    from fop_bench.training import Training

SCHEMA = 2
CURE = "delete that file, and --resume starts the run again from its beginning"


class _Plateau(TypedDict):
    scale: NonNegative
    best: Annotated[Any, Limit("a number", lambda best: isinstance(best, float) and best == best)]
    bad_epochs: Whole


class _Checkpoint(TypedDict):
    model: dict[str, Any]
    optimizer: dict[str, Any]
    schedule: _Plateau
    scaler: dict[str, Any]
    rng: list[list[Any]]
    epoch: Whole
    step: Whole
    train_time: NonNegative


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
        first = str(error).partition("\n")[0]
        raise RecordError(f"{path} cannot be read ({first}): {CURE}") from error
    found = state.get("schema") if isinstance(state, dict) else type(state).__name__
    if found != SCHEMA:
        raise RecordError(
            f"{path}: expected checkpoint schema {SCHEMA}, found {found!r}: "
            "go on with the fop-bench that wrote it"
        )
    try:
        checked: dict[str, Any] = fit(state, _Checkpoint)
        _check_finite(checked["model"], "model")
        _check_finite(checked["optimizer"], "optimizer")
    except ValueError as error:
        raise RecordError(f"{path}: {error}: {CURE}") from error
    return checked


def _check_finite(value: Any, place: str) -> None:
    """A tensor that is not finite would only be noticed as a run that diverges."""
    if isinstance(value, Tensor):
        if value.is_floating_point() and not bool(value.isfinite().all()):
            raise ValueError(f"{place} holds numbers that are not finite")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _check_finite(item, f"{place}.{key}")
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            _check_finite(item, f"{place}[{number}]")


def load_checkpoint(path: Path, training: Training, recorded: Sequence[dict[str, Any]]) -> None:
    """Brings `training` to the checkpoint, on every rank; records made after it are dropped, they
    will be made again.
    """
    state = read_checkpoint(path, training.device)
    metrics = [record for record in recorded if record["step"] <= state["step"]]
    try:
        _check_progress(state, training, metrics)
        _restore(state, training)
    except Exception as error:  # every part has errors of its own for a state that is not its own
        raise RecordError(f"{path} is no state of this run ({error}): {CURE}") from error
    training.metrics = metrics


def _check_progress(
    state: Mapping[str, Any], training: Training, metrics: Sequence[dict[str, Any]]
) -> None:
    epoch, step = state["epoch"], state["step"]
    if epoch > training.config.epochs or step != epoch * training.steps_per_epoch:
        raise ValueError(
            f"epoch {epoch} and step {step}, in a run of {training.config.epochs} epochs with "
            f"{training.steps_per_epoch} steps each"
        )
    last = metrics[-1]["step"] if metrics else 0
    if last != step:
        raise ValueError(f"it is at step {step}, the records before it end at {last}")


def _restore(state: Mapping[str, Any], training: Training) -> None:
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
