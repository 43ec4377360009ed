"""A step whose size the model itself tells: which directions there are, and what is written."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fop.capture import Forwards
from fop.context import Context
from fop.replay import Direction
from fop.scaling import LossScale, Number, unscaled
from fop.slices import local
from fop.trust import AVERAGE_DECAY, NOISY, Memory, Model, Outcome, size_step
from fop.update import Change, fallback_lr

State = dict[str, Any]


class SizedSteps:
    """Takes such steps, where the loss can be read; remembers of a model whether it repeats."""

    def __init__(self, model: nn.Module, forwards: Forwards) -> None:
        self._model = model
        self._forwards = forwards
        self._reuses: bool | None = None  # outputs of the user's own pass serve as the base

    def take(
        self,
        context: Context,
        changes: Sequence[Change],
        preconditioned: Container[Tensor],
        memory: Memory,
        energy: float,
        noise: float | None,
    ) -> Outcome | str:
        """Change the parameters; or why that could not be done, with nothing changed.

        `energy` is <a, M^-1 a> over all layers, `noise` what half-batches show of it to be noise.
        """
        scale = _loss_scale(context.loss_scale)
        why = self._forwards.unreadable or ("" if self._forwards.complete else "no forward pass")
        if scale is None:
            why = "GradScaler.unscale_() hides the scale of the loss: set optimizer.grad_scaler"
        counts = context.ranks.sum_of_ranks(
            torch.tensor(
                [float(bool(why)), len(self._forwards.complete), len(self._forwards.complete) ** 2],
                dtype=torch.float64,
            )
        ).tolist()
        if counts[0] or scale is None:
            return why or "the loss of another rank can't be read"
        if counts[1] ** 2 != counts[2] * context.ranks.size:
            return "ranks have run different numbers of forward passes"
        values = [change.part.local(change.part.parameter) for change in changes]
        model = Model(
            self._model,
            self._forwards.complete,
            values,
            context.ranks,
            seed=context.number,
            scale=scale,
        )
        why = self._find_base(context, model)
        if why:
            return why
        signal = memory.signal(energy, noise)
        directions = _directions(context, changes, values, preconditioned, noisy=signal < NOISY)
        gradients = unscaled([_gradient(change) for change in changes], context.loss_scale)
        found = size_step(model, directions, gradients, memory, signal)
        if isinstance(found, str):
            return found
        coefficients, outcome = found
        _write(context, changes, values, directions, coefficients, preconditioned)
        return outcome

    def _find_base(self, context: Context, model: Model) -> str:
        # Modules may be switched between training and evaluation, so it is asked again.
        if self._reuses is None or context.number % 50 == 0:
            repeats, reuses = model.repeats()
            flags = context.ranks.any_rank([not repeats, not reuses])
            if flags[0]:
                return "the model gives another output when it is run again"
            self._reuses = not flags[1]
        elif not self._reuses:
            model.run_base()
        return ""


def _loss_scale(loss_scale: LossScale | None) -> float | None:
    """What undoes the scale of the loss in gradients at the output; None where it is not known."""
    if loss_scale is None:
        return 1.0
    if loss_scale.inverse is not None:
        return float(loss_scale.inverse)
    return None if loss_scale.scaler is None else 1 / loss_scale.scaler.get_scale()


def _gradient(change: Change) -> Tensor:
    grad = change.part.parameter.grad
    if grad is None:
        return torch.zeros_like(change.part.local(change.part.parameter))
    return change.part.local(grad)


def _directions(
    context: Context,
    changes: Sequence[Change],
    values: Sequence[Tensor],
    preconditioned: Container[Tensor],
    *,
    noisy: bool,
) -> list[Direction]:
    """u, the previous displacement, and that of parameters without curvature."""
    updates: list[Tensor] = []
    previous: list[Tensor] = []
    rest: list[Tensor] = []
    moved = with_rest = False
    for change, value in zip(changes, values, strict=True):
        parameter, state = change.part.parameter, context.state[change.part.parameter]
        group, zeros = context.options[parameter], torch.zeros_like(value)
        if parameter in preconditioned:
            update = change.update.to(value.dtype)
            average = _entry(state, "update_average", parameter, start=change, value=update)
            average.mul_(AVERAGE_DECAY).add_(update, alpha=1 - AVERAGE_DECAY)
            updates.append(average.clone() if noisy else update)
            rest.append(zeros)
        else:
            with_rest = True
            updates.append(zeros)
            rest.append(_normalised(change, value, state, group))
        moved |= "momentum_buffer" in state and bool(group["momentum"])
        buffer = state.get("momentum_buffer")
        previous.append(zeros if buffer is None else change.part.local(buffer))
    found: list[Direction] = [updates]
    if moved and not noisy:
        found.append(previous)
    if with_rest:
        found.append(rest)
    return found


def _entry(state: State, name: str, parameter: Tensor, *, start: Change, value: Tensor) -> Tensor:
    """A part's rows of an entry shaped like the parameter, which starts with this value."""
    if name not in state:
        state[name] = torch.zeros_like(local(parameter))
    rows = start.part.local(state[name])
    if not bool(rows.any()):
        rows.copy_(value)
    return rows


def _normalised(change: Change, value: Tensor, state: State, group: Mapping[str, Any]) -> Tensor:
    """AdamW's direction without its momentum, which the previous displacement is; SGD's."""
    gradient, parameter = change.update.to(value.dtype), change.part.parameter
    if group["rule"] == "sgd":
        return gradient
    if "exp_avg" not in state:
        state["exp_avg"] = torch.zeros_like(local(parameter))
        state["exp_avg_sq"] = torch.zeros_like(local(parameter))
        state["step"] = torch.zeros((), dtype=torch.float32, device=value.device)
    if change.part.start == 0:  # of several parts of a parameter, the first one counts
        state["step"] += 1
    decay = group["betas"][1]
    square = change.part.local(state["exp_avg_sq"])
    square.mul_(decay).addcmul_(gradient, gradient, value=1 - decay)
    corrected = square / (1 - decay ** float(state["step"]))
    # No eps of its own: the units of the loss must not matter.
    floor = torch.finfo(value.dtype).tiny
    found: Tensor = gradient / (corrected.sqrt() + floor)
    return found


def _write(
    context: Context,
    changes: Sequence[Change],
    values: Sequence[Tensor],
    directions: Sequence[Direction],
    coefficients: Sequence[float],
    preconditioned: Container[Tensor],
) -> None:
    """Weight decay, which shrinks weights directly, and the displacement, by the share of lr."""
    for index, (change, value) in enumerate(zip(changes, values, strict=True)):
        parameter = change.part.parameter
        group, state = context.options[parameter], context.state[parameter]
        displacement = torch.zeros_like(value)
        for factor, direction in zip(coefficients, directions, strict=True):
            displacement.add_(direction[index], alpha=factor)
        reference: Number = group["reference_lr"]
        displacement.mul_(group["lr"] / reference if reference else 0.0)
        if group["weight_decay"]:
            lr = group["lr"] if parameter in preconditioned else fallback_lr(group)
            value.mul_(1 - lr * group["weight_decay"])
        value.add_(displacement)
        if group["momentum"]:
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(local(parameter))
            change.part.local(state["momentum_buffer"]).copy_(displacement)
