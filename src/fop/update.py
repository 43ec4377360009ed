"""How an update or a plain gradient changes a parameter: momentum on displacements, and AdamW.

    delta <- momentum delta - lr u        the displacement, kept as `momentum_buffer`
    w     <- w + delta

At a constant lr this is torch.optim.SGD. The past is kept in units of displacement, so that a
change of lr never rescales it: what was moved stays moved, as far as momentum carries it.

Both rules take lists of tensors, for few launches, and take the step only where the 0-dimensional
flag `finite` is true, without asking the host; without the flag they take it in any case.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from fop.capture import factor_dtype
from fop.layer import Layer, State
from fop.scaling import Number
from fop.settings import Settings
from fop.slices import ParameterSlice, local

Group = Mapping[str, Any]
Tensors = list[Tensor] | tuple[Tensor, ...]


def reference_lr(group: Group) -> Number:
    """The largest lr so far, or that a scheduler announces: what lr is a share of."""
    # Schedulers announce their peak in the group: all of them under "initial_lr", but for
    # OneCycleLR, whose initial lr is not its largest.
    largest: Number = 0.0
    for key in ("lr", "reference_lr", "initial_lr", "max_lr"):
        value = group.get(key)
        if isinstance(value, Tensor) and value.device.type == "cpu":
            value = float(value)
        if value is None:
            continue
        if isinstance(largest, Tensor) or isinstance(value, Tensor):  # stays on its device
            largest = torch.maximum(torch.as_tensor(largest).to(value), torch.as_tensor(value))
        else:
            largest = max(largest, value)
    return largest


def fallback_lr(group: Group) -> Number:
    """The learning rate of the fallback optimizer, which follows the schedule of `lr`."""
    lr: Number = group["lr"]
    if group["fallback_lr"] is None:
        return lr
    reference = group["reference_lr"]
    if isinstance(reference, Tensor):
        return torch.where(reference > 0, group["fallback_lr"] * lr / reference, 0.0)
    share: Number = lr / reference if reference > 0 else 0.0
    chosen: Number = group["fallback_lr"] * share
    return chosen


def momentum_step(
    parameters: Tensors,
    updates: Tensors,
    displacements: Tensors | None,
    group: Group,
    finite: Tensor | None,
    lr: Number,
    *,
    decoupled: bool,
) -> None:
    """SGD's rule in terms of displacements; None where there is no momentum.

    Where the step is not taken, `updates` must be zeros already: the rest may be multiplied by 0.
    """
    momentum, weight_decay = group["momentum"], group["weight_decay"]
    if weight_decay and not decoupled:
        updates = _if_finite(torch._foreach_add(updates, parameters, alpha=weight_decay), finite)
    if weight_decay and decoupled:
        _scale(parameters, 1 - lr * weight_decay, finite)
    if displacements is None:
        _subtract(parameters, updates, lr)
        return
    _scale(displacements, momentum, finite)
    _subtract(displacements, updates, lr)
    moved = _if_finite(displacements, finite)
    if group["nesterov"]:
        torch._foreach_add_(parameters, moved, alpha=momentum)
        _subtract(parameters, updates, lr)
    else:
        torch._foreach_add_(parameters, moved)


def adamw_step(
    parameters: Tensors,
    gradients: Tensors,
    states: Sequence[dict[str, Any]],
    group: Group,
    finite: Tensor | None,
    lr: Number,
) -> None:
    """torch.optim.AdamW's own kernel, which can be told on the device to change nothing."""
    for parameter, state in zip(parameters, states, strict=True):
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
    adamw(
        list(parameters),
        list(gradients),
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [],
        [state["step"] for state in states],
        fused=True,
        found_inf=None if finite is None else (~finite).to(parameters[0].device, torch.float32),
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=lr,
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


def _subtract(tensors: Tensors, updates: Tensors, lr: Number) -> None:
    """tensor -= lr update"""
    if isinstance(lr, Tensor):
        scaled = torch._foreach_mul(updates, lr.to(updates[0]))
        torch._foreach_sub_(tensors, scaled)
    else:
        torch._foreach_add_(tensors, updates, alpha=-lr)


def _scale(tensors: Tensors, factor: Number, finite: Tensor | None) -> None:
    """tensor *= factor, or 1 where the step is not taken."""
    if finite is not None:
        like = tensors[0]
        # Precise enough to act like a Python number.
        chosen = torch.as_tensor(factor, dtype=factor_dtype(like.dtype), device=like.device)
        factor = torch.where(finite.to(like.device), chosen, torch.ones_like(chosen))
    torch._foreach_mul_(tensors, factor)


def _if_finite(values: Tensors, finite: Tensor | None) -> Tensors:
    return values if finite is None else torch._foreach_mul(values, finite.to(values[0]))


# ---- which updates reach which rows


@dataclass(frozen=True)
class Change:
    """An update of some rows of a parameter: of those of them that this rank has."""

    part: ParameterSlice
    update: Tensor


def rest_of(
    parameters: Iterable[nn.Parameter], layers: Iterable[Layer]
) -> dict[nn.Parameter, list[ParameterSlice]]:
    """Of parameters, the rows that belong to none of the layers."""
    taken: dict[nn.Parameter, list[ParameterSlice]] = {}
    for layer in layers:
        for part in layer.sample.slices:
            taken.setdefault(part.parameter, []).append(part)
    found: dict[nn.Parameter, list[ParameterSlice]] = {}
    for parameter in parameters:
        if parameter not in taken:
            found[parameter] = [ParameterSlice(parameter)]
            continue
        end, gaps = 0, []
        for part in sorted(taken[parameter], key=lambda part: part.start):
            gaps.append((end, part.start))
            end = part.end
        gaps.append((end, parameter.shape[0] if parameter.dim() else 1))
        rows = [slice(start, stop) for start, stop in gaps if start < stop]
        if rows:
            found[parameter] = [ParameterSlice(parameter, some) for some in rows]
    return found


def apply_changes(
    changes: Iterable[Change],
    options: Mapping[Any, Group],
    state: State,
    settings: Settings,
    preconditioned: Container[Tensor],
    taken: Mapping[Tensor, Tensor | None],
) -> None:
    """Change the parameters in `taken`: in any case, or where the flag there says so, if any.

    `preconditioned` are those that follow the learning rate and rule of layers.
    """
    alike: dict[object, list[Change]] = {}
    for change in changes:
        parameter = change.part.parameter
        if parameter in taken:
            group, flag = options[parameter], taken[parameter]
            has_momentum = bool(group["momentum"]) or "momentum_buffer" in state[parameter]
            rule = (id(group), parameter in preconditioned, has_momentum, id(flag))
            # On a CPU nothing is gained by lists, and temporaries of one are fewer.
            alone = id(change) if flag is None else None
            alike.setdefault((rule, parameter.device, parameter.dtype, alone), []).append(change)
    for some in alike.values():
        parameter = some[0].part.parameter
        group, by_curvature = options[parameter], parameter in preconditioned
        lr = group["lr"] if by_curvature else fallback_lr(group)
        parts = [change.part for change in some]
        states = [state[part.parameter] for part in parts]
        tensors = [part.local(part.parameter) for part in parts]
        updates = [c.update.to(c.part.parameter.dtype) for c in some]
        if not by_curvature and settings.fallback_of_groups["rule"] != "sgd":
            adamw_step(tensors, updates, states, group, taken[parameter], lr)
        else:
            buffers = _displacements(parts, states, group)
            decoupled = settings.decoupled_weight_decay
            momentum_step(
                tensors, updates, buffers, group, taken[parameter], lr, decoupled=decoupled
            )


def _displacements(
    parts: Sequence[ParameterSlice], states: Sequence[dict[str, Any]], group: Group
) -> list[Tensor] | None:
    if not group["momentum"] and "momentum_buffer" not in states[0]:
        return None
    for part, own in zip(parts, states, strict=True):
        if "momentum_buffer" not in own:
            own["momentum_buffer"] = torch.zeros_like(local(part.parameter))
    pairs = zip(parts, states, strict=True)
    return [part.local(own["momentum_buffer"]) for part, own in pairs]
