"""How an update or a plain gradient changes a parameter: momentum on displacements, and AdamW.

    delta <- momentum delta - lr u        the displacement, kept as `momentum_buffer`
    w     <- w + delta

At a constant lr this is torch.optim.SGD. The past is kept in units of displacement, so that a
change of lr never rescales it: what was moved stays moved, as far as momentum carries it.

Both rules take the step only where the 0-dimensional flag `healthy` is true, without asking the
host; without the flag they take it in any case.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from fop.capture import factor_dtype
from fop.scaling import Number

Group = Mapping[str, Any]


def reference_lr(group: Group) -> Number:
    """The largest lr so far, or that a scheduler announces: what lr is a share of."""
    # Schedulers announce their peak in the group: all of them under "initial_lr", but for
    # OneCycleLR, whose initial lr is not its largest.
    announced = (group.get(key) for key in ("reference_lr", "initial_lr", "max_lr"))
    largest: Number = _host_number(group["lr"])
    for value in announced:
        if value is not None:
            largest = _larger(largest, _host_number(value))
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
    parameter: Tensor,
    update: Tensor,
    state: dict[str, Any],
    group: Group,
    healthy: Tensor | None,
    lr: Number,
    *,
    decoupled: bool,
) -> None:
    """SGD's rule in terms of displacements."""
    momentum, weight_decay = group["momentum"], group["weight_decay"]
    if weight_decay and not decoupled:
        update = update.add(parameter, alpha=weight_decay)
    update = _or_zero(healthy, update)
    if weight_decay and decoupled:
        parameter.mul_(_if_healthy(healthy, 1 - lr * weight_decay, parameter))
    if not momentum and "momentum_buffer" not in state:
        _subtract(parameter, update, lr)
        return
    if "momentum_buffer" not in state:
        state["momentum_buffer"] = torch.zeros_like(parameter)
    displacement = state["momentum_buffer"]
    displacement.mul_(_if_healthy(healthy, momentum, displacement))
    _subtract(displacement, update, lr)
    if not group["nesterov"]:
        parameter.add_(_or_zero(healthy, displacement))
        return
    parameter.add_(_or_zero(healthy, displacement), alpha=momentum)
    _subtract(parameter, update, lr)


def adamw_step(
    parameter: Tensor,
    gradient: Tensor,
    state: dict[str, Any],
    group: Group,
    healthy: Tensor | None,
    lr: Number,
) -> None:
    """torch.optim.AdamW's own kernel, which can be told on the device to change nothing."""
    if "exp_avg" not in state:
        state["exp_avg"] = torch.zeros_like(parameter)
        state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
    adamw(
        [parameter],
        [gradient],
        [state["exp_avg"]],
        [state["exp_avg_sq"]],
        [],
        [state["step"]],
        fused=True,
        found_inf=None if healthy is None else (~healthy).to(parameter.device, torch.float32),
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=lr,
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


def _subtract(tensor: Tensor, update: Tensor, lr: Number) -> None:
    """tensor -= lr update"""
    if isinstance(lr, Tensor):
        tensor.sub_(update * lr.to(update.device))
    else:
        tensor.add_(update, alpha=-lr)


def _host_number(value: Number) -> Number:
    """A plain number, unless that would have to be fetched from an accelerator."""
    return float(value) if isinstance(value, Tensor) and value.device.type == "cpu" else value


def _larger(one: Number, two: Number) -> Number:
    if isinstance(one, Tensor):
        return one.clamp(min=two)
    return two.clamp(min=one) if isinstance(two, Tensor) else max(one, two)


def _or_zero(healthy: Tensor | None, values: Tensor) -> Tensor:
    return values if healthy is None else torch.where(healthy, values, 0.0)


def _if_healthy(healthy: Tensor | None, factor: Number, like: Tensor) -> Number:
    """`factor`, or 1 where the step is not taken; precise enough to act like a Python number."""
    if healthy is None:
        return factor
    chosen = torch.as_tensor(factor, dtype=factor_dtype(like.dtype), device=like.device)
    return torch.where(healthy, chosen, torch.ones_like(chosen))
