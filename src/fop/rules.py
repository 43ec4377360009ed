"""How an update or a plain gradient changes a parameter: momentum as in torch.optim.SGD, and AdamW.

Both take the step only where the 0-dimensional flag `healthy` is true, without asking the host;
without the flag they take it in any case.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from fop.moments import factor_dtype


def momentum_step(
    parameter: Tensor,
    update: Tensor,
    state: dict[str, Any],
    group: Mapping[str, Any],
    healthy: Tensor | None,
    *,
    decoupled: bool,
) -> None:
    """torch.optim.SGD's rule, operation for operation: without curvature it is SGD exactly."""
    lr, momentum, weight_decay = group["lr"], group["momentum"], group["weight_decay"]
    if weight_decay and not decoupled:
        update = update.add(parameter, alpha=weight_decay)
    direction = update = _or_zero(healthy, update)
    if momentum:
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        buffer = state["momentum_buffer"]
        buffer.mul_(_if_healthy(healthy, momentum, buffer)).add_(update)
        direction = update.add(buffer, alpha=momentum) if group["nesterov"] else buffer
        direction = _or_zero(healthy, direction)
    if weight_decay and decoupled:
        parameter.mul_(_if_healthy(healthy, 1 - lr * weight_decay, parameter))
    parameter.add_(direction, alpha=-lr)


def adamw_step(
    parameter: Tensor,
    gradient: Tensor,
    state: dict[str, Any],
    group: Mapping[str, Any],
    healthy: Tensor | None,
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
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


def _or_zero(healthy: Tensor | None, values: Tensor) -> Tensor:
    return values if healthy is None else torch.where(healthy, values, 0.0)


def _if_healthy(healthy: Tensor | None, factor: float, like: Tensor) -> Tensor | float:
    """`factor`, or 1 where the step is not taken; precise enough to act like a Python number."""
    if healthy is None:
        return factor
    chosen = torch.full((), factor, dtype=factor_dtype(like.dtype), device=like.device)
    return torch.where(healthy, chosen, torch.ones_like(chosen))
